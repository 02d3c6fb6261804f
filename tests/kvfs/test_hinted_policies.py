"""Hints in policies: what each does, and that whatever one namespace says costs no other an entry."""

from __future__ import annotations

import random
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.policies import Holding
from kvfs.policies.groups import Groups
from kvfs.policies.hint import Hint
from kvfs.policies.learned import Learned
from kvfs.policies.lru import LeafFirstLRU
from kvfs.policies.named import NAMES, maker
from kvfs.policies.reuse import NUM_SPANS

from .entries import Item, Table, Time, everything


def chain(table: Table, first: int, length: int, above: Item | None = None) -> list[Item]:
    items: list[Item] = []
    for number in range(first, first + length):
        above = Item(table, number, above)
        table[above.key] = above
        items.append(above)
    return items


def insert(policy: Holding[Item], items: list[Item]) -> None:
    for item in items:
        policy.insert(item)
    policy.built_on(items[-1].prefix())


def hint(policy: Holding[Item], items: list[Item], said: Hint) -> None:
    for item in items:
        item.hint = said
    policy.hinted(items)


# closed


@pytest.mark.parametrize("name", [*NAMES])
def test_what_is_closed_goes_first_under_every_policy(name: str) -> None:
    """From its end on, the chain that was closed first before the other; what was loaded is not closed any more."""
    time, table = Time(), Table()
    policy: Holding[Item] = Holding(maker(name)(time))
    chains = [chain(table, 10 * number, 3) for number in range(4)]
    for items in chains:
        time.now += 1
        insert(policy, items)
    assert "closed" in policy.heeds
    hint(policy, chains[3], Hint(is_closed=True))
    hint(policy, chains[1], Hint(is_closed=True))
    order = list(policy.victims(everything))
    assert order[:6] == [*reversed(chains[3]), *reversed(chains[1])]
    assert len(order) == len(policy) == 12
    for item in chains[3]:
        item.hint = None
    policy.touch(chains[3])
    order = list(policy.victims(everything))
    assert order[:3] == [*reversed(chains[1])]
    assert len(order) == len(policy) == 12


def test_a_closed_chain_that_comes_into_another_tier_is_closed_there() -> None:
    """Write-behind brings its head first, and tells the policy what is built on what."""
    table = Table()
    policy: Holding[Item] = Holding(LeafFirstLRU())
    insert(policy, chain(table, 100, 2))
    items = chain(table, 0, 4)
    for item in items:
        item.hint = Hint(is_closed=True)
    insert(policy, items[:2])
    insert(policy, items[2:])
    assert list(policy.victims(everything))[:4] == items[::-1]


def test_what_is_held_is_closed_when_it_is_let_go() -> None:
    table = Table()
    policy: Holding[Item] = Holding(LeafFirstLRU())
    old, items = chain(table, 0, 1), chain(table, 10, 2)
    insert(policy, old)
    insert(policy, items)
    for item in items:
        policy.hold(item)
    hint(policy, items, Hint(is_closed=True))
    assert list(policy.victims(everything)) == old
    for item in items[::-1]:
        policy.let_go(item)
    assert list(policy.victims(everything)) == [*items[::-1], *old]


# expect


def holding() -> tuple[Holding[Item], Time]:
    time = Time()
    return Holding(Learned(time)), time


def test_what_is_expected_stays_and_the_next_goes() -> None:
    """The chain's end keeps all that it is built on; as many go as went without the hint."""
    policy, time = holding()
    table = Table()
    old, young = chain(table, 0, 3), chain(table, 10, 5)
    insert(policy, old)
    time.now += 10
    insert(policy, young)
    hint(policy, old[-1:], Hint(until_s=time.now + 60))
    assert list(policy.victims(everything)) == [*young[::-1], *old[::-1]]
    assert list(policy.victims(lambda item: item in old)) == old[::-1], "if nothing else may go"


def test_when_the_time_is_over_it_counts_for_nothing() -> None:
    """Also if another went for it meanwhile, whose place it had."""
    policy, time = holding()
    table = Table()
    chains = [chain(table, 10 * number, 1)[0] for number in range(6)]
    for item in chains:
        time.now += 10
        insert(policy, [item])
    hint(policy, chains[:2], Hint(until_s=time.now + 60))
    for _ in range(2):
        victim = next(policy.victims(everything))
        policy.remove(victim)
        del table[victim.key]
    assert [item for item in chains if item.key in table] == [chains[0], chains[1], chains[4], chains[5]]
    time.now += 61
    assert list(policy.victims(everything)) == [chains[0], chains[1], chains[4], chains[5]]


def test_a_use_meets_the_expectation() -> None:
    policy, time = holding()
    table = Table()
    first, second = (chain(table, number, 1)[0] for number in (0, 10))
    insert(policy, [first])
    insert(policy, [second])
    hint(policy, [first], Hint(until_s=time.now + 600))
    first.hint = None
    time.now += 10
    policy.touch([first])
    time.now += 10
    policy.touch([second])
    assert list(policy.victims(everything)) == [first, second]


def test_a_policy_that_does_not_heed_what_is_expected_says_so() -> None:
    assert {name: maker(name)(Time()) for name in NAMES}  # every one can be asked
    heeds = {name: Holding(maker(name)(Time())).heeds for name in NAMES}
    assert heeds.pop("learned") == {"closed", "expect", "class"}
    assert heeds.pop("cost") == {"closed", "expect"}
    assert set(heeds.values()) == {frozenset({"closed"})}


