"""A policy with some entries set aside: they are in the tier and never go, and looking for victims does not meet them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Generic

from kvfs.policies.base import Entry, Policy


class Holding(Generic[Entry]):
    """Another policy's order, without the entries that are held, and with some that go last.

    Invariant: an entry of the tier is either in the order or among the held ones. `is_held` says of a new one which;
    later the caller says so by `hold` and `let_go`. `depth` says of an entry, whenever victims are looked for, whether
    it goes after all others, the deepest first; None: when its turn comes.
    """

    def __init__(
        self,
        order: Policy[Entry],
        is_held: Callable[[Entry], bool],
        depth: Callable[[Entry], int | None] = lambda _: None,
    ) -> None:
        self._order = order
        self._is_held = is_held
        self._depth = depth
        self._held: set[Entry] = set()

    def __len__(self) -> int:
        return len(self._order) + len(self._held)

    def hold(self, entry: Entry) -> None:
        """An entry must not go from now on; one that is not in the tier is no error."""
        before = len(self._order)
        self._order.remove(entry)
        if len(self._order) < before:
            self._held.add(entry)

    def let_go(self, entry: Entry) -> None:
        """An entry may go again, and counts as just used; one that is not in the tier is no error."""
        if entry in self._held:
            self._held.remove(entry)
            self._order.insert(entry)

    def insert(self, entry: Entry) -> None:
        """See `Policy`."""
        if self._is_held(entry):
            self._held.add(entry)
        else:
            self._order.insert(entry)

    def touch(self, prefix: Sequence[Entry]) -> None:
        """See `Policy`."""
        self._order.touch(prefix)

    def demote(self, entry: Entry) -> None:
        """See `Policy`."""
        self._order.demote(entry)

    def remove(self, entry: Entry) -> None:
        """See `Policy`."""
        if entry in self._held:
            self._held.remove(entry)
        else:
            self._order.remove(entry)

    def victims(self, may_go: Callable[[Entry], bool]) -> Iterator[Entry]:
        """See `Policy`."""
        late: list[tuple[int, Entry]] = []
        for entry in self._order.victims(may_go):
            depth = self._depth(entry)
            if depth is None:
                yield entry
            else:
                late.append((depth, entry))
        late.sort(key=itemgetter(0), reverse=True)
        yield from (entry for _, entry in late)
