"""Residency: which chunk has bytes where, who holds them, and what happens when it comes and goes.

This is the bookkeeping under the store: leases, removal, and extents that outlive their chunk because somebody still
reads them. Who has to go for others is in `room`, what is remembered of it in `departures`; the transfers themselves
are elsewhere (`promotion`, `write_behind`).

Invariants, between any two awaits:
* a visible chunk has an extent in at least one tier, or is being given one by the task that made it;
* the extents of a leased chunk are neither reused nor written;
* an extent of a volume is free only if no committed row of the index names it;
* what is pinned, or has to stay for the sake of what is, is held in the order of the lowest tier, and not evicted from it;
* what is kept back from NVMe is in RAM, and may be evicted from there unless it is held.

Concurrency: belongs to the event loop's thread. Only `settle` and `settle_and_erase` wait.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Literal

import trio

from kvfs.catalog import NOWHERE, Catalog, Chunk, ChunkTable
from kvfs.copied_in import CopiedIn
from kvfs.departures import Departures
from kvfs.errors import UnavailableError
from kvfs.ghosts import Ghosts, Refusals
from kvfs.kept_back import KeptBack
from kvfs.metrics import Counters, EventLog
from kvfs.pins import Pins
from kvfs.policies import Policy
from kvfs.prefixes import Moves, PrefixDirectory, Renamed
from kvfs.room import Room
from kvfs.stripes import Stripe, Stripes
from kvfs.system import System
from kvfs.tiers.ram import RamTier

log = logging.getLogger(__name__)

Change = Literal["published", "removed", "moved"]
Observer = Callable[[Change, Chunk, PrefixDirectory[Chunk] | None], None]
NameObserver = Callable[[ChunkTable, Renamed[Chunk]], None]


class Residency:
    """The catalog and the tiers, kept in step.

    Attributes:
        catalog, ram, nvme (None for a RAM cache), counters, events.
        pins: what must stay in the lowest tier; copied_in: what goes in an order of its own.
        departures: what is remembered of chunks that went; refusals: of what was not done with some.
        started_ns: when all this began, since the epoch.
        kept_back: what admission keeps from NVMe; room: makes some, in all tiers.
        num_leases: holds on all chunks together.
        over_quota: namespaces that have to let go of something as soon as they can: of these `on_last_lease` is told when
            nobody holds a chunk any more.
        observers: told of every chunk that appears, moves in the prefix view (with the directory it was in) or goes.
        name_observers: of every prefix directory that got another name or place.
    """

    def __init__(
        self,
        ram: RamTier,
        nvme: Stripes | None,
        counters: Counters,
        events: EventLog,
        system: System,
    ) -> None:
        self.catalog = Catalog()
        self.ram = ram
        self.nvme = nvme
        self.counters = counters
        self.events = events
        self.started_ns = system.time_ns()
        self.departures = Departures(ram, nvme, system, self.started_ns)
        self.refusals = Refusals()
        self.pins = Pins(self._held_changed)
        self.copied_in = CopiedIn(system.monotonic)
        self.kept_back = KeptBack()
        self.room = Room(ram, nvme, self.pins, self.copied_in, self.kept_back, counters, self.discard)
        self.observers: list[Observer] = []
        self.name_observers: list[NameObserver] = []
        self._system = system
        self.num_leases = 0
        self.over_quota: set[ChunkTable] = set()
        self.on_last_lease: Callable[[ChunkTable], None] = lambda _: None
        self._unfinished: dict[Chunk, list[int]] = {}

    @property
    def ghosts(self) -> Ghosts:
        """What is remembered of chunks that went."""
        return self.departures.ghosts

    def now_ns(self) -> int:
        """The time since the epoch, by which chunks go."""
        return self._system.time_ns()

    @property
    def capacity(self) -> int:
        """Of the lowest tier, from which nothing comes back."""
        return self.ram.extents.capacity if self.nvme is None else self.nvme.capacity

    @property
    def used_bytes(self) -> int:
        """Of the same."""
        return self.ram.extents.used_bytes if self.nvme is None else self.nvme.used_bytes

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

    def discard(self, chunk: Chunk, why: str, cause: str = "") -> None:
        """Take a chunk out of sight and out of every tier; nothing waits, `settle` makes it durable.

        `why` and `cause` are remembered, see `Ghost`.
        """
        if chunk.is_removed:
            return
        if chunk.position and chunk.parent not in chunk.table.chunks and cause:
            cause = "unreachable"
        if chunk.position == 0 or chunk.parent in chunk.table.chunks:
            self._demote_descendants(chunk)  # else that was done when its parent went
        stripe = self.nvme.of(chunk) if self.nvme is not None else None
        self.ram.hide(chunk)
        if stripe is not None:
            stripe.delete(chunk)  # also a dirty one: its row may be on its way
            stripe.tier.policy.remove(chunk)
        self.kept_back.discard(chunk)
        directory = self.catalog.discard(chunk)
        self.copied_in.removed(chunk)
        if self.pins.removed(chunk) and stripe is not None:
            stripe.pin(chunk, None)
        self.departures.remember(chunk, why, cause)
        self.events.append(why, namespace=chunk.table.directory, key=chunk.key.hex())
        self.tell("removed", chunk, directory)
        if not chunk.leases:
            self._give_back(chunk)

    def placed_on_nvme(self, chunk: Chunk) -> None:
        """A chunk got its extent on its volume."""
        if self.pins.is_held(chunk):
            self.room.forget_gap(chunk)

    def _held_changed(self, chunk: Chunk, is_held: bool) -> None:
        self.room.forget_gap(chunk)
        stripe = self.nvme.of(chunk) if self.nvme is not None else None
        order = self.ram.policy if stripe is None else stripe.tier.policy
        if stripe is not None:
            stripe.held_bytes += chunk.length if is_held else -chunk.length
        if is_held:
            order.hold(chunk)
            if chunk in self.kept_back:
                self.kept_back.on_held(chunk)
        else:
            order.let_go(chunk)

    def _demote_descendants(self, chunk: Chunk) -> None:
        for orphan in chunk.table.prefixes.descendants(chunk):
            self.ram.policy.demote(orphan)
            if self.nvme is not None:
                self.nvme.of(orphan).tier.policy.demote(orphan)

    def discard_recovered(self, chunk: Chunk) -> None:
        """Forget a chunk of the index whose bytes on the volume belong to another; its extent is not freed."""
        if self.nvme is not None:
            self.nvme.of(chunk).delete(chunk)
        self.catalog.discard(chunk)
        chunk.nvme = NOWHERE

    async def settle(self, chunks: Collection[Chunk] | None = None) -> None:
        """Wait until what became of these chunks is durable, or of anything. Raises UnavailableError.

        What is true of all volumes, as limits are, is durable once one of them has it.
        """
        if self.nvme is None:
            return
        stripes = list(self.nvme) if chunks is None else self.nvme.holding(chunks)
        failures = await _each(stripes, lambda stripe: stripe.commits.flush())
        if failures and (chunks is not None or len(failures) == len(stripes)):
            raise failures[0]

    async def settle_and_erase(self, chunks: Collection[Chunk] | None = None) -> None:
        """The same, and until a scan of the volumes does not find it, but for what somebody still holds."""
        await self.settle(chunks)
        if self.nvme is not None:
            stripes = list(self.nvme) if chunks is None else self.nvme.holding(chunks)
            await _each(stripes, lambda stripe: stripe.eraser.flush())

    def _give_back(self, chunk: Chunk) -> None:
        self.ram.drop(chunk)
        extent = self.nvme.of(chunk).tier.forget(chunk) if self.nvme is not None else None
        if extent is not None:
            self.free_on_nvme(chunk, extent[0])

    def free_on_nvme(self, chunk: Chunk, offset: int) -> None:
        """Free an extent of its volume that held a chunk which was removed, when no row can name it any more."""
        if self.nvme is not None:
            self.nvme.of(chunk).free_later(offset, chunk.length)

    def assign(self, chunk: Chunk) -> None:
        """Say which volume a new chunk will go to."""
        if self.nvme is not None:
            chunk.volume = self.nvme.choose(chunk.key)

    def arrived_in_ram(self, chunks: Collection[Chunk]) -> None:
        """Chunks came into RAM: what they are built on must not go before them."""
        _built_on([self.ram.policy], chunks)

    def arrived_on_nvme(self, chunks: Collection[Chunk]) -> None:
        """The same of chunks that were written; what they are built on may be on other volumes."""
        _built_on([stripe.tier.policy for stripe in self.nvme or ()], chunks)


def _built_on(policies: Sequence[Policy[Chunk]], chunks: Collection[Chunk]) -> None:
    parents = {(chunk.table.directory, chunk.parent) for chunk in chunks}
    for chunk in chunks:
        if not chunk.is_removed and (chunk.table.directory, chunk.key) not in parents:
            prefix = chunk.prefix()
            for policy in policies:
                policy.built_on(prefix)


async def _each(stripes: Sequence[Stripe], wait: Callable[[Stripe], Awaitable[None]]) -> list[UnavailableError]:
    """Wait for every volume, side by side; returns what those say that failed."""
    failures: list[UnavailableError] = []

    async def one(stripe: Stripe) -> None:
        try:
            await wait(stripe)
        except UnavailableError as error:
            failures.append(error)

    if len(stripes) == 1:
        await one(stripes[0])
        return failures
    async with trio.open_nursery() as nursery:
        for stripe in stripes:
            nursery.start_soon(one, stripe)
    return failures
