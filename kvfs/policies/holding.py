"""A policy with some entries set aside: those that never go, and those that go before all others.

Looking for victims does not meet the former; the latter cannot be reached any more, because what they are built on went.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Generic

from kvfs.policies.base import E, Policy

_MAX_LOOKED_AT = 64


class Holding(Generic[E]):
    """Another policy's order, without the entries that are held or unreachable. It is a policy too.

    Invariant: an entry of the tier is in the order, or among the held ones, or among the unreachable ones. A new one is
    held if `is_held` says so; later the caller says it by `hold` and `let_go`.

    Attributes, which the owner of the tier may set:
        is_held: see above.
        is_grouped, group: whenever victims are looked for, at the turn of an entry that is grouped the first of the group
            goes that may: of what belongs together the least worthy. Where that is none of the first few, nothing goes
            that was used later.
    """

    def __init__(self, order: Policy[E], is_held: Callable[[E], bool] | None = None) -> None:
        self._order = order
        self.is_held = is_held
        self.is_grouped: Callable[[E], bool] | None = None
        self.group: Callable[[], Iterable[E]] = tuple
        self._held: set[E] = set()
        self._unreachable: dict[E, None] = {}

    def __len__(self) -> int:
        return len(self._order) + len(self._held) + len(self._unreachable)

    def hold(self, entry: E) -> None:
        """An entry must not go from now on; one that is not in the tier is no error."""
        before = len(self._order)
        self._order.remove(entry)
        if len(self._order) < before or self._unreachable.pop(entry, self) is None:
            self._held.add(entry)

    def let_go(self, entry: E) -> None:
        """An entry may go again, and counts as just used; one that is not in the tier is no error."""
        if entry in self._held:
            self._held.remove(entry)
            self._order.insert(entry)

    def demote(self, entry: E) -> None:
        """What an entry is built on went: it goes before all others, the last one first, until it is touched."""
        before = len(self._order)
        self._order.remove(entry)
        if len(self._order) < before:
            self._unreachable[entry] = None

    def insert(self, entry: E) -> None:
        """See `Policy`."""
        if self.is_held is not None and self.is_held(entry):
            self._held.add(entry)
        else:
            self._order.insert(entry)

    def recovered(self, entry: E, age_s: float) -> None:
        """See `Rememberer`; to a policy that is none it comes like any other."""
        recovered = getattr(self._order, "recovered", None)
        if recovered is None or (self.is_held is not None and self.is_held(entry)):
            self.insert(entry)
        else:
            recovered(entry, age_s)

    def recovered_all(self, entries: Sequence[E], ages_s: Iterable[float]) -> None:
        """`recovered` for each, in order; at once where the policy can do that."""
        recovered_all = getattr(self._order, "recovered_all", None)
        if recovered_all is None or (self.is_held is not None and any(map(self.is_held, entries))):
            for entry, age_s in zip(entries, ages_s, strict=True):
                self.recovered(entry, age_s)
        else:
            recovered_all(entries, ages_s)

    def learnt(self, name_of: Callable[[Hashable], str]) -> bytes | None:
        """See `Rememberer`; None of a policy that is none."""
        learnt = getattr(self._order, "learnt", None)
        found: bytes | None = learnt(name_of) if learnt is not None else None
        return found

    def recall(self, learnt: bytes, table_of: Callable[[str], Hashable | None]) -> None:
        """See `Rememberer`; nothing to a policy that is none."""
        recall = getattr(self._order, "recall", None)
        if recall is not None:
            recall(learnt, table_of)

    def touch(self, prefix: Sequence[E]) -> None:
        """See `Policy`."""
        if self._unreachable:
            self._reach(prefix)
        self._order.touch(prefix)

    def built_on(self, prefix: Sequence[E]) -> None:
        """See `Policy`."""
        if self._unreachable:
            self._reach(prefix)
        self._order.built_on(prefix)

    def _reach(self, prefix: Sequence[E]) -> None:
        for entry in prefix:
            if entry in self._unreachable:
                del self._unreachable[entry]
                self._order.insert(entry)

    def bypassed(self, entry: E) -> None:
        """See `Policy`."""
        self._order.bypassed(entry)

    def remove(self, entry: E) -> None:
        """See `Policy`."""
        if entry in self._held:
            self._held.remove(entry)
        elif entry in self._unreachable:
            del self._unreachable[entry]
        else:
            self._order.remove(entry)

    def victims(self, may_go: Callable[[E], bool]) -> Iterator[E]:
        """See `Policy`. Asked again: that leased bytes stay must not depend on a policy, which may be a user's."""
        if self.is_grouped is not None:
            return filter(may_go, self._with_group(may_go, self.is_grouped))
        return filter(may_go, self._ungrouped(may_go))

    def _ungrouped(self, may_go: Callable[[E], bool]) -> Iterator[E]:
        if not self._unreachable:
            return self._order.victims(may_go)
        return chain(filter(may_go, reversed(self._unreachable)), self._order.victims(may_go))

    def _with_group(self, may_go: Callable[[E], bool], is_grouped: Callable[[E], bool]) -> Iterator[E]:
        group: Iterator[E] | None = None
        for entry in self._ungrouped(lambda entry: is_grouped(entry) or may_go(entry)):
            if not is_grouped(entry):
                yield entry
                continue
            group = iter(self.group()) if group is None else group
            found = next((other for other in islice(group, _MAX_LOOKED_AT) if may_go(other)), None)
            if found is None:
                return
            yield found
