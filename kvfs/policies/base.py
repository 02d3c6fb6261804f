"""The interface of a policy. See the package for what a policy may not do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

Entry = TypeVar("Entry")


class Policy(Protocol, Generic[Entry]):
    """An order of eviction over the entries of one tier.

    The tier guarantees: each entry is inserted once before it is touched or removed, and the order is not changed
    while `victims` is being iterated.
    """

    def insert(self, entry: Entry) -> None:
        """An entry came into the tier; it counts as just used."""

    def touch(self, prefix: Sequence[Entry]) -> None:
        """These entries of one chain, from head to tail, were used together. Those not in the tier are skipped."""

    def demote(self, entry: Entry) -> None:
        """This entry cannot be reached any more; it goes before all others."""

    def remove(self, entry: Entry) -> None:
        """An entry left the tier; one that is not there is no error."""

    def victims(self, may_go: Callable[[Entry], bool]) -> Iterator[Entry]:
        """The entries that may go, the first to go first."""

    def __len__(self) -> int: ...
