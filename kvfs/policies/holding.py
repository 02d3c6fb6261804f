"""A policy with some entries set aside: those that never go, and those that go before all others.

Looking for victims does not meet the former. The latter cannot be reached any more, because what they are built on went;
after them come those of which a hint says that they are not used again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Generic

from kvfs.policies.base import E, Entry, Policy
from kvfs.policies.hint import HEEDED_BY_ALL
from kvfs.policies.order import Order
from kvfs.policies.recovering import Recovering, recover_all

_MAX_LOOKED_AT = 64


class Holding(Generic[E]):
    """Another policy's order, without the entries that are held, unreachable or closed. It is a policy too.

    Invariant: an entry of the tier is in the order, or among the held ones, or the unreachable ones, or the closed ones. A
    new one is held if `is_held` says so; later the caller says it by `hold` and `let_go`. It is closed if its hint says
    so; later the caller says by `hinted` that this has changed.

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
        self._held: Order[E, None] = Order(None)
        self._unreachable: Order[E, None] = Order(None)
        self._closed: Order[E, None] = Order(None)  # the first goes first; what is built on one is before it

    def __len__(self) -> int:
        return len(self._order) + len(self._held) + len(self._unreachable) + len(self._closed)

    @property
    def heeds(self) -> frozenset[str]:
        """Which hints have an effect: see `Heeder`, and "closed"."""
        heeds: frozenset[str] = getattr(self._order, "heeds", frozenset())
        return HEEDED_BY_ALL | heeds

    @property
    def order(self) -> Policy[E]:
        """The other policy; another one with the same entries may take its place."""
        return self._order

    @order.setter
    def order(self, order: Policy[E]) -> None:
        self._order = order

    def is_set_aside(self, entry: E) -> bool:
        """Whether an entry is held, unreachable or closed, and so not in the order."""
        return entry in self._held or entry in self._unreachable or entry in self._closed

    def hold(self, entry: E) -> None:
        """An entry must not go from now on; one that is not in the tier is no error."""
        before = len(self._order)
        self._order.remove(entry)
        if len(self._order) < before or self._set_aside(entry):
            self._held.add(entry, None)

    def let_go(self, entry: E) -> None:
        """An entry may go again, and counts as just used; one that is not in the tier is no error."""
        if self._held.discard(entry):
            self._put(entry)

    def _put(self, entry: E) -> None:
        """An entry that is not held has its place again."""
        if _is_closed(entry):
            self._closed.add(entry, None)
        else:
            self._order.insert(entry)

    def demote(self, entry: E) -> None:
        """What an entry is built on went: it goes before all others, the last one first, until it is touched."""
        before = len(self._order)
        self._order.remove(entry)
        if len(self._order) < before or self._closed.discard(entry):
            self._unreachable.add(entry, None)

    def _set_aside(self, entry: E) -> bool:
        """Whether the entry was one of those that go before all others; it is none any more."""
        return self._unreachable.discard(entry) or self._closed.discard(entry)

    def hinted(self, entries: Sequence[E]) -> None:
        """The hints of these entries of one chain, from head to tail, have changed; those not in the tier are skipped."""
        for entry in reversed(entries):
            if _is_closed(entry):
                before = len(self._order)
                self._order.remove(entry)
                if len(self._order) < before or self._closed.discard(entry):
                    self._closed.add(entry, None)
            elif self._closed.discard(entry):
                self._order.insert(entry)
        hinted = getattr(self._order, "hinted", None)
        if hinted is not None:
            hinted(entries)

    def insert(self, entry: E) -> None:
        """See `Policy`."""
        if self.is_held is not None and self.is_held(entry):
            self._held.add(entry, None)
        elif entry.hint is None:  # almost always
            self._order.insert(entry)
        else:
            self._put(entry)

    def recovered(self, entry: E, age_s: float) -> None:
        """See `Rememberer`; to a policy that is none it comes like any other."""
        recovered = getattr(self._order, "recovered", None)
        if recovered is None or (self.is_held is not None and self.is_held(entry)):
            self.insert(entry)
        else:
            recovered(entry, age_s)

    def recovered_all(self, entries: Sequence[E], ages_s: Iterable[float]) -> None:
        """`recovered` for each, in order; at once where the policy can do that."""
        if self.is_held is not None and any(map(self.is_held, entries)):
            for entry, age_s in zip(entries, ages_s, strict=True):
                self.recovered(entry, age_s)
        else:
            recover_all(self._order, entries, ages_s)

    def recover_later(self, entries: Sequence[E], needed_ns: Iterable[int]) -> None:
        """The same of so many that it takes long, none of which is held: see `Recovering`, which the caller goes on with."""
        self._order = Recovering(self._order, entries, needed_ns)

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
        if self._unreachable.size or self._closed.size:
            self._reach(prefix)
        self._order.touch(prefix)

    def built_on(self, prefix: Sequence[E]) -> None:
        """See `Policy`."""
        if self._unreachable.size:
            self._reach(prefix)
        if self._closed.size:  # still: whoever goes on with a closed chain says so by `hinted`
            self._closed.to_end(prefix)
        self._order.built_on(prefix)

    def _reach(self, prefix: Sequence[E]) -> None:
        """The entries can be reached, or are not closed any more."""
        for entry in prefix:
            if self._set_aside(entry):
                self._put(entry)

    def bypassed(self, entry: E) -> None:
        """See `Policy`."""
        self._order.bypassed(entry)

    def remove(self, entry: E) -> None:
        """See `Policy`."""
        if self._held.size and self._held.discard(entry):
            return
        if not (self._unreachable.size or self._closed.size) or not self._set_aside(entry):
            self._order.remove(entry)

    def victims(self, may_go: Callable[[E], bool]) -> Iterator[E]:
        """See `Policy`. Asked again: that leased bytes stay must not depend on a policy, which may be a user's."""
        if self.is_grouped is not None:
            return filter(may_go, self._with_group(may_go, self.is_grouped))
        return filter(may_go, self._ungrouped(may_go))

    def _ungrouped(self, may_go: Callable[[E], bool]) -> Iterator[E]:
        if not self._unreachable.size and not self._closed.size:
            return self._order.victims(may_go)
        first = chain(reversed(self._unreachable), self._closed)
        return chain(filter(may_go, first), self._order.victims(may_go))

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


def _is_closed(entry: Entry) -> bool:
    return entry.hint is not None and entry.hint.is_closed
