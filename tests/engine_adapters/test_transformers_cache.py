"""PrefixCache against a real store and session server, with a tiny random model.

`expected` is what the model alone generates: whatever the cache does, the tokens are these.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from kvfs.config import VolumeSetting
from kvfs.engine_adapters.transformers_cache import PrefixCache
from kvfs.engine_adapters.transformers_calls import CACHE_ARGUMENT
from kvfs.errors import UsageError
from kvfs.heeding import is_closed
from kvfs.messages import Tier
from kvfs.testing import DEADLINE_S, wait_until

from .conftest import Node, prompt_of, tiny_model

NEW_TOKENS = 12
CHUNK = 64


def open_cache(node: Node, model: Any, **options: Any) -> PrefixCache:
    defaults = {"tokens_per_chunk": CHUNK, "break_even": False, "reserve_tokens": 256, "deadline_s": DEADLINE_S}
    return PrefixCache(node.mount, model, **{**defaults, **options})


def greedy(generate: Callable[..., Any], prompt: torch.Tensor, **arguments: Any) -> Any:
    return generate(prompt, **{"max_new_tokens": NEW_TOKENS, "do_sample": False, **arguments})


class Tokens(BaseStreamer):
    """Everything that is streamed."""

    def __init__(self) -> None:
        self.put_: list[list[int]] = []
        self.num_ends = 0

    def put(self, value: torch.Tensor) -> None:
        self.put_.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.num_ends += 1


@pytest.mark.parametrize(
    ("num_tokens", "reused"),
    [
        (300, 288),  # four full chunks and a short one of 32
        (256, 255),  # everything is stored: one token is computed all the same
        (40, 32),  # a short chunk alone
        (257, 256),
        (20, 0),  # less than the floor
    ],
)
def test_what_was_computed_once_is_loaded(node: Node, model: Any, num_tokens: int, reused: int) -> None:
    prompt = prompt_of(num_tokens)
    expected = greedy(model.generate, prompt)
    with open_cache(node, model) as cache:
        assert torch.equal(greedy(cache.generate, prompt), expected)
        assert cache.statistics().last_load.tokens_reused == 0
        assert torch.equal(greedy(cache.generate, prompt), expected)
        last = cache.statistics().last_load
        assert last.tokens_reused == reused
        assert last.tier is (Tier.RAM if reused else Tier.NONE)
        counts = cache.statistics()
        assert (counts.requests, counts.hits, counts.misses) == (2, int(reused > 0), 2 - int(reused > 0))
        assert counts.tokens_reused == ({Tier.RAM: reused} if reused else {})


def test_another_process_loads_it(node: Node, model: Any) -> None:
    """Another PrefixCache over another model object with the same weights, as another process has."""
    prompt = prompt_of(300)
    with open_cache(node, model) as cache:
        expected = greedy(cache.generate, prompt)
    with open_cache(node, tiny_model()) as other:
        assert torch.equal(greedy(other.generate, prompt), expected)
        assert other.statistics().last_load.tokens_reused == 288


def test_other_weights_find_nothing(node: Node, model: Any) -> None:
    prompt = prompt_of(300)
    with open_cache(node, model) as cache:
        greedy(cache.generate, prompt)
    changed = tiny_model()
    with torch.no_grad():
        changed.model.embed_tokens.weight[77, 3] += 1e-3  # a single number
    with open_cache(node, changed) as other:
        assert other.namespace.directory != cache.namespace.directory
        assert torch.equal(greedy(other.generate, prompt), greedy(changed.generate, prompt))
        assert other.statistics().hits == 0


def test_after_a_restart_it_comes_from_nvme(start_node: Callable[..., Any], model: Any) -> None:
    prompt = prompt_of(300)
    expected = greedy(model.generate, prompt)
    volume: dict[str, Any] = {}
    with start_node() as node, open_cache(node, model) as cache:
        volume = {"nvme": (VolumeSetting(str(node.mount / "volume"), 64 << 20),)}
        (node.mount / "volume").mkdir()
        greedy(cache.generate, prompt)
    with start_node(**volume) as node, open_cache(node, model) as cache:
        greedy(cache.generate, prompt)
    with start_node(**volume) as node, open_cache(node, model) as cache:
        assert torch.equal(greedy(cache.generate, prompt), expected)
        last = cache.statistics().last_load
        assert (last.tokens_reused, last.tier) == (288, Tier.NVME)


def test_a_session_outlives_the_daemon(start_node: Callable[..., Any], model: Any, expect_log: Any) -> None:
    """The engine goes on while there is none, and finds the next one by itself."""
    expect_log("does not answer")
    prompt = prompt_of(300)
    expected = greedy(model.generate, prompt)
    with start_node() as node:
        cache = open_cache(node, model)
        assert torch.equal(greedy(cache.generate, prompt), expected)
    assert torch.equal(greedy(cache.generate, prompt), expected)
    assert cache.statistics().last_load.tokens_reused == 0
    with start_node():
        cache._parts.client._retry_at = 0.0  # the second after a failure is over
        greedy(cache.generate, prompt)
        assert torch.equal(greedy(cache.generate, prompt), expected)
        assert cache.statistics().last_load.tokens_reused == 288
        cache.close()


def test_a_mount_that_is_not_there_is_no_error(
    tmp_path: Any, model: Any, expect_log: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once, however many requests find that it is still so."""
    expect_log("no kvfs is mounted")
    prompt = prompt_of(100)
    with PrefixCache(tmp_path / "nothing", model) as cache:
        for _ in range(2):
            assert torch.equal(greedy(cache.generate, prompt), greedy(model.generate, prompt))
            cache._parts.client._retry_at = 0.0  # the second after a failure is over
        assert cache.statistics().misses == 2
    told = [record for record in caplog.records if record.levelname == "WARNING" and record.name.startswith("kvfs")]
    assert len(told) == 1


