"""Prefetching: what waits on NVMe is in RAM when its load comes, and nobody has to make room for it who needs it more."""

from __future__ import annotations

import errno
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from kvfs import prefetch
from kvfs.catalog import Chunk, ChunkTable
from kvfs.client import Client
from kvfs.errors import UsageError
from kvfs.keys import KeyChain
from kvfs.messages import Tier, Warmth
from kvfs.store import Store
from kvfs.testing import FaultySystem, chain_of, eventually, open_table, sized_namespace, store_chain

MIB = sized_namespace(1 << 20)


@asynccontextmanager
async def cold(
    directory: Path, *counts: int, system: FaultySystem | None = None, ram: int = 8 << 20
) -> AsyncIterator[tuple[Store, ChunkTable, list[list[Chunk]]]]:
    """A store with chains of so many chunks of 1 MiB, all of them on NVMe only."""
    chains: list[KeyChain] = [chain_of(MIB, count, seed) for seed, count in enumerate(counts)]
    async with open_table(directory, MIB, nvme=64 << 20, ram=32 << 20) as (store, table):
        for chain in chains:
            await store_chain(store, table, chain)
    async with open_table(directory, MIB, system, nvme=64 << 20, ram=ram) as (store, table):
        yield store, table, [[table.chunks[key] for key in chain.keys] for chain in chains]


def in_ram(chunks: list[Chunk]) -> int:
    return sum(chunk.tier is Tier.RAM for chunk in chunks)


def load(store: Store, chunks: list[Chunk]) -> list[Tier]:
    """What a load of a session does, as far as it is the store's; where the chunks were."""
    sources = [chunk.tier for chunk in chunks]
    store.touch(chunks, sources)
    return sources


async def test_an_order_brings_chunks_into_ram(tmp_path: Path) -> None:
    """They are not used by that, and when they are loaded they count as useful, once."""
    async with cold(tmp_path, 3) as (store, _, (chunks,)):
        order = store.prefetch(chunks, 0, 60)
        await eventually(lambda: in_ram(chunks) == 3)
        assert order.is_over
        assert store.statistics().num_leases == 0
        assert [chunk.hits for chunk in chunks] == [0, 0, 0]
        assert (store.counters.prefetches_begun, store.counters.prefetches_useful) == (3, 0)
        for _ in range(2):
            assert load(store, chunks) == [Tier.RAM] * 3
        assert (store.counters.prefetches_useful, store.counters.prefetches_wasted) == (3, 0)


async def test_what_leaves_ram_unused_is_counted_as_wasted(tmp_path: Path) -> None:
    async with cold(tmp_path, 2) as (store, _, (chunks,)):
        store.prefetch(chunks, 0, 60)
        await eventually(lambda: in_ram(chunks) == 2)
        load(store, chunks[:1])
        await store.remove(chunks)
        assert (store.counters.prefetches_useful, store.counters.prefetches_wasted) == (1, 1)


async def test_a_chunk_is_read_once_whoever_asks(tmp_path: Path) -> None:
    """A load finds the promotion that an order has begun, and an order passes over what a load has begun."""
    system = FaultySystem()
    async with cold(tmp_path, 2, system=system) as (store, _, (chunks,)):
        system.reads.clear()
        system.read_gate.clear()
        store.lease_all(chunks)
        (begun,) = store.promote(chunks[1:])
        assert begun is not None
        store.prefetch(chunks, 0, 60)
        await eventually(lambda: store.counters.prefetches_begun == 1)
        promotions = store.promote(chunks)
        assert promotions[1] is begun
        system.read_gate.set()
        await eventually(lambda: in_ram(chunks) == 2)
        assert len(system.reads) == len(set(system.reads)) == 2
        assert store.counters.promotions == 2
        store.release_all(chunks)
        load(store, chunks)
        assert store.counters.prefetches_useful == 1


async def test_the_higher_priority_goes_first_then_the_older(tmp_path: Path) -> None:
    system = FaultySystem()
    async with cold(tmp_path, 1, 1, 1, 1, system=system) as (store, _, chains):
        system.reads.clear()
        chunks = [chain[0] for chain in chains]
        places = {chunk.nvme: number for number, chunk in enumerate(chunks)}
        for number, priority in enumerate((0, 7, 100, 7)):
            store.prefetch([chunks[number]], priority, 60)
        await eventually(lambda: in_ram(chunks) == 4)
        assert [places[offset] for offset, _ in system.reads] == [2, 1, 3, 0]


