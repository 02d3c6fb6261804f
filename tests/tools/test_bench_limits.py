"""What the benchmark compares with: it has to do what it says, or every ratio is wrong."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from kvfs.tools.bench import rig
from kvfs.tools.bench.limits import RawFile

CHUNK_BYTES, NUM_CHUNKS = 1 << 20, 12


@pytest.mark.parametrize("num_layers", [4, 16, 32])
def test_layers_of_a_raw_file_come_in_order_and_whole(tmp_path: Path, num_layers: int) -> None:
    """What is said to be there of all chunks has been read, each step more than the one before."""
    source, ring = rig.noise(NUM_CHUNKS * CHUNK_BYTES), rig.anonymous(NUM_CHUNKS * CHUNK_BYTES)
    layer_bytes = CHUNK_BYTES // num_layers
    told = [0]
    with closing(RawFile(tmp_path / "raw", len(source), 2)) as raw:
        raw.write(source, CHUNK_BYTES)
        for count in raw.layers(ring, CHUNK_BYTES, num_layers, NUM_CHUNKS):
            assert count > told[-1]
            told.append(count)
            for start in range(0, len(source), CHUNK_BYTES):
                end = start + count * layer_bytes
                assert ring[start:end] == source[start:end]
    assert told[-1] == num_layers
    assert len(told) > 4
