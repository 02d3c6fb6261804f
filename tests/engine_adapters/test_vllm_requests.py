"""Chains of vLLM's requests: from token ids, and from what else their KV depends on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvfs.engine_adapters.vllm_requests import RequestChunks, root_extras, why_bypass
from kvfs.keys import KeyChain, key_of, root

FINGERPRINT = b"f" * 32
SIZE = 4


def request(**changes: Any) -> Any:
    facts = {
        "prompt_embeds": None,
        "prompt_token_ids": [1],
        "resumable": False,
        "lora_request": None,
        "cache_salt": None,
    }
    return SimpleNamespace(**{**facts, **changes})


def item(offset: int, length: int, identifier: str) -> Any:
    return SimpleNamespace(mm_position=SimpleNamespace(offset=offset, length=length), identifier=identifier)


def chunks_of(tokens: list[int], *items: Any, extras: tuple[str, ...] = ()) -> RequestChunks:
    chunks = RequestChunks(FINGERPRINT, extras, SIZE, items)
    chunks.take(tokens)
    return chunks


def test_the_chain_is_that_of_every_adapter() -> None:
    tokens = list(range(10, 24))
    chunks = chunks_of(tokens, extras=("salt:a",))
    chain = KeyChain(root(FINGERPRINT, ["salt:a"]), SIZE, tokens)
    assert chunks.chains == chain.chains
    assert chunks.new_chunk(0).parent == key_of(chain.root)
    assert chunks.new_chunk(2).parent == chain.keys[1]
    assert chunks.new_chunk(2).position == 2


def test_growing_gives_what_all_at_once_gives() -> None:
    tokens = list(range(30))
    chunks = chunks_of(tokens[:3])
    for end in (3, 4, 5, 13, 13, 30):
        chunks.take(tokens[:end])
    assert chunks.chains == chunks_of(tokens).chains
    assert chunks.num_tokens == 30


def test_an_image_counts_where_it_lies() -> None:
    """The text before it is shared with everybody; its own chunks, and all behind, with the same image at the same place."""
    tokens = [1, 2, 3, 4, 9, 9, 9, 9, 9, 9, 5, 6]
    plain, cat, dog = chunks_of(tokens), chunks_of(tokens, item(5, 4, "cat")), chunks_of(tokens, item(5, 4, "dog"))
    assert plain.chains[0] == cat.chains[0] == dog.chains[0]
    assert len({plain.chains[1], cat.chains[1], dog.chains[1], chunks_of(tokens, item(4, 4, "cat")).chains[1]}) == 4
    assert len({plain.chains[2], cat.chains[2], dog.chains[2]}) == 3
    assert cat.chains == chunks_of(tokens, item(5, 4, "cat")).chains
    assert cat.new_chunk(1).parent == key_of(plain.chains[0])


def test_salt_and_adapter_are_part_of_the_root() -> None:
    adapter = SimpleNamespace(lora_name="polite", lora_path="/adapters/polite")
    assert root_extras(request(), "") == []
    assert root_extras(request(cache_salt="tenant"), "") == ["salt:tenant"]
    one, other = (root_extras(request(lora_request=adapter), digest) for digest in ("d1", "d2"))
    assert one != other
    assert "polite" in one[0]


def test_what_cannot_be_served_is_bypassed() -> None:
    assert why_bypass(request()) is None
    assert "embeddings" in (why_bypass(request(prompt_embeds=object())) or "")
    assert "changed" in (why_bypass(request(resumable=True)) or "")
