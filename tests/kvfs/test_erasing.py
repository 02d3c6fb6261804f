"""What a person removed is not found by a scan of the volume; what it lay on is used again only afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from kvfs.catalog import ChunkTable
from kvfs.keys import Key
from kvfs.store import Store
from kvfs.testing import (
    FaultySystem,
    chain_of,
    eventually,
    open_table,
    read_all,
    sized_namespace,
    store_chain,
)

NS = sized_namespace(64 << 10)


def found(directory: Path) -> set[Key]:
    """The keys of all headers on the volume, as a scan finds them."""
    raw = Path(directory, "nvme", "volume").read_bytes()
    mark = b'"key":"'
    keys = set()
    for block in range(0, len(raw), 4096):
        head = raw[block : block + 4096]
        if head[8:9] == b"{" and mark in head:
            begin = head.index(mark) + len(mark)
            keys.add(Key(bytes.fromhex(head[begin : begin + 32].decode())))
    return keys


async def stored(store: Store, table: ChunkTable, num_chunks: int = 4) -> list[Key]:
    chain = chain_of(NS, num_chunks)
    await store_chain(store, table, chain)
    assert await store.flush()
    return chain.keys


async def test_rm_erases_the_header(tmp_path: Path) -> None:
    """When it returns: the others' are there, and what is not removed can be read."""
    async with open_table(tmp_path, NS) as (store, table):
        keys = await stored(store, table)
        assert found(tmp_path) == set(keys)
        await store.remove([table.chunks[keys[1]], table.chunks[keys[3]]])
        assert found(tmp_path) == {keys[0], keys[2]}
        assert len(await read_all(store, table.chunks[keys[2]])) == table.chunks[keys[2]].length
        nvme = store.statistics().nvme
        assert nvme is not None
        assert nvme.used_bytes == table.stored_bytes
    async with open_table(tmp_path, NS) as (store, table):
        assert set(table.chunks) == {keys[0], keys[2]}


async def test_ages_quotas_and_evictions_erase_too(tmp_path: Path) -> None:
    """The volume shows what the cache has, and no older copy of anything."""
    async with open_table(tmp_path, NS, nvme=1 << 20, ram=1 << 20) as (store, table):
        keys = await stored(store, table, 3)
        await store.limits.set_quota(table, 2 * (64 << 10))
        assert await store.flush()
        assert found(tmp_path) == set(keys[:2])
        await store.limits.set_quota(table, None)
        await store.limits.set_max_age(table, 0)
        assert await store.flush()
        assert found(tmp_path) == set()
        await store.limits.set_max_age(table, None)
        for seed in range(1, 6):
            await store_chain(store, table, chain_of(NS, 5, seed))
            assert await store.flush()
        assert store.counters.evictions_nvme > 0
        assert found(tmp_path) == set(table.chunks)


async def test_what_is_held_is_erased_when_it_is_let_go(tmp_path: Path) -> None:
    """An open file stays readable; rm does not wait for it."""
    async with open_table(tmp_path, NS) as (store, table):
        keys = await stored(store, table, 1)
        chunk = table.chunks[keys[0]]
        store.lease(chunk)
        await store.remove([chunk])
        assert found(tmp_path) == {*keys}
        assert len(await read_all(store, chunk)) == chunk.length
        store.release(chunk)
        assert await store.flush()
        assert found(tmp_path) == set()


async def test_a_chunk_that_is_removed_while_it_is_written(tmp_path: Path) -> None:
    """Its bytes reach the volume after it is gone from view, and go from there."""
    system = FaultySystem()
    chain = chain_of(NS, 1)
    async with open_table(tmp_path, NS, system) as (store, table):
        system.sync_gate.clear()
        await store_chain(store, table, chain)
        await eventually(lambda: found(tmp_path) == set(chain.keys))
        await store.remove([*table.chunks.values()])
        system.open_gates()
        assert await store.flush()
        assert found(tmp_path) == set()
        nvme = store.statistics().nvme
        assert nvme is not None
        assert nvme.used_bytes == 0


async def test_the_extent_is_used_again_after_it_was_erased(tmp_path: Path) -> None:
    """While the device hangs rm waits; the name is gone, and its room is not given to others."""
    system = FaultySystem()
    async with open_table(tmp_path, NS, system) as (store, table):
        keys = await stored(store, table, 1)
        system.write_gate.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.remove, [*table.chunks.values()])
            await eventually(lambda: keys[0] not in table.chunks)
            nvme = store.statistics().nvme
            assert nvme is not None
            assert nvme.used_bytes == 64 << 10
            assert found(tmp_path) == {*keys}
            system.open_gates()
        assert found(tmp_path) == set()
        nvme = store.statistics().nvme
        assert nvme is not None
        assert nvme.used_bytes == 0


@pytest.mark.expect_log("could not be erased, a scan of the volume may find them")
async def test_a_device_that_fails(tmp_path: Path) -> None:
    """The removal is durable all the same, and the log says what it does not hold."""
    system = FaultySystem()
    async with open_table(tmp_path, NS, system) as (store, table):
        keys = await stored(store, table, 1)
        system.write_error = 5
        await store.remove([*table.chunks.values()])
        system.write_error = 0
        assert store.counters.io_errors == 1
        assert found(tmp_path) == {*keys}
    async with open_table(tmp_path, NS) as (_, table):
        assert not table.chunks
