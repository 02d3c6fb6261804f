"""The store without FUSE and without sockets: real arenas, real volumes, small sizes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import trio

from kvfs.catalog import Chunk, ChunkTable
from kvfs.errors import UsageError
from kvfs.intake import Reservation
from kvfs.keys import KeyChain, key_of
from kvfs.messages import NewChunk, StoreStatus, Tier
from kvfs.opening import open_store
from kvfs.store import Store
from kvfs.testing import (
    DEADLINE_S,
    FaultySystem,
    chain_of,
    eventually,
    new_chunks,
    open_table,
    payload_of,
    publish_chunk,
    read_all,
    settings_in,
    sized_namespace,
    store_chain,
    store_chunk,
    tiny_namespace,
)

STORED, EXISTS, REFUSED, BAD = StoreStatus.STORED, StoreStatus.EXISTS, StoreStatus.REFUSED, StoreStatus.BAD
NS = tiny_namespace()
MIB = sized_namespace(1 << 20)
"""Chunks of just under 1 MiB: eight fill a RAM tier of 8 MiB."""


def chunk_at(table: ChunkTable, chain: KeyChain, position: int) -> Chunk:
    return table.chunks[chain.keys[position]]


async def assert_right(store: Store, table: ChunkTable, chain: KeyChain, position: int) -> None:
    """The chunk is there, and its payload is the one that its chain value calls for."""
    chunk = chunk_at(table, chain, position)
    raw = await read_all(store, chunk)
    facts = None
    store.lease(chunk)
    try:
        facts = await store.facts(chunk)
    finally:
        store.release(chunk)
    assert facts.chain == chain.chains[position]
    geo = table.namespace.derived[chunk.num_tokens]
    assert raw[geo.header_bytes :][: geo.payload_bytes] == payload_of(chain.chains[position], geo)


def events(store: Store, kind: str) -> list[dict[str, object]]:
    found = [json.loads(line) for line in store.events.read(0, store.events.size).splitlines()]
    return [event for event in found if event["event"] == kind]


# storing


async def test_store_and_restart(tmp_path: Path) -> None:
    """What was stored is matched and read back, and again after a restart, then from NVMe."""
    chain = chain_of(NS, 5)
    async with open_table(tmp_path) as (store, table):
        assert await store_chain(store, table, chain) == [STORED] * 5
        assert chunk_at(table, chain, 0).tier is Tier.RAM
        for position in range(5):
            await assert_right(store, table, chain, position)
    async with open_table(tmp_path) as (store, table):
        found = store.match(table, chain.keys)
        assert [chunk.key for chunk in found] == chain.keys
        assert {chunk.tier for chunk in found} == {Tier.NVME}
        for chunk in found:
            store.release(chunk)
        for position in range(5):
            await assert_right(store, table, chain, position)
        assert store.statistics().num_leases == 0


async def test_what_a_restart_remembers(tmp_path: Path) -> None:
    """Times, hits, positions, parents and the prefix view survive a restart."""
    chain = chain_of(NS, 3)
    system = FaultySystem()
    system.now_ns = 1000
    async with open_table(tmp_path, system=system) as (store, table):
        await store_chain(store, table, chain)
        system.now_ns = 2000
        store.touch([chunk_at(table, chain, 1)], [Tier.RAM])
        shape = [(d.name, [c.key for c in d.chunks()]) for d in table.prefixes.directories.values()]
    async with open_table(tmp_path) as (store, table):
        chunk = chunk_at(table, chain, 1)
        assert (chunk.created_ns, chunk.last_used_ns, chunk.hits) == (1000, 2000, 1)
        assert (chunk.position, chunk.parent, chunk.num_tokens) == (1, chain.keys[0], 16)
        assert chunk_at(table, chain, 0).parent == key_of(chain.root)
        assert [(d.name, [c.key for c in d.chunks()]) for d in table.prefixes.directories.values()] == shape
        assert table.created_ns == 1000


async def test_short_chunks(tmp_path: Path) -> None:
    """The last chunk of a prompt may be shorter than the others."""
    chain = KeyChain(chain_of(NS, 0).root, 16, list(range(23)))
    short = NewChunk(chain.short_chain(7), chain.keys[0], 1, 7)
    async with open_table(tmp_path, NS) as (store, table):
        await store_chain(store, table, chain)
        assert await store_chunk(store, table, short) is STORED
    async with open_table(tmp_path, NS) as (store, table):
        chunk = table.chunks[key_of(chain.short_chain(7))]
        geo = NS.derived[7]
        assert chunk.num_tokens == 7
        assert chunk.length == geo.file_bytes < NS.derived[16].file_bytes
        raw = await read_all(store, chunk)
        assert raw[geo.header_bytes :][: geo.payload_bytes] == payload_of(chain.short_chain(7), geo)


async def test_existing_chunks_are_not_stored_twice(tmp_path: Path) -> None:
    async with open_table(tmp_path) as (store, table):
        (new,) = new_chunks(chain_of(NS, 1))
        assert await store_chunk(store, table, new) is STORED
        assert await store_chunk(store, table, new) is EXISTS
        assert store.counters.stores_existing == 1


async def test_two_sessions_store_the_same_chunk(tmp_path: Path) -> None:
    """Both get room; the first to publish wins, the second is told, and its room is free again."""
    async with open_table(tmp_path, nvme=None) as (store, table):
        (new,) = new_chunks(chain_of(NS, 1))
        one, other = store.reserve(table, new), store.reserve(table, new)
        assert isinstance(one, Reservation)
        assert isinstance(other, Reservation)
        statuses: list[StoreStatus] = []

        async def publish(reservation: Reservation) -> None:
            statuses.append(await publish_chunk(store, reservation))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(publish, one)
            nursery.start_soon(publish, other)
        assert sorted(statuses) == [STORED, EXISTS]
        assert store.statistics().ram.used_bytes == one.geometry.file_bytes


async def test_wrong_bytes_are_not_published(tmp_path: Path) -> None:
    """Bytes that do not have the checksums that were sent are BAD, in whichever layer, and leave nothing behind."""
    async with open_table(tmp_path, nvme=None) as (store, table):
        (new,) = new_chunks(chain_of(NS, 1))
        for layer in range(NS.num_layers):
            reservation = store.reserve(table, new)
            assert isinstance(reservation, Reservation)
            payload = bytearray(payload_of(new.chain, reservation.geometry))  # type: ignore[arg-type]
            payload[reservation.geometry.layers[layer][-1].end - 1] ^= 1
            assert await publish_chunk(store, reservation, bytes(payload)) is BAD
        assert store.counters.stores_bad == NS.num_layers
        assert not table.chunks
        assert store.statistics().ram.used_bytes == 0
        assert await store_chunk(store, table, new) is STORED


@pytest.mark.expect_log("a payload could not be received")
async def test_a_window_that_was_truncated(tmp_path: Path) -> None:
    """A client that takes its window away gets BAD, and the daemon no signal."""
    async with open_table(tmp_path, nvme=None) as (store, table):
        (new,) = new_chunks(chain_of(NS, 1))
        reservation = store.reserve(table, new)
        assert isinstance(reservation, Reservation)
        assert await publish_chunk(store, reservation, b"short") is BAD
        assert store.statistics().ram.used_bytes == 0


async def test_aborted_reservations_are_free_again(tmp_path: Path) -> None:
    async with open_table(tmp_path, nvme=None) as (store, table):
        reservation = store.reserve(table, new_chunks(chain_of(NS, 1))[0])
        assert isinstance(reservation, Reservation)
        store.abort(reservation)
        assert store.statistics().ram.used_bytes == 0
        assert store.counters.stores_aborted == 1


async def test_impossible_chunks_are_refused(tmp_path: Path) -> None:
    """A number of tokens that the namespace cannot have."""
    async with open_table(tmp_path, nvme=None) as (store, table):
        (new,) = new_chunks(chain_of(NS, 1))
        with pytest.raises(UsageError, match="1 to 16 tokens"):
            store.reserve(table, NewChunk(new.chain, new.parent, 0, 17))


async def test_a_namespace_has_one_layout(tmp_path: Path) -> None:
    """An identity that comes with another layout of layers is refused, before and after a restart."""
    import msgspec

    other = msgspec.structs.replace(NS, layers=NS.layers[:1])
    assert other.directory == NS.directory
    async with open_table(tmp_path) as (store, table):
        await store_chain(store, table, chain_of(NS, 1))
        with pytest.raises(UsageError, match="another chunk layout"):
            store.attach(other)
    async with open_store(settings_in(tmp_path)) as store:
        with pytest.raises(UsageError, match="another chunk layout"):
            store.attach(other)


async def test_ranks_are_apart(tmp_path: Path) -> None:
    """One chain stands for a chunk in each rank's namespace."""
    ranks = [tiny_namespace(rank=0), tiny_namespace(rank=1)]
    chain = chain_of(ranks[0], 1)
    async with open_store(settings_in(tmp_path)) as store:
        for rank in ranks:
            assert await store_chain(store, store.attach(rank), chain) == [STORED]
    async with open_store(settings_in(tmp_path)) as store:
        for rank in ranks:
            await assert_right(store, store.attach(rank), chain, 0)


