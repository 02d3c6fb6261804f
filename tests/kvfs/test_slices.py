"""The pieces that a chunk file is read in."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvfs.chunk import ALIGNMENT, Geometry, geometry
from kvfs.testing import sized_namespace
from kvfs.tiers.nvme import Slice, slices

KIB, MIB = 1 << 10, 1 << 20


def cut(payload_bytes: int, num_layers: int, num_chunks: int) -> tuple[Geometry, list[Slice]]:
    geo = geometry(sized_namespace(payload_bytes, num_layers=num_layers), 16)
    return geo, list(slices(geo, num_chunks))


@pytest.mark.parametrize("num_chunks", [1, 3, 64, 1000])
@pytest.mark.parametrize(
    ("payload_bytes", "num_layers"), [(64 * KIB, 4), (MIB, 16), (3 * MIB, 28), (7 * MIB, 3), (32 * MIB, 32)]
)
def test_pieces_hold_each_layer_once_and_every_byte(payload_bytes: int, num_layers: int, num_chunks: int) -> None:
    """Whole layers in order, at offsets that direct I/O takes; neighbours share an os_page at most."""
    geo, pieces = cut(payload_bytes, num_layers, num_chunks)
    assert (pieces[0].begin, pieces[0].first_layer) == (0, 0)
    assert (pieces[-1].end, pieces[-1].layers) == (geo.file_bytes, num_layers)
    for piece in pieces:
        assert piece.begin % ALIGNMENT == piece.end % ALIGNMENT == 0
        assert piece.first_layer < piece.layers
        if piece.first_layer:
            assert piece.begin <= geo.layer_range(piece.first_layer)[0]
        assert geo.layer_range(piece.layers - 1)[1] <= piece.end
    for one, other in pairwise(pieces):
        assert one.layers == other.first_layer
        assert 0 <= one.end - other.begin <= ALIGNMENT


def test_of_many_small_chunks_the_first_layer_comes_by_itself() -> None:
    """An engine begins with it; the fewer the chunks, the fewer the pieces, since each is told of."""
    numbers = [len(cut(MIB, 16, num_chunks)[1]) for num_chunks in (1, 4, 64)]
    assert numbers[0] == 1
    assert numbers == sorted(set(numbers))
    pieces = cut(MIB, 16, 64)[1]
    assert pieces[0].layers == 1
    assert max(piece.layers - piece.first_layer for piece in pieces) <= 3


def test_no_piece_is_longer_than_it_has_to_be() -> None:
    """Two MiB, unless one layer is longer."""
    _, pieces = cut(32 * MIB, 32, 64)
    assert pieces[0].layers == 1
    assert max(piece.end - piece.begin for piece in pieces) <= 2 * MIB + ALIGNMENT
    assert [piece.layers for piece in cut(7 * 4 * MIB, 7, 64)[1]] == list(range(1, 8))
