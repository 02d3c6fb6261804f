"""Leaves that are expected to be used soon: which, until when, and who goes in the place of one.

At the turn of an expected leaf the least worthy leaf of its own namespace goes that is not expected, and the expected
one takes the place of that in the order. So its namespace loses an entry exactly when it would have lost one without
the hint, and no other namespace does: whoever expects everything protects nothing. Where its namespace has nothing else
that may go, it goes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import Generic, NamedTuple

from kvfs.policies.base import E
from kvfs.policies.leaves import Node

Ranked = tuple[float, float, int, Node[E]]
"""A leaf in the order of eviction: value, last use, a number that makes it unique, and who."""

_MAX_LOOKED_AT = 256  # of the leaves of other namespaces that share groups, and of those that may not go


class Place(NamedTuple):
    """Where an expected node stood, and stands again when the time is over: by `until_s`, in its group, by last use."""

    until_s: float
    group: int
    last: float


class Expectations(Generic[E]):
    """The nodes that are expected, each with its place. What became of a node meanwhile, its owner knows."""

    def __init__(self) -> None:
        self._places: dict[Node[E], Place] = {}
        self._ends: list[tuple[float, int, Node[E]]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._places)

    def add(self, node: Node[E], until_s: float, group: int) -> None:
        """A node is expected until then; `group` is that in which it stands otherwise."""
        self._places[node] = Place(until_s, group, node.last)
        if len(self._ends) > 2 * len(self._places) + 1000:  # most of them said otherwise since
            self._ends = [
                end for end in self._ends if end[2] in self._places and self._places[end[2]].until_s == end[0]
            ]
            heapify(self._ends)
        heappush(self._ends, (until_s, next(self._numbers), node))

    def pop(self, node: Node[E]) -> Place | None:
        """A node is not expected any more; its place, if it was."""
        return self._places.pop(node, None)

    def over(self, now_s: float) -> Iterator[Node[E]]:
        """The nodes whose time is over; the owner pops each."""
        while self._ends and self._ends[0][0] <= now_s:
            until_s, _, node = heappop(self._ends)
            place = self._places.get(node)
            if place is not None and place.until_s == until_s:
                yield node


class StandIns(Generic[E]):
    """Who goes instead, in one search for victims; nothing may change until it ends.

    `order_of` gives the leaves of a namespace, those of others among them perhaps, the least worthy first.
    """

    def __init__(self, order_of: Callable[[Hashable], Iterator[Ranked[E]]], may_go: Callable[[E], bool]) -> None:
        self._order_of = order_of
        self._may_go = may_go
        self._orders: dict[Hashable, Iterator[Ranked[E]]] = {}
        self._next: dict[Hashable, Ranked[E]] = {}

    def of(self, expected: Node[E], free: list[Ranked[E]], seen: set[Node[E]]) -> Node[E] | None:
        """Who goes instead of an expected node, None if nobody can.

        `free` are nodes that become leaves by what went in this search; those `seen` went, or may not go.
        """
        assert expected.entry is not None
        table = expected.entry.table
        first = self._next_leaf(table, seen)
        for ranked in free:
            if (first is None or ranked < first) and ranked[-1] not in seen and self._is_fit(ranked[-1], table):
                first = ranked
        return first[-1] if first is not None else None

    def _is_fit(self, node: Node[E], table: Hashable) -> bool:
        entry = node.entry
        return node.group >= 0 and entry is not None and entry.table == table and self._may_go(entry)

    def _next_leaf(self, table: Hashable, seen: set[Node[E]]) -> Ranked[E] | None:
        """The least worthy leaf of a namespace that was not seen."""
        found = self._next.get(table)
        if found is not None and found[-1] not in seen:
            return found
        self._next.pop(table, None)
        if table not in self._orders:
            self._orders[table] = self._order_of(table)
        for ranked in islice(self._orders[table], _MAX_LOOKED_AT):
            if ranked[-1] not in seen and self._is_fit(ranked[-1], table):
                self._next[table] = ranked
                return ranked
        return None
