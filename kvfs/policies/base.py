"""The interface of a policy, and what a policy may know of an entry. See the package for what a policy may not do."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Generic, Protocol, Self, TypeVar

from kvfs.policies.hint import Hint

Clock = Callable[[], float]
"""Seconds that never go back. A policy is given one when it is made; a test or a simulation gives its own."""

Mark = tuple[Hashable, bytes]
"""Who an entry is, also when it went and came back as another object."""


class Entry(Hashable, Protocol):
    """What a policy may look at; a chunk has all of it.

    Attributes:
        table: its namespace; key: unique there, and evenly distributed; parent: key of the entry it is built on;
            position: how many are above it.
        length: bytes it takes; num_tokens: what it saves the engine from computing.
        hits: loads so far, the present one included; returns: how often it was stored again after an eviction.
        hint: what somebody outside knows of it, None: nothing.
    """

    @property
    def table(self) -> Hashable:
        """See above."""

    @property
    def key(self) -> bytes:
        """See above."""

    @property
    def parent(self) -> bytes:
        """See above."""

    @property
    def position(self) -> int:
        """See above."""

    @property
    def length(self) -> int:
        """See above."""

    @property
    def num_tokens(self) -> int:
        """See above."""

    @property
    def hits(self) -> int:
        """See above."""

    @property
    def returns(self) -> int:
        """See above."""

    @property
    def hint(self) -> Hint | None:
        """See above."""

    def above(self) -> Self | None:
        """What it is built on, in whatever tier; None if that is not stored."""


E = TypeVar("E", bound=Entry)
E_contra = TypeVar("E_contra", bound=Entry, contravariant=True)


class Policy(Protocol, Generic[E]):
    """An order of eviction over the entries of one tier.

    The tier guarantees: each entry is inserted once before it is touched or removed, and nothing is called while
    `victims` is being iterated.
    """

    def insert(self, entry: E) -> None:
        """An entry came into the tier; it counts as just used."""

    def touch(self, prefix: Sequence[E]) -> None:
        """An engine loaded these entries of one chain, from head to tail. Those not in the tier are skipped."""

    def built_on(self, prefix: Sequence[E]) -> None:
        """The last of these entries of one chain are new: what they are built on must not go before them.

        That is no use of them: what an engine loads and continues comes by `touch` too.
        """

    def bypassed(self, entry: E) -> None:
        """An entry was asked for and did not come into the tier, since it would have been the first to go."""

    def remove(self, entry: E) -> None:
        """An entry left the tier, for whatever reason; one that is not there is no error."""

    def victims(self, may_go: Callable[[E], bool]) -> Iterator[E]:
        """The entries that may go, each once, the first to go first; what is built on an entry goes before it."""

    def __len__(self) -> int: ...


class Rememberer(Protocol, Generic[E_contra]):
    """What a policy may have besides, to go on after a restart where it was."""

    def recovered(self, entry: E_contra, age_s: float) -> None:
        """Like `insert`, of an entry that was last used, or built on, so long ago. They come the oldest first."""

    def recovered_all(self, entries: Sequence[E_contra], ages_s: Iterable[float]) -> None:
        """The same of many at once; what may be left out, and is called by itself too."""

    def learnt(self, name_of: Callable[[Hashable], str]) -> bytes:
        """What was learned, for `recall`. Tables are written by their names."""

    def recall(self, learnt: bytes, table_of: Callable[[str], Hashable | None]) -> None:
        """Go on from that, before any entry came; what cannot be understood is forgotten, with a UsageError."""


class Heeder(Protocol[E_contra]):
    """What a policy may have besides, to heed hints. Without it only that a chain is closed has an effect.

    Attributes: heeds: "class", "expect" or both. `insert` and `recovered` look at an entry's hint themselves.
    """

    heeds: frozenset[str]

    def hinted(self, entries: Sequence[E_contra]) -> None:
        """The hints of these entries have changed; those not in the tier are skipped."""


def mark_of(entry: Entry) -> Mark:
    """See `Mark`."""
    return entry.table, entry.key