# RAM


async def fill(store: Store, table: ChunkTable, count: int, seed: int = 0) -> KeyChain:
    chain = chain_of(table.namespace, count, seed)
    assert await store_chain(store, table, chain) == [STORED] * count
    return chain


async def test_a_full_ram_of_leases_refuses_at_once(tmp_path: Path) -> None:
    """Nothing waits: with every byte leased a store is refused, counted, and works once a lease ends."""
    async with open_table(tmp_path, MIB) as (store, table):
        chain = await fill(store, table, 8)
        await store.flush()
        held = store.match(table, chain.keys)
        with trio.fail_after(DEADLINE_S):
            assert await store_chunk(store, table, new_chunks(chain_of(MIB, 1, 1))[0]) is REFUSED
        assert store.counters.stores_refused == 1
        store.release(held.pop())
        assert await store_chunk(store, table, new_chunks(chain_of(MIB, 1, 1))[0]) is STORED
        for chunk in held:
            store.release(chunk)
        assert len(table.chunks) == 9


async def test_a_full_ram_of_dirty_chunks_refuses_at_once(tmp_path: Path) -> None:
    """What is not on NVMe yet may not leave RAM; once it is clean it may."""
    system = FaultySystem()
    async with open_table(tmp_path, MIB, system) as (store, table):
        system.write_gate.clear()
        chain = await fill(store, table, 8)
        assert await store_chunk(store, table, new_chunks(chain_of(MIB, 1, 1))[0]) is REFUSED
        assert len(store.match(table, chain.keys)) == 8
        for chunk in table.chunks.values():
            store.release(chunk)
        system.write_gate.set()
        await store.flush()
        assert await store_chunk(store, table, new_chunks(chain_of(MIB, 1, 1))[0]) is STORED
        assert len(table.chunks) == 9