def test_the_next_turn_of_a_chat_reuses_prompt_and_answer(node: Node, model: Any) -> None:
    prompt = prompt_of(100)
    with open_cache(node, model) as cache:
        first = greedy(cache.generate, prompt, max_new_tokens=60)
        turn = torch.cat([first, prompt_of(50, seed=1)], dim=1)
        assert torch.equal(greedy(cache.generate, turn), greedy(model.generate, turn))
        assert cache.statistics().last_load.tokens_reused == 128  # the second chunk has generated tokens in it


def test_a_longer_prompt_reuses_the_short_end_of_another(node: Node, model: Any) -> None:
    prompt = prompt_of(100)
    longer = torch.cat([prompt, prompt_of(200, seed=1)], dim=1)
    with open_cache(node, model) as cache:
        greedy(cache.generate, prompt, max_new_tokens=1)
        assert torch.equal(greedy(cache.generate, longer), greedy(model.generate, longer))
        assert cache.statistics().last_load.tokens_reused == 64 + 32


def test_prompts_that_part_share_what_they_have_in_common(node: Node, model: Any) -> None:
    prompt, other = prompt_of(300), prompt_of(300)
    other[0, 150] = (other[0, 150] + 1) % 128
    with open_cache(node, model) as cache:
        greedy(cache.generate, prompt)
        assert torch.equal(greedy(cache.generate, other), greedy(model.generate, other))
        assert cache.statistics().last_load.tokens_reused == 128


def test_salts_and_extra_keys_keep_prompts_apart(node: Node, model: Any) -> None:
    prompt = prompt_of(300)
    with open_cache(node, model) as cache:
        for arguments in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": ""}, {"extra_keys": ["a"]}):
            greedy(cache.generate, prompt, **arguments)
            assert cache.statistics().last_load.tokens_reused == 0
        greedy(cache.generate, prompt, cache_salt="b")
        assert cache.statistics().last_load.tokens_reused == 288


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("position", [0, 2, 4])
def test_a_flipped_bit_is_a_counted_miss(
    node: Node, model: Any, layer: int, position: int, expect_log: Callable[[str], None]
) -> None:
    """The forward pass is abandoned, also in the last layer; the tokens are right, and each is streamed once."""
    expect_log("computed instead of loaded")
    expect_log("is corrupt and was dropped")
    prompt = prompt_of(300)
    expected = greedy(model.generate, prompt)
    with open_cache(node, model) as cache:
        greedy(cache.generate, prompt)
        chunk = node.chunks()[position]
        node.flip(chunk, layer)
        streamer = Tokens()
        assert torch.equal(greedy(cache.generate, prompt, streamer=streamer), expected)
        assert streamer.put_ == [prompt[0].tolist(), *([token] for token in expected[0, 300:].tolist())]
        assert streamer.num_ends == 1
        counts = cache.statistics()
        assert counts.failures == 1
        assert counts.last_load.tokens_reused == (position * CHUNK)
        greedy(cache.generate, prompt)  # what was dropped is stored again, now or by the request before
        greedy(cache.generate, prompt)
        assert cache.statistics().last_load.tokens_reused == 288
        assert cache.statistics().failures == 1


