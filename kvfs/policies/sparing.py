"""A search for victims that spares what is expected to be used soon, at the expense of its own namespace.

At the turn of an expected leaf the least worthy other leaf of its namespace goes, the *stand-in*, and the expected one
takes the place of that in the order. What it is built on would have gone next, and cannot: at its turn a stand-in goes
too. So a namespace loses an entry whenever it would have lost one without its hints, and others lose none for them: who
expects everything protects nothing. Where there is no stand-in, the expected leaf goes itself.

What was spared once does not count as below what it is built on, which so becomes a leaf in the order, and is known to be
locked; the owner of the order keeps that true (`Locks`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from heapq import heappop, heappush
from itertools import islice
from math import inf
from typing import Generic, NamedTuple

from kvfs.policies.base import E
from kvfs.policies.leaves import Node
from kvfs.policies.ranking import Ranked

_MAX_LOOKED_AT = (
    256  # for a stand-in, of the leaves of other namespaces that share groups, and of those that may not go
)


class Spared(NamedTuple, Generic[E]):
    """A node that was spared because it, or something that is built on it, is expected until then."""

    node: Node[E]
    until_s: float


Locks = dict[Node[E], dict[Node[E], None]]
"""For each node what is built on it directly and was spared: it does not count as below that node any more."""


class Search(Generic[E]):
    """One search; nothing may change until it ends.

    `candidates` are the leaves, the least worthy first, one perhaps several times; `order_of` likewise those of a
    namespace, those of others among them perhaps; `rank` places what becomes a leaf; `end_of` says until when a node is
    expected, `locks` what was spared before. `spared` is filled: who goes, and what is to be spared for that.

    What is expected has a negative group. Attributes: gone: those that went, or may not go; stuck: the latter.
    """

    def __init__(
        self,
        candidates: Iterator[Ranked[E]],
        order_of: Callable[[Hashable], Iterator[Ranked[E]]],
        rank: Callable[[Node[E]], Ranked[E]],
        end_of: Callable[[Node[E]], float | None],
        locks: Locks[E],
        may_go: Callable[[E], bool],
        spared: dict[Node[E], Spared[E]],
    ) -> None:
        self.gone: set[Node[E]] = set()
        self.stuck: list[Node[E]] = []
        self._candidates = candidates
        self._order_of = order_of
        self._rank = rank
        self._end_of = end_of
        self._locks_before = locks
        self._may_go = may_go
        self._spared = spared
        self._free: list[Ranked[E]] = []
        self._num_gone: dict[Node[E], int] = {}  # of what is below a node: went, or was spared
        self._counted: set[Node[E]] = set()  # in that
        self._locks: Locks[E] = {}
        self._places: dict[Node[E], Ranked[E]] = {}  # of what was spared
        self._orders: dict[Hashable, Iterator[Ranked[E]]] = {}
        self._next: dict[Hashable, Ranked[E]] = {}

    def __iter__(self) -> Iterator[E]:
        """The victims, but for what is built on by something that may not go."""
        item = next(self._candidates, None)
        while item is not None or self._free:
            if self._free and (item is None or self._free[0] < item):
                ranked = heappop(self._free)
            else:
                assert item is not None
                ranked = item
                item = next(self._candidates, None)
            node = ranked[-1]
            if node in self.gone or self._places.get(node, ranked) is not ranked:
                continue
            assert node.entry is not None
            lock = self._lock(node)
            if not self._may_go(node.entry):
                self.gone.add(node)
                self.stuck.append(node)
            elif node.group >= 0 and lock is None:
                yield self._go(node)
            elif (stand_in := self._stand_in(node)) is not None:
                self._spare(node, stand_in)
                yield self._go(stand_in[-1])
            elif lock is None:
                yield self._go(node)
            else:  # its turn comes when what is built on it is gone
                heappush(self._free, ranked)
                self._places[node] = ranked
                while lock is not None:
                    node, lock = lock, self._lock(lock)
                yield from self._go_if_may(node)

    def _go_if_may(self, node: Node[E]) -> Iterator[E]:
        assert node.entry is not None
        if self._may_go(node.entry):
            yield self._go(node)
            return
        self.gone.add(node)
        self.stuck.append(node)
        while node.above is not None and self._lock(node.above) is None and node.above in self._places:
            node = node.above  # is stuck on it
            self.gone.add(node)

    def _lock(self, node: Node[E]) -> Node[E] | None:
        """Something that is built on a node and was spared, in this search or before."""
        for locks in (self._locks, self._locks_before):
            for below in locks.get(node, ()):
                if below not in self.gone:
                    return below
        return None

    def _go(self, node: Node[E]) -> E:
        assert node.entry is not None
        self.gone.add(node)
        self._count(node)
        return node.entry

    def _count(self, node: Node[E]) -> None:
        """A node is gone or spared: what it is built on has its turn when all below it has had."""
        above = node.above
        if above is None or above.entry is None or node in self._counted or node in self._locks_before.get(above, ()):
            return
        self._counted.add(node)
        self._num_gone[above] = self._num_gone.get(above, 0) + 1
        if self._num_gone[above] == above.num_below:
            heappush(self._free, self._rank(above))

    def _spare(self, node: Node[E], stand_in: Ranked[E]) -> None:
        value, last, _, other = stand_in
        self._spared[other] = Spared(node, self._until(node))
        self._count(node)
        self._places[node] = (value, last, self._rank(node)[2], node)
        heappush(self._free, self._places[node])
        if node.above is not None:
            self._locks.setdefault(node.above, {})[node] = None

    def _until(self, node: Node[E]) -> float:
        until_s = self._end_of(node)
        while until_s is None and (lock := self._lock(node)) is not None:
            node = lock
            until_s = self._end_of(node)
        return until_s if until_s is not None else -inf

    def _stand_in(self, node: Node[E]) -> Ranked[E] | None:
        """Who goes instead of a node, None if nobody can."""
        assert node.entry is not None
        table = node.entry.table
        first = self._next_leaf(table)
        for ranked in self._free:
            if (first is None or ranked < first) and self._is_fit(ranked[-1], table):
                first = ranked
        return first

    def _is_fit(self, node: Node[E], table: Hashable) -> bool:
        entry = node.entry
        return (
            node.group >= 0 and node not in self.gone and node not in self._places and self._lock(node) is None
            and entry is not None and entry.table == table and self._may_go(entry)
        )  # fmt: skip

    def _next_leaf(self, table: Hashable) -> Ranked[E] | None:
        """The least worthy leaf of a namespace that can stand in."""
        found = self._next.pop(table, None)
        if found is None or not self._is_fit(found[-1], table):
            if table not in self._orders:
                self._orders[table] = self._order_of(table)
            some = islice(self._orders[table], _MAX_LOOKED_AT)
            found = next((ranked for ranked in some if self._is_fit(ranked[-1], table)), None)
        if found is not None:
            self._next[table] = found
        return found
