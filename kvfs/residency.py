"""Residency: which chunk has bytes where, who holds them, and what happens when it has to go.

This is the bookkeeping under the store: leases, eviction, removal, and extents that outlive their chunk because
somebody still reads them. The transfers themselves are elsewhere (`promotion`, `write_behind`).

Invariants, between any two awaits:
* a visible chunk has an extent in at least one tier, or is being given one by the task that made it;
* the extents of a leased chunk are neither reused nor written;
* an extent of the volume is free only if no committed row of the index names it;
* what is pinned, or has to stay for the sake of what is, is not evicted from the lowest tier;
* no chunk is evicted to make room for one that is built on it;
* what is kept back from NVMe is in RAM, and may be evicted from there unless it is held.

Concurrency: belongs to the event loop's thread. Only `reserve_nvme` and `settle` wait; what they return is true when
they return and must be used before the next await.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal

from kvfs.catalog import NOWHERE, Catalog, Chunk, ChunkTable
from kvfs.commits import Commits
from kvfs.copied_in import CopiedIn
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
GHOSTS_A_CHUNK = 4
"""With fewer, what was used before is taken for new: 1 and 0 make a hit ratio of .155 one of .133 and .084."""
BYPASSED = "bypass"
_ASKED_FOR_AGAIN = ("evict", BYPASSED)


class Residency:
    """The catalog and the tiers, kept in step.

    Attributes:
        catalog, ram, nvme and commits (None for a RAM cache), counters, events.
        pins: what must stay in the lowest tier; copied_in: what goes in an order of its own.
        ghosts: what is remembered of chunks that went.
        num_leases: holds on all chunks together.
        kept_back_bytes: of chunks that admission keeps from NVMe; on_held: told of one that must not be evicted any more.
        over_quota: namespaces that have to let go of something as soon as they can: of these `on_last_lease` is told when
            nobody holds a chunk any more.
        observers: told of every chunk that appears, moves in the prefix view (with the directory it was in) or goes.
        name_observers: of every prefix directory that got another name or place.
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
        self.copied_in = CopiedIn(system.monotonic)
        self.lowest = nvme or ram  # from which nothing comes back
        self._longest: int | None = None  # see `_longest_gap`; None: not known
        self._order = self.lowest.policy
        self._order.is_held = self.pins.is_held
        self._order.is_grouped = lambda chunk: self.copied_in.depth(chunk) is not None
        self._order.group = self._deepest_copied
        self.observers: list[Observer] = []
        self.eraser = Eraser(nvme, counters) if nvme is not None else None
        self.name_observers: list[NameObserver] = []
        self._system = system
        self.num_leases = 0
        self.over_quota: set[ChunkTable] = set()
        self.on_last_lease: Callable[[ChunkTable], None] = lambda _: None
        self._unfinished: dict[Chunk, list[int]] = {}
        self._kept_back: set[Chunk] = set()
        self.kept_back_bytes = 0
        self.on_held: Callable[[Chunk], None] = lambda _: None

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
        elif self.over_quota and chunk.table in self.over_quota:
            self.on_last_lease(chunk.table)

    def lease_all(self, chunks: Collection[Chunk]) -> None:
        """Hold many at once: a match has hundreds, and its client waits."""
        for chunk in chunks:
            chunk.leases += 1
        self.num_leases += len(chunks)

    def release_all(self, chunks: Collection[Chunk]) -> None:
        """End one hold of each."""
        for chunk in chunks:
            if chunk.leases == 1 and (chunk.is_removed or self._unfinished or self.over_quota):
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

    def discard(self, chunk: Chunk, why: str) -> None:
        """Take a chunk out of sight and out of every tier; nothing waits, `settle` makes it durable."""
        if chunk.is_removed:
            return
        if chunk.position == 0 or chunk.parent in chunk.table.chunks:
            self._demote_descendants(chunk)  # else that was done when its parent went
        if self.commits is not None:  # also for a dirty one: its row may be on its way
            self.commits.delete(chunk.table.number, chunk.key)
        self.ram.policy.remove(chunk)
        if self.nvme is not None:
            self.nvme.policy.remove(chunk)
        self.no_longer_kept_back(chunk)
        directory = self.catalog.discard(chunk)
        self.copied_in.removed(chunk)
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

    def keep_back(self, chunk: Chunk) -> None:
        """A chunk that is in RAM only is not to be written to NVMe, for now."""
        self._kept_back.add(chunk)
        self.kept_back_bytes += chunk.length

    def is_kept_back(self, chunk: Chunk) -> bool:
        """Whether it may be evicted from RAM though it is nowhere else."""
        return chunk in self._kept_back

    @property
    def num_kept_back(self) -> int:
        """How many chunks admission keeps from NVMe."""
        return len(self._kept_back)

    def no_longer_kept_back(self, chunk: Chunk) -> None:
        """It will be written, or it is gone; one that was not kept back is no error."""
        if chunk in self._kept_back:
            self._kept_back.remove(chunk)
            self.kept_back_bytes -= chunk.length

    def _deepest_copied(self) -> Iterator[Chunk]:
        """What copies have brought that may leave the lowest tier, the deepest first."""
        is_ram = self.nvme is None
        for chunk in self.copied_in.deepest_first():
            if (chunk.ram if is_ram else chunk.nvme) != NOWHERE and not self.pins.is_held(chunk):
                yield chunk

    def _held_changed(self, chunk: Chunk, is_held: bool) -> None:
        self._longest = None
        if is_held:
            self._order.hold(chunk)
            if chunk in self._kept_back:
                self.on_held(chunk)
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

    def free_on_nvme(self, chunk: Chunk, offset: int) -> None:
        """Free an extent of the volume that held a chunk which was removed, when no row can name it any more."""
        if self.commits is not None:
            self.commits.free_later(offset, chunk.length, self.eraser.put if self.eraser is not None else None)

    def arrived(self, policy: Policy[Chunk], chunks: Collection[Chunk]) -> None:
        """Chunks came into the tier of this policy: what they are built on must not go before them."""
        parents = {(chunk.table.directory, chunk.parent) for chunk in chunks}
        for chunk in chunks:
            if not chunk.is_removed and (chunk.table.directory, chunk.key) not in parents:
                policy.built_on(chunk.prefix())

    # room

    def reserve_ram(self, length: int, above: Chunk | None = None, spared: Collection[Chunk] = ()) -> int | None:
        """An extent of the arena, making room if need be; None under pressure. What is `spared` stays.

        `above` is what a new chunk is built on: in a RAM cache none is taken that would be the first to go.
        """
        if self.nvme is not None:
            may_go = self._may_leave_ram
            if spared:
                return self.ram.reserve(
                    length, lambda chunk: chunk not in spared and may_go(chunk), self._evict_from_ram
                )
            return self.ram.reserve(length, may_go, self._evict_from_ram)
        if length > self._longest_gap():
            return None
        return self.ram.reserve(length, self._may_leave_ram, self._evict_from_ram, above)

    def reserve_ram_for_copy(self, length: int, position: int | None) -> int | None:
        """The same for a file that is being copied in, the chunk at this position of its chain if that is known."""

        def may_go(chunk: Chunk) -> bool:
            is_lost = chunk.nvme == NOWHERE
            return self._may_leave_ram(chunk) and (not is_lost or self.copied_in.may_go_for(chunk, position))

        if self.nvme is None and length > self._longest_gap():
            return None
        return self.ram.reserve(length, may_go, self._evict_from_ram)

    def _may_leave_ram(self, chunk: Chunk) -> bool:
        if chunk.leases:
            return False
        if chunk.nvme != NOWHERE:
            return True
        return not self.pins.is_held(chunk) and (self.nvme is None or self.nvme.is_degraded or chunk in self._kept_back)

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

    async def reserve_nvme(self, chunks: Sequence[Chunk]) -> list[int]:
        """Extents of the volume for these chunks, evicting the least worthy; fewer than asked for if they cannot be had.

        A chunk for which only what it is built on could go is the least worthy itself: it goes, and has NOWHERE.
        Raises UnavailableError if the index cannot be written.
        """
        assert self.nvme is not None
        offsets: list[int] = []
        try:
            for chunk in chunks:
                while (offset := self.nvme.extents.allocate(chunk.length)) is None and not chunk.is_removed:
                    if not self._make_room_on_nvme(chunk, frozenset(chunks)):
                        return offsets
                    await self.settle()
                    if self.eraser is not None:
                        await self.eraser.free()
                offsets.append(NOWHERE if offset is None else offset)
        except UnavailableError:
            for chunk, offset in zip(chunks, offsets, strict=False):
                if offset != NOWHERE:
                    self.nvme.extents.free(offset, chunk.length)
            raise
        return offsets

    def _make_room_on_nvme(self, chunk: Chunk, group: frozenset[Chunk]) -> bool:
        """Evict something for a chunk, or the chunk itself and what is built on it; returns whether anything could go.

        A chunk that an engine stored without the one before it is less worthy than all others: nobody can reach it.

        `group` is what is being written with it.
        """
        assert self.nvme is not None
        if chunk.length > self._longest_gap():
            return False
        prefix = frozenset(chunk.prefix())
        is_held = self.pins.is_held(chunk)
        is_copied = self.copied_in.depth(chunk) is not None and not is_held
        is_wanted = is_held or is_copied or not chunk.position or chunk.parent in chunk.table.chunks

        def may_go(victim: Chunk) -> bool:
            if victim.leases or victim in prefix:
                return False
            return not is_copied or self.copied_in.may_go_for(victim, chunk.position)

        victims = self.nvme.least_worthy(chunk.length, may_go) if is_wanted else []
        are_last = not victims or self.copied_in.depth(victims[0]) is not None
        if is_copied and are_last and self.copied_in.is_writing_deeper(chunk, group):
            return False
        if victims:
            self._evict_from_nvme(victims, chunk.length)
            return True
        if is_held or not any(self.nvme.policy.victims(lambda victim: not victim.leases)):
            return False
        for orphan in [each for each in chunk.table.prefixes.descendants(chunk) if each.is_dirty]:
            self._lost_room(orphan)
        self._lost_room(chunk)
        return True

    def _lost_room(self, chunk: Chunk) -> None:
        """A dirty chunk is less worthy than all that is on the volume, and it is not held."""
        self.counters.evictions_nvme += 1
        self.discard(chunk, "evict")

    def _evict_from_nvme(self, victims: list[Chunk], wanted: int) -> None:
        """Evict what makes room for `wanted` bytes and some more, but copied chunks only as far as need be."""
        freed = 0
        for victim in victims:
            if freed >= wanted and self.copied_in.depth(victim) is not None:
                return
            freed += victim.length
            self.counters.evictions_nvme += 1
            self.discard(victim, "evict")
