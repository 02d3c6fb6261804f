"""Residency: which chunk has bytes where, who holds them, and what happens when it has to go.

This is the bookkeeping under the store: leases, eviction, removal, and extents that outlive their chunk because
somebody still reads them. The transfers themselves are elsewhere (`promotion`, `write_behind`).

Invariants, between any two awaits:
* a visible chunk has an extent in at least one tier, or is being given one by the task that made it;
* the extents of a leased chunk are neither reused nor written;
* an extent of the volume is free only if no committed row of the index names it;
* what is pinned, or has to stay for the sake of what is, is not evicted from the lowest tier.

Concurrency: belongs to the event loop's thread. Only `reserve_nvme` and `settle` wait; what they return is true when
they return and must be used before the next await.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Literal

from kvfs.catalog import NOWHERE, Catalog, Chunk, ChunkTable
from kvfs.commits import Commits
from kvfs.erasing import Eraser
from kvfs.errors import UnavailableError
from kvfs.ghosts import MAX_GHOSTS, Ghost, Ghosts
from kvfs.metrics import Counters, EventLog
from kvfs.pins import Pins
from kvfs.policies import Policy
from kvfs.prefixes import Moves, PrefixDirectory, Renamed
from kvfs.system import System
from kvfs.tiers.nvme import NvmeTier
from kvfs.tiers.ram import RamTier

log = logging.getLogger(__name__)

Change = Literal["published", "removed", "moved"]
Observer = Callable[[Change, Chunk, PrefixDirectory[Chunk] | None], None]
NameObserver = Callable[[ChunkTable, Renamed[Chunk]], None]
GHOSTS_A_CHUNK = (
    4  # fewer cost hits: what was used before is what will be used again (a hit ratio of .155 becomes .133)
)
BYPASSED = "bypass"
_ASKED_FOR_AGAIN = ("evict", BYPASSED)
_ERASED = frozenset({"rm", "expire"})


class Residency:
    """The catalog and the tiers, kept in step.

    Attributes: catalog, ram, nvme (None for a RAM cache), commits (None likewise), counters, events;
    pins: what must stay in the lowest tier; ghosts: what is remembered of chunks that went; num_leases: holds on all
    chunks together; observers: told of every chunk that appears, moves in the prefix view (with the directory it was in) or
    goes; name_observers: of every prefix directory that got another name or place.
    """

    def __init__(
        self,
        ram: RamTier,
        nvme: NvmeTier | None,
        commits: Commits | None,
        counters: Counters,
        events: EventLog,
        system: System,
    ) -> None:
        self.catalog = Catalog()
        self.ram = ram
        self.nvme = nvme
        self.commits = commits
        self.counters = counters
        self.events = events
        self.ghosts = Ghosts()
        self.pins = Pins(self._held_changed)
        self.lowest = nvme or ram  # from which nothing comes back
        self._longest: int | None = None  # see `_longest_gap`; None: not known
        self._order = self.lowest.policy
        self._order.is_held = self.pins.is_held
        self.observers: list[Observer] = []
        self.eraser = Eraser(nvme, counters) if nvme is not None else None
        self.name_observers: list[NameObserver] = []
        self._system = system
        self.num_leases = 0
        self._to_erase: set[Chunk] = set()  # removed, and still with bytes
        self._unfinished: dict[Chunk, list[int]] = {}

    # leases

    def lease(self, chunk: Chunk) -> None:
        """Hold the chunk's bytes, wherever they are."""
        chunk.leases += 1
        self.num_leases += 1

    def release(self, chunk: Chunk) -> None:
        """End one hold; the last one gives back what a removed chunk still had."""
        chunk.leases -= 1
        self.num_leases -= 1
        if chunk.leases:
            return
        if self._unfinished:
            for offset in self._unfinished.pop(chunk, ()):
                self.ram.extents.free(offset, chunk.length)
        if chunk.is_removed:
            self._give_back(chunk)

    def lease_all(self, chunks: Collection[Chunk]) -> None:
        """Hold many at once: a match has hundreds, and its client waits."""
        for chunk in chunks:
            chunk.leases += 1
        self.num_leases += len(chunks)

    def release_all(self, chunks: Collection[Chunk]) -> None:
        """End one hold of each."""
        for chunk in chunks:
            if chunk.leases == 1 and (chunk.is_removed or self._unfinished):
                self.release(chunk)
            else:
                chunk.leases -= 1
                self.num_leases -= 1

    def free_with_last_lease(self, chunk: Chunk, offset: int) -> None:
        """Give back an extent of the arena into which a leased chunk was read in part: holders may look at that part."""
        self._unfinished.setdefault(chunk, []).append(offset)

    # coming and going

    def tell(self, change: Change, chunk: Chunk, directory: PrefixDirectory[Chunk] | None) -> None:
        """Tell the observers, and the pins before them."""
        if change == "published":
            self.pins.added(chunk)
        for observer in self.observers:
            observer(change, chunk, directory)

    def tell_moves(self, table: ChunkTable, moves: Moves[Chunk]) -> None:
        """Tell the observers what a new chunk moved in the prefix view."""
        for chunk, directory in moves.chunks:
            self.tell("moved", chunk, directory)
        for renamed in moves.directories:
            for observer in self.name_observers:
                observer(table, renamed)

    def discard(self, chunk: Chunk, why: str, *, erases: bool = False) -> None:
        """Take a chunk out of sight and out of every tier; nothing waits, `settle` makes it durable.

        With `erases`, and where a person wants it gone, a scan of the volume does not find it again.
        """
        if chunk.is_removed:
            return
        if erases or why in _ERASED:
            self._to_erase.add(chunk)
        if chunk.position == 0 or chunk.parent in chunk.table.chunks:
            self._demote_descendants(chunk)  # else that was done when its parent went
        if self.commits is not None:  # also for a dirty one: its row may be on its way
            self.commits.delete(chunk.table.number, chunk.key)
        self.ram.policy.remove(chunk)
        if self.nvme is not None:
            self.nvme.policy.remove(chunk)
        directory = self.catalog.discard(chunk)
        if self.pins.removed(chunk) and self.commits is not None:
            self.commits.pin(chunk.table.number, chunk.key, None)
        self._remember(chunk, why)
        self.events.append(why, namespace=chunk.table.directory, key=chunk.key.hex())
        self.tell("removed", chunk, directory)
        if not chunk.leases:
            self._give_back(chunk)

    def _remember(self, chunk: Chunk, why: str) -> None:
        self.ghosts.limit = max(MAX_GHOSTS, GHOSTS_A_CHUNK * len(self._order))
        ghost = Ghost(self._system.time_ns(), why, chunk.hits, chunk.returns)
        self.ghosts.add(chunk.table.directory, chunk.key, ghost)

    def recall(self, chunk: Chunk) -> str | None:
        """A chunk is about to be stored: it goes on with the uses it had when it went. Returns why it went, if it did."""
        ghost = self.ghosts.pop(chunk.table.directory, chunk.key)
        if ghost is None:
            return None
        chunk.hits = ghost.hits
        chunk.returns = ghost.returns + (ghost.why in _ASKED_FOR_AGAIN)
        return ghost.why

    def bypass(self, chunk: Chunk) -> None:
        """A chunk was to be stored that is not worth its place: what it was asked for is remembered."""
        self.recall(chunk)
        self.lowest.policy.bypassed(chunk)
        self._remember(chunk, BYPASSED)

    def placed_on_nvme(self, chunk: Chunk) -> None:
        """A chunk got its extent on the volume."""
        if self.pins.is_held(chunk):
            self._longest = None

    def _held_changed(self, chunk: Chunk, is_held: bool) -> None:
        self._longest = None
        if is_held:
            self._order.hold(chunk)
        else:
            self._order.let_go(chunk)

    def _demote_descendants(self, chunk: Chunk) -> None:
        for orphan in chunk.table.prefixes.descendants(chunk):
            self.ram.policy.demote(orphan)
            if self.nvme is not None:
                self.nvme.policy.demote(orphan)

    def discard_recovered(self, chunk: Chunk) -> None:
        """Forget a chunk of the index whose bytes on the volume belong to another; its extent is not freed."""
        if self.commits is not None:
            self.commits.delete(chunk.table.number, chunk.key)
        self.catalog.discard(chunk)
        chunk.nvme = NOWHERE

    async def settle(self) -> None:
        """Wait until what was discarded is gone for good. Raises UnavailableError."""
        if self.commits is not None:
            await self.commits.flush()

    async def settle_and_erase(self) -> None:
        """The same, and until a scan of the volume does not find it, but for what somebody still holds."""
        await self.settle()
        if self.eraser is not None:
            await self.eraser.flush()

    def _give_back(self, chunk: Chunk) -> None:
        self.ram.drop(chunk)
        extent = self.nvme.forget(chunk) if self.nvme is not None else None
        if extent is not None:
            self.free_on_nvme(chunk, extent[0])
        self._to_erase.discard(chunk)

    def free_on_nvme(self, chunk: Chunk, offset: int) -> None:
        """Free an extent of the volume that held a chunk which was removed, when no row can name it any more."""
        if self.commits is not None:
            erase = self.eraser.put if self.eraser is not None and chunk in self._to_erase else None
            self.commits.free_later(offset, chunk.length, erase)

    def arrived(self, policy: Policy[Chunk], chunks: Collection[Chunk]) -> None:
        """Chunks came into the tier of this policy: what they are built on must not go before them."""
        parents = {(chunk.table.directory, chunk.parent) for chunk in chunks}
        for chunk in chunks:
            if not chunk.is_removed and (chunk.table.directory, chunk.key) not in parents:
                policy.built_on(chunk.prefix())

    # room

    def reserve_ram(self, length: int, above: Chunk | None = None) -> int | None:
        """An extent of the arena, making room if need be; None under pressure.

        `above` is what a new chunk is built on: in a RAM cache none is taken that would be the first to go.
        """
        if self.nvme is not None:
            return self.ram.reserve(length, self._may_leave_ram, self._evict_from_ram)
        if length > self._longest_gap():
            return None
        return self.ram.reserve(length, self._may_leave_ram, self._evict_from_ram, above)

    def _may_leave_ram(self, chunk: Chunk) -> bool:
        if chunk.leases:
            return False
        if chunk.nvme != NOWHERE:
            return True
        return not self.pins.is_held(chunk) and (self.nvme is None or self.nvme.is_degraded)

    def _evict_from_ram(self, chunk: Chunk) -> None:
        self.counters.evictions_ram += 1
        if chunk.nvme == NOWHERE:
            self.discard(chunk, "evict")
        else:
            self.ram.drop(chunk)

    def _longest_gap(self) -> int:
        """The longest extent that the lowest tier could give if all went that is not held.

        Scattered pins may leave none for a longer chunk; to look for it would cost everything else.
        """
        extents, is_ram = self.lowest.extents, self.nvme is None
        if not self.pins.held_bytes:
            return extents.capacity
        if self._longest is not None:
            return self._longest
        longest, end = 0, extents.base
        for offset, length in sorted((chunk.ram if is_ram else chunk.nvme, chunk.length) for chunk in self.pins.held()):
            if offset != NOWHERE:
                longest, end = max(longest, offset - end), offset + length
        self._longest = max(longest, extents.base + extents.capacity - end)
        return self._longest

    async def reserve_nvme(self, lengths: Iterable[int]) -> list[int]:
        """Extents of the volume, evicting the least worthy chunks; fewer than asked for if they cannot be had.

        Raises UnavailableError if the index cannot be written.
        """
        assert self.nvme is not None
        offsets: list[int] = []
        sizes: list[int] = []
        for length in lengths:
            while (offset := self.nvme.extents.allocate(length)) is None:
                victims = self.nvme.least_worthy(length)
                if not victims or length > self._longest_gap():
                    return offsets
                for victim in victims:
                    self.counters.evictions_nvme += 1
                    self.discard(victim, "evict")
                try:
                    await self.settle()
                except UnavailableError:
                    for extent in zip(offsets, sizes, strict=True):
                        self.nvme.extents.free(*extent)
                    raise
            offsets.append(offset)
            sizes.append(length)
        return offsets
