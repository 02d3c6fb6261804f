"""A transformers model on a real mount: what the files are, what removing, stopping and killing does."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvfs.engine_adapters.transformers_cache import PrefixCache
from kvfs.engine_adapters.transformers_calls import CACHE_ARGUMENT
from kvfs.messages import Tier
from kvfs.testing import DEADLINE_S, wait_until

from .conftest import Daemon

CHUNK = 64
torch.set_num_threads(1)  # the model is tiny: several threads wait for each other longer than they compute
STOPPED_S = 0.5


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, eos_token_id=None, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def open_cache(daemon: Daemon, model: Any) -> Iterator[Callable[..., PrefixCache]]:
    made: list[PrefixCache] = []

    def open_(deadline_s: float = DEADLINE_S) -> PrefixCache:
        made.append(
            PrefixCache(
                daemon.path, model, model_id="tiny", tokens_per_chunk=CHUNK, break_even=False, deadline_s=deadline_s,
                reserve_tokens=512,
            )
        )  # fmt: skip
        return made[-1]

    yield open_
    for cache in made:
        cache.close()


def prompt_of(num_tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 128, (1, num_tokens), generator=torch.Generator().manual_seed(seed))


def greedy(generate: Callable[..., Any], prompt: torch.Tensor) -> torch.Tensor:
    tokens: torch.Tensor = generate(prompt, max_new_tokens=8, do_sample=False)
    return tokens


def test_the_files_are_the_model_s_keys_and_values(mounted: Daemon, model: Any, open_cache: Any) -> None:
    prompt = prompt_of(100)
    cache = open_cache()
    greedy(cache.generate, prompt)
    held = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt, **{CACHE_ARGUMENT: held})
    chunks = mounted.path / cache.namespace.directory / "chunks"
    seen = {}
    for path in chunks.iterdir():
        with safe_open(path, "pt") as file:
            position, count = int(file.metadata()["position"]), int(file.metadata()["num_tokens"])
            seen[position] = count
            for layer in range(3):
                part = slice(position * CHUNK, position * CHUNK + count)
                keys, values = held.layers[layer].keys, held.layers[layer].values
                assert torch.allclose(file.get_tensor(f"layers.{layer}.k"), keys[0, :, part], atol=1e-6)
                assert torch.allclose(file.get_tensor(f"layers.{layer}.v"), values[0, :, part], atol=1e-6)
    assert seen == {0: CHUNK, 1: 32}


def test_a_removed_prefix_is_computed_again(mounted: Daemon, model: Any, open_cache: Any) -> None:
    prompt = prompt_of(300)
    expected = greedy(model.generate, prompt)
    cache = open_cache()
    greedy(cache.generate, prompt)
    (prefix,) = (mounted.path / cache.namespace.directory / "prefixes").iterdir()
    shutil.rmtree(prefix)
    assert torch.equal(greedy(cache.generate, prompt), expected)
    assert cache.statistics().last_load.tokens_reused == 0
    greedy(cache.generate, prompt)
    assert cache.statistics().last_load.tokens_reused == 288


def test_a_restarted_daemon_has_it_on_nvme(mounted: Daemon, model: Any, open_cache: Any) -> None:
    prompt = prompt_of(300)
    greedy(open_cache().generate, prompt)
    assert mounted.stop() == 0
    mounted.start()
    cache = open_cache()
    assert torch.equal(greedy(cache.generate, prompt), greedy(model.generate, prompt))
    assert cache.statistics().last_load.tokens_reused == 288
    assert cache.statistics().last_load.tier is Tier.NVME


@pytest.mark.expect_log("does not answer")
def test_a_stopped_daemon_costs_its_deadline_and_nothing_else(mounted: Daemon, model: Any, open_cache: Any) -> None:
    prompt = prompt_of(300)
    expected = greedy(model.generate, prompt)
    greedy(open_cache().generate, prompt)
    cache = open_cache(STOPPED_S)
    os.kill(mounted.pid, signal.SIGSTOP)
    begin = time.monotonic()
    assert torch.equal(greedy(cache.generate, prompt), expected)
    assert time.monotonic() - begin < 40 * STOPPED_S  # it would not go on before the daemon does
    assert cache.statistics().last_load.tokens_reused == 0
    os.kill(mounted.pid, signal.SIGCONT)

    def is_loaded() -> bool:
        assert torch.equal(greedy(cache.generate, prompt), expected)
        return cache.statistics().last_load.tokens_reused == 288

    wait_until(is_loaded, "the daemon that goes on is used again")


@pytest.mark.expect_log("does not answer")
def test_a_killed_daemon_is_a_miss(mounted: Daemon, model: Any, open_cache: Any) -> None:
    prompt = prompt_of(300)
    cache = open_cache()
    greedy(cache.generate, prompt)
    mounted.stop(signal.SIGKILL)
    assert torch.equal(greedy(cache.generate, prompt), greedy(model.generate, prompt))
    assert cache.statistics().last_load.tokens_reused == 0


def test_two_engines_share_a_prefix(mounted: Daemon, model: Any, open_cache: Any) -> None:
    prompt = prompt_of(300)
    greedy(open_cache().generate, prompt)
    other = open_cache()
    assert torch.equal(greedy(other.generate, prompt), greedy(model.generate, prompt))
    assert other.statistics().last_load.tokens_reused == 288
