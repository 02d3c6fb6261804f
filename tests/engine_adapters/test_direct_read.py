"""Chunks read from a real volume into a tensor of the CPU, and verified there. (On a GPU: tests/gpu.)"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch

from kvfs.device.reader import Reader
from kvfs.engine_adapters import direct_read
from kvfs.engine_adapters.device_checksum import checksums
from kvfs.engine_adapters.direct_read import layer_checksums, read_chunk
from kvfs.errors import CorruptChunk, UsageError
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


async def test_a_chunk_is_read_and_verified(placed: tuple[Path, list[int]]) -> None:
    path, offsets = placed
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    with Reader() as reader:
        for chain, offset in zip(CHAIN.chains, offsets, strict=True):
            target = torch.zeros(1 << 20, dtype=torch.uint8)
            facts = read_chunk(reader, fd, offset, NAMESPACE, chain, 16, target)
            geo = direct_read.geometry(NAMESPACE, 16)
            right = payload_of(chain, geo)
            assert target[: geo.payload_bytes].numpy().tobytes() == right
            assert facts.checksums == checksums_of(right, geo)
        with pytest.raises(CorruptChunk, match="another chunk"):
            read_chunk(reader, fd, offsets[0], NAMESPACE, CHAIN.chains[1], 16, target)
        with pytest.raises(CorruptChunk):
            read_chunk(reader, fd, 4096 * 1000, NAMESPACE, CHAIN.chains[1], 16, target)
        with pytest.raises(UsageError, match="bytes, not"):
            read_chunk(reader, fd, offsets[0], NAMESPACE, CHAIN.chains[0], 16, target[:100])
    os.close(fd)


async def test_a_flipped_bit_is_found(placed: tuple[Path, list[int]]) -> None:
    path, offsets = placed
    geo = direct_read.geometry(NAMESPACE, 16)
    fd, at = os.open(path, os.O_RDWR), offsets[0] + geo.header_bytes + geo.bounds[2] + 7
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 4]), at)
    os.fsync(fd)
    os.close(fd)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    target = torch.zeros(1 << 20, dtype=torch.uint8)
    with Reader() as reader, pytest.raises(CorruptChunk, match="layer 2 does not have its checksum"):
        read_chunk(reader, fd, offsets[0], NAMESPACE, CHAIN.chains[0], 16, target)
    os.close(fd)


def test_layers_of_different_lengths() -> None:
    """What a GPU would compute for them, computed here."""
    geo = direct_read.geometry(NAMESPACE, 16)
    payload = torch.frombuffer(bytearray(payload_of(CHAIN.chains[0], geo)), dtype=torch.uint8)
    bounds = geo.bounds
    each = [checksums(payload[a:b].view(1, -1))[0] for a, b in itertools.pairwise(bounds)]
    assert each == layer_checksums(geo, payload) == list(checksums_of(payload.numpy().tobytes(), geo))
