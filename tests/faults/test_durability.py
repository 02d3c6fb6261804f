"""Clean means durable, removed means gone: what a crash at any instant leaves, played through on copies of the disk.

A crash is a copy of volume and index taken while the store runs; a power loss also takes from the copy every write that
was not synced.
"""

from __future__ import annotations

import errno
import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
import trio.lowlevel

from kvfs.catalog import ChunkTable
from kvfs.chunk import geometry
from kvfs.documents import DIRECTORY as DOCUMENTS
from kvfs.index import FILE_NAME as INDEX
from kvfs.keys import KeyChain
from kvfs.messages import StoreStatus
from kvfs.namespace import Namespace
from kvfs.opening import open_store
from kvfs.store import Store
from kvfs.testing import (
    FaultySystem,
    LosingSystem,
    chain_of,
    eventually,
    new_chunks,
    open_table,
    payload_of,
    read_all,
    settings_in,
    sized_namespace,
    store_chain,
    store_chunk,
    tiny_namespace,
)
from kvfs.volume import FILE_NAME as VOLUME

NS = tiny_namespace()
MIB = sized_namespace(1 << 20)


def crash(directory: Path, to: Path, system: FaultySystem) -> Path:
    """What a machine that died now would find when it starts again.

    No write to the volume begins meanwhile, and the log is copied before what it may be checkpointed into, so that the
    copies are of one moment.
    """
    shutil.rmtree(to, ignore_errors=True)
    (to / "nvme").mkdir(parents=True)
    system.write_gate.clear()
    for name in (INDEX + "-wal", INDEX, VOLUME):
        shutil.copy(directory / "nvme" / name, to / "nvme" / name)
    if isinstance(system, LosingSystem):
        system.lose(to / "nvme" / VOLUME)
    system.write_gate.set()
    return to


@contextmanager
def index_of(directory: Path) -> Iterator[sqlite3.Connection]:
    """Another connection to the index, as somebody would have who looks at it from outside."""
    connection = sqlite3.connect(directory / "nvme" / INDEX, isolation_level=None)
    try:
        yield connection
    finally:
        connection.close()


def indexed_keys(directory: Path) -> set[bytes]:
    with index_of(directory) as connection:
        return {key for (key,) in connection.execute("SELECT key FROM chunks")}


def is_right(raw: bytes, chain: KeyChain, position: int, namespace: Namespace) -> bool:
    geo = geometry(namespace, chain.tokens_per_chunk)
    return raw[geo.header_bytes :][: geo.payload_bytes] == payload_of(chain.chains[position], geo)


async def assert_all_right(directory: Path, chains: list[KeyChain], namespace: Namespace) -> set[bytes]:
    """Whatever a store finds in the directory has the right bytes; returns the keys."""
    async with open_table(directory, namespace) as (store, table):
        places = {key: (chain, position) for chain in chains for position, key in enumerate(chain.keys)}
        found = set(table.chunks)
        for key in found:
            assert is_right(await read_all(store, table.chunks[key]), *places[key], namespace)
        assert store.counters.corrupt == 0
    return found


async def test_clean_means_written_synced_and_committed_in_this_order(tmp_path: Path) -> None:
    """While the sync has not returned nothing is in the index, and nothing is called clean."""
    system = FaultySystem()
    async with open_table(tmp_path, system=system) as (store, table):
        system.sync_gate.clear()
        num_before = len(system.writes)
        chain = chain_of(NS, 3)
        await store_chain(store, table, chain)
        await eventually(lambda: len(system.writes) > num_before)
        await trio.testing.wait_all_tasks_blocked()
        assert indexed_keys(tmp_path) == set()
        assert store.statistics().num_dirty == 3
        assert all(chunk.is_dirty for chunk in table.chunks.values())
        system.sync_gate.set()
        await store.flush()
        assert indexed_keys(tmp_path) == set(chain.keys)
        assert store.statistics().num_dirty == 0


async def test_clean_survives_power_loss(tmp_path: Path) -> None:
    """At whatever moment the power goes: what was clean is there, and whatever is there is right."""
    rng = random.Random(1)
    losing = LosingSystem()
    chains = []
    async with open_table(tmp_path, system=losing, nvme=8 << 20) as (store, table):
        for seed in range(12):
            chain = chain_of(NS, rng.randrange(1, 9), seed)
            chains.append(chain)
            await store_chain(store, table, chain)
            if rng.random() < 0.3 and table.chunks:
                await store.remove([rng.choice(list(table.chunks.values()))])
            for _ in range(rng.randrange(6)):
                await trio.lowlevel.checkpoint()
            clean = {chunk.key for chunk in table.chunks.values() if not chunk.is_dirty}
            found = await assert_all_right(crash(tmp_path, tmp_path / "crash", losing), chains, NS)
            assert clean <= found


