"""A policy that is being told what a restart found, while the cache is in use.

To tell a policy of a million entries takes longer than to find them. So they wait, in the order of their last need, and
it is told of them a few at a time, the oldest first. What is built on an entry was told before it, or waits before it: so
what the policy knows goes leaf first by its own order, and after it what waits goes leaf first by last need. What was
used meanwhile goes last; the policy hears of that when it knows all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Generic

from kvfs.policies.base import E, Policy

_NS = 1e9
_PIECE = 65_536  # entries: one dict of a million takes 8 ms to give back


class Recovering(Generic[E]):
    """See the module. It takes the place of the policy in an order, until that `is_over`; then the policy does.

    Attributes: policy: the one that is being told.

    Invariant: an entry of the tier waits, or is in the policy, or in `_to_come`: those of `_came` of which the policy was not
    told yet; each has a note.
    """

    def __init__(self, policy: Policy[E], entries: Sequence[E], needed_ns: Iterable[int]) -> None:
        """`entries` are those of the tier, the oldest first, what is built on one before it; and when each was needed."""
        self.policy = policy
        then_ns = [*needed_ns]
        self._waiting: list[dict[E, int]] = []  # of all pieces, and in each, the oldest is the last
        for begin in range(0, len(entries), _PIECE):
            piece = slice(begin, begin + _PIECE)
            self._waiting.append(dict(zip(reversed(entries[piece]), reversed(then_ns[piece]), strict=True)))
        self._waiting.reverse()
        self._came: set[E] = set()  # meanwhile
        self._to_come: set[E] = set()
        self._used: set[E] = set()
        self._notes: deque[tuple[Callable[[Any], None], Any]] = deque()

    def __len__(self) -> int:
        return len(self.policy) + sum(map(len, self._waiting)) + len(self._to_come)

    def __getattr__(self, name: str) -> object:
        """What else the policy may have, see `Rememberer` and `Heeder`: of what it was not told it knows nothing yet."""
        return getattr(self.policy, name)

    @property
    def is_over(self) -> bool:
        """Whether the policy knows all."""
        return not any(self._waiting) and not self._notes

    def tell(self, most: int, now_ns: int) -> None:
        """Tell the policy of so many entries that wait; or, when none do, of one thing that happened meanwhile."""
        while self._waiting and not self._waiting[-1]:
            self._waiting.pop()
        if not self._waiting:
            tell, what = self._notes.popleft()
            tell(what)
            return
        piece = self._waiting[-1]
        told = [piece.popitem() for _ in range(min(most, len(piece)))]
        entries, ages_s = [entry for entry, _ in told], [(now_ns - needed_ns) / _NS for _, needed_ns in told]
        recover_all(self.policy, entries, ages_s)

    def _insert_late(self, entry: E) -> None:
        if entry in self._to_come:
            self._to_come.remove(entry)
            self.policy.insert(entry)

    # a policy

    def insert(self, entry: E) -> None:
        """See `Policy`."""
        self._came.add(entry)
        self._to_come.add(entry)
        self._used.add(entry)
        self._notes.append((self._insert_late, entry))

    def touch(self, prefix: Sequence[E]) -> None:
        """See `Policy`."""
        self._used.update(prefix)
        self._notes.append((self.policy.touch, tuple(prefix)))

    def built_on(self, prefix: Sequence[E]) -> None:
        """See `Policy`."""
        self._used.update(prefix)
        self._notes.append((self.policy.built_on, tuple(prefix)))

    def bypassed(self, entry: E) -> None:
        """See `Policy`."""
        self._notes.append((self.policy.bypassed, entry))

    def remove(self, entry: E) -> None:
        """See `Policy`."""
        if any(piece.pop(entry, None) is not None for piece in self._waiting):
            return
        self._came.discard(entry)
        if entry in self._to_come:
            self._to_come.remove(entry)
        else:
            self.policy.remove(entry)

    def victims(self, may_go: Callable[[E], bool]) -> Iterator[E]:
        """See `Policy`."""
        used, came = self._used, self._came
        if not used:
            return self._in_order(may_go)
        return chain(
            self._in_order(lambda entry: entry not in used and may_go(entry)),
            self._latest(may_go),
            filter(lambda entry: entry in used and entry not in came, self._in_order(may_go)),  # others had their turn
        )

    def _in_order(self, may_go: Callable[[E], bool]) -> Iterator[E]:
        """What was there at the restart."""
        waiting = chain.from_iterable(map(reversed, reversed(self._waiting)))
        return chain(self.policy.victims(may_go), filter(may_go, waiting))

    def _latest(self, may_go: Callable[[E], bool]) -> Iterator[E]:
        """What came since, which may be built on what was there, the deepest first: a policy hears of it bit by bit."""
        yield from filter(may_go, sorted(self._came, key=attrgetter("position"), reverse=True))


def recover_all(policy: Policy[E], entries: Sequence[E], ages_s: Iterable[float]) -> None:
    """Tell a policy of these entries, last used so long ago, the oldest first; in the fastest way that it has."""
    recovered_all = getattr(policy, "recovered_all", None)
    if recovered_all is not None:
        recovered_all(entries, ages_s)
        return
    recovered = getattr(policy, "recovered", None)
    for entry, age_s in zip(entries, ages_s, strict=True):
        if recovered is None:
            policy.insert(entry)
        else:
            recovered(entry, age_s)
