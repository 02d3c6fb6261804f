"""What copies that are under way have brought so far, so that a copy does not evict what it is building on.

Files of a chain are copied in whatever order a directory has. So the tail may come before the chunks that lead to it,
and by last use the head of the chain may be the first to go. When it is the turn of something that a copy has brought,
the deepest of all that goes in its stead; and for a chunk of a copy nothing goes that does not stand deeper: of a chain
that does not fit the beginning stays, whatever the order.

Pure bookkeeping. Concurrency: belongs to the event loop's thread.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvfs.catalog import Chunk, ChunkTable

QUIET_S = 60.0  # after which a copy is over, if nobody says so: a large chunk over a slow line takes as long
_MAX_ON_THE_WAY = 1024  # chunks that write-behind has in hand


@dataclass(slots=True)
class _Copy:
    last_s: float
    chunks: set[Chunk] = field(default_factory=set)


class CopiedIn:
    """The chunks of all copies that are under way, one for each namespace. `now_s` is the system's monotonic clock.

    Invariant: the heap has an entry for each of them, and may have more.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._copies: dict[ChunkTable, _Copy] = {}
        self._heap: list[tuple[int, int, Chunk]] = []
        self._numbers = itertools.count()

    def brought(self, chunk: Chunk) -> None:
        """A copy has brought this chunk, or found it there."""
        now_s, copy = self._now_s(), self._copies.get(chunk.table)
        if copy is None or now_s - copy.last_s >= QUIET_S:
            copy = self._copies[chunk.table] = _Copy(now_s)
        copy.last_s = now_s
        if chunk not in copy.chunks:
            copy.chunks.add(chunk)
            heapq.heappush(self._heap, (-chunk.position, next(self._numbers), chunk))

    def removed(self, chunk: Chunk) -> None:
        """A chunk is no longer visible."""
        if self._copies and (copy := self._copies.get(chunk.table)) is not None:
            copy.chunks.discard(chunk)

    def is_over(self, table: ChunkTable) -> None:
        """Nothing more is copied to this namespace."""
        self._copies.pop(table, None)
        if not self._copies:
            self._heap.clear()

    def expire(self) -> None:
        """Forget the copies of which nothing came for long."""
        before_s = self._now_s() - QUIET_S
        self._copies = {table: copy for table, copy in self._copies.items() if copy.last_s > before_s}
        if len(self._heap) > 2 * sum(len(copy.chunks) for copy in self._copies.values()):
            self._heap = [entry for entry in self._heap if self.depth(entry[2]) is not None]
            heapq.heapify(self._heap)

    def depth(self, chunk: Chunk) -> int | None:
        """Where in its chain a chunk stands that a copy under way has brought; None for all others."""
        if not self._copies or (copy := self._copies.get(chunk.table)) is None or chunk not in copy.chunks:
            return None
        return chunk.position if self._now_s() - copy.last_s < QUIET_S else None

    def deepest_first(self) -> Iterator[Chunk]:
        """All that copies have brought; nothing is brought or removed while this is being iterated."""
        taken: list[tuple[int, int, Chunk]] = []
        seen: set[Chunk] = set()
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                if self.depth(entry[2]) is None or entry[2] in seen:
                    continue
                taken.append(entry)
                seen.add(entry[2])
                yield entry[2]
        finally:
            for entry in taken:
                heapq.heappush(self._heap, entry)

    def is_writing_deeper(self, chunk: Chunk, group: frozenset[Chunk]) -> bool:
        """Whether what a copy has brought, and stands deeper, is on its way to NVMe, other than in this group."""
        for other in itertools.islice(self.deepest_first(), _MAX_ON_THE_WAY):
            if other.position <= chunk.position:
                return False
            if other.is_dirty and other.leases and other not in group:
                return True
        return False

    def may_go_for(self, victim: Chunk, position: int | None) -> bool:
        """Whether `victim` may make way for a chunk that is copied in; `position` None: nobody knows its place yet."""
        depth = self.depth(victim)
        return depth is None or (position is not None and depth > position)