async def test_ram_evicts_leaves_first(tmp_path: Path) -> None:
    """Of a prefix that was used together, the tail leaves RAM before the head."""
    async with open_table(tmp_path, MIB) as (store, table):
        chain = await fill(store, table, 8)
        await store.flush()
        store.touch([chunk_at(table, chain, i) for i in range(8)], [Tier.RAM] * 8)
        await fill(store, table, 3, seed=1)
        tiers = [chunk_at(table, chain, i).tier for i in range(8)]
        assert tiers == [Tier.RAM] * 5 + [Tier.NVME] * 3


async def test_a_chain_that_was_only_stored_also_goes_leaf_first(tmp_path: Path) -> None:
    """A stored prefix was used from its head to its tail: its tail goes first, from RAM and after a restart alike."""
    async with open_table(tmp_path, MIB, nvme=12 << 20) as (store, table):
        chain = await fill(store, table, 8)
        store.stored([chunk_at(table, chain, 7)])
        await store.flush()
        await fill(store, table, 3, seed=1)
        assert [chunk_at(table, chain, i).tier for i in range(8)] == [Tier.RAM] * 5 + [Tier.NVME] * 3
    async with open_table(tmp_path, MIB, nvme=12 << 20) as (store, table):
        await fill(store, table, 4, seed=2)
        await store.flush()
        left = [chunk_at(table, chain, i).position for i in range(8) if chain.keys[i] in table.chunks]
        assert left == list(range(len(left)))
        assert 2 <= len(left) <= 7