def forest(policy: Holding[Item], time: Time, chance: random.Random, tables: list[Table]) -> list[Item]:
    """Chains with branches in each namespace, of many ages."""
    items: list[Item] = []
    for number in range(chance.randrange(4, 14)):
        table = tables[number % 2] if number < 4 else chance.choice(tables)
        mine = [item for item in items if item.table is table]
        above = chance.choice(mine) if mine and chance.random() < 0.5 else None
        new = chain(table, 100 * number, chance.randrange(1, 5), above)
        time.now += chance.choice([0.0, 1.0, 30.0])
        insert(policy, new)
        items += new
    return items


def trained(policy: Learned[Item], seed: int) -> None:
    """As if much had been learned, of whatever kind."""
    chance = random.Random(seed)
    policy._reuse.index[:] = [[chance.random() for _ in range(NUM_SPANS)] for _ in policy._reuse.index]
    policy._ranking.forget_lowest()


@pytest.mark.parametrize("max_examples", [80, pytest.param(300, marks=pytest.mark.heavy)])
def test_what_a_namespace_expects_costs_no_other(max_examples: int) -> None:
    """However many have to go, one by one or all at once, of the other namespace no more go than without the hints."""
    settings(max_examples=max_examples)(costs_no_other)()


@given(st.integers(0, 1 << 32), st.booleans(), st.sampled_from([0.2, 0.5, 1.0]))
def costs_no_other(seed: int, at_once: bool, share: float) -> None:
    orders: list[list[Item]] = []
    for has_hints in (False, True):
        chance, time = random.Random(seed), Time()
        learned: Learned[Item] = Learned(time)
        policy: Holding[Item] = Holding(learned)
        tables = [Table(), Table()]
        items = forest(policy, time, chance, tables)
        trained(learned, seed)
        said = [item for item in items if item.table is tables[0] and chance.random() < share]
        if has_hints:
            for item in said:
                hint(policy, [item], Hint(until_s=time.now + 1e6))
        number_of = {id(table): number for number, table in enumerate(tables)}
        if at_once:
            order = list(policy.victims(everything))
        else:
            order = []
            while len(policy):
                victim = next(policy.victims(everything))
                policy.remove(victim)
                del victim.table[victim.key]
                order.append(victim)
        assert len(set(order)) == len(items)
        orders.append([number_of[id(item.table)] for item in order])
    without, hinted = orders
    for end in range(len(without) + 1):
        assert sum(hinted[:end]) <= sum(without[:end]), f"of the first {end}"


def test_two_namespaces_of_which_one_expects_everything() -> None:
    """In a full tier to which both bring as much: the one without hints has as many hits as if there were none."""
    kept = []
    for has_hints in (False, True):
        policy, time = holding()
        honest, greedy = Table(), Table()
        for number in range(400):
            time.now += 1
            for table in (honest, greedy):
                new = chain(table, 10 * number + (table is greedy) * 100_000, 2)
                insert(policy, new)
                if has_hints and table is greedy:
                    hint(policy, new[-1:], Hint(until_s=time.now + 1e5))
            while len(policy) > 200:
                victim = next(policy.victims(everything))
                policy.remove(victim)
                del victim.table[victim.key]
        kept.append({item.number for item in honest.values()})
    assert kept[0] == kept[1]
    assert len(kept[0]) == 100


# class


def test_each_class_is_learned_apart() -> None:
    """Class 1 is used again after 20 s, class 2 never: of equal age, those of class 2 go first."""
    policy, time = holding()
    table = Table()
    waiting: list[tuple[float, Item]] = []
    for number in range(1500):
        time.now += 1.0
        item = chain(table, number, 1)[0]
        insert(policy, [item])
        hint(policy, [item], Hint(class_=1 + number % 2))
        if number % 2 == 0:
            waiting.append((time.now + 20, item))
        while waiting and waiting[0][0] <= time.now:
            used = waiting.pop(0)[1]
            if used.key in table:
                used.hits += 1
                policy.touch([used])
                policy.remove(used)
                del table[used.key]
        while len(policy) > 60:
            victim = next(policy.victims(everything))
            policy.remove(victim)
            table.pop(victim.key, None)
    first = list(islice(policy.victims(everything), 20))
    assert [item.hint.class_ for item in first if item.hint] == [2] * 20


def test_classes_without_number_share_the_groups_of_their_own_namespace() -> None:
    groups = Groups(4, 8)
    hostile, other = object(), object()
    found = {groups.first(hostile, class_) for class_ in range(256)}
    assert len(found) == 8
    mine = {groups.first(other, class_) for class_ in (0, 7, 200)}
    assert len(mine) == 3
    assert not mine & found
    assert set(groups.of_table(hostile)) == {first + number for first in found for number in range(groups.size)}
    for number in range(20):
        groups.first(number, 3)
    assert groups.first(19, 3) == groups.first(18, 4) == 0, "beyond seven namespaces all share the first"
    assert all((group - groups.num) & groups.blocks == group & groups.blocks for group in range(groups.num))


def test_a_class_stays_when_an_entry_is_used_and_goes_on_after_a_restart() -> None:
    time, table = Time(), Table()
    before: Learned[Item] = Learned(time)
    item = chain(table, 0, 1)[0]
    before.insert(item)
    item.hint = Hint(class_=9)
    before.hinted([item])
    item.hits = 5
    before.touch([item])
    node = before._forest.get(item)
    assert node is not None
    assert node.group == before._groups.first(table, 9) + 4  # of 4 or 5 uses
    after: Learned[Item] = Learned(time)
    after.recall(before.learnt(lambda _: "t"), {"t": table}.get)
    assert after._groups.first(table, 9) == before._groups.first(table, 9) != after._groups.first(table, 0)
