"""A user's policy, held to what every policy promises.

It names only entries of its tier, each once, and comes to an end. One that does not would have the tier look for room
for ever, with the whole store behind it; here it raises UsageError instead. What it does beside that is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic

from kvfs.errors import UsageError
from kvfs.policies.base import E, Policy

_TIMES_ASKED = 8
_ASKED_ANYWAY = 1000


class Checked(Generic[E]):
    """Another policy under the same interface; `name` is what its user calls it."""

    def __init__(self, policy: Policy[E], name: str) -> None:
        self._policy = policy
        self._name = name
        self._entries: set[E] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def __getattr__(self, name: str) -> object:
        """What else it may have, see `Rememberer`."""
        return getattr(self._policy, name)

    def insert(self, entry: E) -> None:
        """See `Policy`."""
        self._entries.add(entry)
        self._policy.insert(entry)

    def recovered(self, entry: E, age_s: float) -> None:
        """See `Rememberer`; to a policy that is none it comes like any other."""
        self._entries.add(entry)
        getattr(self._policy, "recovered", lambda entry, _: self._policy.insert(entry))(entry, age_s)

    def recovered_all(self, entries: Sequence[E], ages_s: Iterable[float]) -> None:
        """See `Rememberer`."""
        for entry, age_s in zip(entries, ages_s, strict=False):
            self.recovered(entry, age_s)

    def touch(self, prefix: Sequence[E]) -> None:
        """See `Policy`."""
        self._policy.touch(prefix)

    def built_on(self, prefix: Sequence[E]) -> None:
        """See `Policy`."""
        self._policy.built_on(prefix)

    def bypassed(self, entry: E) -> None:
        """See `Policy`."""
        self._policy.bypassed(entry)

    def remove(self, entry: E) -> None:
        """See `Policy`."""
        self._entries.discard(entry)
        self._policy.remove(entry)

    def victims(self, may_go: Callable[[E], bool]) -> Iterator[E]:
        """See `Policy`. Raises UsageError where it is not kept to."""
        num_left = _TIMES_ASKED * len(self._entries) + _ASKED_ANYWAY

        def may_go_and_is_asked_sometimes(entry: E) -> bool:
            nonlocal num_left
            num_left -= 1
            if num_left < 0:
                raise self._broken("asks without end which entries may go")
            return may_go(entry)

        seen: set[E] = set()
        for entry in self._policy.victims(may_go_and_is_asked_sometimes):
            if entry not in self._entries:
                raise self._broken(f"names {_short(entry)}, which is not in the tier")
            if entry in seen:
                raise self._broken(f"names {_short(entry)} twice")
            seen.add(entry)
            yield entry

    def _broken(self, what: str) -> UsageError:
        return UsageError(f"policy {self._name!r} {what}: see kvfs.policies.base.Policy.victims")


def _short(entry: object) -> str:
    text = repr(entry)
    return text if len(text) <= 80 else text[:77] + "…"
