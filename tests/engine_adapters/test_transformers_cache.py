"""PrefixCache against a real store and session server, with a tiny random model."""

from __future__ import annotations

from typing import Any

import torch

from kvfs.engine_adapters.transformers_cache import PrefixCache
from kvfs.messages import Tier

from .conftest import Node, prompt_of

NEW_TOKENS = 12


def open_cache(node: Node, model: Any, **options: Any) -> PrefixCache:
    return PrefixCache(
        node.mount, model, **{"tokens_per_chunk": 64, "break_even": False, "reserve_tokens": 256, **options}
    )


def test_warm(node: Node, model: Any) -> None:
    prompt = prompt_of(300)
    expected = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    with open_cache(node, model) as cache:
        assert torch.equal(cache.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False), expected)
        print(cache.statistics())
        assert torch.equal(cache.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False), expected)
        print(cache.statistics())
        last = cache.statistics().last_load
        assert (last.tokens_reused, last.tier) == (299 if False else 288, Tier.RAM)
