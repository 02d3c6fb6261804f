"""Another policy takes over while the cache is in use: every entry is in the new order, once, and by its last use."""

from __future__ import annotations

import random
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import trio

from kvfs.catalog import NOWHERE, Chunk, ChunkTable
from kvfs.config import POLICIES
from kvfs.errors import UsageError
from kvfs.keys import KeyChain
from kvfs.messages import Tier
from kvfs.pins import FOREVER
from kvfs.policies import Holding, LeafFirstLRU
from kvfs.policies.changing import Changing
from kvfs.policies.named import maker
from kvfs.store import Store
from kvfs.system import System
from kvfs.testing import (
    chain_of,
    eventually,
    new_chunks,
    open_table,
    read_all,
    sized_namespace,
    store_chain,
    store_chunk,
)

NS = sized_namespace(64 << 10)
LENGTH = 64 << 10
PLACES: dict[str, dict[str, Any]] = {
    "ram": {"ram": 4 << 20, "nvme": None},
    "nvme": {"ram": 2 << 20, "nvme": 4 << 20},
    "two volumes": {"ram": 2 << 20, "nvme": 4 << 20, "volumes": 2},
}


class Hurried(System):
    """A clock that goes on by 10 ms whenever it is looked at: whatever works for a while lets others go on each time."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        self.now_s += 0.01
        return self.now_s


def orders(store: Store) -> list[tuple[Holding[Chunk], Any]]:
    """The order of each tier, and what says whether a chunk is in the tier."""
    nvme = store._residency.nvme
    found: list[tuple[Holding[Chunk], Any]] = [(store._residency.ram.policy, lambda chunk: chunk.ram != NOWHERE)]
    found.extend(
        (stripe.tier.policy, lambda chunk, n=stripe.number: chunk.nvme != NOWHERE and chunk.volume == n)
        for stripe in nvme or ()
    )
    return found


def check(store: Store) -> None:
    """Each tier's order has what is in the tier, once, and what is built on an entry before it where policies say so."""
    for order, is_there in orders(store):
        assert not isinstance(order.order, Changing)
        there = {chunk for chunk in store.catalog.chunks() if is_there(chunk)}
        found = list(order.order.victims(lambda _: True))
        assert len(found) == len(set(found)) == len(order.order)
        set_aside = {chunk for chunk in there if order.is_set_aside(chunk)}
        assert set(found) | set_aside == there
        assert not set(found) & set_aside
        assert len(order) == len(there)


async def use(store: Store, table: ChunkTable, choice: random.Random, number: int) -> None:
    """Something that engines and people do."""
    what = choice.randrange(8)
    chain = chain_of(NS, 5, seed=choice.randrange(40))
    if what < 3:
        for new in new_chunks(chain, 0, choice.randint(1, 5)):
            await store_chunk(store, table, new)
    elif what < 6:
        found = store.match(table, chain.keys)
        store.touch(found, [chunk.tier for chunk in found])
        store.release_all(found)
    elif what == 6 and number % 3 == 0:
        await store.remove([chunk for key in chain.keys[3:] if (chunk := table.chunks.get(key)) is not None])
    elif (chunk := table.chunks.get(chain.keys[0])) is not None:
        await (store.limits.pin([chunk], FOREVER) if choice.random() < 0.5 else store.limits.unpin([chunk]))


@pytest.mark.heavy
@pytest.mark.parametrize("place", PLACES)
async def test_each_policy_takes_over_from_each_other_while_the_cache_is_in_use(tmp_path: Path, place: str) -> None:
    """No chunk is lost; what is pinned or leased stays, there are evictions all the time, and bytes are right after it."""
    changes = list(pairwise([POLICIES[0], *(name for pair in product(POLICIES, POLICIES) for name in pair)]))
    choice = random.Random(7)
    async with open_table(tmp_path, NS, Hurried(), **PLACES[place]) as (store, table):
        pinned, leased = chain_of(NS, 3, seed=100), chain_of(NS, 3, seed=101)
        await store_chain(store, table, pinned)
        await store_chain(store, table, leased)
        await store.limits.pin([table.chunks[pinned.keys[2]]], FOREVER)
        held = store.match(table, leased.keys)
        num_changes, is_over = 0, False

        async def be_used() -> None:
            number = 0
            while not is_over:
                await use(store, table, choice, number)
                number += 1
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(be_used)
            for before, name in changes:
                assert store.policy.name == before
                await store.policy.change(name)
                assert store.policy.name == store.statistics().policy == name
                check(store)
                num_changes += before != name
            await eventually(lambda: store.counters.evictions_ram + store.counters.evictions_nvme > 20)
            is_over = True
        events = bytes(store.events.read(0, 1 << 20)).count(b'"policy"')
        assert num_changes > 50
        assert events > 0
        for chain in (pinned, leased):
            assert all(key in table.chunks for key in chain.keys)
        left = list(table.chunks.values())
        store.lease_all(left)  # what is written behind still evicts
        for chunk in left:
            assert len(await read_all(store, chunk)) == chunk.length
        store.release_all([*left, *held])


async def used(store: Store, table: ChunkTable, chain: KeyChain, system: Any) -> None:
    """An engine loads a chain, a second after the last one did."""
    system.now_ns += 10**9
    found = store.match(table, chain.keys)
    store.touch(found, [Tier.RAM] * len(found))
    store.release_all(found)


async def begun(store: Store) -> None:
    """A change is under way."""
    while not store.policy.coming:
        await trio.lowlevel.checkpoint()


