"""Quotas and ages: a namespace keeps to what it may be, at the cost of its own least worthy chunks and no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from kvfs.catalog import ChunkTable
from kvfs.index import LimitRow
from kvfs.intake import Reservation
from kvfs.keys import KeyChain
from kvfs.messages import StoreStatus, Tier
from kvfs.pins import FOREVER
from kvfs.store import Store
from kvfs.testing import (
    FaultySystem,
    chain_of,
    eventually,
    new_chunks,
    open_table,
    publish_chunk,
    sized_namespace,
    store_chain,
    store_chunk,
    tiny_namespace,
)

STORED, REFUSED = StoreStatus.STORED, StoreStatus.REFUSED
NS = sized_namespace(64 << 10)
OTHER = sized_namespace(64 << 10, "tests/other")
LENGTH = 64 << 10
SECOND = 10**9


def stored(table: ChunkTable, chain: KeyChain) -> list[int]:
    """The positions of a chain that are there."""
    return [position for position, key in enumerate(chain.keys) if key in table.chunks]


async def store_one(store: Store, table: ChunkTable, seed: int) -> StoreStatus:
    """Store a chunk that shares nothing with others, and wait until it is clean."""
    status = await store_chunk(store, table, new_chunks(chain_of(table.namespace, 1, seed))[0])
    store.stored([*table.chunks.values()][-1:])
    assert await store.flush()
    return status


def lengths(table: ChunkTable) -> int:
    return sum(chunk.length for chunk in table.chunks.values())


# quotas


@pytest.mark.parametrize("nvme", [32 << 20, None])
async def test_a_quota_takes_the_least_worthy_of_the_namespace(tmp_path: Path, nvme: int | None) -> None:
    """What was used stays, what was not goes; other namespaces lose nothing."""
    async with open_table(tmp_path, NS, nvme=nvme) as (store, table):
        other = store.attach(OTHER)
        await store_one(store, other, 0)
        await store.limits.set_quota(table, 4 * LENGTH)
        for seed in range(4):
            assert await store_one(store, table, seed) is STORED
        first = table.chunks[chain_of(NS, 1, 0).keys[0]]
        store.touch([first], [Tier.RAM])
        assert await store_one(store, table, 4) is STORED
        there = [seed for seed in range(5) if stored(table, chain_of(NS, 1, seed))]
        assert there == [0, 2, 3, 4]
        assert table.stored_bytes == lengths(table) == 4 * first.length
        counters = store.counters
        assert (counters.evictions_quota, counters.evictions_nvme, counters.stores_over_quota) == (1, 0, 0)
        assert len(other.chunks) == 1


@pytest.mark.parametrize("nvme", [32 << 20, None])
async def test_a_small_namespace_looks_at_its_own(tmp_path: Path, nvme: int | None) -> None:
    """Where others have nearly all chunks, the order is that of the last use, leaf first; what is pinned stays."""
    tiny = tiny_namespace()
    async with open_table(tmp_path, NS, nvme=nvme) as (store, table):
        other = store.attach(tiny)
        for seed in range(3):
            await store_chain(store, other, chain_of(tiny, 50, seed))
        chain, pinned = chain_of(NS, 3), chain_of(NS, 2, seed=9)
        await store_chain(store, table, pinned)
        await store_chain(store, table, chain)
        assert await store.flush()
        await store.limits.pin([table.chunks[pinned.keys[1]]], FOREVER)
        store.touch([table.chunks[key] for key in chain.keys[:2]], [Tier.RAM] * 2)
        await store.limits.set_quota(table, 3 * LENGTH)
        assert (stored(table, chain), stored(table, pinned)) == ([0], [0, 1])
        assert await store_one(store, table, 4) is STORED
        assert (stored(table, chain), stored(table, pinned)) == ([], [0, 1])
        assert len(other.chunks) == 150


async def test_a_quota_counts_what_is_reserved(tmp_path: Path) -> None:
    """It is refused at once, counted, and given back with the reservation."""
    async with open_table(tmp_path, NS) as (store, table):
        await store.limits.set_quota(table, 3 * LENGTH)
        reservations = [store.reserve(table, new) for new in new_chunks(chain_of(NS, 4))]
        assert [isinstance(one, Reservation) for one in reservations] == [True] * 3 + [False]
        assert (store.counters.stores_refused, store.counters.stores_over_quota) == (1, 1)
        for one in reservations[:2]:
            assert isinstance(one, Reservation)
            store.abort(one)
        assert isinstance(reservations[2], Reservation)
        assert await publish_chunk(store, reservations[2], b"wrong".ljust(LENGTH, b"\0")) is StoreStatus.BAD
        assert (table.stored_bytes, table.reserved_bytes) == (0, 0)
        assert await store_chain(store, table, chain_of(NS, 4)) == [STORED] * 3 + [REFUSED]


async def test_what_a_new_chunk_is_built_on_does_not_go_for_it(tmp_path: Path) -> None:
    """A prompt longer than its quota is kept from its head on, as far as there is room."""
    async with open_table(tmp_path, NS) as (store, table):
        await store.limits.set_quota(table, 3 * LENGTH)
        await store_one(store, table, seed=1)
        chain = chain_of(NS, 5)
        for new in new_chunks(chain):
            await store_chunk(store, table, new)
            assert await store.flush()
        assert stored(table, chain) == [0, 1, 2]


@pytest.mark.parametrize("holds", ["leases", "pins"])
async def test_a_quota_that_is_lowered_under_holders_is_kept_to_when_they_let_go(tmp_path: Path, holds: str) -> None:
    """At once, not with the next look at all limits a minute later."""
    async with open_table(tmp_path, NS) as (store, table):
        for seed in range(6):
            await store_one(store, table, seed)
        chunks = [*table.chunks.values()]
        if holds == "leases":
            store.lease_all(chunks)
        else:
            await store.limits.pin(chunks, FOREVER)
        await store.limits.set_quota(table, 2 * LENGTH)
        assert len(table.chunks) == 6
        if holds == "leases":
            store.release_all(chunks[:5])
        else:
            await store.limits.unpin(chunks[:5])
        await eventually(lambda: table.stored_bytes <= 2 * LENGTH)
        assert [chunk.is_removed for chunk in chunks] == [True] * 4 + [False] * 2


async def test_what_is_held_does_not_go_for_a_quota(tmp_path: Path, mock_clock: trio.testing.MockClock) -> None:
    """Pinned, leased and dirty chunks stay and the store is refused; looking again has to wait a moment."""
    async with open_table(tmp_path, NS) as (store, table):
        await store.limits.set_quota(table, 2 * LENGTH)
        await store_one(store, table, 0)
        await store_one(store, table, 1)
        one, two = table.chunks.values()
        await store.limits.pin([one], FOREVER)
        store.lease(two)
        assert await store_one(store, table, 2) is REFUSED
        store.release(two)
        assert await store_one(store, table, 2) is REFUSED
        mock_clock.jump(0.06)
        assert await store_one(store, table, 2) is STORED
        assert not one.is_removed
        assert two.is_removed


async def test_a_smaller_quota_takes_what_is_too_much(tmp_path: Path) -> None:
    """At once; the least worthy first. None lets it grow again, and a chunk larger than the quota is refused."""
    async with open_table(tmp_path, NS) as (store, table):
        for seed in range(6):
            await store_one(store, table, seed)
        await store.limits.set_quota(table, 4 * LENGTH)
        assert [seed for seed in range(6) if stored(table, chain_of(NS, 1, seed))] == [2, 3, 4, 5]
        await store.limits.set_quota(table, LENGTH // 2)
        assert table.stored_bytes == 0
        assert await store_one(store, table, 7) is REFUSED
        await store.limits.set_quota(table, None)
        assert await store_one(store, table, 7) is STORED


async def test_evictions_for_a_quota_come_in_batches(tmp_path: Path) -> None:
    """A thirty-second of it at once: looking for victims passes over all other chunks."""
    tiny = tiny_namespace()
    async with open_table(tmp_path, tiny) as (store, table):
        length = table.file_bytes(16)
        await store.limits.set_quota(table, 96 * length)
        for seed in range(96):
            assert await store_chunk(store, table, new_chunks(chain_of(tiny, 1, seed))[0]) is STORED
        assert await store.flush()
        counts = []
        for seed in range(96, 102):
            assert await store_one(store, table, seed) is STORED
            counts.append(store.counters.evictions_quota)
        assert counts == [3, 3, 3, 6, 6, 6]


# ages


@pytest.fixture
def system() -> FaultySystem:
    """Its clock stands still."""
    system = FaultySystem()
    system.now_ns = 1000 * SECOND
    return system


def later(system: FaultySystem, seconds: float) -> None:
    assert system.now_ns is not None
    system.now_ns += int(seconds * SECOND)


@pytest.mark.parametrize("nvme", [32 << 20, None])
async def test_what_was_not_used_for_long_goes(tmp_path: Path, system: FaultySystem, nvme: int | None) -> None:
    """From the leaves up; what something younger is built on stays, and so does what is pinned or held."""
    chain, branch, pinned, leased, dead = (chain_of(NS, 4, seed) for seed in range(5))
    async with open_table(tmp_path, NS, system, nvme=nvme) as (store, table):
        for one in (chain, branch, pinned, leased, dead):
            await store_chain(store, table, one)
        assert await store.flush()
        later(system, 100)
        store.touch([table.chunks[branch.keys[2]]], [Tier.RAM])
        await store.limits.pin([table.chunks[pinned.keys[1]]], FOREVER)
        held = table.chunks[leased.keys[0]]
        store.lease(held)
        await store.limits.set_max_age(table, 100 * SECOND)
        assert len(table.chunks) == 20
        later(system, 1)
        await store.limits.sweep()
        assert [stored(table, one) for one in (chain, branch, pinned, leased, dead)] == [[], [0, 1, 2], [0, 1], [0], []]
        store.release(held)
        await store.limits.sweep()
        assert stored(table, leased) == []
        assert store.counters.expired == 15
        events = [json.loads(line) for line in store.events.read(0, 1 << 20).splitlines()]
        expired = [event["key"] for event in events if event["event"] == "expire"]
        for one in (chain, dead):
            places = [expired.index(key.hex()) for key in one.keys]
            assert places == sorted(places, reverse=True)


async def test_ages_are_looked_at_every_minute(
    tmp_path: Path, system: FaultySystem, mock_clock: trio.testing.MockClock
) -> None:
    async with open_table(tmp_path, NS, system, nvme=None) as (store, table):
        await store_chain(store, table, chain_of(NS, 2))
        await store.limits.set_max_age(table, SECOND)
        later(system, 30)
        mock_clock.jump(30)
        for _ in range(20):
            await trio.lowlevel.checkpoint()
        assert len(table.chunks) == 2
        mock_clock.jump(31)
        for _ in range(20):
            await trio.lowlevel.checkpoint()
        assert len(table.chunks) == 0


async def test_what_comes_while_it_looks_keeps_what_it_is_built_on(
    tmp_path: Path, system: FaultySystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expiring takes several turns of the loop; a chunk that is stored in between is no orphan."""
    monkeypatch.setattr("kvfs.limits._AT_ONCE", 2)
    monkeypatch.setattr("kvfs.limits._EXPIRED_AT_ONCE", 2)
    chain = chain_of(NS, 8)
    async with open_table(tmp_path, NS, system, nvme=None) as (store, table):
        for new in new_chunks(chain, 0, 6):
            await store_chunk(store, table, new)
        later(system, 10)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.limits.set_max_age, table, SECOND)
            await trio.lowlevel.checkpoint()
            reservation = store.reserve(table, new_chunks(chain)[6])
            assert isinstance(reservation, Reservation)
            assert store._storing._settle(reservation, store.system.time_ns(), True) is STORED
        parents = [position - 1 for position in stored(table, chain) if position]
        assert set(parents) <= set(stored(table, chain))
        assert 6 in stored(table, chain)


# both


async def test_limits_survive_a_restart(tmp_path: Path, system: FaultySystem) -> None:
    async with open_table(tmp_path, NS, system) as (store, table):
        other = store.attach(OTHER)
        await store.limits.set_quota(table, 5 * LENGTH)
        await store.limits.set_max_age(table, 7 * SECOND)
        await store.limits.set_quota(other, LENGTH)
        await store.limits.set_quota(other, None)
    async with open_table(tmp_path, NS, system) as (store, table):
        assert (table.quota_bytes, table.max_age_ns) == (5 * LENGTH, 7 * SECOND)
        other = store.attach(OTHER)
        assert (other.quota_bytes, other.max_age_ns) == (None, None)
        (stripe,) = store._residency.nvme or ()
        stripe.commits.limit(LimitRow(77, 5, 5))  # as an older kvfs leaves it that removes a namespace
    async with open_table(tmp_path, NS, system) as (store, table):
        assert table.quota_bytes == 5 * LENGTH
        await store.settle()
        assert store.catalog.tables.keys() == {table.directory, other.directory}
