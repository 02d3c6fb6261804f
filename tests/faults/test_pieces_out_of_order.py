"""Pieces of a chunk come in any order: each is judged by its own bytes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvfs.chunk import geometry
from kvfs.opening import open_store
from kvfs.system import System
from kvfs.testing import chain_of, eventually, payload_of, read_all, settings_in, sized_namespace, store_chain
from kvfs.tiers.nvme import slices

NS = sized_namespace(2 << 20, num_layers=8)  # no layer ends where an os_page ends


class LateSystem(System):
    """Reads at `late` wait for the gate."""

    def __init__(self) -> None:
        self.late = -1
        self.gate = threading.Event()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset == self.late:
            self.gate.wait()
        return super().preadv(fd, buffers, offset)


@pytest.mark.parametrize("late", range(len([*slices(geometry(NS, 16))])))
async def test_a_piece_that_comes_late_makes_no_other_corrupt(tmp_path: Path, late: int) -> None:
    """The os_page that two layers share may be read last for the first of them: no sound chunk is dropped for that."""
    chain = chain_of(NS, 1)
    async with open_store(settings_in(tmp_path)) as store:
        await store_chain(store, store.attach(NS), chain)
    system = LateSystem()
    async with open_store(settings_in(tmp_path, io_threads=4), system) as store:
        (chunk,) = store.attach(NS).chunks.values()
        pieces = [*slices(geometry(NS, 16))]
        system.late = chunk.nvme + pieces[late].begin
        store.lease(chunk)
        (promotion,) = store.promote([chunk])
        assert promotion is not None
        # Behind a late header no other piece can be judged, so there all are read, and wait.
        await eventually(lambda: promotion.num_left == (1 if late else len(pieces)))
        system.gate.set()
        await eventually(lambda: promotion.num_left == 0)
        assert promotion.error is None
        store.release(chunk)
        raw = await read_all(store, chunk)
        geo = geometry(NS, 16)
        assert raw[geo.header_bytes :][: geo.payload_bytes] == payload_of(chain.chains[0], geo)
        assert store.counters.corrupt == 0
