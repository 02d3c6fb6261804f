"""Policies: the order in which entries go. Pure, so a list is model enough."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvfs.policies import LeafFirstLRU


class Order(RuleBasedStateMachine):
    """A plain list, first to go first."""

    def __init__(self) -> None:
        super().__init__()
        self.policy: LeafFirstLRU[int] = LeafFirstLRU()
        self.order: list[int] = []
        self.next = 0

    @rule()
    def insert(self) -> None:
        self.policy.insert(self.next)
        self.order.append(self.next)
        self.next += 1

    @rule(prefix=st.lists(st.integers(0, 12), unique=True, max_size=6))
    def touch(self, prefix: list[int]) -> None:
        """The tail of a prefix goes before its head; what is not there is skipped."""
        self.policy.touch(prefix)
        there = [entry for entry in reversed(prefix) if entry in self.order]
        self.order = [entry for entry in self.order if entry not in there] + there

    @rule(entry=st.integers(0, 12))
    def demote(self, entry: int) -> None:
        self.policy.demote(entry)
        if entry in self.order:
            self.order.remove(entry)
            self.order.insert(0, entry)

    @rule(entry=st.integers(0, 12))
    def remove(self, entry: int) -> None:
        self.policy.remove(entry)
        if entry in self.order:
            self.order.remove(entry)

    @precondition(lambda self: self.order)
    @rule(modulus=st.integers(1, 4))
    def some_may_not_go(self, modulus: int) -> None:
        """`victims` passes over those that may not go and changes nothing."""
        found = list(self.policy.victims(lambda entry: entry % modulus == 0))
        assert found == [entry for entry in self.order if entry % modulus == 0]

    @invariant()
    def order_is_equal(self) -> None:
        assert list(self.policy.victims(lambda _: True)) == self.order
        assert len(self.policy) == len(self.order)


Order.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestOrder = Order.TestCase
