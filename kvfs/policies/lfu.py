"""Least frequently used; of those used equally often the one that was used longest ago.

With an age (`lfu-ttl`) what was not used for so long goes before all others, however often it was used: without one, what
was popular once stays for ever. Neither is good for agents' sessions, whose newest chunks are the best and have no
hits yet.

A chain's head was used at least as often as its tail, and is touched after it: so leaves go first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from operator import itemgetter
from typing import Generic

from kvfs.policies.base import Clock, E
from kvfs.policies.order import Order

_MOST = 255
_GONE = -1
MAX_IDLE_S = 600.0


class LFU(Generic[E]):
    """Entries by how often they were used.

    Invariant: in each of `_by_uses` the values, times of the last use, never decrease. An entry is in one of them, and
    `_uses` says in which.
    """

    def __init__(self, clock: Clock, max_idle_s: float = math.inf) -> None:
        self._clock = clock
        self._max_idle_s = max_idle_s
        self._uses: Order[E, int] = Order(_GONE)
        self._by_uses: dict[int, Order[E, float]] = {}

    def __len__(self) -> int:
        return len(self._uses)

    def insert(self, entry: E) -> None:
        """See `Policy`."""
        self._put(entry, self._clock())

    def recovered(self, entry: E, age_s: float) -> None:
        """See `Rememberer`."""
        self._put(entry, self._clock() - max(0.0, age_s))

    def touch(self, prefix: Sequence[E]) -> None:
        """See `Policy`."""
        now = self._clock()
        for entry in reversed(prefix):
            if entry in self._uses:
                self.remove(entry)
                self._put(entry, now)

    def built_on(self, prefix: Sequence[E]) -> None:
        """See `Policy`."""
        self.touch(prefix)

    def _put(self, entry: E, now: float) -> None:
        uses = min(entry.hits + entry.returns, _MOST)
        self._uses.add(entry, uses)
        there = self._by_uses.get(uses)
        if there is None:
            there = self._by_uses[uses] = Order(-math.inf)
        there.add(entry, now)

    def bypassed(self, entry: E) -> None:
        """See `Policy`: nothing is learned from it."""

    def remove(self, entry: E) -> None:
        """See `Policy`."""
        uses = self._uses.get(entry)
        if uses != _GONE:
            self._uses.discard(entry)
            self._by_uses[uses].discard(entry)
            if not self._by_uses[uses]:
                del self._by_uses[uses]

    def victims(self, may_go: Callable[[E], bool]) -> Iterator[E]:
        """See `Policy`."""
        before = self._clock() - self._max_idle_s
        idle = [
            list(takewhile(lambda item: item[1] < before, entries.items()))
            for _, entries in sorted(self._by_uses.items())
            if next(entries.items())[1] < before
        ]
        for entry, _ in heapq.merge(*idle, key=itemgetter(1)):
            if may_go(entry):
                yield entry
        for _, entries in sorted(self._by_uses.items()):
            for entry, last in entries.items():
                if last >= before and may_go(entry):
                    yield entry
