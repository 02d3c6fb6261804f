"""The RAM tier: which chunk has which extent of the arena.

Concurrency: belongs to the event loop's thread; nothing waits. Threads get `view`s of extents whose chunk is leased.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Protocol

from kvfs.catalog import NOWHERE, Chunk
from kvfs.extents import ExtentAllocator
from kvfs.policies import Holding, Policy

_VICTIMS_AT_ONCE = 16


class Memory(Protocol):
    """What the tier needs of an arena: its size, and its bytes for whoever asks for them."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole."""

    @property
    def view(self) -> memoryview:
        """All of them, writable."""


class Record(Protocol):
    """What is told of the extents that hold visible chunks, see `kvfs.kept.Record`."""

    def put(self, offset: int, length: int) -> None:
        """The extent holds a chunk that is visible now."""

    def clear(self, offset: int) -> None:
        """Whatever the extent holds is not to be seen again."""


class RamTier:
    """The arena, what is free in it, and who goes first.

    Attributes:
        memory, extents, policy: chunks in the policy are exactly those that are visible and have an extent.
        on_drop: called with each chunk whose extent is given back.
        record: for whoever takes the arena over, None if nobody can.
    """

    def __init__(self, memory: Memory, policy: Policy[Chunk]) -> None:
        self.memory = memory
        self.extents = ExtentAllocator(memory.size_bytes)
        self.policy: Holding[Chunk] = Holding(policy)
        self.on_drop: list[Callable[[Chunk], None]] = []
        self.record: Record | None = None

    def view(self, offset: int, length: int) -> memoryview:
        """The bytes of an extent, writable."""
        return self.memory.view[offset : offset + length]

    def reserve(
        self,
        length: int,
        may_go: Callable[[Chunk], bool],
        evict: Callable[[Chunk], None],
        above: Chunk | None = None,
    ) -> int | None:
        """An extent of `length` bytes, or None if not even eviction makes room.

        `evict` is called for the victims one after the other; it has to give their extents back. With `above`, what the
        newcomer would be built on, it gets no room where that would go next: it cannot be worth more.
        """
        found = self.reserve_all(length, 1, may_go, evict, above)
        return found[0] if found else None

    def reserve_all(
        self,
        length: int,
        count: int,
        may_go: Callable[[Chunk], bool],
        evict: Callable[[Chunk], None],
        above: Chunk | None = None,
    ) -> list[int]:
        """`count` such extents, or as many as there is room for: victims are looked for once for all of them."""
        found: list[int] = []
        if length > self.extents.capacity:
            return found
        allocate = self.extents.allocate
        num_asked = 1
        while True:
            while len(found) < count and (offset := allocate(length)) is not None:
                found.append(offset)
            missing = count - len(found)
            if not missing:
                return found
            victims = list(islice(self.policy.victims(may_go), max(missing, num_asked)))
            if not victims:
                return found
            for victim in victims:
                if victim is above:
                    return found
                evict(victim)
                while missing and (offset := allocate(length)) is not None:
                    found.append(offset)
                    missing -= 1
                if not missing:
                    return found
            num_asked = min(2 * num_asked, _VICTIMS_AT_ONCE)

    def place(self, chunk: Chunk, offset: int) -> None:
        """The extent at `offset` now holds this chunk."""
        chunk.ram = offset
        if not chunk.is_removed:
            self.policy.insert(chunk)
            if self.record is not None:
                self.record.put(offset, chunk.length)

    def hide(self, chunk: Chunk) -> None:
        """The chunk is out of sight; its extent, if it has one, stays until `drop`."""
        self.policy.remove(chunk)
        if self.record is not None and chunk.ram != NOWHERE:
            self.record.clear(chunk.ram)

    def drop(self, chunk: Chunk) -> None:
        """Give the chunk's extent back, if it has one."""
        self.hide(chunk)
        if chunk.ram != NOWHERE:
            self.extents.free(chunk.ram, chunk.length)
            chunk.ram = NOWHERE
            for dropped in self.on_drop:
                dropped(chunk)
