"""A device that neither does nor refuses what it is asked holds its own threads, and nobody else for long."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import trio

from kvfs import prefetch, residency, volume_writer
from kvfs.catalog import NOWHERE, Chunk, ChunkTable
from kvfs.errors import UnavailableError
from kvfs.index import Batch, Index
from kvfs.messages import StoreStatus, Tier
from kvfs.store import Store
from kvfs.stripes import Stripe
from kvfs.testing import (
    DEADLINE_S,
    FaultySystem,
    chain_of,
    eventually,
    new_chunks,
    open_table,
    read_all,
    sized_namespace,
    store_chain,
    store_chunk,
)

MIB = sized_namespace(1 << 20)
HANGS = "the device has not answered|writing to NVMe works again"


def stripes_of(store: Store) -> tuple[Stripe, Stripe]:
    assert store._residency.nvme is not None
    good, bad = store._residency.nvme
    return good, bad


def on(table: ChunkTable, stripe: Stripe) -> list[Chunk]:
    return [chunk for chunk in table.chunks.values() if chunk.nvme != NOWHERE and chunk.volume == stripe.number]


@pytest.fixture
def system(tmp_path: Path) -> FaultySystem:
    """One in which the second volume can be made to hang."""
    system = FaultySystem()
    system.bad_place = tmp_path / "nvme2"
    return system


@pytest.fixture
async def opened(
    tmp_path: Path, system: FaultySystem, monkeypatch: pytest.MonkeyPatch, expect_log: Callable[[str], None]
) -> AsyncIterator[tuple[Store, ChunkTable]]:
    """A store with two volumes and chunks on both; it soon says that one hangs, as a slow one may seem to for a moment."""
    expect_log(HANGS)
    monkeypatch.setattr(volume_writer, "_HANGS_AFTER_S", 0.2)
    monkeypatch.setattr(residency, "PATIENCE_S", 3.0)  # what the other volume is asked for has to be done by then
    async with open_table(tmp_path, MIB, system, volumes=2, ram=16 << 20, nvme=64 << 20) as (store, table):
        await store_chain(store, table, chain_of(MIB, 10))
        assert await store.flush()
        yield store, table


async def test_everything_else_goes_on_while_writes_hang(
    opened: tuple[Store, ChunkTable], system: FaultySystem
) -> None:
    """Stores, RAM hits, the other volume, removal there and limits; what hangs is said, and nothing of it is lost."""
    store, table = opened
    good, bad = stripes_of(store)
    system.close_gates()
    later = chain_of(MIB, 10, 1)
    with trio.fail_after(DEADLINE_S):
        assert set(await store_chain(store, table, later)) == {StoreStatus.STORED}
        await eventually(lambda: store.statistics().volumes[1].is_degraded)
        await eventually(lambda: all(chunk.volume for chunk in table.chunks.values() if chunk.is_dirty))
        await eventually(lambda: not store.statistics().volumes[0].is_degraded)
        matched = store.match(table, later.keys)
        assert {chunk.tier for chunk in matched} == {Tier.RAM}
        store.release_all(matched)
        for chunk in on(table, good):
            assert len(await read_all(store, chunk)) == chunk.length
        await store.remove(on(table, good)[:1])
        await store.limits.set_quota(table, 1 << 30)
        assert not await store.flush(0.1)
    left = store.what_is_unwritten(is_kept=False)
    assert left.num_chunks == sum(chunk.is_dirty for chunk in table.chunks.values()) > 0
    assert f"the device has not answered for 0.2 s (the volume in {bad.directory})" in left.sentence
    assert left.sentence.startswith(f"{left.num_chunks} chunk")
    system.open_gates()
    assert await store.flush()
    await eventually(lambda: not store.statistics().volumes[1].is_degraded)
    assert b'"event":"recovered"' in store.events.read(0, 1 << 20)


async def test_stores_go_on_when_ram_is_full_of_what_a_hanging_volume_should_have(
    opened: tuple[Store, ChunkTable], system: FaultySystem
) -> None:
    """As with one that fails: what is not under way leaves RAM, as it would a RAM cache."""
    store, table = opened
    system.close_gates()
    with trio.fail_after(DEADLINE_S):
        await store_chain(store, table, chain_of(MIB, 2, 1))
        await eventually(lambda: store.statistics().volumes[1].is_degraded or not store.statistics().num_dirty)
        for seed in range(2, 40):
            (new,) = new_chunks(chain_of(MIB, 1, seed))
            while await store_chunk(store, table, new) is StoreStatus.REFUSED:
                await eventually(
                    lambda: store.statistics().volumes[1].is_degraded and not store.statistics().volumes[0].dirty_bytes
                )
    system.open_gates()
    assert await store.flush()


async def test_what_others_have_is_prefetched_while_reads_hang(
    opened: tuple[Store, ChunkTable], system: FaultySystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads of the other volume, and the one who gives orders, are free; later the rest comes too."""
    store, table = opened
    assert store._prefetcher is not None
    good, bad = stripes_of(store)
    for chunk in table.chunks.values():
        store._residency.ram.drop(chunk)
    system.close_gates()
    monkeypatch.setattr(prefetch, "_PATIENCE_S", 0.05)
    store.prefetch(on(table, bad), 10, DEADLINE_S)
    await eventually(lambda: store._prefetcher._hanging)
    monkeypatch.setattr(prefetch, "_PATIENCE_S", DEADLINE_S)  # the other may be slow
    store.prefetch(on(table, good), 0, DEADLINE_S)
    await eventually(lambda: all(chunk.ram != NOWHERE for chunk in on(table, good)))
    assert all(chunk.ram == NOWHERE for chunk in on(table, bad))
    system.open_gates()
    await eventually(lambda: not store.statistics().num_leases)
    assert store.counters.prefetches_wasted > 0
    store.prefetch([chunk for chunk in table.chunks.values() if chunk.ram == NOWHERE], 0, DEADLINE_S)
    await eventually(lambda: store.statistics().ram.num_chunks == 10)


class Hanging:
    """Commits of an index that wait until they are let go."""

    def __init__(self, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self._commit = index.commit
        monkeypatch.setattr(index, "commit", self.commit)

    def commit(self, batch: Batch) -> None:
        self.gate.wait()
        self._commit(batch)


@pytest.mark.heavy
async def test_changes_end_with_one_sentence_while_an_index_hangs(
    opened: tuple[Store, ChunkTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is removed there is out of sight; what concerns all volumes is durable on the other; nobody waits for ever."""
    store, table = opened
    good, bad = stripes_of(store)
    hanging = Hanging(bad.commits._index, monkeypatch)
    sentence = f"the volume in {bad.directory} does not answer: what was asked for is in force"
    doomed = on(table, bad)
    try:
        with trio.fail_after(DEADLINE_S):
            with pytest.raises(UnavailableError, match=sentence):
                await store.remove(doomed[:1])
            began_s = trio.current_time()
            for chunk in doomed[1:]:
                with pytest.raises(UnavailableError, match=sentence):
                    await store.remove([chunk])
            with pytest.raises(UnavailableError, match=sentence):
                await store.limits.pin(list(table.chunks.values()) + doomed, 1 << 62)
            await store.limits.set_quota(table, 1 << 30)
            await store.remove(on(table, good)[:1])
        assert trio.current_time() - began_s < DEADLINE_S
        assert not set(table.chunks) & {chunk.key for chunk in doomed}
    finally:
        hanging.gate.set()
    await store.settle()
    assert await store.flush()