@pytest.mark.heavy
async def test_an_overwritten_volume_survives_power_loss(tmp_path: Path) -> None:
    """The same while a full volume is being overwritten: an evicted extent is never reused before it is forgotten."""
    losing = LosingSystem()
    chains = []
    async with open_table(tmp_path, MIB, losing, nvme=6 << 20) as (store, table):
        for seed in range(10):
            chains.append(chain_of(MIB, 2, seed))
            assert await store_chain(store, table, chains[-1]) == [StoreStatus.STORED] * 2
            num_writes = len(losing.writes)
            for moment in range(4):
                await eventually(
                    lambda n=num_writes + moment: len(losing.writes) > n or not store.statistics().num_dirty
                )
                clean = {chunk.key for chunk in table.chunks.values() if not chunk.is_dirty}
                found = await assert_all_right(crash(tmp_path, tmp_path / "crash", losing), chains, MIB)
                assert clean <= found
            await store.flush()


async def test_an_extent_is_free_only_after_the_commit(tmp_path: Path) -> None:
    """While the index cannot be written a removed chunk's room on NVMe is not given to another."""
    async with open_table(tmp_path, MIB) as (store, table):
        chain = chain_of(MIB, 3)
        await store_chain(store, table, chain)
        await store.flush()
        used = store.statistics().nvme.used_bytes  # type: ignore[union-attr]
        with index_of(tmp_path) as connection:
            connection.execute("BEGIN IMMEDIATE")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.remove, list(table.chunks.values()))
                await eventually(lambda: not table.chunks)
                with trio.move_on_after(0.1):
                    await trio.sleep_forever()
                assert store.statistics().nvme.used_bytes == used  # type: ignore[union-attr]
                assert indexed_keys(tmp_path) == set(chain.keys)
                connection.execute("ROLLBACK")
        assert indexed_keys(tmp_path) == set()
        await eventually(lambda: store.statistics().nvme.used_bytes == 0)  # type: ignore[union-attr]


async def test_removal_is_durable_when_it_returns(tmp_path: Path) -> None:
    """A removed chunk does not come back after a crash."""
    chain, system = chain_of(NS, 4), FaultySystem()
    async with open_table(tmp_path, system=system) as (store, table):
        await store_chain(store, table, chain)
        await store.flush()
        await store.remove([table.chunks[chain.keys[1]]])
        found = await assert_all_right(crash(tmp_path, tmp_path / "crash", system), [chain], NS)
        assert found == set(chain.keys) - {chain.keys[1]}


@pytest.mark.parametrize("attempt", range(6))
async def test_removal_while_the_row_is_being_written(tmp_path: Path, attempt: int) -> None:
    """A chunk that is removed while write-behind commits its row is gone too when the removal returns."""
    chain = chain_of(NS, 2)
    async with open_table(tmp_path) as (store, table):
        await store.flush()
        with index_of(tmp_path) as connection:
            connection.execute("BEGIN IMMEDIATE")  # holds the commit of the rows
            await store_chain(store, table, chain)
            await eventually(lambda: store.statistics().nvme.used_bytes)  # type: ignore[union-attr]
            with trio.move_on_after(0.05 * attempt / 3):
                await trio.sleep_forever()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.remove, list(table.chunks.values()))
                await eventually(lambda: not table.chunks)
                connection.execute("ROLLBACK")
        assert indexed_keys(tmp_path) == set()
        assert await store.flush(60)
        await eventually(lambda: store.statistics().nvme.used_bytes == 0)  # type: ignore[union-attr]
        assert await store_chunk(store, table, new_chunks(chain)[0]) is StoreStatus.STORED
        await store.flush()
        assert indexed_keys(tmp_path) == {chain.keys[0]}


@pytest.mark.heavy
@pytest.mark.expect_log("the index could not be written")
@pytest.mark.expect_log("writing to NVMe")
async def test_an_index_that_cannot_be_written(tmp_path: Path) -> None:
    """Nothing is called clean, nothing leaks; when the index works again everything becomes clean."""
    system = FaultySystem()
    async with open_table(tmp_path, MIB, system) as (store, table):
        chain = chain_of(MIB, 3)
        with index_of(tmp_path) as connection:
            connection.execute("CREATE TRIGGER no BEFORE INSERT ON chunks BEGIN SELECT RAISE(ABORT, 'no'); END")
            await store_chain(store, table, chain)
            await eventually(lambda: store.statistics().nvme.is_degraded)  # type: ignore[union-attr]
            assert store.statistics().num_dirty == 3
            await eventually(lambda: store.statistics().nvme.used_bytes == 0)  # type: ignore[union-attr]
            connection.execute("DROP TRIGGER no")
        assert await store.flush(60)
        assert not store.statistics().nvme.is_degraded  # type: ignore[union-attr]
        assert await assert_all_right(crash(tmp_path, tmp_path / "crash", system), [chain], MIB) == set(chain.keys)


