"""Spans: which tokens of a request are which chunk.

A sequence falls into full chunks of `tokens_per_chunk` tokens. Behind the last one that is stored there may be a *short*
chunk, a multiple of `tokens_per_block` tokens: the end of an earlier prompt. Pure: nothing here asks the cache.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvfs.keys import TOKEN_BYTES, ChainHash, Key, KeyChain, extend, key_of, token_bytes
from kvfs.messages import NewChunk


class Span(msgspec.Struct, frozen=True):
    """One chunk of a sequence: tokens `begin` to `end`, and what names them."""

    chain: ChainHash
    parent: Key
    position: int
    begin: int
    num_tokens: int

    @property
    def end(self) -> int:
        """Index of the first token behind it."""
        return self.begin + self.num_tokens

    def new_chunk(self) -> NewChunk:
        """As a store request names it."""
        return NewChunk(self.chain, self.parent, self.position, self.num_tokens)


class TokenSpans:
    """The spans of a token sequence that may grow.

    Attributes:
        tokens_per_chunk: tokens of a full chunk.
        tokens_per_block: short chunks hold a multiple of it.
    """

    def __init__(self, root: ChainHash, tokens: Any, *, tokens_per_chunk: int, tokens_per_block: int) -> None:
        self.tokens_per_chunk = tokens_per_chunk
        self.tokens_per_block = tokens_per_block
        self._tokens = bytearray(token_bytes(tokens))
        self._chain = KeyChain(root, tokens_per_chunk, bytes(self._tokens))

    @property
    def num_tokens(self) -> int:
        """Tokens taken in so far."""
        return len(self._tokens) // TOKEN_BYTES

    @property
    def num_full(self) -> int:
        """Full chunks so far."""
        return len(self._chain.chains)

    def extend(self, tokens: Any) -> None:
        """Take in more tokens."""
        raw = bytes(token_bytes(tokens))
        self._tokens += raw
        self._chain.extend(raw)

    def full(self, position: int) -> Span:
        """The full chunk at `position`."""
        begin = position * self.tokens_per_chunk
        return Span(self._chain.chains[position], self._parent(position), position, begin, self.tokens_per_chunk)

    def short(self, position: int, num_tokens: int) -> Span:
        """The short chunk of `num_tokens` behind the full chunks before `position`."""
        begin = position * self.tokens_per_chunk
        raw = bytes(self._tokens[begin * TOKEN_BYTES : (begin + num_tokens) * TOKEN_BYTES])
        if not raw or len(raw) != num_tokens * TOKEN_BYTES:
            raise ValueError(f"there are no {num_tokens} tokens behind token {begin}")
        return Span(extend(self._chain.parent_of(position), raw), self._parent(position), position, begin, num_tokens)

    def short_candidates(self, position: int) -> list[Span]:
        """Every short chunk that could be stored at `position`, the longest first."""
        left = self.num_tokens - position * self.tokens_per_chunk
        longest = self._whole_blocks(min(left, self.tokens_per_chunk - 1))
        return [self.short(position, count) for count in range(longest, 0, -self.tokens_per_block)]

    def short_last(self) -> Span | None:
        """The short chunk at the end of the sequence, if a block lies behind the last full chunk."""
        count = self._whole_blocks(self.num_tokens % self.tokens_per_chunk)
        return self.short(self.num_full, count) if count else None

    def _whole_blocks(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self.tokens_per_block

    def _parent(self, position: int) -> Key:
        return key_of(self._chain.parent_of(position))