def test_sampling_draws_what_it_would_draw_without_a_cache(node: Node, model: Any) -> None:
    prompt = prompt_of(300)
    with open_cache(node, model) as cache:
        greedy(cache.generate, prompt)
        torch.manual_seed(5)
        expected = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=True)
        torch.manual_seed(5)
        assert torch.equal(cache.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=True), expected)
        assert cache.statistics().last_load.tokens_reused == 288


def test_an_answer_longer_than_the_slab_grows_it(node: Node, model: Any) -> None:
    prompt = prompt_of(500)
    expected = greedy(model.generate, prompt, max_new_tokens=400)
    with open_cache(node, model) as cache:
        greedy(cache.generate, prompt)
        assert torch.equal(greedy(cache.generate, prompt, max_new_tokens=400), expected)
        assert torch.equal(
            greedy(cache.generate, expected, max_new_tokens=1), greedy(model.generate, expected, max_new_tokens=1)
        )
        assert cache.statistics().last_load.tokens_reused == 896  # 899 tokens had KV; those after a full chunk are lost


def test_arguments_may_come_as_a_tokenizer_gives_them(node: Node, model: Any) -> None:
    prompt = prompt_of(300)
    expected = greedy(model.generate, prompt)
    mask = torch.ones_like(prompt)
    with open_cache(node, model) as cache:
        assert torch.equal(
            cache.generate(input_ids=prompt, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False), expected
        )
        assert torch.equal(cache.generate(inputs=prompt, max_new_tokens=NEW_TOKENS, do_sample=False), expected)
        assert cache.statistics().hits == 1


def test_what_is_returned_is_a_cache_to_go_on_with(node: Node, model: Any) -> None:
    prompt = prompt_of(300)
    longer = greedy(model.generate, prompt, max_new_tokens=2 * NEW_TOKENS)
    with open_cache(node, model) as cache:
        for _ in range(2):
            output = greedy(cache.generate, prompt, return_dict_in_generate=True)
            held = getattr(output, CACHE_ARGUMENT)
            for kept in (copy.deepcopy(held), held):
                again = greedy(model.generate, output.sequences, **{CACHE_ARGUMENT: kept})
                assert torch.equal(again, longer)


def test_memory_of_a_returned_cache_is_not_used_by_others(node: Node, model: Any) -> None:
    prompt = prompt_of(300)
    with open_cache(node, model) as cache:
        output = greedy(cache.generate, prompt, return_dict_in_generate=True)
        keys = getattr(output, CACHE_ARGUMENT).layers[0].keys
        before = keys.clone()
        del output
        gc.collect()
        for seed in range(1, 4):
            greedy(cache.generate, prompt_of(300, seed))
        assert torch.equal(keys, before)


def test_storing_in_the_background_is_done_after_a_flush(node: Node, model: Any) -> None:
    prompts = [prompt_of(300, seed) for seed in range(3)]
    with open_cache(node, model, background_store=True) as cache:
        for prompt in prompts:
            greedy(cache.generate, prompt)
            cache.flush()
        for prompt in prompts:
            assert torch.equal(greedy(cache.generate, prompt), greedy(model.generate, prompt))
            assert cache.statistics().last_load.tokens_reused == 288
        assert cache.statistics().stores_dropped == 0