@pytest.mark.expect_log("the index could not be written")
@pytest.mark.expect_log("writing to NVMe")
async def test_eviction_with_an_index_that_cannot_be_written(tmp_path: Path) -> None:
    """A full volume whose evictions cannot be committed loses no room for ever."""
    async with open_table(tmp_path, MIB, nvme=6 << 20, ram=16 << 20) as (store, table):
        await store_chain(store, table, chain_of(MIB, 4))
        await store.flush()
        with index_of(tmp_path) as connection:
            connection.execute("CREATE TRIGGER no BEFORE DELETE ON chunks BEGIN SELECT RAISE(ABORT, 'no'); END")
            await store_chain(store, table, chain_of(MIB, 3, 1))
            await eventually(lambda: store.statistics().nvme.is_degraded)  # type: ignore[union-attr]
            connection.execute("DROP TRIGGER no")
        assert await store.flush(60)
        await store.remove(list(table.chunks.values()))
        await store.flush()
        await eventually(lambda: store.statistics().nvme.used_bytes == 0)  # type: ignore[union-attr]
        assert store.statistics().ram.used_bytes == 0


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("attribute", ["write_error", "sync_error"])
@pytest.mark.expect_log("writing to NVMe")
async def test_a_device_that_cannot_be_written(tmp_path: Path, attribute: str, number: int) -> None:
    """Degraded, not broken: RAM goes on as a RAM cache, and when the device works again what is left becomes clean."""
    system = FaultySystem()
    async with open_table(tmp_path, MIB, system) as (store, table):
        setattr(system, attribute, number)
        first = chain_of(MIB, 2)
        await store_chain(store, table, first)
        await eventually(lambda: store.statistics().nvme.is_degraded)  # type: ignore[union-attr]
        await eventually(lambda: store.statistics().nvme.used_bytes == 0)  # type: ignore[union-attr]
        for seed in range(1, 6):
            statuses = await store_chain(store, table, chain_of(MIB, 2, seed))
            assert StoreStatus.STORED in statuses
        assert store.counters.evictions_ram > 0
        assert store.counters.io_errors > 0
        await assert_readable(store, table, chain_of(MIB, 2, 5))
        setattr(system, attribute, 0)
        assert await store.flush(60)
        assert not store.statistics().nvme.is_degraded  # type: ignore[union-attr]
        assert b'"event":"degraded"' in store.events.read(0, 1 << 20)
        assert b'"event":"recovered"' in store.events.read(0, 1 << 20)
        names = set(table.chunks)
    async with open_table(tmp_path, MIB) as (store, table):
        assert set(table.chunks) == names
        await assert_readable(store, table, chain_of(MIB, 2, 5))


async def assert_readable(store: Store, table: ChunkTable, chain: KeyChain) -> None:
    for position, key in enumerate(chain.keys):
        assert is_right(await read_all(store, table.chunks[key]), chain, position, table.namespace)


# restarts on a damaged index


def edit_index(directory: Path, statement: str, *values: object) -> None:
    with index_of(directory) as connection:
        assert connection.execute(statement, values).rowcount


async def restarted_with(directory: Path, num_dropped: int = 0) -> tuple[set[bytes], set[bytes]]:
    """Keys after a restart that drops so many rows, and those that the index has once the store is up (its owner has not
    written anything).
    """
    async with open_table(directory, MIB) as (store, table):
        assert store.counters.rows_dropped == num_dropped
        return set(table.chunks), indexed_keys(directory)


@pytest.fixture
async def chain(tmp_path: Path) -> KeyChain:
    """Four chunks on a volume whose store has ended, the namespace already known to the index."""
    chain = chain_of(MIB, 4)
    async with open_table(tmp_path, MIB) as (store, table):
        await store_chain(store, table, chain)
    return chain


@pytest.mark.expect_log("two chunks claim the same extent|1 rows of the index cannot be true")
@pytest.mark.parametrize("shift", [0, 4096, -4096, 512 << 10])
async def test_overlaps_are_resolved_by_what_is_on_the_volume(tmp_path: Path, chain: KeyChain, shift: int) -> None:
    """Of two rows that claim the same bytes the one whose header is there stays; the other is forgotten for good."""
    with index_of(tmp_path) as connection:
        (offset,) = connection.execute("SELECT offset FROM chunks WHERE position = 1").fetchone()
    edit_index(tmp_path, "UPDATE chunks SET offset = ? WHERE position = 3", offset + shift)
    found, indexed = await restarted_with(tmp_path, num_dropped=1)
    assert found == indexed == set(chain.keys[:3])
    assert await assert_all_right(tmp_path, [chain], MIB) == set(chain.keys[:3])


