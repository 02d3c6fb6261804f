"""Extents: which bytes of a flat space are free. Best fit, in granules of 4096 bytes, neighbours joined.

Chunks of one namespace are equally long, so a freed extent is mostly taken again as it is: free extents are kept by
length, and one of the very length is found at once. No I/O, no waiting.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from kvfs.chunk import ALIGNMENT


class ExtentAllocator:
    """The free extents of the bytes from `base` to `base + capacity`.

    Attributes:
        capacity: bytes in all.
        free_bytes: bytes not allocated.

    Invariant: free extents never touch each other, and none overlaps an allocated one.
    """

    def __init__(self, capacity: int, base: int = 0, used: Iterable[tuple[int, int]] = ()) -> None:
        """`used` are (offset, length) pairs, sorted by offset, that do not overlap."""
        self.capacity = capacity - capacity % ALIGNMENT
        self.base = base
        self.free_bytes = 0
        self._length_at: dict[int, int] = {}  # start of a free extent -> its length
        self._start_before: dict[int, int] = {}  # end of a free extent -> its start
        self._starts: dict[int, set[int]] = {}  # length -> starts of the free extents so long
        self._lengths: list[int] = []  # the lengths that occur, sorted
        position = base
        for offset, length in used:
            if offset != position:
                if offset < position:
                    raise ValueError(f"extent {offset}+{length} overlaps another or lies outside")
                self._insert(position, offset - position)
            position = offset + length
        if position > base + self.capacity:
            raise ValueError(f"the last extent overlaps what is outside: it ends at {position}")
        self._insert(position, base + self.capacity - position)

    @property
    def used_bytes(self) -> int:
        """Bytes allocated."""
        return self.capacity - self.free_bytes

    @property
    def largest_free(self) -> int:
        """The longest extent that `allocate` could give now."""
        return self._lengths[-1] if self._lengths else 0

    def allocate(self, length: int) -> int | None:
        """The offset of a free extent of `length` bytes (a multiple of 4096), or None if there is none."""
        if length <= 0 or length % ALIGNMENT:
            raise ValueError(f"{length} is not a positive multiple of {ALIGNMENT}")
        starts = self._starts.get(length)
        if starts:
            start = next(iter(starts))
            self._delete(start, length)
            return start
        index = bisect_left(self._lengths, length)
        if index == len(self._lengths):
            return None
        found = self._lengths[index]
        start = next(iter(self._starts[found]))
        self._delete(start, found)
        self._insert(start + length, found - length)
        return start

    def free(self, offset: int, length: int) -> None:
        """Give an extent back; it must be one that `allocate` gave (or `used` named)."""
        start, end = offset, offset + length
        before = self._start_before.get(start)
        if before is not None:
            self._delete(before, start - before)
            start = before
        behind = self._length_at.get(end)
        if behind is not None:
            self._delete(end, behind)
            end += behind
        self._insert(start, end - start)

    def _insert(self, start: int, length: int) -> None:
        if not length:
            return
        self._length_at[start] = length
        self._start_before[start + length] = start
        starts = self._starts.get(length)
        if starts is None:
            self._starts[length] = {start}
            insort(self._lengths, length)
        else:
            starts.add(start)
        self.free_bytes += length

    def _delete(self, start: int, length: int) -> None:
        del self._length_at[start]
        del self._start_before[start + length]
        starts = self._starts[length]
        starts.remove(start)
        if not starts:
            del self._starts[length]
            del self._lengths[bisect_left(self._lengths, length)]
        self.free_bytes -= length
