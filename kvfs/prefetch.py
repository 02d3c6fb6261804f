"""Prefetching: what a load is likely to ask for is brought from NVMe into RAM before it asks.

An `Order` names chunks of one chain, the first of them first. Of all orders the one of the highest priority goes first, then
the oldest. What a load asks for is promoted for the load, at once; an order passes over it, and a load that comes for what
an order has begun finds that promotion (`promotion` has one for each chunk).

There are three reasons to bring a chunk, counted apart: a request that waits will load it, what was loaded goes on with it
(see `read_ahead`; beneath all orders of requests), or the operator wants it there (`kvfs warm`).

Bounds: `IN_FLIGHT_BYTES` at a time, which is all that a load may have to wait behind; and what was brought and not yet
loaded takes a part of RAM at most, for each reason. Room is made as for every promotion, but what is leased stays, and so
does what another prefetch has brought and nobody has loaded yet.

Invariants:
1. A chunk that waits in an order is leased; that lease goes when it is begun, and a promotion has a lease of its own.
2. `_unused` holds exactly the chunks that were brought, or are being brought, and that neither were loaded since nor left
   RAM, and why. Each of them will be counted once, as useful or as wasted.

Concurrency: belongs to the event loop's thread. `order`, `cancel` and `loaded` never wait.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import Protocol

import trio

from kvfs.catalog import NOWHERE, Chunk
from kvfs.messages import Warmth
from kvfs.metrics import Counters
from kvfs.promotion import Promotion
from kvfs.system import System
from kvfs.tiers.ram import RamTier

IN_FLIGHT_BYTES = 8 << 20
BY_CHAIN_PRIORITY = -1
"""Beneath those that requests may have."""

_ORDERS = 64
LOOK_AGAIN_S = 0.02
"""How soon to look again whether there is room in RAM."""
_PATIENCE_S = 5.0  # after which the next are begun: a volume that hangs does not keep the others from it


class Reason(Enum):
    """Why a chunk is brought; the value begins the names of its counters."""

    REQUEST = "prefetches"
    CHAIN = "read_aheads"
    WARM = "warms"


LARGEST_SHARE = {Reason.REQUEST: (1, 2), Reason.CHAIN: (1, 8), Reason.WARM: (3, 4)}
"""Of RAM, for chunks that were brought and not yet loaded: so many parts of so many."""


class Order:
    """Chunks to be brought. Attributes: priority; reason; deadline: of the monotonic clock; is_over: nothing of it waits."""

    def __init__(
        self, chunks: Iterable[Chunk], priority: int, deadline: float, prefetcher: Prefetcher, reason: Reason
    ) -> None:
        self.priority = priority
        self.deadline = deadline
        self.reason = reason
        self._chunks = deque(chunks)
        self._prefetcher = prefetcher

    @property
    def is_over(self) -> bool:
        """Whether nothing of it waits any more."""
        return not self._chunks

    def next(self) -> Chunk | None:
        """The chunk that waits longest."""
        return self._chunks[0] if self._chunks else None

    def take(self) -> Chunk:
        """The same, which does not wait any more."""
        return self._chunks.popleft()

    def cancel(self) -> None:
        """Give up what was not begun."""
        while self._chunks:
            self._prefetcher.drop(self._chunks.popleft(), self.reason)


class Held(Protocol):
    """What is needed of a `Residency`: RAM, and leases on chunks."""

    @property
    def ram(self) -> RamTier:
        """See `Residency`."""

    @property
    def counters(self) -> Counters:
        """See `Residency`."""

    def lease_all(self, chunks: Collection[Chunk]) -> None:
        """See `Residency`."""

    def release(self, chunk: Chunk) -> None:
        """See `Residency`."""


class Bringing(Protocol):
    """What is needed of a `Promoter`."""

    def is_under_way(self, chunk: Chunk) -> bool:
        """See `Promoter`."""

    def start(
        self, chunks: Iterable[Chunk], *, is_asked_for: bool = True, spared: Collection[Chunk] = ()
    ) -> Sequence[Promotion | None]:
        """See `Promoter`."""


class Prefetcher:
    """Carries out orders; see the module.

    `run` does it as time passes. What goes on in it, `first` and `begin`, never waits: a simulation calls these itself.
    """

    def __init__(self, residency: Held, promoter: Bringing, system: System) -> None:
        self._residency = residency
        self._promoter = promoter
        self._system = system
        self._orders: list[tuple[int, int, Order]] = []  # a heap
        self._most_orders = _ORDERS
        self._numbers = itertools.count()
        self._unused: dict[Chunk, Reason] = {}
        self._unused_bytes = dict.fromkeys(Reason, 0)
        self._hanging: dict[int, Promotion] = {}  # by number of the volume
        self._wake = trio.Event()
        residency.ram.on_drop.append(self._left_ram)

    def order(
        self, chunks: Iterable[Chunk], priority: int, deadline_s: float, reason: Reason = Reason.REQUEST
    ) -> Order:
        """Bring those of these chunks that are not in RAM, unless the deadline comes first."""
        cold = [chunk for chunk in chunks if chunk.ram == NOWHERE and not chunk.is_removed]
        self._residency.lease_all(cold)
        order = Order(cold, priority, self._system.monotonic() + deadline_s, self, reason)
        if cold:
            if len(self._orders) >= self._most_orders:  # those that were cancelled behind one that waits for room
                self._orders = [entry for entry in self._orders if not entry[2].is_over]
                heapq.heapify(self._orders)
                self._most_orders = max(_ORDERS, 2 * len(self._orders))
            heapq.heappush(self._orders, (-priority, next(self._numbers), order))
            self._wake.set()
        return order

    def drop(self, chunk: Chunk, reason: Reason) -> None:
        """A chunk of an order will not be brought."""
        self._count(reason, "dropped")
        self._residency.release(chunk)

    def loaded(self, chunks: Collection[Chunk]) -> None:
        """An engine has loaded these chunks."""
        if self._unused:
            for chunk in chunks:
                if (reason := self._forget(chunk)) is not None:
                    self._count(reason, "useful")

    async def warm(self, chunks: Sequence[Chunk]) -> list[Warmth]:
        """Bring chunks into RAM for the operator, and wait; what became of each. The caller holds leases on them.

        What was there already is kept from other prefetches, as what is brought is.
        """
        found = [Warmth.UNREADABLE] * len(chunks)
        begun: deque[tuple[int, Promotion]] = deque()
        in_flight = 0
        for number, chunk in enumerate(chunks):
            while begun and in_flight + chunk.length > IN_FLIGHT_BYTES:
                in_flight -= await self._end_warming(begun, found)
            if chunk.is_removed:
                found[number] = Warmth.GONE
            elif chunk.ram != NOWHERE:
                found[number] = Warmth.THERE
                if chunk not in self._unused and self._has_room(chunk, Reason.WARM):
                    self._remember(chunk, Reason.WARM)
            elif not self._has_room(chunk, Reason.WARM):
                found[number] = Warmth.OVER_SHARE
            elif (promotion := self._start(chunk)) is None:
                found[number] = Warmth.NO_ROOM
            else:
                if chunk not in self._unused:
                    self._remember(chunk, Reason.WARM)
                in_flight += chunk.length
                begun.append((number, promotion))
        while begun:
            await self._end_warming(begun, found)
        return found

    async def _end_warming(self, begun: deque[tuple[int, Promotion]], found: list[Warmth]) -> int:
        """Wait for the oldest; returns its bytes."""
        number, promotion = begun.popleft()
        await self._wait_for(promotion)
        if promotion.error is None:
            found[number] = Warmth.BROUGHT
        return promotion.chunk.length

    async def _wait_for(self, promotion: Promotion) -> None:
        await promotion.wait_for_layers(promotion.pieces[-1].layers)
        if promotion.error is not None:
            self._left_ram(promotion.chunk)

    def _hangs(self, promotions: Sequence[Promotion]) -> None:
        """These do not end: they take no room from others, and nothing more is begun on their volumes until they do."""
        for promotion in promotions:
            if promotion.num_left:
                self._hanging[promotion.chunk.volume] = promotion
                self._left_ram(promotion.chunk)

    def _does_hang(self, chunk: Chunk) -> bool:
        promotion = self._hanging.get(chunk.volume)
        if promotion is not None and not promotion.num_left:
            del self._hanging[chunk.volume]
            return False
        return promotion is not None

    async def _wait_for_all(self, promotions: Sequence[Promotion], have_ended: trio.Event) -> None:
        for promotion in promotions:
            await self._wait_for(promotion)
        have_ended.set()

    def _left_ram(self, chunk: Chunk) -> None:
        if (reason := self._forget(chunk)) is not None:
            self._count(reason, "wasted")

    def _count(self, reason: Reason, what: str) -> None:
        counters, name = self._residency.counters, f"{reason.value}_{what}"
        setattr(counters, name, getattr(counters, name) + 1)

    def _remember(self, chunk: Chunk, reason: Reason) -> None:
        self._unused[chunk] = reason
        self._unused_bytes[reason] += chunk.length
        self._count(reason, "begun")

    def _forget(self, chunk: Chunk) -> Reason | None:
        reason = self._unused.pop(chunk, None)
        if reason is not None:
            self._unused_bytes[reason] -= chunk.length
            self._wake.set()  # there may be room for the next
        return reason

    def _has_room(self, chunk: Chunk, reason: Reason) -> bool:
        parts, of = LARGEST_SHARE[reason]
        return self._unused_bytes[reason] + chunk.length <= self._residency.ram.extents.capacity * parts // of

    def _start(self, chunk: Chunk) -> Promotion | None:
        """Begin to bring a chunk; None if there is no room but that of what other prefetches have brought."""
        return self._promoter.start([chunk], is_asked_for=False, spared=self._unused)[0]

    async def run(self) -> None:
        """Carry out orders, for ever."""
        async with trio.open_nursery() as nursery:
            await self._run_in(nursery)

    async def _run_in(self, nursery: trio.Nursery) -> None:
        while True:
            self._wake = trio.Event()
            order = self.first()
            if order is None:
                await self._wake.wait()
                continue
            promotions = self.begin(order)
            if promotions:
                have_ended = trio.Event()
                nursery.start_soon(self._wait_for_all, promotions, have_ended)
                with trio.move_on_after(_PATIENCE_S) as patience:
                    await have_ended.wait()
                if patience.cancelled_caught:
                    self._hangs(promotions)
            elif not order.is_over:  # no room
                with trio.move_on_after(LOOK_AGAIN_S):
                    await self._wake.wait()

    def first(self) -> Order | None:
        """The order whose turn it is; those that are over, or too late, are dropped."""
        while self._orders:
            order = self._orders[0][2]
            if not order.is_over and self._system.monotonic() >= order.deadline:
                order.cancel()
            if not order.is_over:
                return order
            heapq.heappop(self._orders)
        return None

    def begin(self, order: Order) -> list[Promotion]:
        """Begin with the next chunks of an order, as many as may be in flight and have room."""
        begun: list[Promotion] = []
        size = 0
        while (chunk := order.next()) is not None:
            if chunk.ram != NOWHERE or chunk.is_removed or self._promoter.is_under_way(chunk):
                self._residency.release(order.take())  # somebody has it already, or nobody wants it
                continue
            if self._does_hang(chunk):
                self.drop(order.take(), order.reason)
                continue
            if begun and size + chunk.length > IN_FLIGHT_BYTES:
                break
            if not self._has_room(chunk, order.reason):
                break
            promotion = self._start(chunk)
            if promotion is None:
                break
            self._residency.release(order.take())
            self._remember(chunk, order.reason)
            size += chunk.length
            begun.append(promotion)
        return begun