async def test_a_cancelled_order_brings_nothing_more(tmp_path: Path) -> None:
    """What was begun arrives; what waited is given up, and its leases with it."""
    system = FaultySystem()
    async with cold(tmp_path, 12, system=system, ram=32 << 20) as (store, _, (chunks,)):
        system.read_gate.clear()
        order = store.prefetch(chunks, 0, 60)
        await eventually(lambda: store.counters.prefetches_begun)
        begun = store.counters.prefetches_begun
        assert begun * chunks[0].length <= prefetch.IN_FLIGHT_BYTES
        order.cancel()
        order.cancel()
        assert store.counters.prefetches_dropped == 12 - begun
        system.read_gate.set()
        await eventually(lambda: in_ram(chunks) == begun)
        assert store.statistics().num_leases == 0


async def hold_in_ram(store: Store, chunks: list[Chunk]) -> None:
    """Lease chunks, and bring them into RAM."""
    store.lease_all(chunks)
    for promotion in store.promote(chunks):
        assert promotion is not None
        await promotion.wait_for_layers(4)


async def test_an_order_that_comes_too_late_is_dropped(tmp_path: Path) -> None:
    async with cold(tmp_path, 2) as (store, _, (chunks,)):
        assert not store.prefetch(chunks, 0, 0.0).is_over
        await eventually(lambda: store.counters.prefetches_dropped == 2)
        assert in_ram(chunks) == 0
        assert store.statistics().num_leases == 0


async def test_leased_chunks_stay_and_the_order_waits_for_room(tmp_path: Path) -> None:
    """RAM is full of what somebody holds: nothing of it goes, and the order is carried out when there is room."""
    async with cold(tmp_path, 4, 2, ram=4 << 20) as (store, _, (held, wanted)):
        await hold_in_ram(store, held)
        order = store.prefetch(wanted, 0, 60)
        with trio.move_on_after(5 * prefetch.LOOK_AGAIN_S):
            await trio.sleep_forever()
        assert in_ram(held) == 4
        assert not order.is_over
        assert store.counters.promotions_refused == 0
        store.release_all(held)
        await eventually(lambda: in_ram(wanted) == 2)


async def test_what_nobody_came_for_takes_half_of_ram_at_most(tmp_path: Path) -> None:
    """Orders go on when some of it was loaded."""
    async with cold(tmp_path, 8, ram=8 << 20) as (store, _, (chunks,)):
        store.prefetch(chunks, 0, 60)
        await eventually(lambda: in_ram(chunks) == 4)
        with trio.move_on_after(5 * prefetch.LOOK_AGAIN_S):
            await trio.sleep_forever()
        assert in_ram(chunks) == 4
        load(store, chunks[:1])
        await eventually(lambda: in_ram(chunks) == 5)


@pytest.mark.expect_log("could not be read")
async def test_what_cannot_be_read_is_wasted_and_the_rest_goes_on(tmp_path: Path) -> None:
    system = FaultySystem()
    async with cold(tmp_path, 2, system=system) as (store, _, (chunks,)):
        system.bad_reads.add(chunks[0].nvme)
        store.prefetch(chunks, 0, 60)
        await eventually(lambda: in_ram(chunks) == 1)
        await eventually(lambda: store.counters.prefetches_wasted == 1)
        system.read_error = errno.EIO
        assert store.statistics().num_leases == 0


async def test_cancelled_orders_do_not_pile_up(tmp_path: Path) -> None:
    """Behind one that waits for room they are forgotten, a few at a time."""
    async with cold(tmp_path, 4, 2, ram=4 << 20) as (store, _, (held, wanted)):
        await hold_in_ram(store, held)
        store.prefetch(wanted, 100, 60)
        for _ in range(1000):
            store.prefetch(wanted, 0, 60).cancel()
        assert store._prefetcher is not None
        assert len(store._prefetcher._orders) <= 2 * prefetch._ORDERS
        store.release_all(held)


