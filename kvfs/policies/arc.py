"""ARC, touched from tail to head: entries used once and used more often, each by last use, and a border that adapts.

After Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. The size of the cache, in
entries, is the most that there were so far; room is made before an entry comes, so that a ghost that comes back moves
the border for the next one only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic

from kvfs.policies.base import E, Mark, mark_of
from kvfs.policies.order import Order


class ARC(Generic[E]):
    """`_once` and `_often` are the entries, `_gone_once` and `_gone_often` who left them; the paper's T1, T2, B1, B2."""

    def __init__(self) -> None:
        self._once: Order[E, None] = Order(None)
        self._often: Order[E, None] = Order(None)
        self._gone_once: Order[Mark, None] = Order(None)
        self._gone_often: Order[Mark, None] = Order(None)
        self._border = 0.0  # how many of `_once` are worth keeping
        self._size = 0

    def __len__(self) -> int:
        return len(self._once) + len(self._often)

    def insert(self, entry: E) -> None:
        """See `Policy`."""
        mark = mark_of(entry)
        self._size = max(self._size, len(self) + 1)
        if mark in self._gone_once:
            self._border += max(1.0, len(self._gone_often) / len(self._gone_once))
            self._gone_once.discard(mark)
            self._often.add(entry, None)
        elif mark in self._gone_often:
            self._border -= max(1.0, len(self._gone_once) / len(self._gone_often))
            self._gone_often.discard(mark)
            self._often.add(entry, None)
        else:
            self._once.add(entry, None)
        self._border = min(max(self._border, 0.0), float(self._size))

    def touch(self, prefix: Sequence[E]) -> None:
        """See `Policy`."""
        for entry in reversed(prefix):
            if self._once.discard(entry):
                self._often.add(entry, None)
            else:
                self._often.to_end((entry,))

    def built_on(self, prefix: Sequence[E]) -> None:
        """See `Policy`."""
        self._often.to_end(prefix)
        self._once.to_end(prefix)

    def bypassed(self, entry: E) -> None:
        """See `Policy`: nothing is learned from it."""

    def remove(self, entry: E) -> None:
        """See `Policy`."""
        if self._once.discard(entry):
            self._gone_once.add(mark_of(entry), None)
            if len(self._once) + len(self._gone_once) > self._size:
                self._gone_once.pop_first()
        elif self._often.discard(entry):
            self._gone_often.add(mark_of(entry), None)
            if len(self) + len(self._gone_once) + len(self._gone_often) > 2 * self._size:
                self._gone_often.pop_first()

    def victims(self, may_go: Callable[[E], bool]) -> Iterator[E]:
        """See `Policy`."""
        once, often = iter(self._once), iter(self._often)
        left = len(self._once)
        while True:
            entry = next(once, None) if left > self._border else None
            if entry is not None:
                left -= 1
            else:
                entry = next(often, None)
                if entry is None:
                    break
            if may_go(entry):
                yield entry
        for entry in once:
            if may_go(entry):
                yield entry