async def test_a_ram_cache_needs_no_disk(tmp_path: Path) -> None:
    """Without NVMe eviction removes a chunk, the tail of what is oldest first; nothing touches the disk."""
    async with open_table(tmp_path, MIB, nvme=None) as (store, table):
        chain = await fill(store, table, 8)
        assert not store.has_nvme
        assert store.statistics().nvme is None
        store.touch([chunk_at(table, chain, i) for i in range(8)], [Tier.RAM] * 8)
        other = await fill(store, table, 2, seed=1)
        assert len(store.match(table, chain.keys)) == 6
        assert len(store.match(table, other.keys)) == 2
        assert store.counters.evictions_ram == 2
        assert len(events(store, "evict")) == 2
        assert store.capacity().num_chunks == 8
        await store.remove(list(table.chunks.values()))
        for chunk in [*store.catalog.chunks()]:
            pytest.fail(f"{chunk} is still there")
    assert not (tmp_path / "nvme").exists()


@pytest.mark.expect_log("a full chunk has 9.0 MiB, but the RAM tier has 8.0 MiB and a window has 4.0 MiB")
async def test_what_does_not_fit_ram_at_all_is_refused(tmp_path: Path) -> None:
    """A chunk larger than the whole tier evicts nobody; that it never fits is told once, when its namespace comes."""
    async with open_store(settings_in(tmp_path, nvme=None)) as store:
        small, large = store.attach(MIB), store.attach(sized_namespace(9 << 20))
        assert store.attach(large.namespace) is large
        await fill(store, small, 2)
        assert await store_chunk(store, large, new_chunks(chain_of(large.namespace, 1))[0]) is REFUSED
        assert len(small.chunks) == 2
        said = [event for line in store.events.read(0, 1 << 20).splitlines() if (event := json.loads(line))]
        assert [(event["namespace"], event["reason"]) for event in said if event["event"] == "too_large"] == [
            (large.directory, "the RAM tier has 8.0 MiB and a window has 4.0 MiB")
        ]


# leases and removal


async def test_a_lease_keeps_bytes_through_removal(tmp_path: Path) -> None:
    """A removed chunk is out of sight at once; who holds it reads on, and its room comes back with the last lease."""
    async with open_table(tmp_path, MIB, nvme=None) as (store, table):
        chain = await fill(store, table, 8)
        chunk = chunk_at(table, chain, 3)
        store.lease(chunk)
        before = bytes(await store.read(chunk, 0, chunk.length))
        await store.remove([chunk])
        assert chain.keys[3] not in table.chunks
        assert await store_chunk(store, table, new_chunks(chain_of(MIB, 1, 1))[0]) is STORED  # somebody else went
        assert bytes(await store.read(chunk, 0, chunk.length)) == before
        used = store.statistics().ram.used_bytes
        store.release(chunk)
        assert store.statistics().ram.used_bytes == used - chunk.length
        assert chunk.tier is Tier.NONE


async def test_a_lease_keeps_bytes_on_nvme_through_removal(tmp_path: Path) -> None:
    """The same for a chunk that is on NVMe only: its extent is not reused while it is held."""
    async with open_table(tmp_path, MIB) as (store, table):
        chain = await fill(store, table, 8)
    async with open_table(tmp_path, MIB, nvme=32 << 20) as (store, table):
        chunk = chunk_at(table, chain, 0)
        store.lease(chunk)
        await store.remove([chunk])
        for seed in range(1, 5):
            await fill(store, table, 7, seed)
            await store.flush()
        raw = bytes(await store.read(chunk, 0, chunk.length))
        geo = MIB.derived[16]
        assert raw[geo.header_bytes :][: geo.payload_bytes] == payload_of(chain.chains[0], geo)
        store.release(chunk)


