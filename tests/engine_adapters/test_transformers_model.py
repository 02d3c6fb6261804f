"""Which models are held, what they are called, and what the others are told."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers

from kvfs.engine_adapters.transformers_model import LAYOUT, describe
from kvfs.errors import UsageError
from kvfs.namespace import decode, encode

from .conftest import tiny_config, tiny_model

SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def namespace_of(model: Any, **options: Any) -> Any:
    return describe(model, **{"tokens_per_chunk": 64, "model_id": "org/tiny", "revision": None, **options}).namespace


def test_a_model_is_described() -> None:
    namespace = namespace_of(tiny_model())
    identity = namespace.identity
    assert (identity.model, identity.kv_dtype, identity.layout) == ("tiny", "F32", LAYOUT)
    assert (identity.num_layers, identity.num_kv_heads, identity.head_size) == (2, 2, 8)
    assert len(namespace.layers) == 1  # both layers look alike
    assert [tensor.name for tensor in namespace.layers[0].tensors] == ["k", "v"]
    assert namespace.layers[0].tensors[0].shape == (2, 64, 8)
    assert '"rope_type":"default"' in identity.rope
    assert decode(encode(namespace)) == namespace


def test_the_same_weights_have_the_same_name_in_every_process() -> None:
    script = (
        "import torch, transformers\n"
        f"from kvfs.engine_adapters.transformers_model import describe\n"
        "torch.manual_seed(0)\n"
        f"config = transformers.LlamaConfig.from_dict({tiny_config().to_dict()!r})\n"
        "model = transformers.LlamaForCausalLM(config).eval()\n"
        "print(describe(model, tokens_per_chunk=64, model_id='org/tiny', revision=None).namespace.directory)\n"
    )
    environment = {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"}
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert made.stdout.strip() == namespace_of(tiny_model()).directory


def test_whatever_kv_depends_on_is_another_name() -> None:
    base = tiny_model()
    one_row = tiny_model()
    with torch.no_grad():
        one_row.model.embed_tokens.weight[100] += 1e-6
    others = [
        one_row,
        tiny_model(seed=1),
        tiny_model(dtype=torch.bfloat16),
        tiny_model(rms_norm_eps=1e-3),
        tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 5.0}),
        tiny_model(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}),
    ]
    names = {namespace_of(model).directory for model in (base, *others)}
    assert len(names) == 1 + len(others)
    assert namespace_of(base, tokens_per_chunk=128).directory not in names
    assert namespace_of(base, model_id="other").directory not in names


def test_how_the_model_runs_is_no_other_name() -> None:
    """Attention implementations round differently, as batches of other shapes do; that is no other KV."""
    eager = tiny_model()
    eager.set_attn_implementation("eager")
    assert namespace_of(eager) == namespace_of(tiny_model())


def test_the_revision_can_be_given() -> None:
    assert namespace_of(tiny_model(), revision="abc").identity.revision == "abc"


def test_without_a_name_the_model_is_called_like_its_directory() -> None:
    model = tiny_model()
    assert namespace_of(model, model_id=None).identity.model == "llama"
    model.config._name_or_path = "/models/Some-Model/"
    assert namespace_of(model, model_id=None).identity.model == "Some-Model"


def sliding() -> Any:
    config = transformers.MistralConfig(**SMALL, sliding_window=16)
    return transformers.MistralForCausalLM(config)


def state_space() -> Any:
    config = transformers.MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2, state_size=4)
    return transformers.MambaForCausalLM(config)


def encoder_decoder() -> Any:
    config = transformers.T5Config(
        vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def linear_attention() -> Any:
    config = transformers.Qwen3NextConfig(
        **{**SMALL, "num_hidden_layers": 4}, head_dim=8, linear_key_head_dim=8, linear_value_head_dim=8,
        linear_num_key_heads=2, linear_num_value_heads=2, num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    return transformers.Qwen3NextForCausalLM(config)


def length_dependent() -> Any:
    return tiny_model(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})


def not_generating() -> Any:
    return torch.nn.Linear(2, 2)


def no_text_config() -> Any:
    return object()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (sliding, "keeps its KV in a DynamicSlidingWindowLayer"),
        (state_space, "state of its own kind|LinearAttention"),
        (encoder_decoder, "decoder-only"),
        (linear_attention, "LinearAttention"),
        (length_dependent, "'dynamic' position encoding"),
        (not_generating, "takes a transformers model"),
        (no_text_config, "takes a transformers model"),
    ],
)
def test_what_cannot_be_held_is_refused_in_one_sentence(make: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        namespace_of(make())
    assert "\n" not in str(refused.value)


def test_a_window_that_is_not_used_is_none() -> None:
    config = transformers.Qwen2Config(**SMALL, use_sliding_window=False, sliding_window=16)
    assert namespace_of(transformers.Qwen2ForCausalLM(config).eval()).identity.num_layers == 2


def test_gpt2_is_held_too() -> None:
    """No rotary encoding, other names in its config, tied weights."""
    config = transformers.GPT2Config(
        vocab_size=128, n_positions=256, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    )
    namespace = namespace_of(transformers.GPT2LMHeadModel(config).eval())
    assert (namespace.identity.num_kv_heads, namespace.identity.head_size) == (4, 8)


def test_weights_that_are_not_in_memory_need_a_revision() -> None:
    from kvfs.engine_adapters.model_digest import digest_weights

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(tiny_config())
    with pytest.raises(UsageError, match="pass revision="):
        digest_weights(model, model.config)
