"""The RAM tier: which chunk has which extent of the arena.

Concurrency: belongs to the event loop's thread; nothing waits. Threads get `view`s of extents whose chunk is leased.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from kvfs.arena import Arena
from kvfs.catalog import NOWHERE, Chunk
from kvfs.extents import ExtentAllocator
from kvfs.policies import LeafFirstLRU, Policy

_VICTIMS_AT_ONCE = 16


class RamTier:
    """The arena, what is free in it, and who goes first.

    Attributes:
        arena, extents, policy: chunks in the policy are exactly those that are visible and have an extent.
        on_drop: called with each chunk whose extent is given back.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.extents = ExtentAllocator(arena.size_bytes)
        self.policy: Policy[Chunk] = LeafFirstLRU()
        self.on_drop: list[Callable[[Chunk], None]] = []

    def view(self, offset: int, length: int) -> memoryview:
        """The bytes of an extent, writable."""
        return self.arena.view[offset : offset + length]

    def reserve(self, length: int, may_go: Callable[[Chunk], bool], evict: Callable[[Chunk], None]) -> int | None:
        """An extent of `length` bytes, or None if not even eviction makes room.

        `evict` is called for the victims one after the other; it has to give their extents back.
        """
        if length > self.extents.capacity:
            return None
        while (offset := self.extents.allocate(length)) is None:
            victims = list(islice(self.policy.victims(may_go), _VICTIMS_AT_ONCE))
            if not victims:
                return None
            for victim in victims:
                evict(victim)
                if self.extents.largest_free >= length:
                    break
        return offset

    def place(self, chunk: Chunk, offset: int) -> None:
        """The extent at `offset` now holds this chunk."""
        chunk.ram = offset
        if not chunk.is_removed:
            self.policy.insert(chunk)

    def drop(self, chunk: Chunk) -> None:
        """Give the chunk's extent back, if it has one."""
        self.policy.remove(chunk)
        if chunk.ram != NOWHERE:
            self.extents.free(chunk.ram, chunk.length)
            chunk.ram = NOWHERE
            for dropped in self.on_drop:
                dropped(chunk)
