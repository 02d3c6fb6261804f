"""Groups of dirty chunks on their way to a volume, side by side and in order."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvfs.catalog import ChunkTable
from kvfs.messages import NewChunk
from kvfs.statistics import Fault
from kvfs.store import Store
from kvfs.testing import FaultySystem, chain_of, eventually, new_chunks, open_table, sized_namespace, store_chunk

LARGE = sized_namespace(5 << 20, num_layers=2)  # two of them are two writes


class HoldingSystem(FaultySystem):
    """One whose next write, once `is_holding` is set, waits for `may_go`, and then fails with `held_error`, if it is one.

    Attributes: num_done: writes that came to their end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_holding = False
        self.held_error = 0
        self.may_go = threading.Event()
        self.num_done = 0

    def open_gates(self) -> None:
        """See `FaultySystem`."""
        super().open_gates()
        if hasattr(self, "may_go"):
            self.may_go.set()

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        """See `System`."""
        if self.is_holding:
            may_go, self.is_holding = self.may_go, False
            may_go.wait()
            if self.held_error:
                raise OSError(self.held_error, "held and failed")
        count = super().pwritev(fd, buffers, offset)
        self.num_done += 1
        return count


async def hold_one_of_two(system: HoldingSystem, store: Store, table: ChunkTable, new: list[NewChunk]) -> None:
    """Have the first three chunks written: one alone, two in a group of two writes, of which one is held."""
    assert await store.flush()
    system.is_holding = True
    await store_chunk(store, table, new[0])
    await eventually(lambda: not system.is_holding)
    for chunk in new[1:3]:  # they wait for a thread, and so become a group
        await store_chunk(store, table, chunk)
    before, system.is_holding = system.num_done, True
    held, system.may_go = system.may_go, threading.Event()
    held.set()
    await eventually(lambda: system.num_done == before + 2)  # the first, and one of the two


async def test_the_next_group_is_written_beside_the_last_writes_of_the_one_before(tmp_path: Path) -> None:
    """A write that takes long holds up no other; but none is durable before it, and all are in the end."""
    system = HoldingSystem()
    chain = chain_of(LARGE, 4)
    new = new_chunks(chain)
    async with open_table(tmp_path, LARGE, system, ram=32 << 20, nvme=64 << 20, window_bytes=8 << 20) as (store, table):
        await hold_one_of_two(system, store, table, new)
        await eventually(lambda: not table.chunks[chain.keys[0]].is_dirty)
        done, syncs = system.num_done, system.num_syncs
        await store_chunk(store, table, new[3])
        await eventually(lambda: system.num_done == done + 1)
        assert system.num_syncs == syncs
        assert all(table.chunks[key].is_dirty for key in chain.keys[1:])
        system.may_go.set()
        assert await store.flush(60)
        assert not any(table.chunks[key].is_dirty for key in chain.keys)


@pytest.mark.expect_log("writing to NVMe")
async def test_a_group_that_fails_beside_another(tmp_path: Path) -> None:
    """The one that was written becomes clean, the other is tried again."""
    system = HoldingSystem()
    chain = chain_of(LARGE, 4)
    new = new_chunks(chain)
    async with open_table(tmp_path, LARGE, system, ram=32 << 20, nvme=64 << 20, window_bytes=8 << 20) as (store, table):
        await hold_one_of_two(system, store, table, new)
        system.held_error = errno.EIO
        done = system.num_done
        await store_chunk(store, table, new[3])
        await eventually(lambda: system.num_done == done + 1)
        system.may_go.set()
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
