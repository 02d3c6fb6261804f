"""The checksum in torch operations is xxh3_64, whatever the length, number and alignment of the pieces."""

from __future__ import annotations

import pytest
import torch
import xxhash

from kvfs.engine_adapters import device_checksum
from kvfs.engine_adapters.device_checksum import checksums

LENGTHS = [
    0, 1, 3, 16, 17, 128, 129, 239, 240, 241, 255, 256, 257, 319, 320, 321, 511, 512, 513, 960, 1023, 1024, 1025, 1087,
    1088, 1089, 2047, 2048, 2049, 3071, 4096, 5000, 8191, 65536, 65537, 100_003, 1 << 18,
]  # fmt: skip


def expected(pieces: torch.Tensor) -> tuple[int, ...]:
    return tuple(xxhash.xxh3_64_intdigest(row.contiguous().numpy().tobytes()) for row in pieces)


def random_bytes(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("num_pieces", [1, 3])
def test_it_is_xxh3(length: int, num_pieces: int) -> None:
    pieces = random_bytes(num_pieces, length, seed=length)
    assert checksums(pieces) == expected(pieces)


def test_every_length_up_to_three_blocks() -> None:
    row = random_bytes(3200)
    for length in range(220, 3200, 7):
        pieces = row[:length].view(1, -1)
        assert checksums(pieces) == expected(pieces), length


@pytest.mark.parametrize("fill", [0, 0xFF, 0x80, 0x7F])
def test_extreme_words(fill: int) -> None:
    """Signed arithmetic on unsigned words would show here."""
    pieces = torch.full((2, 5000), fill, dtype=torch.uint8)
    assert checksums(pieces) == expected(pieces)


@pytest.mark.parametrize("shift", [0, 1, 7, 8, 16, 24])
def test_pieces_that_lie_anywhere(shift: int) -> None:
    """Layers of chunks: rows of a larger tensor, at any offset, at any distance; columns, too."""
    whole = random_bytes(5, 9000)
    for pieces in (
        whole[:, shift : shift + 4567],
        whole[1::2, shift : shift + 4096],
        whole.t()[:, shift % 5 :][:9000:2],
    ):
        assert checksums(pieces) == expected(pieces)


def test_many_pieces_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little is computed at once."""
    pieces = random_bytes(70, 12_345)
    for at_once in (1, 100_000, 1 << 20):
        monkeypatch.setattr(device_checksum, "_AT_ONCE_BYTES", at_once)
        assert checksums(pieces) == expected(pieces)


def test_a_flipped_bit_shows() -> None:
    pieces = random_bytes(1, 4096 * 3 + 5)
    right = checksums(pieces)
    for at in (0, 1023, 1024, 4096 * 3, 4096 * 3 + 4):
        wrong = pieces.clone()
        wrong[0, at] ^= 0x10
        assert checksums(wrong) != right


def test_nothing_and_nonsense() -> None:
    assert checksums(torch.empty(0, 5000, dtype=torch.uint8)) == ()
    for wrong in (torch.zeros(4096, dtype=torch.uint8), torch.zeros(1, 4096, dtype=torch.int8)):
        with pytest.raises(TypeError, match="expected bytes"):
            checksums(wrong)
