"""Leaf first, by what is learned of reuse: the leaf goes whose room is worth least.

Entries are grouped by how often they were used, and by namespace and class (what chats do says little of agents, see
`groups`). What each group is worth is learned in `reuse`, which leaf is worth least is found in `ranking`. What is expected
to be used soon stays, and another of its namespace goes, see `protected`: such a node has a group below 0.

Concurrency: none of this waits. A use costs what it costs to find the entry; a victim a few microseconds. The index is
made anew after some uses, the more the more is watched, but not within `_REBUILD_S` seconds, a step with each of the
next uses: no call takes a millisecond, however large the tier is (a million entries: 0.9 ms at most; 6.7 when the
index was made at once).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain
from math import inf
from typing import Generic

import msgspec

from kvfs.errors import UsageError
from kvfs.policies.base import Clock, E, mark_of
from kvfs.policies.groups import Groups, TableGroups
from kvfs.policies.hint import NOTHING
from kvfs.policies.leaves import Forest, Node
from kvfs.policies.order import PART_MASK
from kvfs.policies.protected import Protected
from kvfs.policies.ranking import TICK_S, Ranked, Ranking
from kvfs.policies.reuse import Learnt, Reuse

_WATCHED_A_USE = 40  # so that a use costs the same however many are watched: of 4,096 the index is made every 100 uses
_FIRST_USES = 64  # until then nothing is known: the leaf used last goes last
_FEWEST_USES = 10
_REBUILD_S = 0.25
_BY_USES = (0, 1, 2, 3, 4, 4, *[5] * 3, *[6] * 7, 7)  # the group for 0, 1, 2, … and 16 or more uses after the first
_NUM_BY_USES = 8  # a power of two; what is used by everybody differs much from what is used now and then
_NUM_CLASSES = 8  # of a namespace with groups of their own, 0 among them

_DONE = object()
_FORMAT = "kvfs-learned/3"


class _Memory(msgspec.Struct, frozen=True):
    format: str
    groups_a_block: int
    tables: dict[str, TableGroups]
    reuse: Learnt


class Learned(Generic[E]):
    """See the module. `weigh` gives each entry a weight below the number of `worth`, which says what each is worth.

    Invariants: a node with nothing below it, but what is locked, stands in the ranking; one whose group is below 0 is
    expected.
    """

    def __init__(
        self,
        clock: Clock,
        weigh: Callable[[E], int] | None = None,
        worth: Sequence[float] = (1.0,),
        num_classes: int = _NUM_CLASSES,
    ) -> None:
        self.heeds = frozenset({"class", "expect"} if num_classes > 1 else {"expect"})
        self._weigh = weigh
        self._groups = Groups(_NUM_BY_USES * len(worth), num_classes)
        num_groups = self._groups.num
        self._reuse = Reuse(num_groups, _NUM_BY_USES)
        weighed = [worth[group // _NUM_BY_USES % len(worth)] for group in range(num_groups)]
        self._forest: Forest[E] = Forest()
        self._ranking: Ranking[E] = Ranking(clock, self._reuse.index, weighed, 2 * num_groups)
        self._protected: Protected[E] = Protected(clock, self._ranking, num_groups)
        self._now = self._ranking.now
        self._num_uses = 0
        self._fewest_uses = _FIRST_USES
        self._rebuilt_at = -inf
        self._rebuilding: Iterator[None] | None = None

    def __len__(self) -> int:
        return len(self._forest)

    def _group(self, entry: E) -> int:
        return self._group_of(
            entry, self._groups.first(entry.table, entry.hint.class_ if entry.hint is not None else 0)
        )

    def _group_of(self, entry: E, first: int) -> int:
        uses = entry.hits + entry.returns
        group = first + (_BY_USES[uses] if uses < len(_BY_USES) else _BY_USES[-1])
        return group if self._weigh is None else group + _NUM_BY_USES * self._weigh(entry)

    # what happens to entries

    def insert(self, entry: E) -> None:
        """See `Policy`."""
        now = self._now()
        self._came(entry, now)

    def recovered(self, entry: E, age_s: float) -> None:
        """See `Rememberer`."""
        self._came(entry, (self._now() - max(0.0, age_s)) // TICK_S * TICK_S)

    def recovered_all(self, entries: Sequence[E], ages_s: Iterable[float]) -> None:
        """See `Rememberer`."""
        now = self._now()
        nodes = self._forest.add_all(entries)
        reuse = self._reuse
        firsts = {table: self._groups.first(table, 0) for table in {entry.table for entry in entries}}
        shared = now  # what is equal is one object: a million of them take 32 MB
        for entry, node, age_s in zip(entries, nodes, ages_s, strict=False):
            hint = entry.hint
            node.group = self._group_of(entry, firsts[entry.table]) if hint is None else self._group(entry)
            last = (now - age_s) // TICK_S * TICK_S if age_s > 0 else now
            if last == shared:
                last = shared
            node.last = shared = last
            if reuse.may_watch(entry.key):
                node.watched = reuse.came(mark_of(entry), node.group, last)
            if hint is not None:
                self._protected.expect(node, hint.until_s)
        self._ranking.add_many(node for node in nodes if not node.num_below)

    def _came(self, entry: E, last: float) -> None:
        node = self._forest.add(entry)
        node.group = self._group(entry)
        node.last = last
        if self._reuse.may_watch(entry.key):
            node.watched = self._reuse.came(mark_of(entry), node.group, last)
        if entry.hint is not None:
            self._protected.expect(node, entry.hint.until_s)
        above = node.above
        if above is not None and above.entry is not None:
            if above.num_below == 1:
                self._ranking.discard(above)
            if above.group < 0:  # the chain goes on
                self._protected.no_more(above)
        if not node.num_below:
            self._ranking.add(node)

    def touch(self, prefix: Sequence[E]) -> None:
        """See `Policy`."""
        if not prefix:
            return
        now = self._now()
        parts, reuse, weigh, blocks = self._forest.parts, self._reuse, self._weigh, self._groups.blocks
        for entry in prefix:
            node = parts[hash(entry) & PART_MASK].get(entry)
            if node is None:
                continue
            if node.group < 0:
                self._protected.no_more(node)
            uses = entry.hits + entry.returns  # as in `_group`; a call costs as much as all the rest
            group = (node.group & blocks) + (_BY_USES[uses] if uses < len(_BY_USES) else _BY_USES[-1])
            if weigh is not None:
                group += _NUM_BY_USES * weigh(entry)
            watched = node.watched
            if watched is not None:
                if watched.is_watched:
                    reuse.used(watched, group, now)
                else:
                    node.watched = None
            if node.num_below:
                node.group = group
                node.last = now
            else:
                self._ranking.move(node, group, now)
        self._count_use(now)

    def built_on(self, prefix: Sequence[E]) -> None:
        """See `Policy`."""
        now = self._now()
        parts, reuse = self._forest.parts, self._reuse
        for entry in prefix:
            node = parts[hash(entry) & PART_MASK].get(entry)
            if node is None:
                continue
            if node.watched is not None:
                reuse.continued(node.watched, now)
            if node.group < 0:  # the chain goes on
                self._protected.no_more(node)
            if node.num_below:
                node.last = now
            elif node.last != now:
                self._ranking.move(node, node.group, now)
        self._count_use(now)

    def bypassed(self, entry: E) -> None:
        """See `Policy`: whether it is asked for again is learned all the same."""
        now = self._now()
        mark = mark_of(entry)
        if self._reuse.came(mark, self._group(entry), now) is not None:
            self._reuse.left(mark, now)

    def remove(self, entry: E) -> None:
        """See `Policy`."""
        node = self._forest.get(entry)
        if node is None:
            return
        self._protected.leaves(node)
        if not node.num_below:
            self._ranking.discard(node)
        if node.watched is not None:
            self._reuse.left(mark_of(entry), self._now())
        above = self._forest.discard(entry)
        if above is not None:
            self._ranking.add(above)
        self._protected.left(node)

    def hinted(self, entries: Sequence[E]) -> None:
        """See `Heeder`."""
        for entry in entries:
            node = self._forest.get(entry)
            if node is None:
                continue
            if node.group < 0:
                self._protected.no_more(node)
            hint = entry.hint or NOTHING
            first = self._groups.first(entry.table, hint.class_)
            if first != node.group & self._groups.blocks:
                self._protected.regroup(node, node.group - (node.group & self._groups.blocks) + first, node.last)
                if node.watched is not None:
                    node.watched.group = node.group
            self._protected.expect(node, hint.until_s)

    def _count_use(self, now: float) -> None:
        self._num_uses += 1
        if self._rebuilding is not None:
            if next(self._rebuilding, _DONE) is _DONE:
                self._rebuilding = None
                self._ranking.forget_lowest()
        elif (
            self._num_uses >= max(self._fewest_uses, self._reuse.num_watched / _WATCHED_A_USE)
            and now - self._rebuilt_at >= _REBUILD_S
        ):
            self._num_uses = 0
            self._fewest_uses = _FEWEST_USES
            self._rebuilt_at = now
            self._rebuilding = self._reuse.rebuild(now)

    # over a restart

    def learnt(self, name_of: Callable[[Hashable], str]) -> bytes:
        """See `Rememberer`."""
        tables = self._groups.learnt(name_of)
        return msgspec.json.encode(_Memory(_FORMAT, self._groups.size, tables, self._reuse.learnt()))

    def recall(self, learnt: bytes, table_of: Callable[[str], Hashable | None]) -> None:
        """See `Rememberer`. Of a table that is gone its groups stay, for a namespace that comes."""
        try:
            memory = msgspec.json.decode(learnt, type=_Memory)
        except msgspec.MsgspecError as error:
            raise UsageError(f"what was learned cannot be understood: {error}") from error
        if (memory.format, memory.groups_a_block) != (_FORMAT, self._groups.size):
            raise UsageError("what was learned is of another policy, or another version of it")
        self._groups.check(memory.tables)
        self._reuse.recall(memory.reuse)
        self._groups.recall(memory.tables, table_of)
        for _ in self._reuse.rebuild(self._now()):
            pass

    # who goes

    def victims(self, may_go: Callable[[E], bool]) -> Iterator[E]:
        """See `Policy`. What is built on by something that may not go comes after all that is a leaf, or becomes one."""
        now = self._now()
        if self._protected:
            search = self._protected.search(now, self._all_groups, self._groups_of, may_go)
            yield from search
            yield from _above(search.stuck, search.gone, may_go)
            return
        seen: set[Node[E]] = set()
        num_gone: dict[Node[E], int] = {}  # of what is below a node
        parents: list[Ranked[E]] = []  # all below them has gone
        stuck: list[Node[E]] = []
        candidates = self._ranking.candidates(now, self._groups.begun)
        item = next(candidates, None)
        while item is not None or parents:
            if parents and (item is None or parents[0] < item):
                node = heappop(parents)[-1]
            else:
                assert item is not None
                node = item[-1]
                item = next(candidates, None)
            if node in seen:
                continue
            seen.add(node)
            entry = node.entry
            assert entry is not None
            if not may_go(entry):
                stuck.append(node)
                continue
            yield entry
            above = node.above
            if above is not None and above.entry is not None:
                num_gone[above] = num_gone.get(above, 0) + 1
                if num_gone[above] == above.num_below:
                    heappush(parents, self._ranking.rank(above, now))
        yield from _above(stuck, seen, may_go)

    def _all_groups(self) -> Iterator[int]:
        return chain(self._groups.begun, self._protected.groups)

    def _groups_of(self, table: Hashable) -> Iterator[int]:
        return iter(self._groups.of_table(table))


def _above(stuck: Iterable[Node[E]], seen: set[Node[E]], may_go: Callable[[E], bool]) -> Iterator[E]:
    """What is built on by these nodes, which may not go."""
    for node in stuck:
        above = node.above
        while above is not None and above not in seen:
            seen.add(above)
            if above.entry is not None and may_go(above.entry):
                yield above.entry
            above = above.above
