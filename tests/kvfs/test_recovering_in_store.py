"""After a start the cache is in use while its policies are still told what was found: all of it is right meanwhile."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio

from kvfs import policy_change, recovery
from kvfs.pins import FOREVER
from kvfs.policies.recovering import Recovering
from kvfs.store import Store
from kvfs.testing import chain_of, eventually, open_table, read_all, sized_namespace, store_chain

from .test_policy_change import NS, PLACES, Hurried, check, use

NUM_PROMPTS, LENGTH = 10, 5


def is_being_told(store: Store) -> bool:
    nvme = store._residency.nvme
    return any(isinstance(stripe.tier.policy.order, Recovering) for stripe in nvme or ())


async def fill(directory: Path, policy: str, place: str) -> None:
    """What a daemon before has left; the first prompt is pinned."""
    async with open_table(directory, NS, policy=policy, **PLACES[place]) as (store, table):
        for number in range(NUM_PROMPTS):
            await store_chain(store, table, chain_of(NS, LENGTH, seed=number))
            assert await store.flush()  # else RAM may have no room for the next one
        assert len(table.chunks) == NUM_PROMPTS * LENGTH
        await store.limits.pin([table.chunks[chain_of(NS, LENGTH, seed=0).keys[2]]], FOREVER)


@pytest.fixture
def bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a million chunks: hardly anything is told at once."""
    monkeypatch.setattr(recovery, "_AT_ONCE", 1)
    monkeypatch.setattr(policy_change, "_TOLD_AT_ONCE", 1)


@pytest.mark.usefixtures("bit_by_bit")
@pytest.mark.parametrize("place", ["nvme", "two volumes"])
@pytest.mark.parametrize("policy", ["learned", "lru", "arc"])
async def test_right_after_the_start_all_is_found_evicted_and_set_as_ever(
    tmp_path: Path, policy: str, place: str
) -> None:
    await fill(tmp_path, policy, place)
    choice = random.Random(3)
    async with open_table(tmp_path, NS, Hurried(), policy=policy, **PLACES[place]) as (store, table):
        assert is_being_told(store)
        assert store.statistics().policy == policy
        for number in range(NUM_PROMPTS):
            chain = chain_of(NS, LENGTH, seed=number)
            found = store.match(table, chain.keys)
            assert len(found) == LENGTH
            store.release_all(found)
        for number in range(40, 200):
            await store_chain(store, table, chain_of(NS, 2, seed=number))
            await use(store, table, choice, number)
            if store.counters.evictions_nvme:
                break
        assert store.counters.evictions_nvme
        pinned = chain_of(NS, LENGTH, seed=0).keys[:3]
        assert all(key in table.chunks for key in pinned)
        await eventually(lambda: not is_being_told(store))
        check(store)
        for chunk in store.match(table, pinned):
            assert len(await read_all(store, chunk)) == chunk.length
            store.release(chunk)


@pytest.mark.usefixtures("bit_by_bit")
async def test_a_policy_that_is_set_right_after_the_start_comes_when_the_other_knows_all(tmp_path: Path) -> None:
    await fill(tmp_path, "learned", "nvme")
    async with open_table(tmp_path, NS, Hurried(), policy="learned", **PLACES["nvme"]) as (store, _):
        assert is_being_told(store)
        await store.policy.change("lru")
        assert store.policy.name == "lru"
        assert not is_being_told(store)
        check(store)


@pytest.mark.usefixtures("bit_by_bit")
async def test_a_daemon_that_ends_before_its_policy_knows_all_has_lost_nothing(tmp_path: Path) -> None:
    await fill(tmp_path, "learned", "nvme")
    for _ in range(2):
        async with open_table(tmp_path, NS, Hurried(), policy="learned", **PLACES["nvme"]) as (store, table):
            assert is_being_told(store)
            assert len(table.chunks) == NUM_PROMPTS * LENGTH


@pytest.mark.usefixtures("bit_by_bit")
async def test_what_is_used_while_the_policy_is_told_goes_after_what_was_not(tmp_path: Path) -> None:
    ns = sized_namespace(64 << 10)
    places = {"ram": 2 << 20, "nvme": 4 << 20}
    async with open_table(tmp_path, ns, policy="lru", **places) as (store, table):
        for number in range(8):
            await store_chain(store, table, chain_of(ns, LENGTH, seed=number))
            assert await store.flush()
    async with open_table(tmp_path, ns, Hurried(), policy="lru", **places) as (store, table):
        first = chain_of(ns, LENGTH, seed=0)
        found = store.match(table, first.keys)
        store.touch(found, [chunk.tier for chunk in found])
        store.release_all(found)
        assert is_being_told(store)
        nvme = store._residency.nvme
        assert nvme is not None
        order = next(iter(nvme)).tier.policy
        assert [*order.victims(lambda _: True)][-LENGTH:] == found[::-1]
        while is_being_told(store):
            await trio.lowlevel.checkpoint()
        assert [*order.victims(lambda _: True)][-LENGTH:] == found[::-1]