async def test_a_removed_key_can_be_stored_again(tmp_path: Path) -> None:
    """Also while somebody still reads the old one."""
    async with open_table(tmp_path) as (store, table):
        chain = await fill(store, table, 2)
        old = chunk_at(table, chain, 0)
        store.lease(old)
        await store.remove([old])
        assert await store_chunk(store, table, new_chunks(chain)[0]) is STORED
        assert chunk_at(table, chain, 0) is not old
        store.release(old)
        await store.flush()
        await assert_right(store, table, chain, 0)
    async with open_table(tmp_path) as (store, table):
        await assert_right(store, table, chain, 0)


async def test_removal_is_told_and_counted(tmp_path: Path) -> None:
    """Observers learn of what is published, moved and removed, with the directory that it was in."""
    seen: list[tuple[str, bytes, str | None]] = []
    async with open_table(tmp_path) as (store, table):
        store.on_change.append(
            lambda change, chunk, directory: seen.append((change, chunk.key, directory.name if directory else None))
        )
        chain = await fill(store, table, 2)
        branch = KeyChain(chain.root, 16, [*range(16), *range(100, 116)])
        await store_chunk(store, table, new_chunks(branch)[1])
        await store.remove([chunk_at(table, chain, 0)], "rm")
        await store.remove([chunk_at(table, branch, 1)], "rm")
        top = chain.keys[0].hex()
        assert seen == [
            ("published", chain.keys[0], top), ("published", chain.keys[1], top), ("moved", chain.keys[1], top),
            ("published", branch.keys[1], branch.keys[1].hex()), ("removed", chain.keys[0], top),
            ("removed", branch.keys[1], branch.keys[1].hex()),
        ]  # fmt: skip
        assert store.counters.removals == 2
        assert [event["key"] for event in events(store, "rm")] == [chain.keys[0].hex(), branch.keys[1].hex()]


async def test_a_long_chain_is_removed_quickly(tmp_path: Path) -> None:
    """``rm -r`` of a prefix of thousands of chunks does not hold the event loop for seconds."""
    small = sized_namespace(2 * 4096, num_layers=1)
    async with open_table(tmp_path, small, nvme=None, ram=32 << 20) as (store, table):
        chain = await fill(store, table, 3000)
        begin = time.thread_time()
        await store.remove(list(table.prefixes.directories[chain.keys[0].hex()].subtree()))
        assert time.thread_time() - begin < 1.0  # a thirtieth of that where it was measured
        assert not table.chunks


async def test_demoted_orphans_go_first(tmp_path: Path) -> None:
    """What was built on a removed chunk cannot be reached: it is evicted before anything else."""
    async with open_table(tmp_path, MIB, nvme=None) as (store, table):
        one = await fill(store, table, 4)
        other = await fill(store, table, 4, seed=1)
        store.touch([chunk_at(table, one, i) for i in range(4)], [Tier.RAM] * 4)
        await store.remove([chunk_at(table, one, 0)])
        await fill(store, table, 3, seed=2)
        assert len(store.match(table, other.keys)) == 4
        assert [i for i in range(4) if one.keys[i] in table.chunks] == [1]


# NVMe


async def test_a_full_volume_evicts_what_was_used_longest_ago(tmp_path: Path) -> None:
    """A full volume is no error: the least recently used chunks go, the rest stays right, also after a restart."""
    async with open_table(tmp_path, MIB, nvme=10 << 20) as (store, table):
        old = await fill(store, table, 4)
        await store.flush()
        used = await fill(store, table, 4, seed=1)
        await store.flush()
        store.touch([chunk_at(table, old, 0)], [Tier.RAM])
        new = await fill(store, table, 4, seed=2)
        assert await store.flush(60)
        assert old.keys[0] in table.chunks
        assert len(store.match(table, new.keys)) == 4
        assert store.counters.evictions_nvme >= 3
        assert any(key not in table.chunks for key in old.keys[1:])
        for chunk in list(table.chunks.values()):
            while chunk.leases:
                store.release(chunk)
        names = {chunk.key for chunk in table.chunks.values() if not chunk.is_dirty}
        assert used.keys[0] in names or store.counters.evictions_nvme > 4
    async with open_table(tmp_path, MIB, nvme=10 << 20) as (store, table):
        assert set(table.chunks) == names
        for chain in (old, used, new):
            for position, key in enumerate(chain.keys):
                if key in table.chunks:
                    await assert_right(store, table, chain, position)


