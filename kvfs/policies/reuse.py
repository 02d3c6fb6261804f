"""When what was used is used again: learned on line, for groups of entries that are alike.

For every group a Kaplan-Meier estimate says how likely an entry that has lain unused for so long is used again in each
of the next spans of time; spans double. What is still waiting, and what was forgotten while it waited, is counted as
censored. From that follows an index (Gittins): the most uses per second of room that an entry promises, over all spans
that it could be kept for. It is the value by which `kvfs.policies.learned` evicts.

Only a sample is watched, chosen by key, in the tier or gone from it, so that neither memory nor the pause of `rebuild`
grows with the cache. (Conversations, 2 and 5 % of the chunks: a hit ratio of .1527 and .2214 with all entries watched,
of .1530 and .2210 with `_MAX_WATCHED`.)
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from math import inf

import msgspec

from kvfs.errors import UsageError
from kvfs.policies.base import Mark

SPANS_A_S = 16  # as long as the first one
NUM_SPANS = 26  # the last begins after twelve days
EDGES = (0.0, *(2.0**power / SPANS_A_S for power in range(NUM_SPANS - 1)))
"""Where each span of ages begins, in seconds: 0, 1/16, 1/8, … 1, 2, 4, … 1048576; the last is open."""
_WIDTHS = (EDGES[1], *EDGES[1:])  # of the open one: as long as it took to get there
_MAX_WATCHED = 4096  # to look at all of them takes 3 ms then, most of it waiting for memory
_STEP = 512
_GROUPS_A_STEP = 8
_MOST_MASK = 0xFFFF
_GHOSTS = 4  # times what is in the tier
_PRIOR = 15.0  # entries' worth of evidence that a group is like the one of fewer uses
_HALF_LIFE_S = 3600.0
_HALF_LIFE_SEEN = 4000.0  # what was learned from less is not halved, however old it is


def span_of(age: float) -> int:
    """The span that an age lies in."""
    return min(int(age * SPANS_A_S).bit_length(), NUM_SPANS - 1)


class Learnt(msgspec.Struct, frozen=True):
    """What was learned, for the next start: for each group and span, uses in the sample, and what was forgotten unused.

    `part` is the share of all entries that was watched: one in `part + 1`.
    """

    used: list[list[float]]
    forgotten: list[list[float]]
    part: int


class Watched:
    """One entry of the sample: its group and last use, and whether that was its coming back."""

    __slots__ = ("group", "is_back", "is_watched", "last")

    def __init__(self, group: int, last: float) -> None:
        self.group = group
        self.last = last
        self.is_back = False
        self.is_watched = True


class Reuse:
    """The sample, what was learned, and the index.

    So many groups in a row, `num_by_uses`, are alike but for their uses, which grow: of each little is known at first but
    that it is like the one before it, and of the first that it is like all others together.

    Attributes: index: for each group its value at the beginning of each span.
    """

    def __init__(self, num_groups: int, num_by_uses: int = 1) -> None:
        self._num_by_uses = num_by_uses
        self.index = [[0.0] * NUM_SPANS for _ in range(num_groups)]
        self._here: dict[Mark, Watched] = {}
        self._gone: OrderedDict[Mark, Watched] = OrderedDict()
        self._mask = 0
        self._used = [[0.0] * NUM_SPANS for _ in range(num_groups)]
        self._forgotten = [[0.0] * NUM_SPANS for _ in range(num_groups)]
        self._halved_at = -inf

    def may_watch(self, key: bytes) -> bool:
        """Whether an entry with this key is in the sample."""
        return not self._mask or not int.from_bytes(key[:4], "little") & self._mask

    def came(self, mark: Mark, group: int, now: float) -> Watched | None:
        """An entry came into the tier; returns what to watch it by, if it is watched."""
        if not self.may_watch(mark[1]):
            return None
        watched = self._gone.pop(mark, None)
        if watched is None:
            watched = Watched(group, now)
        else:
            self._count(watched, group, now)
            watched.is_back = True
        self._here[mark] = watched
        if self.num_watched > _MAX_WATCHED:
            self._watch_less()
        return watched

    def used(self, watched: Watched, group: int, now: float) -> None:
        """A watched entry was used; if it came back for this very use, that was counted."""
        if watched.is_back:
            watched.is_back = False
            watched.group, watched.last = group, now
        else:
            self._count(watched, group, now)

    def continued(self, watched: Watched, now: float) -> None:
        """Something was built on a watched entry."""
        watched.is_back = False
        watched.last = now

    def left(self, mark: Mark, now: float) -> None:
        """A watched entry left the tier; it is watched on, for a while."""
        watched = self._here.pop(mark, None)
        if watched is None:
            return
        self._gone[mark] = watched
        while len(self._gone) > _GHOSTS * (len(self._here) + 1):
            _, oldest = self._gone.popitem(last=False)
            self._forgotten[oldest.group][span_of(now - oldest.last)] += 1

    def _count(self, watched: Watched, group: int, now: float) -> None:
        self._used[watched.group][span_of(now - watched.last)] += 1
        watched.group, watched.last = group, now

    def _watch_less(self) -> None:
        self._mask = 2 * self._mask + 1
        for kept in (self._here, self._gone):
            for mark in [mark for mark in kept if int.from_bytes(mark[1][:4], "little") & self._mask]:
                kept.pop(mark).is_watched = False
        self._halve()

    @property
    def num_watched(self) -> int:
        """How many are watched, in the tier or gone from it."""
        return len(self._here) + len(self._gone)

    def _num_seen(self) -> float:
        return sum(map(sum, self._used)) + sum(map(sum, self._forgotten))

    def _halve(self) -> None:
        for table in (self._used, self._forgotten):
            for row in table:
                row[:] = [count / 2 for count in row]

    def learnt(self) -> Learnt:
        """See `Learnt`; what waits is not in it, the entries themselves come back with their ages."""
        return Learnt([row.copy() for row in self._used], [row.copy() for row in self._forgotten], self._mask)

    def recall(self, learnt: Learnt) -> None:
        """Go on from there, before anything came. Raises UsageError for what is not of this many groups and spans."""
        for table in (learnt.used, learnt.forgotten):
            if len(table) != len(self._used) or any(len(row) != NUM_SPANS for row in table):
                raise UsageError("what was learned is of other groups")
            if not all(0 <= count < inf for row in table for count in row):
                raise UsageError("what was learned is no counts")
        if learnt.part < 0 or learnt.part & (learnt.part + 1):
            raise UsageError("what was learned is of no such share")
        self._used = [row.copy() for row in learnt.used]
        self._forgotten = [row.copy() for row in learnt.forgotten]
        self._mask = min(learnt.part, _MOST_MASK)

    def rebuild(self, now: float) -> Iterator[None]:
        """Make the index anew from what was learned until now, in short steps: the last one does it."""
        if self._halved_at == -inf:
            self._halved_at = now
        elif now - self._halved_at >= _HALF_LIFE_S and self._num_seen() >= _HALF_LIFE_SEEN:
            self._halve()
            self._halved_at = now
        watched = [*self._here.values(), *self._gone.values()]
        waiting: Counter[int] = Counter()
        for first in range(0, len(watched), _STEP):
            waiting.update(
                [
                    one.group << 8
                    | (
                        int((now - one.last) * SPANS_A_S).bit_length() if one.last < now else 0
                    )  # used since the first step
                    for one in watched[first : first + _STEP]
                    if one.is_watched
                ]
            )
            yield
        censored = [row.copy() for row in self._forgotten]
        for code, number in waiting.items():
            censored[code >> 8][min(code & 0xFF, NUM_SPANS - 1)] += number
        known = [group for group, row in enumerate(censored) if any(row) or any(self._used[group])]
        used = {group: self._used[group].copy() for group in known}
        all_used = [sum(column) for column in zip(*used.values(), strict=True)]
        all_censored = [sum(column) for column in zip(*map(censored.__getitem__, known), strict=True)]
        common = _hazards(all_used, all_censored, [0.0] * NUM_SPANS, 1e-6) if known else [0.0] * NUM_SPANS
        index = [_index(common)] * len(censored)
        prior_weight = _PRIOR / (self._mask + 1)
        before = common
        for number, group in enumerate(known, 1):
            if not group % self._num_by_uses:
                before = common
            before = _hazards(used[group], censored[group], before, prior_weight)
            index[group] = _index(before)
            if not number % _GROUPS_A_STEP:
                yield
        self.index[:] = index


def _hazards(used: list[float], censored: list[float], prior: list[float], weight: float) -> list[float]:
    """For each span, how likely what gets to its beginning unused is used within it."""
    at_risk = sum(used) + sum(censored)
    found = []
    for uses, lost, before in zip(used, censored, prior, strict=True):
        seen = at_risk - lost / 2 + weight
        found.append(min(0.999, (uses + weight * before) / seen) if seen > 0 else 0.0)
        at_risk -= uses + lost
    return found


def _index(hazards: list[float]) -> list[float]:
    """For each span the most uses a second, over all spans up to which what begins it could be kept."""
    found = []
    for first in range(NUM_SPANS):
        uses = seconds = best = 0.0
        still_unused = 1.0
        for span in range(first, NUM_SPANS):
            hazard = hazards[span]
            seconds += still_unused * _WIDTHS[span] * (1 - hazard / 2)
            uses += still_unused * hazard
            still_unused *= 1 - hazard
            if uses > best * seconds:
                best = uses / seconds
        found.append(best)
    return found
