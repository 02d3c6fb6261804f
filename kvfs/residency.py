"""Residency: which chunk has bytes where, who holds them, and what happens when it has to go.

This is the bookkeeping under the store: leases, eviction, removal, and extents that outlive their chunk because
somebody still reads them. The transfers themselves are elsewhere (`promotion`, `write_behind`).

Invariants, between any two awaits:
* a visible chunk has an extent in at least one tier, or is being given one by the task that made it;
* the extents of a leased chunk are neither reused nor written;
* an extent of a volume is free only if no committed row of the index names it;
* what is pinned, or has to stay for the sake of what is, is not evicted from the lowest tier;
* no chunk is evicted to make room for one that is built on it;
* what is kept back from NVMe is in RAM, and may be evicted from there unless it is held.

Concurrency: belongs to the event loop's thread. Only `reserve_nvme` and `settle` wait; what they return is true when
they return and must be used before the next await.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Literal

import trio

from kvfs.catalog import NOWHERE, Catalog, Chunk, ChunkTable
from kvfs.copied_in import CopiedIn
from kvfs.errors import UnavailableError
from kvfs.ghosts import MAX_GHOSTS, Ghost, Ghosts, Refusals
from kvfs.metrics import Counters, EventLog
from kvfs.pins import Pins
from kvfs.policies import Holding, Policy
from kvfs.prefixes import Moves, PrefixDirectory, Renamed
from kvfs.stripes import Stripe, Stripes
from kvfs.system import System
from kvfs.tiers.ram import RamTier

log = logging.getLogger(__name__)

Change = Literal["published", "removed", "moved"]
Observer = Callable[[Change, Chunk, PrefixDirectory[Chunk] | None], None]
NameObserver = Callable[[ChunkTable, Renamed[Chunk]], None]
GHOSTS_A_CHUNK = 4
"""With fewer, what was used before is taken for new: 1 and 0 make a hit ratio of .155 one of .133 and .084."""
BYPASSED = "bypass"
_MINUTE_NS = 60 * 10**9
_ASKED_FOR_AGAIN = ("evict", BYPASSED)


class Residency:
    """The catalog and the tiers, kept in step.

    Attributes:
        catalog, ram, nvme (None for a RAM cache), counters, events.
        pins: what must stay in the lowest tier; copied_in: what goes in an order of its own.
        ghosts: what is remembered of chunks that went; refusals: of what was not done with some.
        started_ns: when all this began, since the epoch.
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
        self.ghosts = Ghosts(forgotten_ns=self.started_ns)
        self.refusals = Refusals()
        self.pins = Pins(self._held_changed)
        self.copied_in = CopiedIn(system.monotonic)
        self._longest_in_ram: int | None = None  # see `_longest_gap`; None: not known
        if nvme is None:
            self._order_as_lowest(ram.policy, None)
        for stripe in nvme or ():
            self._order_as_lowest(stripe.tier.policy, stripe)
        self.observers: list[Observer] = []
        self.name_observers: list[NameObserver] = []
        self._system = system
        self.num_leases = 0
        self.over_quota: set[ChunkTable] = set()
        self.on_last_lease: Callable[[ChunkTable], None] = lambda _: None
        self._unfinished: dict[Chunk, list[int]] = {}
        self._kept_back: set[Chunk] = set()
        self.kept_back_bytes = 0
        self.on_held: Callable[[Chunk], None] = lambda _: None

    def _order_as_lowest(self, order: Holding[Chunk], stripe: Stripe | None) -> None:
        """What goes from this order is gone."""
        order.is_held = self.pins.is_held
        order.is_grouped = lambda chunk: self.copied_in.depth(chunk) is not None
        order.group = partial(self._deepest_copied, stripe)

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
        self.no_longer_kept_back(chunk)
        directory = self.catalog.discard(chunk)
        self.copied_in.removed(chunk)
        if self.pins.removed(chunk) and stripe is not None:
            stripe.pin(chunk, None)
        self._remember(chunk, why, cause)
        self.events.append(why, namespace=chunk.table.directory, key=chunk.key.hex())
        self.tell("removed", chunk, directory)
        if not chunk.leases:
            self._give_back(chunk)

    def now_ns(self) -> int:
        """The time since the epoch, by which chunks go."""
        return self._system.time_ns()

    def _remember(self, chunk: Chunk, why: str, cause: str = "") -> None:
        self.ghosts.limit = max(
            MAX_GHOSTS, GHOSTS_A_CHUNK * (len(self.ram.policy) if self.nvme is None else self.nvme.num_chunks)
        )
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
            extents = self.ram.extents if is_in_ram or self.nvme is None else self.nvme.of(chunk).tier.extents
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
        self.ram.policy.bypassed(chunk)
        self._remember(chunk, BYPASSED)

    def placed_on_nvme(self, chunk: Chunk) -> None:
        """A chunk got its extent on its volume."""
        if self.pins.is_held(chunk):
            self._forget_gap(chunk)

    def _forget_gap(self, chunk: Chunk) -> None:
        if self.nvme is None:
            self._longest_in_ram = None
        else:
            self.nvme.of(chunk).longest_gap = None

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

    def _deepest_copied(self, stripe: Stripe | None) -> Iterator[Chunk]:
        """What copies have brought that may leave this volume, or a RAM cache, the deepest first."""
        for chunk in self.copied_in.deepest_first():
            if self._offset(chunk, stripe) != NOWHERE and not self.pins.is_held(chunk):
                yield chunk

    def _offset(self, chunk: Chunk, stripe: Stripe | None) -> int:
        """Where a chunk is on this volume, or in RAM if none is named."""
        if stripe is None:
            return chunk.ram
        return chunk.nvme if chunk.volume == stripe.number else NOWHERE

    def _held_changed(self, chunk: Chunk, is_held: bool) -> None:
        self._forget_gap(chunk)
        stripe = self.nvme.of(chunk) if self.nvme is not None else None
        order = self.ram.policy if stripe is None else stripe.tier.policy
        if stripe is not None:
            stripe.held_bytes += chunk.length if is_held else -chunk.length
        if is_held:
            order.hold(chunk)
            if chunk in self._kept_back:
                self.on_held(chunk)
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
        if length > self._longest_gap(None):
            return None
        return self.ram.reserve(length, self._may_leave_ram, self._evict_from_ram, above)

    def reserve_ram_for_copy(self, length: int, position: int | None) -> int | None:
        """The same for a file that is being copied in, the chunk at this position of its chain if that is known."""

        def may_go(chunk: Chunk) -> bool:
            is_lost = chunk.nvme == NOWHERE
            return self._may_leave_ram(chunk) and (not is_lost or self.copied_in.may_go_for(chunk, position))

        if self.nvme is None and length > self._longest_gap(None):
            return None
        return self.ram.reserve(length, may_go, self._evict_from_ram)

    def _may_leave_ram(self, chunk: Chunk) -> bool:
        if chunk.leases:
            return False
        if chunk.nvme != NOWHERE:
            return True
        if self.pins.is_held(chunk):
            return False
        return self.nvme is None or self.nvme.of(chunk).tier.is_degraded or chunk in self._kept_back

    def _evict_from_ram(self, chunk: Chunk) -> None:
        self.counters.evictions_ram += 1
        if chunk.nvme == NOWHERE:
            self.discard(chunk, "evict", "policy" if self.nvme is None else "not_admitted")
        else:
            self.ram.drop(chunk)

    def _longest_gap(self, stripe: Stripe | None) -> int:
        """The longest extent that a volume, or a RAM cache, could give if all went that is not held.

        Scattered pins may leave none for a longer chunk; to look for it would cost everything else.
        """
        extents = self.ram.extents if stripe is None else stripe.tier.extents
        if not self.pins.held_bytes:
            return extents.capacity
        known = self._longest_in_ram if stripe is None else stripe.longest_gap
        if known is not None:
            return known
        longest, end = 0, extents.base
        for offset, length in sorted((self._offset(chunk, stripe), chunk.length) for chunk in self.pins.held()):
            if offset != NOWHERE:
                longest, end = max(longest, offset - end), offset + length
        longest = max(longest, extents.base + extents.capacity - end)
        if stripe is None:
            self._longest_in_ram = longest
        else:
            stripe.longest_gap = longest
        return longest

    async def reserve_nvme(self, stripe: Stripe, chunks: Sequence[Chunk]) -> list[int]:
        """Extents of a volume for these chunks, evicting the least worthy; fewer than asked for if they cannot be had.

        A chunk for which only what it is built on could go is the least worthy itself: it goes, and has NOWHERE.
        Raises UnavailableError if the index cannot be written.
        """
        extents = stripe.tier.extents
        offsets: list[int] = []
        try:
            for chunk in chunks:
                while (offset := extents.allocate(chunk.length)) is None and not chunk.is_removed:
                    if not self._make_room_on_nvme(stripe, chunk, frozenset(chunks)):
                        return offsets
                    await stripe.commits.flush()
                    await stripe.eraser.free()
                offsets.append(NOWHERE if offset is None else offset)
        except UnavailableError:
            for chunk, offset in zip(chunks, offsets, strict=False):
                if offset != NOWHERE:
                    extents.free(offset, chunk.length)
            raise
        return offsets

    def _make_room_on_nvme(self, stripe: Stripe, chunk: Chunk, group: frozenset[Chunk]) -> bool:
        """Evict something for a chunk, or the chunk itself and what is built on it; returns whether anything could go.

        A chunk that an engine stored without the one before it is less worthy than all others: nobody can reach it.

        `group` is what is being written with it.
        """
        tier = stripe.tier
        if chunk.length > self._longest_gap(stripe):
            return False
        prefix = frozenset(chunk.prefix())
        is_held = self.pins.is_held(chunk)
        is_copied = self.copied_in.depth(chunk) is not None and not is_held
        is_wanted = is_held or is_copied or not chunk.position or chunk.parent in chunk.table.chunks

        def may_go(victim: Chunk) -> bool:
            if victim.leases or victim in prefix:
                return False
            return not is_copied or self.copied_in.may_go_for(victim, chunk.position)

        victims = tier.least_worthy(chunk.length, may_go) if is_wanted else []
        are_last = not victims or self.copied_in.depth(victims[0]) is not None
        if is_copied and are_last and self.copied_in.is_writing_deeper(chunk, group):
            return False
        if victims:
            self._evict_from_nvme(victims, chunk.length)
            return True
        if is_held or not any(tier.policy.victims(lambda victim: not victim.leases)):
            return False
        for orphan in [each for each in chunk.table.prefixes.descendants(chunk) if each.is_dirty]:
            self._lost_room(orphan)
        self._lost_room(chunk)
        return True

    def _lost_room(self, chunk: Chunk) -> None:
        """A dirty chunk is less worthy than all that is on the volume, and it is not held."""
        self.counters.evictions_nvme += 1
        self.discard(chunk, "evict", "no_room")

    def _evict_from_nvme(self, victims: list[Chunk], wanted: int) -> None:
        """Evict what makes room for `wanted` bytes and some more, but copied chunks only as far as need be."""
        freed = 0
        for victim in victims:
            if freed >= wanted and self.copied_in.depth(victim) is not None:
                return
            freed += victim.length
            self.counters.evictions_nvme += 1
            self.discard(victim, "evict", "policy")


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
