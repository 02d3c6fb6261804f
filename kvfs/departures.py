"""Departures: what is remembered of a chunk that goes, and goes on when it comes back.

Concurrency: belongs to the event loop's thread. Nothing waits.
"""

from __future__ import annotations

from kvfs.catalog import Chunk
from kvfs.ghosts import MAX_GHOSTS, Ghost, Ghosts
from kvfs.stripes import Stripes
from kvfs.system import System
from kvfs.tiers.ram import RamTier

GHOSTS_A_CHUNK = 4
"""With fewer, what was used before is taken for new: 1 and 0 make a hit ratio of .155 one of .133 and .084."""
BYPASSED = "bypass"
_MINUTE_NS = 60 * 10**9
_ASKED_FOR_AGAIN = ("evict", BYPASSED)


class Departures:
    """What went from these tiers. Attributes: ghosts."""

    def __init__(self, ram: RamTier, nvme: Stripes | None, system: System, started_ns: int) -> None:
        self.ghosts = Ghosts(forgotten_ns=started_ns)
        self._ram = ram
        self._nvme = nvme
        self._system = system

    def remember(self, chunk: Chunk, why: str, cause: str = "") -> None:
        """A chunk goes, or was not taken; see `Ghost`. It has the extents that it had."""
        num_chunks = len(self._ram.policy) if self._nvme is None else self._nvme.num_chunks
        self.ghosts.limit = max(MAX_GHOSTS, GHOSTS_A_CHUNK * num_chunks)
        now_ns = self._system.time_ns()
        full = self._full(chunk, cause) if cause else 0
        ghost = Ghost(now_ns, why, chunk.hits, chunk.returns, cause, (now_ns - chunk.last_used_ns) / _MINUTE_NS, full)
        self.ghosts.add(chunk.table.directory, chunk.key, ghost)

    def _full(self, chunk: Chunk, cause: str) -> int:
        """The per cent in use of what a chunk had to leave, before it did."""
        if cause == "quota":
            used, whole = chunk.table.stored_bytes + chunk.table.reserved_bytes + chunk.length, chunk.table.quota_bytes
        else:
            is_in_ram = cause == "not_admitted"
            extents = self._ram.extents if is_in_ram or self._nvme is None else self._nvme.of(chunk).tier.extents
            used, whole = extents.used_bytes, extents.capacity
        return 100 * used // whole if whole else 100

    def recall(self, chunk: Chunk) -> str | None:
        """A chunk is about to be stored: it goes on with the uses it had when it went. Returns why it went, if it did."""
        ghost = self.ghosts.pop(chunk.table.directory, chunk.key)
        if ghost is None:
            return None
        chunk.hits = ghost.hits
        chunk.returns = ghost.returns + (ghost.why in _ASKED_FOR_AGAIN)
        return ghost.why

    def bypass(self, chunk: Chunk) -> None:
        """A RAM cache was to store a chunk that is not worth its place: what it was asked for is remembered."""
        self.recall(chunk)
        self._ram.policy.bypassed(chunk)
        self.remember(chunk, BYPASSED)
