"""Which nodes are expected to be used soon, until when, and where they stand when that is over. See `sparing`."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, NamedTuple

from kvfs.policies.base import E
from kvfs.policies.leaves import Node


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

    def end_of(self, node: Node[E]) -> float | None:
        """Until when a node is expected, None if it is not."""
        place = self._places.get(node)
        return place.until_s if place is not None else None

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
