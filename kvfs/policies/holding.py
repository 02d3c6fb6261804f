"""A policy with some entries set aside: they are in the tier and never go, and looking for victims does not meet them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Generic

from kvfs.policies.base import Entry, Policy

_MAX_LOOKED_AT = 64


class Holding(Generic[Entry]):
    """Another policy's order, without the entries that are held, and with some that go in an order of their own.

    Invariant: an entry of the tier is either in the order or among the held ones. `is_held` says of a new one which;
    later the caller says so by `hold` and `let_go`. `is_grouped` says of an entry, whenever victims are looked for, that
    at its turn the first of `group` goes that may: of what belongs together the least worthy. Where that is none of the
    first few, nothing goes that was used later.
    """

    def __init__(
        self,
        order: Policy[Entry],
        is_held: Callable[[Entry], bool],
        is_grouped: Callable[[Entry], bool] = lambda _: False,
        group: Callable[[], Iterable[Entry]] = tuple,
    ) -> None:
        self._order = order
        self._is_held = is_held
        self._is_grouped = is_grouped
        self._group = group
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
        group: Iterator[Entry] | None = None
        for entry in self._order.victims(lambda entry: self._is_grouped(entry) or may_go(entry)):
            if not self._is_grouped(entry):
                yield entry
                continue
            group = iter(self._group()) if group is None else group
            found = next((other for other in islice(group, _MAX_LOOKED_AT) if may_go(other)), None)
            if found is None:
                return
            yield found
