"""Which calls of `generate` the cache serves; the others run without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from kvfs.engine_adapters.transformers_calls import (
    DEFAULT_NEW_TOKENS,
    PromptOnceStreamer,
    new_tokens,
    pop_prompt,
    why_bypass,
)
from kvfs.errors import UsageError

from .conftest import Node, prompt_of, tiny_model
from .test_transformers_cache import Tokens, open_cache

PROMPT = prompt_of(100)


def padded() -> torch.Tensor:
    mask = torch.ones_like(PROMPT)
    mask[0, 0] = 0
    return mask


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"max_new_tokens": 5, "do_sample": True, "temperature": 0.5, "top_k": 10},
        {"attention_mask": torch.ones_like(PROMPT)},
        {"num_beams": 1, "num_return_sequences": 1},
        {"generation_config": GenerationConfig(max_new_tokens=3)},
        {"repetition_penalty": 1.3, "stopping_criteria": None, "use_cache": True},
        {"prefill_chunk_size": 32},
        {"pixel_values": None},
    ],
    ids=lambda arguments: ",".join(arguments) or "none",
)
def test_served(model: Any, arguments: dict[str, Any]) -> None:
    assert why_bypass(model, PROMPT, arguments) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_beams": 2}, "num_beams is 2"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences is 2"),
        ({"generation_config": GenerationConfig(num_beams=3)}, "num_beams is 3"),
        ({"use_cache": False}, "use_cache is False"),
        ({"cache_implementation": "static"}, "cache_implementation is static"),
        ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens is 2"),
        ({"assistant_model": object()}, "assistant_model may change"),
        ({"custom_generate": object()}, "custom_generate may change"),
        ({"inputs_embeds": torch.zeros(1)}, "inputs_embeds may change"),
        ({"pixel_values": torch.zeros(1)}, "pixel_values may change"),
        ({"position_ids": torch.zeros(1)}, "position_ids may change"),
        ({"attention_mask": padded()}, "leaves tokens out"),
        ({"attention_mask": torch.ones(1, 120)}, "leaves tokens out"),
        ({"guidance_scale": 1.5}, "guidance_scale is 1.5"),
    ],
)
def test_not_served(model: Any, arguments: dict[str, Any], words: str) -> None:
    assert words in str(why_bypass(model, PROMPT, arguments))


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (torch.cat([PROMPT, PROMPT]), "more than one sequence"),
        (None, "not a tensor"),
        (PROMPT[:, :1], "fewer than two"),
        (PROMPT[0], "not a tensor of token ids"),
    ],
)
def test_prompts_that_are_not_served(model: Any, prompt: Any, words: str) -> None:
    assert words in str(why_bypass(model, prompt, {}))


def test_a_model_in_training_drops_out_and_is_not_served() -> None:
    model = tiny_model()
    model.train()
    assert "training mode" in str(why_bypass(model, PROMPT, {}))


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_beams": 2},
        {"do_sample": False, "attention_mask": padded(), "pad_token_id": 0},
        {"use_cache": False},
    ],
    ids=["beams", "padding", "no cache"],
)
def test_what_is_not_served_runs_as_ever(node: Node, model: Any, arguments: dict[str, Any]) -> None:
    with open_cache(node, model) as cache:
        output = cache.generate(PROMPT, max_new_tokens=5, **arguments)
        assert torch.equal(output, model.generate(PROMPT, max_new_tokens=5, **arguments))
        counts = cache.statistics()
        assert (counts.requests, counts.bypasses, counts.hits, counts.misses) == (1, 1, 0, 0)


def test_a_batch_runs_as_ever(node: Node, model: Any) -> None:
    batch = torch.cat([PROMPT, prompt_of(100, seed=1)])
    with open_cache(node, model) as cache:
        output = cache.generate(batch, max_new_tokens=5, do_sample=False)
        assert torch.equal(output, model.generate(batch, max_new_tokens=5, do_sample=False))
        assert cache.statistics().bypasses == 1


def test_the_prompt_may_come_under_either_name() -> None:
    assert pop_prompt(PROMPT, {}) is PROMPT
    arguments = {"inputs": PROMPT, "past_key_values": None}
    assert pop_prompt(None, arguments) is PROMPT
    assert arguments == {}
    with pytest.raises(UsageError, match="not both"):
        pop_prompt(PROMPT, {"inputs": PROMPT})


@pytest.mark.parametrize("name", ["input_ids", "inputs"])
@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (PROMPT[0].tolist(), r"\[1, tokens\], not a list$"),
        ({"input_ids": PROMPT}, r"\[1, tokens\], not a dict$"),
        (PROMPT[0], r"not one of shape \[\d+\]: give input_ids\[None\]$"),
    ],
)
def test_what_is_no_batch_of_token_ids_is_a_mistake(prompt: Any, said: str, name: str) -> None:
    """`generate` itself stumbles over it somewhere inside; the sentence says what to give."""
    given = (prompt, {}) if name == "input_ids" else (None, {"inputs": prompt})
    with pytest.raises(UsageError, match=said):
        pop_prompt(*given)


def test_the_slab_is_sized_by_what_the_call_says(model: Any) -> None:
    assert new_tokens(model, 100, {"max_new_tokens": 7}) == 7
    assert new_tokens(model, 100, {"max_length": 130}) == 30
    assert new_tokens(model, 100, {"max_new_tokens": 10**6}) == DEFAULT_NEW_TOKENS
    assert new_tokens(model, 100, {"generation_config": GenerationConfig(max_new_tokens=9)}) == 9


def test_a_repeated_call_streams_the_prompt_once() -> None:
    heard = Tokens()
    streamer = PromptOnceStreamer(heard)
    streamer.put(torch.tensor([1, 2]))
    streamer.begin_again()
    for value in ([1, 2], [3], [4]):
        streamer.put(torch.tensor(value))
    streamer.end()
    assert heard.put_ == [[1, 2], [3], [4]]
    assert heard.num_ends == 1


def test_a_call_that_failed_before_it_streamed_anything_loses_nothing() -> None:
    heard = Tokens()
    streamer = PromptOnceStreamer(heard)
    streamer.begin_again()
    streamer.put(torch.tensor([1, 2]))
    assert heard.put_ == [[1, 2]]


def test_stop_strings_get_the_tokenizer(model: Any) -> None:
    class Tokenizer:
        """Enough of one for `stop_strings` to find it."""

    from kvfs.engine_adapters.transformers_calls import add_tokenizer

    tokenizer = Tokenizer()
    arguments: dict[str, Any] = {"stop_strings": ["x"]}
    add_tokenizer(model, tokenizer, arguments)
    assert arguments["tokenizer"] is tokenizer
    arguments = {}
    add_tokenizer(model, tokenizer, arguments)
    assert arguments == {}