def test_a_full_cache_refuses_and_nothing_else_happens(start_node: Callable[..., Any], model: Any) -> None:
    prompt = prompt_of(1200)
    with start_node(ram_bytes=1 << 20, window_bytes=256 << 10) as node, open_cache(node, model) as cache:
        for _ in range(2):
            assert torch.equal(greedy(cache.generate, prompt), greedy(model.generate, prompt))


def test_half_precision(node: Node) -> None:
    model = tiny_model(dtype=torch.bfloat16)
    prompt = prompt_of(300)
    with open_cache(node, model) as cache:
        expected = greedy(cache.generate, prompt)
        assert cache.namespace.identity.kv_dtype == "BF16"
        greedy(cache.generate, prompt)
        assert cache.statistics().last_load.tokens_reused == 288
        assert torch.equal(greedy(model.generate, prompt), expected)


def test_a_changed_model_is_computed(node: Node) -> None:
    model = tiny_model()
    prompt = prompt_of(300)
    with open_cache(node, model) as cache:
        greedy(cache.generate, prompt)
        with torch.no_grad():
            model.lm_head.weight.add_(0.5)
            model.model.layers[0].self_attn.k_proj.weight.mul_(2)
        assert torch.equal(greedy(cache.generate, prompt), greedy(model.generate, prompt))
        assert cache.statistics().bypasses == 1


def test_kv_of_another_dtype_than_at_the_start_is_computed(node: Node, model: Any) -> None:
    prompt = prompt_of(300)
    with open_cache(node, model) as cache, torch.autocast("cpu", dtype=torch.bfloat16):
        streamer = Tokens()
        output = greedy(cache.generate, prompt, streamer=streamer)
        assert torch.equal(output, greedy(model.generate, prompt))
        assert len(streamer.put_) == 1 + NEW_TOKENS
        assert cache.statistics().bypasses == 1


def test_a_second_cache_is_a_mistake(node: Node, model: Any) -> None:
    prompt = prompt_of(300)
    with open_cache(node, model) as cache:
        held = getattr(greedy(cache.generate, prompt, return_dict_in_generate=True), CACHE_ARGUMENT)
        for name in ("cache", "past_key_values"):
            with pytest.raises(UsageError, match=f"call it without {name}="):
                cache.generate(prompt, **{name: held})


@pytest.mark.parametrize("break_even", [True, False])
def test_repeated_requests_stay_right(node: Node, model: Any, break_even: bool) -> None:
    prompts = [prompt_of(num, seed) for num, seed in ((300, 0), (200, 0), (300, 1), (64, 0), (65, 0), (128, 1))]
    expected = [greedy(model.generate, prompt) for prompt in prompts]
    with open_cache(node, model, break_even=break_even) as cache:
        for _ in range(3):
            for prompt, tokens in zip(prompts, expected, strict=True):
                assert torch.equal(greedy(cache.generate, prompt), tokens)
        counts = cache.statistics()
        assert counts.requests == 18
        assert counts.hits + counts.misses == 18
        assert counts.failures == counts.bypasses == 0


@pytest.mark.parametrize("in_background", [False, True])
def test_what_is_known_of_a_conversation_is_passed_on(node: Node, model: Any, in_background: bool) -> None:
    """Of the prompt's chunks, the short one at its end too, and of those generated; behind the store."""
    with open_cache(node, model, background_store=in_background) as cache:
        greedy(cache.generate, prompt_of(300), class_=7, expect_s=60)
        cache.flush()
        wait_until(lambda: sum(chunk.hint is not None for chunk in node.chunks()) >= 4, "the hint has come")
        full = sorted((chunk for chunk in node.chunks() if chunk.num_tokens == CHUNK), key=lambda chunk: chunk.position)
        assert [chunk.hint.class_ for chunk in full if chunk.hint] == [7] * len(full)
        now_s = node.store.system.monotonic()
        assert [chunk.position for chunk in full if chunk.hint and chunk.hint.until_s > now_s] == [full[-1].position]
        greedy(cache.generate, prompt_of(300), closed=True)
        wait_until(lambda: all(is_closed(chunk) for chunk in node.chunks()), "all of it is closed")
        with pytest.raises(UsageError, match="class is a number from 0 to 255"):
            greedy(cache.generate, prompt_of(300), class_=256)