@pytest.mark.expect_log("two chunks claim the same extent|1 rows of the index cannot be true")
async def test_an_overlap_from_the_front(tmp_path: Path, chain: KeyChain) -> None:
    """The same where the false row comes first."""
    edit_index(tmp_path, "DELETE FROM chunks WHERE position = 0")
    with index_of(tmp_path) as connection:
        (offset,) = connection.execute("SELECT offset FROM chunks WHERE position = 1").fetchone()
    edit_index(tmp_path, "UPDATE chunks SET offset = ? WHERE position = 3", offset - 4096)
    found, indexed = await restarted_with(tmp_path, num_dropped=1)
    assert found == indexed == set(chain.keys[1:3])


@pytest.mark.expect_log("1 rows of the index cannot be true")
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("offset", 100), ("offset", 0), ("offset", -4096), ("offset", 1 << 40), ("length", 4096), ("num_tokens", 0),
        ("num_tokens", 17), ("num_tokens", 1 << 40), ("namespace", 99), ("num_tokens", None), ("offset", "x"), ("key", b"k"),
        ("parent", b""), ("position", -1), ("position", 1 << 40), ("created_ns", "soon"), ("hits", None),
    ],
)  # fmt: skip
async def test_impossible_rows_are_dropped(tmp_path: Path, chain: KeyChain, column: str, value: object) -> None:
    """A row that cannot be true is forgotten, before anything else may use its extent; the others stay."""
    edit_index(tmp_path, f"UPDATE chunks SET {column} = ? WHERE position = 2", value)
    found, indexed = await restarted_with(tmp_path, num_dropped=1)
    assert found == indexed == set(chain.keys) - {chain.keys[2]}


DAMAGED_DOCUMENTS = [b"", b"{}", b"\xff", None, 5, "text"]


@pytest.mark.expect_log("is mended with its document")
@pytest.mark.parametrize(
    ("column", "value"),
    [*(("document", value) for value in DAMAGED_DOCUMENTS), ("directory", "x"), ("created_ns", "x")],
)
async def test_a_damaged_namespace_is_mended(tmp_path: Path, chain: KeyChain, column: str, value: object) -> None:
    """The document beside the volume says what its row said; no chunk is lost, and the row is right again."""
    edit_index(tmp_path, f"UPDATE namespaces SET {column} = ?", value)
    for _ in range(2):
        assert await restarted_with(tmp_path) == (set(chain.keys), set(chain.keys))
        with index_of(tmp_path) as connection:
            [(directory, created_ns)] = connection.execute("SELECT directory, created_ns FROM namespaces")
        assert (directory, type(created_ns)) == (MIB.directory, int)
    assert await assert_all_right(tmp_path, [chain], MIB) == set(chain.keys)


@pytest.mark.expect_log("is mended with its document")
@pytest.mark.parametrize("statement", ["DELETE FROM namespaces", "UPDATE namespaces SET number = 7"])
async def test_a_lost_namespace_is_found_by_the_headers_of_its_chunks(
    tmp_path: Path, chain: KeyChain, statement: str
) -> None:
    """Its row is gone, or bears another number: what is on the volume says whose the chunks are."""
    edit_index(tmp_path, statement)
    async with open_table(tmp_path, MIB) as (store, table):
        assert b"namespace_mended" in store.events.read(0, 1 << 20)
        assert store.counters.rows_dropped == 0
        assert set(table.chunks) == set(chain.keys)
    assert await restarted_with(tmp_path) == (set(chain.keys), set(chain.keys))


@pytest.mark.expect_log("is not readable|cannot be true")
@pytest.mark.parametrize("document", DAMAGED_DOCUMENTS)
async def test_an_unreadable_namespace_is_dropped(tmp_path: Path, chain: KeyChain, document: object) -> None:
    """Without its document its chunks cannot be told apart any more: they are counted, and it can be used anew."""
    shutil.rmtree(tmp_path / "nvme" / DOCUMENTS)
    edit_index(tmp_path, "UPDATE namespaces SET document = ?", document)
    async with open_store(settings_in(tmp_path)) as store:
        assert store.counters.rows_dropped == len(chain.keys)
        assert b'"rows_dropped","chunks":4' in store.events.read(0, 1 << 20)
    assert await restarted_with(tmp_path) == (set(), set())
    async with open_table(tmp_path, MIB) as (store, table):
        await store_chain(store, table, chain)
    assert await assert_all_right(tmp_path, [chain], MIB) == set(chain.keys)


async def test_documents_are_written_again_where_they_are_missing(tmp_path: Path, chain: KeyChain) -> None:
    """A volume of an earlier version gets them at its first start."""
    path = tmp_path / "nvme" / DOCUMENTS / f"{MIB.directory}.json"
    before = path.read_bytes()
    shutil.rmtree(path.parent)
    assert await restarted_with(tmp_path) == (set(chain.keys), set(chain.keys))
    assert path.read_bytes() == before
