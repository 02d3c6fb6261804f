"""What copies that are under way have brought so far, so that a copy does not evict what it is building on.

Files of a chain are copied in whatever order a directory has. So the tail may come before the chunks that lead to it,
and of an order by last use the head of the chain would be the first to go. What a copy has brought goes after all else,
the deepest first, and for a chunk of a copy only what stands deeper than that one: of a chain that does not fit the
beginning stays, whatever the order.

Pure bookkeeping. Concurrency: belongs to the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvfs.catalog import Chunk, ChunkTable

QUIET_S = 60.0  # after which a copy is over, if nobody says so: a large chunk over a slow line takes as long


@dataclass(slots=True)
class _Copy:
    last_s: float
    chunks: set[Chunk] = field(default_factory=set)


class CopiedIn:
    """The chunks of all copies that are under way, one for each namespace. `now_s` is the system's monotonic clock."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._copies: dict[ChunkTable, _Copy] = {}

    def brought(self, chunk: Chunk) -> None:
        """A copy has brought this chunk, or found it there."""
        now_s, copy = self._now_s(), self._copies.get(chunk.table)
        if copy is None or now_s - copy.last_s >= QUIET_S:
            copy = self._copies[chunk.table] = _Copy(now_s)
        copy.last_s = now_s
        copy.chunks.add(chunk)

    def removed(self, chunk: Chunk) -> None:
        """A chunk is no longer visible."""
        if self._copies and (copy := self._copies.get(chunk.table)) is not None:
            copy.chunks.discard(chunk)

    def is_over(self, table: ChunkTable) -> None:
        """Nothing more is copied to this namespace."""
        self._copies.pop(table, None)

    def expire(self) -> None:
        """Forget the copies of which nothing came for long."""
        before_s = self._now_s() - QUIET_S
        self._copies = {table: copy for table, copy in self._copies.items() if copy.last_s > before_s}

    def depth(self, chunk: Chunk) -> int | None:
        """Where in its chain a chunk stands that a copy under way has brought; None for all others."""
        if not self._copies or (copy := self._copies.get(chunk.table)) is None or chunk not in copy.chunks:
            return None
        return chunk.position if self._now_s() - copy.last_s < QUIET_S else None

    def is_writing_deeper(self, chunk: Chunk, group: frozenset[Chunk]) -> bool:
        """Whether what a copy has brought, and stands deeper, is on its way to NVMe, other than in this group."""
        return any(
            other.is_dirty and other.leases and other.position > chunk.position and other not in group
            for copy in self._copies.values()
            for other in copy.chunks
        )

    def may_go_for(self, victim: Chunk, position: int | None) -> bool:
        """Whether `victim` may make way for a chunk that is copied in; `position` None: nobody knows its place yet."""
        depth = self.depth(victim)
        return depth is None or (position is not None and depth > position)
