"""Prefetching: what a load is likely to ask for is brought from NVMe into RAM before it asks.

An `Order` names chunks of one chain, the first of them first. Of all orders the one of the highest priority goes first, then
the oldest. What a load asks for is promoted for the load, at once; an order passes over it, and a load that comes for what
an order has begun finds that promotion (`promotion` has one for each chunk).

Bounds: `IN_FLIGHT_BYTES` at a time, which is all that a load may have to wait behind; and what was brought and not yet
loaded takes a half of RAM at most. Room is made as for every promotion: what is leased stays.

Invariants:
1. A chunk that waits in an order is leased; that lease goes when it is begun, and a promotion has a lease of its own.
2. `_unused` holds exactly the chunks that orders have begun to bring and that neither were loaded since nor left RAM.
   Each of them will be counted once, as useful or as wasted.

Concurrency: belongs to the event loop's thread. `order`, `cancel` and `loaded` never wait.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Collection, Iterable

import trio

from kvfs.catalog import NOWHERE, Chunk
from kvfs.promotion import Promoter, Promotion
from kvfs.residency import Residency
from kvfs.system import System

IN_FLIGHT_BYTES = 8 << 20
LARGEST_SHARE = 2
"""Of RAM, for chunks that were brought and not yet loaded: one part in so many."""

_ORDERS = 64
LOOK_AGAIN_S = 0.02
"""How soon to look again whether there is room in RAM."""


class Order:
    """Chunks to be brought. Attributes: priority; deadline: of the monotonic clock; is_over: nothing of it waits."""

    def __init__(self, chunks: Iterable[Chunk], priority: int, deadline: float, prefetcher: Prefetcher) -> None:
        self.priority = priority
        self.deadline = deadline
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
            self._prefetcher.drop(self._chunks.popleft())


class Prefetcher:
    """Carries out orders; see the module."""

    def __init__(self, residency: Residency, promoter: Promoter, system: System) -> None:
        self._residency = residency
        self._promoter = promoter
        self._system = system
        self._orders: list[tuple[int, int, Order]] = []  # a heap
        self._most_orders = _ORDERS
        self._numbers = itertools.count()
        self._unused: set[Chunk] = set()
        self._unused_bytes = 0
        self._wake = trio.Event()
        residency.ram.on_drop.append(self._left_ram)

    def order(self, chunks: Iterable[Chunk], priority: int, deadline_s: float) -> Order:
        """Bring those of these chunks that are not in RAM, unless the deadline comes first."""
        cold = [chunk for chunk in chunks if chunk.ram == NOWHERE and not chunk.is_removed]
        self._residency.lease_all(cold)
        order = Order(cold, priority, self._system.monotonic() + deadline_s, self)
        if cold:
            if len(self._orders) >= self._most_orders:  # those that were cancelled behind one that waits for room
                self._orders = [entry for entry in self._orders if not entry[2].is_over]
                heapq.heapify(self._orders)
                self._most_orders = max(_ORDERS, 2 * len(self._orders))
            heapq.heappush(self._orders, (-priority, next(self._numbers), order))
            self._wake.set()
        return order

    def drop(self, chunk: Chunk) -> None:
        """A chunk of an order will not be brought."""
        self._residency.counters.prefetches_dropped += 1
        self._residency.release(chunk)

    def loaded(self, chunks: Collection[Chunk]) -> None:
        """An engine has loaded these chunks."""
        if self._unused:
            for chunk in chunks:
                if self._forget(chunk):
                    self._residency.counters.prefetches_useful += 1

    def _left_ram(self, chunk: Chunk) -> None:
        if self._forget(chunk):
            self._residency.counters.prefetches_wasted += 1

    def _forget(self, chunk: Chunk) -> bool:
        if chunk not in self._unused:
            return False
        self._unused.remove(chunk)
        self._unused_bytes -= chunk.length
        self._wake.set()  # there may be room for the next
        return True

    async def run(self) -> None:
        """Carry out orders, for ever."""
        while True:
            self._wake = trio.Event()
            order = self._first()
            if order is None:
                await self._wake.wait()
                continue
            promotions = self._begin(order)
            if promotions:
                for promotion in promotions:
                    await promotion.wait_for_layers(promotion.pieces[-1].layers)
                    if promotion.error is not None:
                        self._left_ram(promotion.chunk)
            elif not order.is_over:  # no room
                with trio.move_on_after(LOOK_AGAIN_S):
                    await self._wake.wait()

    def _first(self) -> Order | None:
        """The order whose turn it is; those that are over, or too late, are dropped."""
        while self._orders:
            order = self._orders[0][2]
            if not order.is_over and self._system.monotonic() >= order.deadline:
                order.cancel()
            if not order.is_over:
                return order
            heapq.heappop(self._orders)
        return None

    def _begin(self, order: Order) -> list[Promotion]:
        """Begin with the next chunks of an order, as many as may be in flight and have room."""
        most = self._residency.ram.extents.capacity // LARGEST_SHARE
        begun: list[Promotion] = []
        size = 0
        while (chunk := order.next()) is not None:
            if chunk.ram != NOWHERE or chunk.is_removed or self._promoter.is_under_way(chunk):
                self._residency.release(order.take())  # somebody has it already, or nobody wants it
                continue
            if begun and size + chunk.length > IN_FLIGHT_BYTES:
                break
            if self._unused_bytes + chunk.length > most:
                break
            promotion = self._promoter.start([chunk], is_asked_for=False)[0]
            if promotion is None:
                break
            self._residency.release(order.take())
            self._unused.add(chunk)
            self._unused_bytes += chunk.length
            self._residency.counters.prefetches_begun += 1
            size += chunk.length
            begun.append(promotion)
        return begun
