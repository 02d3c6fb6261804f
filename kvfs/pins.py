"""Pins: which chunks a person wants kept, until when, and what has to stay for their sake.

A chunk is *held* if it is pinned, or if a held chunk is built on it: a pinned chunk that cannot be reached any more would
be worth nothing. What is held is never evicted; a person may remove it. A chunk that is stored again beneath pinned ones
is held again.

Pure bookkeeping: no clock, no I/O, no waiting. `kvfs.limits` makes pins durable and ends them in time.

Concurrency: belongs to the event loop's thread; consistent after every call.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator

from kvfs.catalog import Chunk, ChunkTable
from kvfs.keys import Key

FOREVER = (1 << 63) - 1
"""The end of a pin without an end, in nanoseconds since the epoch like all others; the largest integer of the index."""

_Place = tuple[ChunkTable, Key, int]


class Pins:
    """All pins of a store.

    Attributes: held_bytes: bytes of the chunk files that are held.

    Invariants: every pinned chunk is visible and held; `_children` counts the held chunks by what they are built on,
    whether that is stored or not. The position is part of the place, so that no forged chain of parents is a circle.

    `held_changed` is told of each chunk that begins or ends to be held.
    """

    def __init__(self, held_changed: Callable[[Chunk, bool], None]) -> None:
        self.held_bytes = 0
        self._held_changed = held_changed
        self._until: dict[Chunk, int] = {}
        self._held: set[Chunk] = set()
        self._children: dict[_Place, int] = {}
        self._ends: list[tuple[int, int, Chunk]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """How many chunks are pinned."""
        return len(self._until)

    def is_held(self, chunk: Chunk) -> bool:
        """Whether the chunk may not be evicted."""
        return chunk in self._held

    def held(self) -> Iterator[Chunk]:
        """The chunks that are held, in no order; nothing must change meanwhile."""
        return iter(self._held)

    def end_of(self, chunk: Chunk, now_ns: int) -> int | None:
        """When the chunk's pin ends, or None if it has none (any more)."""
        until_ns = self._until.get(chunk)
        return until_ns if until_ns is not None and until_ns > now_ns else None

    def common_end(self, chunks: Iterable[Chunk], now_ns: int) -> int | None:
        """The first end among the pins of these chunks; None unless every one is pinned."""
        first: int | None = None
        for chunk in chunks:
            until_ns = self.end_of(chunk, now_ns)
            if until_ns is None:
                return None
            first = until_ns if first is None else min(first, until_ns)
        return first

    @property
    def next_end_ns(self) -> int:
        """No pin ends before this; FOREVER if none will."""
        return self._ends[0][0] if self._ends else FOREVER

    def to_hold(self, chunks: Iterable[Chunk]) -> set[Chunk]:
        """What would be held besides if these chunks were pinned."""
        found: set[Chunk] = set()
        for chunk in chunks:
            above: Chunk | None = chunk
            while above is not None and above not in self._held and above not in found:
                found.add(above)
                above = above.above()
        return found

    def pin(self, chunk: Chunk, until_ns: int) -> None:
        """Pin a visible chunk, or change the end of its pin."""
        self._until[chunk] = until_ns
        if until_ns != FOREVER:
            if len(self._ends) > 2 * len(self._until) + 1000:  # most are of pins that were changed since
                self._ends = [end for end in self._ends if self._until.get(end[2]) == end[0]]
                heapq.heapify(self._ends)
            heapq.heappush(self._ends, (until_ns, next(self._numbers), chunk))
        self._hold(chunk)

    def unpin(self, chunk: Chunk) -> bool:
        """End a chunk's pin; returns whether it had one."""
        if self._until.pop(chunk, None) is None:
            return False
        self._let_go(chunk)
        return True

    def end(self, now_ns: int) -> list[Chunk]:
        """End the pins whose time has come; returns their chunks."""
        ended = []
        while self._ends and self._ends[0][0] <= now_ns:
            until_ns, _, chunk = heapq.heappop(self._ends)
            if self._until.get(chunk) == until_ns:
                self.unpin(chunk)
                ended.append(chunk)
        return ended

    def added(self, chunk: Chunk) -> None:
        """A chunk became visible: what is held may be built on it."""
        if self._children and self._num_children(chunk):
            self._hold(chunk)

    def removed(self, chunk: Chunk) -> bool:
        """A chunk is no longer visible; returns whether it was pinned."""
        if chunk not in self._held:
            return False
        was_pinned = self._until.pop(chunk, None) is not None
        self._stop_holding(chunk)
        return was_pinned

    def _num_children(self, chunk: Chunk) -> int:
        return self._children.get((chunk.table, chunk.key, chunk.position), 0)

    def _hold(self, chunk: Chunk) -> None:
        above: Chunk | None = chunk
        while above is not None and above not in self._held:
            self._held.add(above)
            self.held_bytes += above.length
            if above.position:
                place = (above.table, above.parent, above.position - 1)
                self._children[place] = self._children.get(place, 0) + 1
            self._held_changed(above, True)
            above = above.above()

    def _let_go(self, chunk: Chunk) -> None:
        """The chunk is held for one reason less; stop holding it, and what it is built on, if that was the last."""
        if chunk in self._held and chunk not in self._until and not self._num_children(chunk):
            self._stop_holding(chunk)

    def _stop_holding(self, chunk: Chunk) -> None:
        above: Chunk | None = chunk
        while above is not None:
            self._held.remove(above)
            self.held_bytes -= above.length
            if above.position:
                place = (above.table, above.parent, above.position - 1)
                self._children[place] -= 1
                if not self._children[place]:
                    del self._children[place]
            self._held_changed(above, False)
            above = above.above()
            if above is not None and (above in self._until or self._num_children(above)):
                above = None
