"""Leaf first, by what is learned of reuse: the leaf goes whose room is worth least.

Entries are grouped by how often they were used (and by namespace: what chats do says little of agents). The value of a
leaf is its group's index at its age, see `reuse`; between the beginnings of two spans it is interpolated. Ties go to the
one used longest ago, so that before anything is learned this is leaf-first LRU.

Concurrency: none of this waits. A use costs what it costs to find the entry; a victim a few microseconds, since the
lowest leaves are sought `_AHEAD` at a time, and what becomes a leaf meanwhile is sorted in. The index is made anew
after `_REBUILD_EVERY` uses, but not within `_REBUILD_S` seconds, a step with each of the next uses: no call takes a
millisecond, however large the tier is (a million entries: 0.9 ms at most; 6.7 when the index was made at once).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import count, islice
from math import inf
from operator import itemgetter
from typing import Generic

import msgspec

from kvfs.errors import UsageError
from kvfs.policies.base import Clock, E, mark_of
from kvfs.policies.leaves import PART_MASK, Forest, Leaves, Node
from kvfs.policies.reuse import EDGES, NUM_SPANS, Learnt, Reuse

_TICK_S = 0.25  # uses within one count as simultaneous
_REBUILD_EVERY = 100
_REBUILD_S = 1.0
_AHEAD = 48
_SEEK_EVERY_S = 1.0
_BY_USES = (0, 1, 2, 2, 3)  # the group for 0, 1, 2, 3, and more uses after the first
_NUM_BY_USES = 4
_NUM_TABLES = 8  # namespaces with groups of their own; all others share the first

_DONE = object()

_Ranked = tuple[float, float, int, Node[E]]  # value, last use, a number that makes it unique, and who


_FORMAT = "kvfs-learned/1"


class _Memory(msgspec.Struct, frozen=True):
    format: str
    groups_a_table: int
    tables: dict[str, int]
    reuse: Learnt


class Learned(Generic[E]):
    """See the module. `weigh` gives each entry a class below `num_weights`, and `worth` says what each is worth."""

    def __init__(self, clock: Clock, weigh: Callable[[E], int] | None = None, worth: Sequence[float] = (1.0,)) -> None:
        self._clock = clock
        self._weigh = weigh
        self._groups_a_table = _NUM_BY_USES * len(worth)
        num_groups = self._groups_a_table * _NUM_TABLES
        self._worth = [worth[group // _NUM_BY_USES % len(worth)] for group in range(num_groups)]
        self._tables: dict[Hashable, int] = {}  # namespace -> its first group
        self._forest: Forest[E] = Forest()
        self._leaves: list[Leaves[E]] = [Leaves() for _ in range(num_groups)]
        self._reuse = Reuse(num_groups)
        self._num_uses = 0
        self._rebuilt_at = -inf
        self._rebuilding: Iterator[None] | None = None
        self._lowest: list[_Ranked[E]] = []  # the first of `_in_order`, and what became a leaf since
        self._sought_at = self._bound = -inf  # when they were sought, and the highest value among them then
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._forest)

    def _now(self) -> float:
        return self._clock() // _TICK_S * _TICK_S

    def _first_group(self, table: Hashable) -> int:
        first = self._tables.get(table)
        if first is None:
            if len(self._tables) == _NUM_TABLES - 1:
                return 0
            first = self._tables[table] = self._groups_a_table * (1 + len(self._tables))
        return first

    def _group(self, entry: E, first: int) -> int:
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
        first_groups = {table: self._first_group(table) for table in {entry.table for entry in entries}}
        for entry, node, age_s in zip(entries, nodes, ages_s, strict=False):
            node.group = group = self._group(entry, first_groups[entry.table])
            node.last = last = (now - age_s) // _TICK_S * _TICK_S if age_s > 0 else now
            if reuse.may_watch(entry.key):
                node.watched = reuse.came(mark_of(entry), group, last)
            if not node.num_below:
                leaves[group].add(node)
        self._forget_lowest()

    def _came(self, entry: E, now: float, last: float) -> None:
        node = self._forest.add(entry)
        node.group = self._group(entry, self._first_group(entry.table))
        node.last = last
        node.watched = self._reuse.came(mark_of(entry), node.group, last)
        above = node.above
        if above is not None and above.num_below == 1 and above.entry is not None:
            self._leaves[above.group].discard(above)
        if not node.num_below:
            self._add_leaf(node, now)

    def touch(self, prefix: Sequence[E]) -> None:
        """See `Policy`."""
        if not prefix:
            return
        now = self._now()
        first = self._first_group(prefix[0].table)
        parts, reuse, weigh = self._forest.parts, self._reuse, self._weigh
        for entry in prefix:
            node = parts[hash(entry) & PART_MASK].get(entry)
            if node is None:
                continue
            uses = entry.hits + entry.returns  # as in `_group`; a call costs as much as all the rest
            group = first + (_BY_USES[uses] if uses < len(_BY_USES) else _NUM_BY_USES - 1)
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
            if node.num_below:
                node.last = now
            elif node.last != now:
                self._move_leaf(node, node.group, now)
        self._count_use(now)

    def bypassed(self, entry: E) -> None:
        """See `Policy`: whether it is asked for again is learned all the same."""
        now = self._now()
        mark = mark_of(entry)
        if self._reuse.came(mark, self._group(entry, self._first_group(entry.table)), now) is not None:
            self._reuse.left(mark, now)

    def remove(self, entry: E) -> None:
        """See `Policy`."""
        node = self._forest.get(entry)
        if node is None:
            return
        now = self._now()
        if not node.num_below:
            self._leaves[node.group].discard(node)
        if node.watched is not None:
            self._reuse.left(mark_of(entry), now)
        above = self._forest.discard(entry)
        if above is not None:
            self._add_leaf(above, now)

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
        tables = {table if isinstance(table, str) else name_of(table): first for table, first in self._tables.items()}
        return msgspec.json.encode(_Memory(_FORMAT, self._groups_a_table, tables, self._reuse.learnt()))

    def recall(self, learnt: bytes, table_of: Callable[[str], Hashable | None]) -> None:
        """See `Rememberer`. Of a table that is gone its groups stay, for a namespace that comes."""
        try:
            memory = msgspec.json.decode(learnt, type=_Memory)
        except msgspec.MsgspecError as error:
            raise UsageError(f"what was learned cannot be understood: {error}") from error
        firsts = sorted(memory.tables.values())
        if (memory.format, memory.groups_a_table) != (_FORMAT, self._groups_a_table) or firsts != [
            self._groups_a_table * (1 + number) for number in range(len(firsts))
        ]:
            raise UsageError("what was learned is of another policy, or another version of it")
        self._reuse.recall(memory.reuse)
        self._tables = {}
        for name, first in sorted(memory.tables.items(), key=itemgetter(1)):
            table = table_of(name)
            self._tables[name if table is None else table] = first
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

    def _in_order(self, now: float) -> Iterator[_Ranked[E]]:
        """The leaves, the least worthy first.

        In a span of one group the values rise or fall with age, so that its next one stands at one of its ends.
        """
        ends: list[tuple[float, float, int, int, int, int, int]] = []
        for group, leaves in enumerate(self._leaves):
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

    def _candidates(self, now: float) -> Iterator[_Ranked[E]]:
        self._seek(now)
        for ranked in self._lowest:
            if not _is_stale(ranked):
                yield ranked
        yield from self._in_order(now)

    def victims(self, may_go: Callable[[E], bool]) -> Iterator[E]:
        """See `Policy`. What is built on by something that may not go comes after all that is a leaf, or becomes one."""
        now = self._now()
        seen: set[Node[E]] = set()
        num_gone: dict[Node[E], int] = {}  # of what is below a node
        parents: list[_Ranked[E]] = []  # all below them has gone
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
                    value = self._value(above.group, now - above.last)
                    heappush(parents, (value, above.last, next(self._numbers), above))
        for node in stuck:
            above = node.above
            while above is not None and above not in seen:
                seen.add(above)
                if above.entry is not None and may_go(above.entry):
                    yield above.entry
                above = above.above


def _is_stale(ranked: _Ranked[E]) -> bool:
    """Whether it went, was used, or is no leaf any more; then it was, or will be, sorted in anew."""
    _, last, _, node = ranked
    return node.entry is None or node.last != last or node.num_below > 0