class Standing(Hurried):
    """The same, with a time of day that stands still."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 10**18

    def time_ns(self) -> int:
        return self.now_ns


@pytest.mark.parametrize("before", POLICIES)
@pytest.mark.parametrize("after", ["lru", pytest.param("fifo", marks=pytest.mark.heavy)])
async def test_the_order_is_that_of_last_use_and_leaves_go_first(tmp_path: Path, before: str, after: str) -> None:
    """Whatever said so before; a chunk that something was built on later counts as used then."""
    system = Standing()
    async with open_table(tmp_path, NS, system, policy=before) as (store, table):
        chains = [chain_of(NS, 3, seed=seed) for seed in range(4)]
        for chain in chains:
            system.now_ns += 10**9
            await store_chain(store, table, chain)
        for index in (2, 0, 3):
            await used(store, table, chains[index], system)
        system.now_ns += 10**9
        longer = chain_of(NS, 4, seed=1)
        assert longer.keys[:3] == chains[1].keys
        await store_chunk(store, table, new_chunks(longer)[3])
        await store.policy.change("arc")  # which is neither of the two
        await store.policy.change(after)
        expected = [key for chain in (chains[2], chains[0], chains[3], longer) for key in reversed(chain.keys)]
        assert [chunk.key for chunk in store._residency.ram.policy.victims(lambda _: True)] == expected


async def test_what_is_used_or_comes_meanwhile_goes_last(tmp_path: Path) -> None:
    """A change that is under way knows every use, also of what it has carried over already."""
    async with open_table(tmp_path, NS, Hurried(), nvme=None) as (store, table):
        chains = [chain_of(NS, 2, seed=seed) for seed in range(30)]
        for chain in chains:
            await store_chain(store, table, chain)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.policy.change, "lru")
            await begun(store)
            oldest = store.match(table, chains[0].keys)
            store.touch(oldest, [Tier.RAM] * 2)
            store.release_all(oldest)
            assert store.policy.name == "learned"
            newest = chain_of(NS, 1, seed=99)
            await store_chain(store, table, newest)
        check(store)
        order = [chunk.key for chunk in store._residency.ram.policy.victims(lambda _: True)]
        assert order[-3:] == [*reversed(chains[0].keys), newest.keys[0]]


async def test_one_that_is_given_up_leaves_everything_as_it_was(tmp_path: Path) -> None:
    async with open_table(tmp_path, NS, Hurried()) as (store, table):
        for seed in range(30):
            await store_chain(store, table, chain_of(NS, 2, seed=seed))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.policy.change, "s3fifo")
            await begun(store)
            assert store.statistics().next_policy == "s3fifo"
            nursery.cancel_scope.cancel()
        assert (store.policy.name, store.policy.coming) == ("learned", "")
        check(store)
        await store.policy.change("s3fifo")
        check(store)


@pytest.mark.parametrize(
    ("name", "said"),
    [("lruu", "there is no policy 'lruu'"), ("a.b:C", "at the start only"), ("", "there is no policy ''")],
)
async def test_only_what_there_is_can_be_set(tmp_path: Path, name: str, said: str) -> None:
    async with open_table(tmp_path, NS) as (store, _):
        with pytest.raises(UsageError, match=said):
            await store.policy.change(name)
        assert store.policy.name == "learned"


async def test_what_was_learned_is_there_when_it_comes_back(tmp_path: Path) -> None:
    async with open_table(tmp_path, NS, Hurried()) as (store, table):
        for seed in range(5):
            await store_chain(store, table, chain_of(NS, 2, seed=seed))
        for _ in range(3):
            found = store.match(table, chain_of(NS, 2).keys)
            store.touch(found, [Tier.RAM] * 2)
            store.release_all(found)
        names: dict[Any, str] = {table: table.directory}
        learnt = store._residency.ram.policy.learnt(names.__getitem__)
        for name in ("cost", "lru", "learned"):
            await store.policy.change(name)
        # cost has learned in groups of its own: nothing that the other understands
        assert store._residency.ram.policy.learnt(names.__getitem__) != learnt
        for name in ("lru", "learned"):
            before = store._residency.ram.policy.learnt(names.__getitem__)
            await store.policy.change(name)
        assert before is None
        assert store._residency.ram.policy.learnt(names.__getitem__) is not None


def test_a_note_of_what_left_again_is_not_told() -> None:
    """It came, went, came again: it is in the new order once."""
    both: Changing[Any] = Changing(LeafFirstLRU(), maker("lru")(lambda: 0.0))
    both.insert("a")
    both.remove("a")
    both.insert("a")
    both.insert("b")
    both.remove("b")
    while both.has_notes:
        both.tell_one()
    assert list(both.new.victims(lambda _: True)) == list(both.old.victims(lambda _: True)) == ["a"]


def test_hints_reach_whoever_heeds_them() -> None:
    """The old one at once, the new one in its turn; what heeds none is not told."""

    class Heeding(LeafFirstLRU[Any]):
        heeds = frozenset({"expect"})

        def __init__(self) -> None:
            super().__init__()
            self.told: list[Any] = []

        def hinted(self, entries: Any) -> None:
            self.told.append(list(entries))

    old, new = Heeding(), Heeding()
    both: Changing[Any] = Changing(old, new)
    assert both.heeds == {"expect"}
    both.insert("a")
    both.hinted(["a"])
    assert (old.told, new.told) == ([["a"]], [])
    while both.has_notes:
        both.tell_one()
    assert new.told == [["a"]]
    deaf: Changing[Any] = Changing(LeafFirstLRU(), LeafFirstLRU())
    deaf.hinted(["a"])
    assert (deaf.heeds, deaf.has_notes) == (frozenset(), False)
