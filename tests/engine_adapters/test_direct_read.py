"""Chunks read from a real volume into a tensor of the CPU, and verified there. (On a GPU: tests/gpu.)"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch

from kvfs.chunk import geometry
from kvfs.device.gpu import Way
from kvfs.device.reader import Reader
from kvfs.engine_adapters.device_checksum import checksums
from kvfs.engine_adapters.direct_read import Wanted, layer_checksums, read_chunks, row_bytes
from kvfs.errors import CorruptChunk, UsageError
from kvfs.loading import VolumeExtent
from kvfs.testing import chain_of, checksums_of, open_table, payload_of, store_chain, tiny_namespace

NAMESPACE = tiny_namespace()
CHAIN = chain_of(NAMESPACE, 3)


@pytest.fixture
async def placed(tmp_path: Path) -> tuple[Path, list[int]]:
    """A volume with chunks, and where they lie on it."""
    async with open_table(tmp_path, NAMESPACE) as (store, table):
        await store_chain(store, table, CHAIN)
        assert await store.flush()
        offsets = [table.chunks[key].nvme for key in CHAIN.keys]
    return tmp_path / "nvme" / "volume", offsets


def rows_of(num_rows: int) -> torch.Tensor:
    return torch.zeros(num_rows, row_bytes(NAMESPACE, 16) + 4096, dtype=torch.uint8)


def wanted_at(fd: int, offsets: list[int], *, is_proven: bool = False) -> list[Wanted]:
    return [
        Wanted(VolumeExtent(fd, offset, is_proven), chain) for offset, chain in zip(offsets, CHAIN.chains, strict=True)
    ]


async def test_chunks_are_read_and_verified(placed: tuple[Path, list[int]]) -> None:
    path, offsets = placed
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    geo = geometry(NAMESPACE, 16)
    with Reader() as reader:
        rows = rows_of(4)
        assert read_chunks(reader, NAMESPACE, 16, wanted_at(fd, offsets), rows) == (Way.HOST, [None] * 3)
        for chain, row in zip(CHAIN.chains, rows, strict=False):
            assert row[: geo.payload_bytes].numpy().tobytes() == payload_of(chain, geo)
        assert not rows[3].any()
        swapped = wanted_at(fd, [offsets[0], offsets[2], 4096 * 1000])
        first, *others = read_chunks(reader, NAMESPACE, 16, swapped, rows)[1]
        assert first is None
        assert [str(other)[:28] for other in others[:1]] == ["these are the bytes of anoth"]
        assert isinstance(others[1], CorruptChunk)
        with pytest.raises(UsageError, match="3 rows"):
            read_chunks(reader, NAMESPACE, 16, swapped, rows[:2])
        with pytest.raises(EOFError):
            read_chunks(reader, NAMESPACE, 16, wanted_at(fd, [offsets[0], offsets[1], 1 << 40]), rows)
    os.close(fd)


@pytest.mark.parametrize("damaged", [[0], [1], [0, 1, 2]])
async def test_flipped_bits_are_found(placed: tuple[Path, list[int]], damaged: list[int]) -> None:
    """In each of the chunks read together; of what the daemon has proven nothing is computed."""
    path, offsets = placed
    geo = geometry(NAMESPACE, 16)
    fd = os.open(path, os.O_RDWR)
    for index in damaged:
        at = offsets[index] + geo.header_bytes + geo.bounds[2] + 7
        os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 4]), at)
    os.fsync(fd)
    os.close(fd)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    with Reader() as reader:
        found = read_chunks(reader, NAMESPACE, 16, wanted_at(fd, offsets), rows_of(3))[1]
        proven = read_chunks(reader, NAMESPACE, 16, wanted_at(fd, offsets, is_proven=True), rows_of(3))[1]
    assert [index for index, wrong in enumerate(found) if wrong] == damaged
    assert all(f"layer 2 of chunk {CHAIN.keys[index].hex()} does not" in str(found[index]) for index in damaged)
    assert proven == [None] * 3
    os.close(fd)


def test_layers_of_different_lengths() -> None:
    """What a GPU would compute for them, computed here; of several payloads whose rows are longer than they are."""
    geo = geometry(NAMESPACE, 16)
    rows = rows_of(3)
    for chain, row in zip(CHAIN.chains, rows, strict=True):
        row[: geo.payload_bytes] = torch.frombuffer(bytearray(payload_of(chain, geo)), dtype=torch.uint8)
    payloads = rows[:, : geo.payload_bytes]
    each = [[checksums(row[a:b].view(1, -1))[0] for a, b in itertools.pairwise(geo.bounds)] for row in payloads]
    assert each == layer_checksums(geo, payloads)
    assert each == [list(checksums_of(payload_of(chain, geo), geo)) for chain in CHAIN.chains]
