"""One policy taking over from another, while entries come, go and are used.

Until the new one has all that is in the tier, the old one says who goes. What is there is carried over, oldest first, in
as many steps as it takes; what happens meanwhile is noted down, and told to the new one after that, so that its order
is the one of uses. An entry that leaves the tier leaves both at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic

from kvfs.policies.base import E, Policy


class Changing(Generic[E]):
    """Two policies as one. Attributes: old: says who goes; new: is being told.

    Invariant: an entry that came since the beginning is in `_came`, until it is told to the new one in `_to_come` as well,
    unless it left; each has a note.
    """

    def __init__(self, old: Policy[E], new: Policy[E]) -> None:
        self.old = old
        self.new = new
        self._came: set[E] = set()
        self._to_come: set[E] = set()
        self._notes: deque[tuple[Callable[[Any], None], Any]] = deque()

    def __len__(self) -> int:
        return len(self.old)

    # carrying over

    def carry(self, entry: E, age_s: float) -> None:
        """An entry of the tier was last used so long ago; what came since the beginning has a note of its own.

        They come the oldest first, and before any note is told.
        """
        if entry in self._came:
            return
        recovered = getattr(self.new, "recovered", None)
        if recovered is None:
            self.new.insert(entry)
        else:
            recovered(entry, age_s)

    @property
    def num_to_come(self) -> int:
        """How many that are in the tier the new policy is yet to be told of."""
        return len(self._to_come)

    @property
    def has_notes(self) -> bool:
        """Whether something is still to be told."""
        return bool(self._notes)

    def tell_one(self) -> None:
        """Tell the new policy the oldest thing that it was not told yet."""
        tell, what = self._notes.popleft()
        tell(what)

    def _insert_late(self, entry: E) -> None:
        if entry in self._to_come:
            self._to_come.remove(entry)
            self.new.insert(entry)

    # a policy

    def insert(self, entry: E) -> None:
        """See `Policy`."""
        self.old.insert(entry)
        self._came.add(entry)
        self._to_come.add(entry)
        self._notes.append((self._insert_late, entry))

    def touch(self, prefix: Sequence[E]) -> None:
        """See `Policy`."""
        self.old.touch(prefix)
        self._notes.append((self.new.touch, tuple(prefix)))

    def built_on(self, prefix: Sequence[E]) -> None:
        """See `Policy`."""
        self.old.built_on(prefix)
        self._notes.append((self.new.built_on, tuple(prefix)))

    def bypassed(self, entry: E) -> None:
        """See `Policy`."""
        self.old.bypassed(entry)
        self._notes.append((self.new.bypassed, entry))

    @property
    def heeds(self) -> frozenset[str]:
        """Which hints either of them heeds."""
        return frozenset[str]().union(*(getattr(policy, "heeds", ()) for policy in (self.old, self.new)))

    def hinted(self, entries: Sequence[E]) -> None:
        """The hints of these entries have changed: told to those that heed any."""
        old, new = (getattr(policy, "hinted", None) for policy in (self.old, self.new))
        if old is not None:
            old(entries)
        if new is not None:
            self._notes.append((new, tuple(entries)))

    def remove(self, entry: E) -> None:
        """See `Policy`."""
        self.old.remove(entry)
        self._to_come.discard(entry)
        self.new.remove(entry)

    def victims(self, may_go: Callable[[E], bool]) -> Iterator[E]:
        """See `Policy`."""
        return self.old.victims(may_go)
