"""Unclaimed: what was written on the volume of an index that was lost.

A daemon whose index is gone begins with an empty catalog; `kvfs fsck --rebuild` can bring back what is on the volume, as
long as nothing is written over it. So its room is used only when there is no other, from the end of the volume, where
what came last lies: the heads of prefixes, without which the rest is of no use, are kept longest. The index remembers
what is left of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvfs.extents import ExtentAllocator

PIECE_BYTES = 64 << 20
"""Given up at once."""

Extent = tuple[int, int]


class PatientAllocator(ExtentAllocator):
    """Gives what is unclaimed when nothing else is free, and before anything is evicted.

    Attributes: unclaimed: (offset, length) by offset; neither allocated nor free.
    """

    def __init__(self, capacity: int, base: int, used: Iterable[Extent], unclaimed: Iterable[Extent]) -> None:
        """`used` and `unclaimed` are sorted by offset; what is used is not unclaimed."""
        used = list(used)
        self.unclaimed = _without(unclaimed, used, base, base + capacity)
        super().__init__(capacity, base, sorted([*used, *self.unclaimed]) if self.unclaimed else used)

    @property
    def used_bytes(self) -> int:
        """Bytes allocated; what is unclaimed can be had."""
        return super().used_bytes - sum(length for _, length in self.unclaimed)

    @property
    def largest_free(self) -> int:
        """See `ExtentAllocator`; an estimate from below."""
        return max(super().largest_free, max((length for _, length in self.unclaimed), default=0))

    def allocate(self, length: int) -> int | None:
        """See `ExtentAllocator`."""
        while (offset := super().allocate(length)) is None and self.unclaimed:
            start, size = self.unclaimed.pop()
            given = min(size, max(length, PIECE_BYTES))
            if given < size:
                self.unclaimed.append((start, size - given))
            self.free(start + size - given, given)
        return offset


def _without(extents: Iterable[Extent], used: Iterable[Extent], begin: int, end: int) -> list[Extent]:
    """The parts of `extents` between `begin` and `end` that are not used; both are sorted."""
    left = []
    waiting = iter([*used, (end, 0)])
    offset, length = next(waiting)
    for start, size in sorted(extents):
        start, stop = max(start, begin), min(start + size, end)
        while start < stop:
            while offset + length <= start < end and offset < end:
                offset, length = next(waiting)
            until = min(stop, offset)
            if until > start:
                left.append((start, until - start))
            if offset >= stop:
                break
            start = max(start, offset + length)
        begin = max(begin, stop)  # what is named twice is there once
    return left
