"""Which leaf of a tier is worth least: leaves by group and last use, and what each group is worth at each age.

The value of a leaf is its group's index at its age, see `reuse`; between the beginnings of two spans it is
interpolated. Ties go to the one used longest ago, so that before anything is learned this is leaf-first LRU.

The lowest leaves are sought `_AHEAD` at a time, and what becomes a leaf meanwhile is sorted in. The last one that became a
leaf is not, until something else does or victims are looked for: chains come from head to tail and go from tail to head,
and so it mostly ends to be one at once.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import count, islice
from math import inf
from typing import Generic

from kvfs.policies.base import Clock, E
from kvfs.policies.leaves import Leaves, Node
from kvfs.policies.reuse import EDGES, NUM_SPANS, SPANS_A_S

TICK_S = 2.0**-6
"""Uses within one count as simultaneous."""
_AHEAD = 48
_SEEK_EVERY_S = 1.0

Ranked = tuple[float, float, int, Node[E]]
"""A leaf in the order of eviction: value, last use, a number that makes it unique, and who."""


class Ranking(Generic[E]):
    """The leaves of `num_groups` groups. `index` has the values of each group, see `Reuse`, and `worth` a factor.

    Group -1 is the last one, as in every list. Invariant: each leaf that was added stands in `_leaves` of its group, or is
    `_latest`; its group and last use change only while it is not added.
    """

    def __init__(self, clock: Clock, index: Sequence[Sequence[float]], worth: Sequence[float], num_groups: int) -> None:
        self._clock = clock
        self._index = index
        self._worth = worth
        self._leaves: list[Leaves[E]] = [Leaves() for _ in range(num_groups)]
        self._latest: Node[E] | None = None
        self._lowest: list[Ranked[E]] = []  # the first of `in_order`, and what became a leaf since
        self._sought_at = self._bound = -inf  # when they were sought, and the highest value among them then
        self._numbers = count()

    def now(self) -> float:
        """The time, in ticks."""
        return self._clock() // TICK_S * TICK_S

    # what is a leaf

    def add(self, node: Node[E]) -> None:
        """A node is a leaf from now on."""
        if self._latest is not None:
            self._sort_in(self._latest)
        self._latest = node

    def add_many(self, nodes: Iterable[Node[E]]) -> None:
        """The same of many at once."""
        for node in nodes:
            self._leaves[node.group].add(node)
        self.forget_lowest()

    def discard(self, node: Node[E]) -> None:
        """A leaf is none any more, or about to change its group or last use."""
        if node is self._latest:
            self._latest = None
        else:
            self._leaves[node.group].discard(node)

    def has(self, node: Node[E]) -> bool:
        """Whether a node was added."""
        return node is self._latest or node in self._leaves[node.group].at.get(node.last, ())

    def move(self, node: Node[E], group: int, last: float) -> None:
        """A leaf has another group or last use."""
        if node is self._latest:
            node.group = group
            node.last = last
        else:
            self._leaves[node.group].discard(node)
            node.group = group
            node.last = last
            self.add(node)

    def forget(self, node: Node[E]) -> None:
        """A leaf is about to stand elsewhere in the order, with the value that it has."""
        self._lowest = [ranked for ranked in self._lowest if ranked[-1] is not node]

    def forget_lowest(self) -> None:
        """Leaves are worth something else than they were."""
        self._lowest.clear()
        self._bound = self._sought_at = -inf

    def _sort_in(self, node: Node[E]) -> None:
        self._leaves[node.group].add(node)
        if self._lowest:
            ranked = self.rank(node, self.now())
            if ranked[0] <= self._bound:
                insort(self._lowest, ranked)

    # who is worth least

    def rank(self, node: Node[E], now: float) -> Ranked[E]:
        """Where a node stands, or would if it were a leaf."""
        return self._value(node.group, now - node.last), node.last, next(self._numbers), node

    def _value(self, group: int, age: float) -> float:
        values = self._index[group]
        span = int(age * SPANS_A_S).bit_length()
        if span >= NUM_SPANS - 1:
            return values[-1] * self._worth[group]
        share = age / EDGES[span] - 1 if span else age * SPANS_A_S  # of the span, which is as long as what is before it
        return (values[span] + (values[span + 1] - values[span]) * share) * self._worth[group]

    def candidates(self, now: float, groups: Iterable[int]) -> Iterator[Ranked[E]]:
        """The leaves of these groups, which are all there are, the least worthy first; one perhaps several times."""
        if self._latest is not None:
            self._sort_in(self._latest)
            self._latest = None
        lowest = self._lowest
        while lowest and _is_stale(lowest[0]):
            del lowest[0]
        if not lowest or now - self._sought_at >= _SEEK_EVERY_S:
            lowest[:] = islice(self.in_order(now, groups), _AHEAD)
            self._bound = lowest[-1][0] if lowest else -inf
            self._sought_at = now
        for ranked in lowest:
            if not _is_stale(ranked):
                yield ranked
        yield from self.in_order(now, groups)

    def in_order(self, now: float, groups: Iterable[int]) -> Iterator[Ranked[E]]:
        """The leaves of these groups, the least worthy first.

        In a span of one group the values rise or fall with age, so that its next one stands at one of its ends.
        """
        ends: list[tuple[float, float, int, int, int, int, int]] = []
        for group in groups:
            leaves = self._leaves[group]
            if not leaves.times:
                continue
            values = self._index[group]
            for span, low, high in leaves.spans(now, EDGES):
                is_rising = span + 1 < NUM_SPANS and values[span + 1] > values[span]
                here, end, step = (high - 1, low - 1, -1) if is_rising else (low, high, 1)
                last = leaves.times[here]
                ends.append((self._value(group, now - last), last, next(self._numbers), group, here, end, step))
        heapify(ends)
        while ends:
            value, last, _, group, here, end, step = heappop(ends)
            leaves = self._leaves[group]
            for node in leaves.at[last]:
                yield value, last, next(self._numbers), node
            here += step
            if here != end:
                last = leaves.times[here]
                heappush(ends, (self._value(group, now - last), last, next(self._numbers), group, here, end, step))


def _is_stale(ranked: Ranked[E]) -> bool:
    """Whether it went, was used, or is no leaf any more; then it was, or will be, sorted in anew."""
    _, last, _, node = ranked
    return node.entry is None or node.last != last or node.num_below > 0
