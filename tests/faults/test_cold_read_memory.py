"""However many files are read, suspected and looked at: the memory for cold reads has its bound."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from kvfs import cold_reads
from kvfs.chunk import geometry
from kvfs.opening import open_store
from kvfs.testing import (
    FaultySystem,
    chain_of,
    eventually,
    payload_of,
    read_all,
    settings_in,
    sized_namespace,
    store_chain,
)

NS = sized_namespace(1 << 20)


@pytest.mark.parametrize("limit_bytes", [1, 2 << 20, 3 << 20])
async def test_reads_beyond_the_bound_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_bytes: int) -> None:
    """While the device hangs no more chunks have memory than fit; when it goes on, all are read."""
    monkeypatch.setattr(cold_reads, "MAX_BYTES", limit_bytes)
    chain = chain_of(NS, 8)
    async with open_store(settings_in(tmp_path, ram=16 << 20)) as store:
        await store_chain(store, store.attach(NS), chain)
    system = FaultySystem()
    async with open_store(settings_in(tmp_path), system) as store:
        table = store.attach(NS)
        system.read_gate.clear()
        found: dict[int, bytes] = {}

        async def read(position: int) -> None:
            found[position] = await read_all(store, table.chunks[chain.keys[position]])

        async with trio.open_nursery() as nursery:
            for position in range(8):
                nursery.start_soon(read, position)
            await eventually(lambda: store.statistics().num_leases == 8)
            await trio.testing.wait_all_tasks_blocked()
            assert store._cold is not None
            buffers = store._cold._buffers.values()
            taken = sum(len(buffer.view) for buffer in buffers)
            assert taken <= max(limit_bytes, geometry(NS, 16).file_bytes)
            assert taken > 0
            system.read_gate.set()
        geo = geometry(NS, 16)
        for position, raw in found.items():
            assert raw[geo.header_bytes :][: geo.payload_bytes] == payload_of(chain.chains[position], geo)
        assert len(found) == 8
        assert store._cold._reading_bytes == 0


async def test_a_reader_that_leaves_the_line_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for room may be cancelled; the next gets it."""
    monkeypatch.setattr(cold_reads, "MAX_BYTES", 1)
    chain = chain_of(NS, 3)
    async with open_store(settings_in(tmp_path)) as store:
        await store_chain(store, store.attach(NS), chain)
    system = FaultySystem()
    async with open_store(settings_in(tmp_path), system) as store:
        first, second, third = (store.attach(NS).chunks[key] for key in chain.keys)
        system.read_gate.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_all, store, first)
            await eventually(lambda: first.leases)
            impatient = trio.CancelScope()

            async def leave() -> None:
                with impatient:
                    await read_all(store, second)

            nursery.start_soon(leave)
            await eventually(lambda: second.leases)
            nursery.start_soon(read_all, store, third)
            await eventually(lambda: third.leases)
            impatient.cancel()
            await eventually(lambda: not second.leases)
            system.read_gate.set()
        assert store.statistics().num_leases == 0
