"""What is expected stays: the expected nodes of a tier, where they stand meanwhile, and what went for them.

An expected node bears its group less the number of groups, which in Python is the same place in every list that is as
long. Who goes instead is the affair of `sparing`; here the node that was spared gets the place of the one that went.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic

from kvfs.policies.base import Clock, E
from kvfs.policies.expected import Expectations
from kvfs.policies.leaves import Node
from kvfs.policies.ranking import Ranked, Ranking
from kvfs.policies.sparing import Locks, Search, Spared


class Protected(Generic[E]):
    """The expectations of one tier, beside its ranking.

    Attributes: groups: those below 0 that a node was in.

    Invariants: a node whose group is negative is expected, and one of `_expected`; what is spared is one of these, and its
    place is that of the one that went for it. What is locked does not count as below what it is built on, see `Locks`.
    """

    def __init__(self, clock: Clock, ranking: Ranking[E], num_groups: int) -> None:
        self.groups: dict[int, None] = {}
        self._clock = clock
        self._ranking = ranking
        self._num_groups = num_groups
        self._expected: Expectations[E] = Expectations()
        self._spared: dict[Node[E], Spared[E]] = {}  # by who goes instead
        self._locks: Locks[E] = {}

    def __bool__(self) -> bool:
        """Whether anything is expected, or was when victims were looked for last."""
        return bool(self._expected or self._spared)

    def expect(self, node: Node[E], until_s: float) -> None:
        """A node, which may not be one of the leaves yet, is expected until then, if that is not over."""
        if until_s <= self._clock():
            return
        group = node.group - self._num_groups
        self._expected.add(node, until_s, node.group)
        self.groups[group] = None
        self.regroup(node, group, node.last)

    def no_more(self, node: Node[E]) -> None:
        """A node is not expected any more, and stands where it stood."""
        place = self._expected.pop(node)
        assert place is not None
        self._unlock(node)
        self.regroup(node, place.group, place.last)

    def regroup(self, node: Node[E], group: int, last: float) -> None:
        """A node has another group and last use, and if it is one of the leaves, another value."""
        if not node.num_below and self._ranking.has(node):
            self._ranking.move(node, group, last)
            self._ranking.forget_lowest()  # it stands there by what it was worth
        else:
            node.group = group
            node.last = last

    def leaves(self, node: Node[E]) -> None:
        """A node is about to go."""
        if self._expected:
            for below in [*self._locks.get(node, ())]:
                self._unlock(below)
            if node.group < 0:
                self._unlock(node)
                self._expected.pop(node)

    def left(self, node: Node[E]) -> None:
        """A node went: if that was for one that is spared, this has its place; what it is built on comes next."""
        if not self._spared or (found := self._spared.pop(node, None)) is None:
            return
        spared, until_s = found
        if spared.entry is None or spared.num_below or until_s <= self._clock():
            return
        if spared.group >= 0:
            self.expect(spared, until_s)
        self._ranking.forget(spared)
        self._ranking.move(spared, node.group - self._num_groups, node.last)
        self.groups[spared.group] = None
        above = spared.above
        if above is not None and spared not in (locks := self._locks.setdefault(above, {})):
            locks[spared] = None
            above.num_below -= 1
            if not above.num_below and above.entry is not None:
                self._ranking.add(above)

    def _unlock(self, node: Node[E]) -> None:
        """A node counts again as below what it is built on."""
        above = node.above
        if above is None or node not in (locks := self._locks.get(above, {})):
            return
        del locks[node]
        if not locks:
            del self._locks[above]
        if not above.num_below and above.entry is not None:
            self._ranking.discard(above)
        above.num_below += 1

    def search(
        self,
        now: float,
        groups: Callable[[], Iterator[int]],
        groups_of: Callable[[Hashable], Iterator[int]],
        may_go: Callable[[E], bool],
    ) -> Search[E]:
        """Look for victims, see `Search`, in these groups, or those of a namespace; who is spared is known afterwards."""
        self._spared.clear()
        for node in self._expected.over(self._clock()):
            self.no_more(node)

        def rank(node: Node[E]) -> Ranked[E]:
            return self._ranking.rank(node, now)

        return Search(
            self._ranking.candidates(now, [*groups()]), lambda table: self._ranking.in_order(now, groups_of(table)),
            rank, self._expected.end_of, self._locks, may_go, self._spared,
        )  # fmt: skip
