"""Groups of dirty chunks on their way to a volume, side by side and in order."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvfs.statistics import Fault
from kvfs.testing import (
    FaultySystem,
    chain_of,
    eventually,
    hold_one_of_two,
    new_chunks,
    open_table,
    sized_namespace,
    store_chunk,
)

LARGE = sized_namespace(5 << 20, num_layers=2)  # two of them are two writes


async def test_the_next_group_is_written_beside_the_last_writes_of_the_one_before(tmp_path: Path) -> None:
    """A write that takes long holds up no other; but none is durable before it, and all are in the end."""
    system = FaultySystem()
    chain = chain_of(LARGE, 4)
    new = new_chunks(chain)
    async with open_table(tmp_path, LARGE, system, ram=32 << 20, nvme=64 << 20, window_bytes=8 << 20) as (store, table):
        held = await hold_one_of_two(system, store, table, new)
        await eventually(lambda: not table.chunks[chain.keys[0]].is_dirty)
        done, syncs = system.num_written, system.num_syncs
        await store_chunk(store, table, new[3])
        await eventually(lambda: system.num_written == done + 1)
        assert system.num_syncs == syncs
        assert all(table.chunks[key].is_dirty for key in chain.keys[1:])
        held.set()
        assert await store.flush(60)
        assert not any(table.chunks[key].is_dirty for key in chain.keys)


@pytest.mark.expect_log("writing to NVMe")
async def test_a_group_that_fails_beside_another(tmp_path: Path) -> None:
    """The one that was written becomes clean, the other is tried again."""
    system = FaultySystem()
    chain = chain_of(LARGE, 4)
    new = new_chunks(chain)
    async with open_table(tmp_path, LARGE, system, ram=32 << 20, nvme=64 << 20, window_bytes=8 << 20) as (store, table):
        held = await hold_one_of_two(system, store, table, new)
        system.held_error = errno.EIO
        done = system.num_written
        await store_chunk(store, table, new[3])
        await eventually(lambda: system.num_written == done + 1)
        held.set()
        assert await store.flush(60)
        assert not any(table.chunks[key].is_dirty for key in chain.keys)
        assert store.counters.io_errors == 1


@pytest.mark.expect_log("its files were removed, or its disk was unmounted")
@pytest.mark.expect_log("writing to NVMe works again")
async def test_what_is_written_to_a_volume_that_was_removed_is_not_durable(tmp_path: Path) -> None:
    """It stays dirty, the volume is degraded and says why; where its files are back it is written."""
    chain = chain_of(LARGE, 2)
    first, second = new_chunks(chain)
    async with open_table(tmp_path, LARGE, ram=32 << 20, nvme=64 << 20, window_bytes=8 << 20) as (store, table):
        await store_chunk(store, table, first)
        assert await store.flush()
        (tmp_path / "nvme").rename(tmp_path / "elsewhere")
        await store_chunk(store, table, second)
        await eventually(lambda: store.statistics().volumes[0].fault is Fault.GONE)
        assert store.statistics().volumes[0].is_degraded
        assert table.chunks[chain.keys[1]].is_dirty
        assert "its files were removed" in store.what_is_unwritten(is_kept=False).reason
        (tmp_path / "elsewhere").rename(tmp_path / "nvme")
        await eventually(lambda: not table.chunks[chain.keys[1]].is_dirty)
        await eventually(lambda: store.statistics().volumes[0].fault is Fault.NONE)
        assert not store.statistics().volumes[0].is_degraded


@pytest.mark.expect_log("No space left on device|Input/output error")
@pytest.mark.expect_log("writing to NVMe works again")
async def test_a_full_disk_is_no_device_that_fails(tmp_path: Path) -> None:
    """Where the volume itself finds no room, too: a file system that allocates what is written only then."""
    system = FaultySystem()
    chain = chain_of(LARGE, 1)
    async with open_table(tmp_path, LARGE, system, ram=32 << 20, nvme=64 << 20, window_bytes=8 << 20) as (store, table):
        for error, fault in ((errno.ENOSPC, Fault.DISK_FULL), (errno.EIO, Fault.DEVICE)):
            system.write_error = error
            if error == errno.ENOSPC:
                await store_chunk(store, table, new_chunks(chain)[0])
            await eventually(lambda fault=fault: store.statistics().volumes[0].fault is fault)
            assert store.statistics().volumes[0].is_disk_full == (fault is Fault.DISK_FULL)
        system.write_error = 0
        await eventually(lambda: store.statistics().volumes[0].fault is Fault.NONE)


@pytest.mark.expect_log("writing to NVMe")
async def test_what_was_removed_in_time_does_not_say_that_a_device_works_again(tmp_path: Path) -> None:
    """A group of which nothing is left to be written is no proof; the next write that succeeds is."""
    system = FaultySystem()
    async with open_table(tmp_path, system=system) as (store, table):
        system.write_error = errno.EIO
        for seed in range(2):
            chain = chain_of(table.namespace, 1, seed)
            await store_chunk(store, table, new_chunks(chain)[0])
            await eventually(lambda n=seed: store.counters.io_errors > n)
            await store.remove([table.chunks[chain.keys[0]]])
            assert await store.flush()
        assert store.statistics().nvme.is_degraded  # type: ignore[union-attr]
        system.write_error = 0
        await store_chunk(store, table, new_chunks(chain_of(table.namespace, 1, 2))[0])
        assert await store.flush()
        events = bytes(store.events.read(0, 1 << 20))
        assert (events.count(b'"degraded"'), events.count(b'"recovered"')) == (1, 1)
