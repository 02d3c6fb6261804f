"""First in, first out. The yardstick below which no policy should fall; nothing to learn, nothing to pay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic

from kvfs.policies.base import E
from kvfs.policies.order import Order


class FIFO(Generic[E]):
    """The order in which entries came."""

    def __init__(self) -> None:
        self._order: Order[E, None] = Order(None)

    def __len__(self) -> int:
        return len(self._order)

    def insert(self, entry: E) -> None:
        """See `Policy`."""
        self._order.add(entry, None)

    def touch(self, prefix: Sequence[E]) -> None:
        """See `Policy`: no use changes anything."""

    def built_on(self, prefix: Sequence[E]) -> None:
        """See `Policy`: a chain came from head to tail, and goes from head to tail."""

    def bypassed(self, entry: E) -> None:
        """See `Policy`: nothing is learned from it."""

    def remove(self, entry: E) -> None:
        """See `Policy`."""
        self._order.discard(entry)

    def victims(self, may_go: Callable[[E], bool]) -> Iterator[E]:
        """See `Policy`."""
        return filter(may_go, self._order)
