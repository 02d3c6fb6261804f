"""Groups of dirty chunks on their way to a volume, side by side and in order."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvfs.catalog import ChunkTable
from kvfs.messages import NewChunk
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
