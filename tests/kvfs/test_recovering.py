"""Recovering: what a restart found goes leaf first while the policy is being told of it, and by the policy afterwards."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs.policies import Holding
from kvfs.policies import recovering as recovering_module
from kvfs.policies.named import NAMES, maker
from kvfs.policies.recovering import Recovering

from .entries import Item, Table, Time, everything

NS = 1_000_000_000
steps = st.lists(st.sampled_from(("tell", "tell", "insert", "touch", "built_on", "remove", "evict")), max_size=60)


def forest(rng: random.Random, num: int) -> list[Item]:
    """Chains and branches of them, with holes."""
    table, entries = Table(), list[Item]()
    for number in range(num):
        above = rng.choice(entries) if entries and rng.random() < 0.9 else None
        entry = Item(table, number, above)
        table[entry.key] = entry
        entries.append(entry)
    return [entry for entry in entries if rng.random() < 0.9]


def by_need(entries: list[Item], rng: random.Random) -> tuple[list[Item], list[int]]:
    """As a start sorts them: a chunk was needed when anything that is built on it was used."""
    needed = {entry: rng.randrange(5) * NS for entry in entries}
    for entry in sorted(entries, key=lambda entry: -entry.position):
        above = entry.above()
        if above in needed:
            needed[above] = max(needed[above], needed[entry])
    order = sorted(entries, key=lambda entry: (needed[entry], -entry.position))
    return order, [needed[entry] for entry in order]


def check_leaf_first(victims: list[Item]) -> None:
    place = {entry: number for number, entry in enumerate(victims)}
    assert len(place) == len(victims), "an entry goes twice"
    for entry in victims:
        above = entry.above()
        if above in place:
            assert place[entry] < place[above], "an entry goes before what is built on it"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovering_module, "_PIECE", 16)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 1 << 32), steps, st.sampled_from(("learned", "cost", "lru")))
def test_at_any_time_it_goes_leaf_first_and_all_of_it_does(seed: int, what: list[str], name: str) -> None:
    rng = random.Random(seed)
    entries, needed_ns = by_need(forest(rng, 40), rng)
    there = set(entries)
    time = Time()
    time.now = 100.0
    recovering = Recovering(maker(name)(time), entries, needed_ns)
    holding: Holding[Item] = Holding(recovering)
    number = 1000
    for step in what:
        if step == "tell" and not recovering.is_over:
            recovering.tell(rng.randrange(1, 9), int(time.now) * NS)
        elif step == "insert" and there:
            above = rng.choice(sorted(there, key=lambda entry: entry.number))
            new = Item(above.table, number, above)
            above.table[new.key] = new
            number += 1
            there.add(new)
            holding.insert(new)
            holding.built_on(new.prefix())
        elif step in ("touch", "built_on") and there:
            prefix = rng.choice(sorted(there, key=lambda entry: entry.number)).prefix()
            time.now += 1
            getattr(holding, step)(prefix)
        elif step in ("remove", "evict"):
            for gone in [*holding.victims(everything)][:1]:
                there.discard(gone)
                holding.remove(gone)
                holding.remove(gone)  # once more is no error
        assert len(holding) == len(there)
        victims = [*holding.victims(everything)]
        assert set(victims) == there
        check_leaf_first(victims)
        some = {entry for entry in there if entry.number % 3}
        assert {*holding.victims(some.__contains__)} == some
    while not recovering.is_over:
        recovering.tell(3, int(time.now) * NS)
    assert len(recovering.policy) == len(there)
    assert {*recovering.policy.victims(everything)} == there
    if name != "lru":
        check_leaf_first([*recovering.policy.victims(everything)])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("at_a_time", [1, 7, 1000])
def test_in_the_end_the_policy_is_what_it_is_when_told_at_once(name: str, at_a_time: int) -> None:
    rng = random.Random(at_a_time)
    entries, needed_ns = by_need(forest(rng, 500), rng)
    time = Time()
    time.now = 100.0
    at_once: Holding[Item] = Holding(maker(name)(time))
    at_once.recovered_all(entries, [100.0 - each_ns / NS for each_ns in needed_ns])
    later: Holding[Item] = Holding(maker(name)(time))
    later.recover_later(entries, needed_ns)
    assert isinstance(later.order, Recovering)
    while not later.order.is_over:
        later.order.tell(at_a_time, 100 * NS)
    assert [*later.order.policy.victims(everything)] == [*at_once.victims(everything)]


def test_before_anything_was_told_the_one_needed_longest_ago_goes_and_what_was_used_goes_last() -> None:
    table = Table()
    chains: list[list[Item]] = []
    for number in range(3):
        head = Item(table, 10 * number, None)
        tail = Item(table, 10 * number + 1, head)
        table |= {head.key: head, tail.key: tail}
        chains.append([head, tail])
    entries = [entry for chain in chains for entry in reversed(chain)]
    recovering = Recovering(maker("learned")(Time()), entries, [1, 1, 2, 2, 3, 3])
    assert [*recovering.victims(everything)] == entries
    recovering.touch(chains[0])
    assert [*recovering.victims(everything)] == [*entries[2:], *entries[:2]]


def test_what_a_user_knows_of_a_policy_that_is_being_told_is_what_the_policy_says() -> None:
    learned = maker("learned")(Time())
    recovering: Holding[Item] = Holding(Recovering(learned, [], []))
    assert recovering.heeds == Holding(learned).heeds
    assert recovering.learnt(str) == Holding(learned).learnt(str)
    assert Holding(Recovering(maker("lru")(Time()), [], [])).learnt(str) is None
