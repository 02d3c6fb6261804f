"""Leaf first, by what is learned of reuse: the leaf goes whose room is worth least.

Entries are grouped by how often they were used, and by namespace and class (what chats do says little of agents, see
`groups`). The value of a leaf is its group's index at its age, see `reuse`; between the beginnings of two spans it is
interpolated. Ties go to the one used longest ago, so that before anything is learned this is leaf-first LRU. What is
expected to be used soon stays, and another of its namespace goes, see `sparing`: such a node bears its group less the
number of groups, which in Python is the same place in every list that is as long.

Concurrency: none of this waits. A use costs what it costs to find the entry; a victim a few microseconds, since the
lowest leaves are sought `_AHEAD` at a time, and what becomes a leaf meanwhile is sorted in. The index is made anew
after `_REBUILD_EVERY` uses, but not within `_REBUILD_S` seconds, a step with each of the next uses: no call takes a
millisecond, however large the tier is (a million entries: 0.9 ms at most; 6.7 when the index was made at once).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain, count, islice
from math import inf
from typing import Generic

import msgspec

from kvfs.errors import UsageError
from kvfs.policies.base import Clock, E, mark_of
from kvfs.policies.expected import Expectations
from kvfs.policies.groups import Groups, TableGroups
from kvfs.policies.hint import NOTHING
from kvfs.policies.leaves import PART_MASK, Forest, Leaves, Node
from kvfs.policies.reuse import EDGES, NUM_SPANS, Learnt, Reuse
from kvfs.policies.sparing import Locks, Ranked, Search, Spared

_TICK_S = 0.25  # uses within one count as simultaneous
_REBUILD_EVERY = 100
_REBUILD_S = 1.0
_AHEAD = 48
_SEEK_EVERY_S = 1.0
_BY_USES = (0, 1, 2, 2, 3)  # the group for 0, 1, 2, 3, and more uses after the first
_NUM_BY_USES = 4
_NUM_CLASSES = 8  # of a namespace with groups of their own, 0 among them

_DONE = object()
_FORMAT = "kvfs-learned/2"


class _Memory(msgspec.Struct, frozen=True):
    format: str
    groups_a_block: int
    tables: dict[str, TableGroups]
    reuse: Learnt


class Learned(Generic[E]):
    """See the module. `weigh` gives each entry a weight below the number of `worth`, which says what each is worth.

    Invariants: a node whose group is negative is expected, and one of `_expected`; what is spared is one of these, and its
    place is that of the one that went for it. A leaf stands in `_leaves` of its group: a node with nothing below it but
    what is spared, see `_locks`.
    """

    def __init__(
        self,
        clock: Clock,
        weigh: Callable[[E], int] | None = None,
        worth: Sequence[float] = (1.0,),
        num_classes: int = _NUM_CLASSES,
    ) -> None:
        self.heeds = frozenset({"class", "expect"} if num_classes > 1 else {"expect"})
        self._clock = clock
        self._weigh = weigh
        self._groups = Groups(_NUM_BY_USES * len(worth), num_classes)
        num_groups = self._groups.num
        self._worth = [worth[group // _NUM_BY_USES % len(worth)] for group in range(num_groups)]
        self._forest: Forest[E] = Forest()
        self._leaves: list[Leaves[E]] = [Leaves() for _ in range(2 * num_groups)]
        self._expected: Expectations[E] = Expectations()
        self._groups_expected: dict[int, None] = {}  # those below 0 that a node was in
        self._spared: dict[Node[E], Spared[E]] = {}  # by who goes instead
        self._locks: Locks[E] = {}
        self._reuse = Reuse(num_groups)
        self._num_uses = 0
        self._rebuilt_at = -inf
        self._rebuilding: Iterator[None] | None = None
        self._lowest: list[Ranked[E]] = []  # the first of `_in_order`, and what became a leaf since
        self._sought_at = self._bound = -inf  # when they were sought, and the highest value among them then
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._forest)

    def _now(self) -> float:
        return self._clock() // _TICK_S * _TICK_S

    def _group(self, entry: E) -> int:
        return self._group_of(
            entry, self._groups.first(entry.table, entry.hint.class_ if entry.hint is not None else 0)
        )

    def _group_of(self, entry: E, first: int) -> int:
        uses = entry.hits + entry.returns
        group = first + (_BY_USES[uses] if uses < len(_BY_USES) else _NUM_BY_USES - 1)
        return group if self._weigh is None else group + _NUM_BY_USES * self._weigh(entry)

    # what happens to entries

    def insert(self, entry: E) -> None:
        """See `Policy`."""
        now = self._now()
        self._came(entry, now, now)

    def recovered(self, entry: E, age_s: float) -> None:
        """See `Rememberer`."""
        now = self._now()
        self._came(entry, now, (now - max(0.0, age_s)) // _TICK_S * _TICK_S)

    def recovered_all(self, entries: Sequence[E], ages_s: Iterable[float]) -> None:
        """See `Rememberer`."""
        now = self._now()
        nodes = self._forest.add_all(entries)
        reuse, leaves = self._reuse, self._leaves
        firsts = {table: self._groups.first(table, 0) for table in {entry.table for entry in entries}}
        for entry, node, age_s in zip(entries, nodes, ages_s, strict=False):
            hint = entry.hint
            node.group = self._group_of(entry, firsts[entry.table]) if hint is None else self._group(entry)
            node.last = last = (now - age_s) // _TICK_S * _TICK_S if age_s > 0 else now
            if reuse.may_watch(entry.key):
                node.watched = reuse.came(mark_of(entry), node.group, last)
            if hint is not None and hint.until_s > self._clock():
                self._expect(node, hint.until_s)
            if not node.num_below:
                leaves[node.group].add(node)
        self._forget_lowest()

    def _came(self, entry: E, now: float, last: float) -> None:
        node = self._forest.add(entry)
        node.group = self._group(entry)
        node.last = last
        node.watched = self._reuse.came(mark_of(entry), node.group, last)
        if entry.hint is not None and entry.hint.until_s > self._clock():
            self._expect(node, entry.hint.until_s)
        above = node.above
        if above is not None and above.entry is not None:
            if above.num_below == 1:
                self._leaves[above.group].discard(above)
            if above.group < 0:  # the chain goes on
                self._expect_no_more(above)
        if not node.num_below:
            self._add_leaf(node, now)

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
                self._expect_no_more(node)
            uses = entry.hits + entry.returns  # as in `_group`; a call costs as much as all the rest
            group = (node.group & blocks) + (_BY_USES[uses] if uses < len(_BY_USES) else _NUM_BY_USES - 1)
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
                self._move_leaf(node, group, now)
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
                self._expect_no_more(node)
            if node.num_below:
                node.last = now
            elif node.last != now:
                self._move_leaf(node, node.group, now)
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
        now = self._now()
        if self._expected:
            for below in [*self._locks.get(node, ())]:
                self._unlock(below)
            if node.group < 0:
                self._unlock(node)
                self._expected.pop(node)
        if not node.num_below:
            self._leaves[node.group].discard(node)
        if node.watched is not None:
            self._reuse.left(mark_of(entry), now)
        above = self._forest.discard(entry)
        if above is not None:
            self._add_leaf(above, now)
        if self._spared and (spared := self._spared.pop(node, None)) is not None:
            self._take_place(spared, node.group, node.last, now)

    def _add_leaf(self, node: Node[E], now: float) -> None:
        self._leaves[node.group].add(node)
        value = self._value(node.group, now - node.last)
        if value <= self._bound:
            insort(self._lowest, (value, node.last, next(self._numbers), node))

    def _move_leaf(self, node: Node[E], group: int, now: float) -> None:
        self._leaves[node.group].discard(node)
        node.group = group
        node.last = now
        self._add_leaf(node, now)

    # hints

    def hinted(self, entries: Sequence[E]) -> None:
        """See `Heeder`."""
        now_s = self._clock()
        for entry in entries:
            node = self._forest.get(entry)
            if node is None:
                continue
            if node.group < 0:
                self._expect_no_more(node)
            hint = entry.hint or NOTHING
            first = self._groups.first(entry.table, hint.class_)
            if first != node.group & self._groups.blocks:
                self._regroup(node, node.group - (node.group & self._groups.blocks) + first, node.last)
                if node.watched is not None:
                    node.watched.group = node.group
            if hint.until_s > now_s:
                self._expect(node, hint.until_s)

    def _expect(self, node: Node[E], until_s: float) -> None:
        self._expected.add(node, until_s, node.group)
        self._groups_expected[node.group - self._groups.num] = None
        self._regroup(node, node.group - self._groups.num, node.last)

    def _expect_no_more(self, node: Node[E]) -> None:
        """The node stands where it stood."""
        place = self._expected.pop(node)
        assert place is not None
        self._unlock(node)
        self._regroup(node, place.group, place.last)

    def _regroup(self, node: Node[E], group: int, last: float) -> None:
        is_leaf = not node.num_below and node in self._leaves[node.group].at.get(node.last, ())
        if is_leaf:
            self._leaves[node.group].discard(node)
        node.group = group
        node.last = last
        if is_leaf:
            self._leaves[group].add(node)
            self._forget_lowest()  # it stands there by what it was worth

    def _take_place(self, spared: Spared[E], group: int, last: float, now: float) -> None:
        """A node that is spared has the place of the one that went for it; what it is built on comes next."""
        node = spared.node
        if node.entry is None or node.num_below or spared.until_s <= self._clock():
            return
        if node.group >= 0:
            self._expect(node, spared.until_s)
        self._lowest = [ranked for ranked in self._lowest if ranked[-1] is not node]
        self._leaves[node.group].discard(node)
        node.group = group - self._groups.num
        node.last = last
        self._groups_expected[node.group] = None
        self._add_leaf(node, now)
        above = node.above
        if above is not None and node not in (locks := self._locks.setdefault(above, {})):
            locks[node] = None
            above.num_below -= 1
            if not above.num_below and above.entry is not None:
                self._add_leaf(above, now)

    def _unlock(self, node: Node[E]) -> None:
        """A node counts again as below what it is built on."""
        above = node.above
        if above is None or node not in (locks := self._locks.get(above, {})):
            return
        del locks[node]
        if not locks:
            del self._locks[above]
        if not above.num_below and above.entry is not None:
            self._leaves[above.group].discard(above)
        above.num_below += 1

    def _end_expectations(self) -> None:
        for node in self._expected.over(self._clock()):
            self._expect_no_more(node)

    def _count_use(self, now: float) -> None:
        self._num_uses += 1
        if self._rebuilding is not None:
            if next(self._rebuilding, _DONE) is _DONE:
                self._rebuilding = None
                self._forget_lowest()
        elif self._num_uses >= _REBUILD_EVERY and now - self._rebuilt_at >= _REBUILD_S:
            self._num_uses = 0
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

    def _value(self, group: int, age: float) -> float:
        values = self._reuse.index[group]
        span = int(age).bit_length()
        if span >= NUM_SPANS - 1:
            return values[-1] * self._worth[group]
        share = age / EDGES[span] - 1 if span else age  # of the span, which is as long as what is before it
        return (values[span] + (values[span + 1] - values[span]) * share) * self._worth[group]

    def _in_order(self, now: float, groups: Iterable[int] | None = None) -> Iterator[Ranked[E]]:
        """The leaves of these groups, of all by default, the least worthy first.

        In a span of one group the values rise or fall with age, so that its next one stands at one of its ends.
        """
        ends: list[tuple[float, float, int, int, int, int, int]] = []
        for group in chain(self._groups.begun, self._groups_expected) if groups is None else groups:
            leaves = self._leaves[group]
            if not leaves.times:
                continue
            values = self._reuse.index[group]
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

    def _forget_lowest(self) -> None:
        self._lowest.clear()
        self._bound = self._sought_at = -inf

    def _seek(self, now: float) -> None:
        """Have the lowest leaves at hand."""
        lowest = self._lowest
        while lowest and _is_stale(lowest[0]):
            del lowest[0]
        if not lowest or now - self._sought_at >= _SEEK_EVERY_S:
            lowest[:] = islice(self._in_order(now), _AHEAD)
            self._bound = lowest[-1][0] if lowest else -inf
            self._sought_at = now

    def _candidates(self, now: float) -> Iterator[Ranked[E]]:
        self._seek(now)
        for ranked in self._lowest:
            if not _is_stale(ranked):
                yield ranked
        yield from self._in_order(now)

    def victims(self, may_go: Callable[[E], bool]) -> Iterator[E]:
        """See `Policy`. What is built on by something that may not go comes after all that is a leaf, or becomes one."""
        now = self._now()
        if self._expected or self._spared:
            self._spared.clear()
            self._end_expectations()
            yield from self._victims_but_expected(now, may_go)
            return
        seen: set[Node[E]] = set()
        num_gone: dict[Node[E], int] = {}  # of what is below a node
        parents: list[Ranked[E]] = []  # all below them has gone
        stuck: list[Node[E]] = []
        candidates = self._candidates(now)
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
                    heappush(parents, self._rank(above, now))
        yield from _above(stuck, seen, may_go)

    def _victims_but_expected(self, now: float, may_go: Callable[[E], bool]) -> Iterator[E]:
        search = Search(
            self._candidates(now), lambda table: self._in_order(now, self._groups.of_table(table)),
            lambda node: self._rank(node, now), self._expected.end_of, self._locks, may_go, self._spared,
        )  # fmt: skip
        yield from search
        yield from _above(search.stuck, search.gone, may_go)

    def _rank(self, node: Node[E], now: float) -> Ranked[E]:
        return self._value(node.group, now - node.last), node.last, next(self._numbers), node


def _above(stuck: Iterable[Node[E]], seen: set[Node[E]], may_go: Callable[[E], bool]) -> Iterator[E]:
    """What is built on by these nodes, which may not go."""
    for node in stuck:
        above = node.above
        while above is not None and above not in seen:
            seen.add(above)
            if above.entry is not None and may_go(above.entry):
                yield above.entry
            above = above.above


def _is_stale(ranked: Ranked[E]) -> bool:
    """Whether it went, was used, or is no leaf any more; then it was, or will be, sorted in anew."""
    _, last, _, node = ranked
    return node.entry is None or node.last != last or node.num_below > 0
