"""Which tokens of a request are which chunk."""

from __future__ import annotations

import pytest

from kvfs import keys
from kvfs.engine_adapters.spans import Span, TokenSpans

ROOT = keys.root(b"f" * 32)


def spans_of(num_tokens: int) -> TokenSpans:
    return TokenSpans(ROOT, list(range(num_tokens)), tokens_per_chunk=64, tokens_per_block=16)


def test_full_chunks_bear_the_names_of_the_key_chain() -> None:
    spans = spans_of(200)
    chain = keys.KeyChain(ROOT, 64, list(range(200)))
    assert spans.num_full == 3
    assert [spans.full(position).chain for position in range(3)] == chain.chains
    second = spans.full(1)
    assert (second.begin, second.end, second.position) == (64, 128, 1)
    assert second.parent == keys.key_of(chain.chains[0])
    assert spans.full(0).parent == keys.key_of(ROOT)


def test_short_candidates_lie_behind_the_last_stored_chunk_longest_first() -> None:
    spans = spans_of(200)
    assert [span.num_tokens for span in spans.short_candidates(3)] == []  # 8 tokens are less than a block
    assert [span.num_tokens for span in spans.short_candidates(1)] == [48, 32, 16]
    assert {(span.begin, span.position) for span in spans.short_candidates(1)} == {(64, 1)}


def test_a_short_chunk_has_the_name_that_a_longer_prompt_computes_for_it() -> None:
    """So the end of one prompt is found as the beginning of the next."""
    stored = spans_of(100).short_last()
    assert stored is not None
    assert stored.num_tokens == 32
    assert stored in spans_of(300).short_candidates(1)


def test_the_end_of_a_prompt_shorter_than_a_block_is_no_chunk() -> None:
    assert spans_of(64 + 15).short_last() is None
    assert spans_of(64).short_last() is None


def test_growing_gives_the_same_spans_as_all_at_once() -> None:
    grown = spans_of(50)
    grown.extend(list(range(50, 70)))
    grown.extend(list(range(70, 200)))
    whole = spans_of(200)
    assert grown.num_tokens == 200
    assert [grown.full(position) for position in range(3)] == [whole.full(position) for position in range(3)]
    assert grown.short(1, 32) == whole.short(1, 32)


def test_more_tokens_than_there_are_cannot_be_a_short_chunk() -> None:
    with pytest.raises(ValueError, match="no 32 tokens"):
        spans_of(70).short(1, 32)


def test_a_store_request_names_parent_and_position() -> None:
    span = spans_of(128).full(1)
    new = span.new_chunk()
    assert (new.chain, new.parent, new.position, new.num_tokens) == (span.chain, span.parent, 1, 64)
    assert isinstance(span, Span)