async def warm(store: Store, chunks: list[Chunk]) -> list[Warmth]:
    """What a session does for `kvfs warm`."""
    store.lease_all(chunks)
    try:
        return await store.warm(chunks)
    finally:
        store.release_all(chunks)


async def test_the_operator_warms_chunks(tmp_path: Path) -> None:
    """It is no use of them; what becomes of them is counted apart."""
    async with cold(tmp_path, 4) as (store, _, (chunks,)):
        used = [(chunk.hits, chunk.last_used_ns) for chunk in chunks]
        assert await warm(store, chunks[:2]) == [Warmth.BROUGHT] * 2
        assert await warm(store, chunks) == [Warmth.THERE] * 2 + [Warmth.BROUGHT] * 2
        assert [(chunk.hits, chunk.last_used_ns) for chunk in chunks] == used
        load(store, chunks[:1])
        await store.remove(chunks)
        counters = store.counters
        assert (counters.warms_begun, counters.warms_useful, counters.warms_wasted) == (4, 1, 3)
        assert counters.prefetches_begun == 0
        assert await warm(store, chunks) == [Warmth.GONE] * 4
        assert store.statistics().num_leases == 0


async def test_what_is_warm_takes_three_quarters_of_ram(tmp_path: Path) -> None:
    """Also what was there already; when it is loaded there is room for more."""
    async with cold(tmp_path, 10, ram=8 << 20) as (store, _, (chunks,)):
        most = (8 << 20) * 3 // 4 // chunks[0].length
        expected = [Warmth.BROUGHT] * most + [Warmth.OVER_SHARE] * (10 - most)
        assert await warm(store, chunks) == expected
        assert in_ram(chunks) == most
        load(store, chunks[:2])
        assert await warm(store, chunks[most:]) == [Warmth.BROUGHT] * 2 + [Warmth.OVER_SHARE] * (10 - most - 2)


async def test_nothing_that_is_leased_or_promised_goes_for_a_warm_chunk(tmp_path: Path) -> None:
    async with cold(tmp_path, 2, 1, 4, ram=4 << 20) as (store, _, (held, promised, chunks)):
        await hold_in_ram(store, held)
        store.prefetch(promised, 0, 60)
        await eventually(lambda: in_ram(promised) == 1)
        found = await warm(store, chunks)
        assert set(found) <= {Warmth.BROUGHT, Warmth.NO_ROOM}
        assert found[-1] is Warmth.NO_ROOM
        assert (in_ram(held), in_ram(promised)) == (2, 1)
        assert store.counters.promotions_refused == 0
        store.release_all(held)


@pytest.mark.expect_log("could not be read")
async def test_what_cannot_be_warmed_does_not_keep_the_rest(tmp_path: Path) -> None:
    system = FaultySystem()
    async with cold(tmp_path, 2, system=system) as (store, _, (chunks,)):
        system.bad_reads.add(chunks[0].nvme)
        assert await warm(store, chunks) == [Warmth.UNREADABLE, Warmth.BROUGHT]
        assert store.statistics().num_leases == 0


async def test_requests_go_before_what_is_read_ahead(tmp_path: Path) -> None:
    system = FaultySystem()
    async with cold(tmp_path, 1, 1, system=system, ram=16 << 20) as (store, _, (ahead, asked)):
        system.reads.clear()
        first = asked[0].nvme
        store.read_ahead(ahead)
        store.prefetch(asked, 0, 60)
        await eventually(lambda: in_ram([*ahead, *asked]) == 2)
        assert [offset == first for offset, _ in system.reads] == [True, False]


@pytest.mark.parametrize(
    ("priority", "deadline_s"), [(-1, 1.0), (101, 1.0), (0, -1.0), (0, math.nan), (0, math.inf), (0, 1e30)]
)
def test_a_prefetch_that_cannot_be_asked_for(tmp_path: Path, priority: int, deadline_s: float) -> None:
    """It is refused before it is sent: the daemon would end the session."""
    with Client(tmp_path, MIB) as client, pytest.raises(UsageError, match="a priority of 0 to 100"):
        client.prefetch(chain_of(MIB, 1).chains, priority=priority, deadline_s=deadline_s)