async def test_a_volume_full_of_leases_keeps_chunks_in_ram(tmp_path: Path) -> None:
    """Nothing on NVMe may go: new chunks stay dirty in RAM, and are written when a lease ends."""
    async with open_table(tmp_path, MIB, nvme=4 << 20, ram=16 << 20) as (store, table):
        chain = await fill(store, table, 3)
        await store.flush()
        held = store.match(table, chain.keys)
        await fill(store, table, 2, seed=1)
        assert not await store.flush(0.3)
        assert store.statistics().num_dirty == 2
        for chunk in held:
            store.release(chunk)
        assert await store.flush(60)
        assert store.statistics().num_dirty == 0


@pytest.mark.expect_log("a full chunk has 6.0 MiB, but the volume has 4.0 MiB")
async def test_the_volume_has_no_room_for_a_chunk_at_all(tmp_path: Path) -> None:
    """A chunk larger than the volume is refused: it would stay dirty, and all that is stored after it with it."""
    async with open_store(settings_in(tmp_path, ram=16 << 20, nvme=4 << 20)) as store:
        small, large = store.attach(MIB), store.attach(sized_namespace(6 << 20))
        assert await store_chunk(store, large, new_chunks(chain_of(large.namespace, 1))[0]) is REFUSED
        assert store.counters.stores_refused == 1
        await fill(store, small, 2)
        assert await store.flush(60)
        assert len(small.chunks) == 2


async def test_shutdown_flushes(tmp_path: Path) -> None:
    """Leaving the store writes what is dirty, though nobody waited for it."""
    async with open_table(tmp_path) as (store, table):
        chain = await fill(store, table, 6)
        assert store.statistics().num_dirty > 0
    async with open_table(tmp_path) as (store, table):
        assert set(table.chunks) == set(chain.keys)


async def test_cancelling_flushes_too(tmp_path: Path) -> None:
    """A store whose surroundings are cancelled (Ctrl-C) still writes what is dirty before it goes, and at once."""
    with trio.fail_after(DEADLINE_S), trio.CancelScope() as scope:
        async with open_table(tmp_path) as (store, table):
            chain = await fill(store, table, 6)
            assert store.statistics().num_dirty > 0
            scope.cancel()
            await trio.sleep_forever()
    async with open_table(tmp_path) as (store, table):
        assert set(table.chunks) == set(chain.keys)


async def test_an_error_inside_flushes_too(tmp_path: Path) -> None:
    """So does one that is left by an exception."""
    chain = chain_of(NS, 3)
    with pytest.RaisesGroup(pytest.RaisesExc(ZeroDivisionError)):
        async with open_table(tmp_path) as (store, table):
            await store_chain(store, table, chain)
            raise ZeroDivisionError
    async with open_table(tmp_path) as (store, table):
        assert set(table.chunks) == set(chain.keys)


async def test_nothing_is_left_open(tmp_path: Path) -> None:
    """A store that was opened and closed has given back every descriptor."""
    async with open_table(tmp_path) as (store, table):
        await fill(store, table, 1)
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(2):
        async with open_table(tmp_path) as (store, table):
            await read_all(store, next(iter(table.chunks.values())))
    assert set(os.listdir("/proc/self/fd")) == before


async def test_a_second_store_on_the_volume_is_refused(tmp_path: Path) -> None:
    async with open_table(tmp_path):
        with pytest.raises(UsageError, match="in use by another"):
            async with open_table(tmp_path):
                pass


async def test_capacity_is_true(tmp_path: Path) -> None:
    """`df`: the volume's size and what is used of it, dirty chunks included; never more than all of it."""
    async with open_table(tmp_path, MIB, nvme=10 << 20) as (store, table):
        empty = store.capacity()
        assert empty.total_bytes == (10 << 20) - 4096
        assert (empty.used_bytes, empty.num_chunks) == (0, 0)
        await fill(store, table, 3)
        length = next(iter(table.chunks.values())).length
        await eventually(lambda: store.statistics().num_dirty == 0)
        assert store.capacity().used_bytes == 3 * length
        await store.remove(list(table.chunks.values()))
        assert store.capacity().used_bytes == 0
