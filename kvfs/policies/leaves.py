"""Which entries of a tier are leaves, on which no other of the tier is built, sorted by group and last use.

Entries come and go in any order: one that is not there, but on which others are built, has a node without an entry.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain, islice
from typing import Generic

from msgspec import Struct

from kvfs.policies.base import E
from kvfs.policies.order import PART_MASK, in_parts
from kvfs.policies.reuse import Watched

_Place = tuple[Hashable, bytes, int]


class Node(Struct, Generic[E], eq=False, gc=False):
    """An entry of the tier, or its place. There are no circles of them, and the collector need not look at a million.

    Attributes:
        entry: None while it is not in the tier; above: the node that it is built on, None at the head of a chain.
        num_below: entries of the tier that are built on it.
        group, last: its group, and when it was last used or continued.
        watched: what is learned by it, if it is in the sample.
    """

    entry: E | None = None
    above: Node[E] | None = None
    num_below: int = 0
    group: int = 0
    last: float = 0.0
    watched: Watched | None = None


class Forest(Generic[E]):
    """The nodes of a tier, by entry.

    Attributes: parts: the nodes, those of an entry in part `hash(entry) & PART_MASK`. One dict of a million has to move
        them all when it grows, and nothing else happens for 34 ms.

    Invariants: `num_below` of a node is the number of nodes in `parts` whose `above` it is. `_absent` holds the nodes
    without an entry that have something below them, by namespace, key and position (so that no forged chain is a circle).
    """

    def __init__(self) -> None:
        self.parts: tuple[dict[E, Node[E]], ...] = in_parts()
        self._absent: dict[_Place, Node[E]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def get(self, entry: E) -> Node[E] | None:
        """The node of an entry, if it is in the tier."""
        return self.parts[hash(entry) & PART_MASK].get(entry)

    def add(self, entry: E) -> Node[E]:
        """A node for a new entry."""
        node = self._absent_or_new(entry) if self._absent else Node()
        node.entry = entry
        if entry.position:
            above = entry.above()
            parent = self.parts[hash(above) & PART_MASK].get(above) if above is not None else None
            if parent is None:
                place = (entry.table, entry.parent, entry.position - 1)
                parent = self._absent.get(place)
                if parent is None:
                    parent = self._absent[place] = Node()
            parent.num_below += 1
            node.above = parent
        self.parts[hash(entry) & PART_MASK][entry] = node
        return node

    def add_all(self, entries: Sequence[E]) -> list[Node[E]]:
        """Nodes for new entries, in their order, where nothing is yet that one of them is built on.

        What an entry is built on mostly is the next one: that is looked at before it is looked for.
        """
        parts, absent = self.parts, self._absent
        nodes: list[Node[E]] = (
            [self._absent_or_new(entry) for entry in entries] if absent else [Node() for _ in entries]
        )
        for entry, node in zip(entries, nodes, strict=True):
            node.entry = entry
            parts[hash(entry) & PART_MASK][entry] = node
        followers = chain(zip(islice(entries, 1, None), islice(nodes, 1, None), strict=True), [(None, None)])
        for entry, node, (follower, its_node) in zip(entries, nodes, followers, strict=False):
            if not entry.position:
                continue
            if follower is not None and follower.key is entry.parent and follower.position + 1 == entry.position:
                above = its_node
            else:
                stored = entry.above()
                above = parts[hash(stored) & PART_MASK].get(stored) if stored is not None else None
                if above is None:
                    place = (entry.table, entry.parent, entry.position - 1)
                    above = absent.get(place)
                    if above is None:
                        above = absent[place] = Node()
            assert above is not None
            above.num_below += 1
            node.above = above
        return nodes

    def _absent_or_new(self, entry: E) -> Node[E]:
        """The node that others are built on already, or one more."""
        node = self._absent.pop((entry.table, entry.key, entry.position), None)
        return Node() if node is None else node

    def discard(self, entry: E) -> Node[E] | None:
        """Take an entry out; returns the node that it was built on, if that is an entry and a leaf now."""
        node = self.parts[hash(entry) & PART_MASK].pop(entry)
        above = node.above
        node.entry = node.above = node.watched = None
        if node.num_below:
            self._absent[entry.table, entry.key, entry.position] = node
        if above is None:
            return None
        above.num_below -= 1
        if above.num_below:
            return None
        if above.entry is None:
            del self._absent[entry.table, entry.parent, entry.position - 1]
            return None
        return above


class Leaves(Generic[E]):
    """The leaves of one group, by last use.

    Invariant: `times` are the sorted keys of `at`, and no set is empty.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.at: dict[float, dict[Node[E], None]] = {}

    def add(self, node: Node[E]) -> None:
        """A node became a leaf."""
        there = self.at.get(node.last)
        if there is not None:
            there[node] = None
            return
        self.at[node.last] = {node: None}
        if not self.times or self.times[-1] < node.last:
            self.times.append(node.last)
        else:
            insort(self.times, node.last)

    def discard(self, node: Node[E]) -> None:
        """A node is no leaf any more, or about to change its group or time."""
        there = self.at[node.last]
        del there[node]
        if not there:
            del self.at[node.last]
            del self.times[bisect_left(self.times, node.last)]

    def spans(self, now: float, edges: tuple[float, ...]) -> Iterator[tuple[int, int, int]]:
        """For each span of ages that has leaves: its number, and from where to where they stand in `times`."""
        times = self.times
        high = len(times)
        for span in range(1, len(edges)):
            low = bisect_right(times, now - edges[span], 0, high)
            if low < high:
                yield span - 1, low, high
                high = low
                if not low:
                    return
        if high:
            yield len(edges) - 1, 0, high
