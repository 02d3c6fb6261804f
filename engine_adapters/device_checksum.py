"""xxh3_64 of many pieces of equal length at once, computed where their bytes are: on a GPU, or on the host.

So bytes that were read straight into GPU memory are verified there, with the checksums that every chunk has. The
algorithm is that of xxHash 0.8 for inputs above 240 bytes, with its default secret; shorter ones are hashed on the host.

A kibibyte is a *block* of 16 stripes of 8 words. What its stripes add to the 8 accumulators is a plain sum, so all
blocks of all pieces are summed at once, which is nearly all of the work. What happens between two blocks, the scramble,
is not: it is a loop over the blocks of a piece, in which all pieces (the layers of all chunks of a load) go side by
side, 8 words each. On a GPU that loop is made of small kernels, so few long pieces take as long as many. (On two cores of a
CPU: 0.5 GB/s for 128 pieces of 1 MiB, beside 20 of xxhash, and 12 us a block however few pieces; there xxhash is the way.)

All integers are unsigned 64-bit words in int64 tensors, which wrap around in the same way; `_shifted` shifts them as
unsigned ones.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import xxhash

MIN_BYTES = 241
_STRIPE_BYTES = 64
_STRIPES_A_BLOCK = 16
_BLOCK_BYTES = _STRIPE_BYTES * _STRIPES_A_BLOCK
_AT_ONCE_BYTES = 8 << 20  # of input; what is computed from it takes six times as much
_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2, _PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME64_4, _PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_PRIME_AVALANCHE = 0x165667919E3779F9
_START = (_PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3, _PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1)
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_LAST_STRIPE_SECRET_AT = len(_SECRET) - _STRIPE_BYTES - 7
_SCRAMBLE_SECRET_AT = len(_SECRET) - _STRIPE_BYTES
_END_SECRET_AT = 11
Words = npt.NDArray[np.uint64]


def checksums(pieces: torch.Tensor) -> tuple[int, ...]:
    """xxh3_64 of each row of a uint8 tensor [pieces, bytes], on any device. It waits for what is queued there.

    On a GPU it takes memory for 6 × 8 MiB at most, beside the words of one stripe a piece.
    """
    if pieces.dtype != torch.uint8 or pieces.ndim != 2:
        raise TypeError(f"expected bytes [pieces, length], not {pieces.dtype} {list(pieces.shape)}")
    num_pieces, size = pieces.shape
    if not num_pieces:
        return ()
    if size < MIN_BYTES:
        return tuple(xxhash.xxh3_64_intdigest(row.tobytes()) for row in pieces.cpu().numpy())
    with torch.inference_mode():
        sums = _accumulate(pieces)
    return _finished(sums.cpu().numpy().view(np.uint64), size)


def _accumulate(pieces: torch.Tensor) -> torch.Tensor:
    """The accumulators [pieces, 8] after all bytes."""
    device, size = pieces.device, pieces.shape[1]
    num_blocks, num_stripes = (size - 1) // _BLOCK_BYTES, (size - 1) % _BLOCK_BYTES // _STRIPE_BYTES
    keys = torch.stack([_secret(8 * stripe, device) for stripe in range(_STRIPES_A_BLOCK)])
    scramble_key, prime = _secret(_SCRAMBLE_SECRET_AT, device), _PRIME32_1
    sums = _words(_START, device).repeat(len(pieces), 1)
    blocks_at_once = max(1, _AT_ONCE_BYTES // (_BLOCK_BYTES * len(pieces)))
    for first in range(0, num_blocks, blocks_at_once):
        after = min(first + blocks_at_once, num_blocks)
        stripes = _stripes(pieces, first * _BLOCK_BYTES, (after - first) * _STRIPES_A_BLOCK)
        blocks = stripes.view(len(pieces), after - first, _STRIPES_A_BLOCK, 8)
        for added in _contributions(blocks, keys).unbind(1):
            sums += added
            sums ^= _shifted(sums, 47)
            sums ^= scramble_key
            sums *= prime
    if num_stripes:
        rest = _stripes(pieces, num_blocks * _BLOCK_BYTES, num_stripes).unsqueeze(1)
        sums += _contributions(rest, keys[:num_stripes]).squeeze(1)
    last = _stripes(pieces, size - _STRIPE_BYTES, 1).unsqueeze(1)
    sums += _contributions(last, _secret(_LAST_STRIPE_SECRET_AT, device).unsqueeze(0)).squeeze(1)
    return sums


def _stripes(pieces: torch.Tensor, begin: int, num_stripes: int) -> torch.Tensor:
    """Stripes of each piece as words [pieces, stripes, 8], copied only where they do not lie on words."""
    rows = pieces[:, begin : begin + num_stripes * _STRIPE_BYTES]
    is_whole = rows.stride(1) == 1 and rows.storage_offset() % 8 == 0 and rows.stride(0) % 8 == 0
    rows = rows if is_whole and rows.data_ptr() % 8 == 0 else rows.clone(memory_format=torch.contiguous_format)
    words = rows.view(torch.int64)
    return words.as_strided((len(words), num_stripes, 8), (words.stride(0), 8, 1), words.storage_offset())


def _contributions(blocks: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """What each block [pieces, blocks, stripes, 8] adds to the accumulators: [pieces, blocks, 8]."""
    mixed = blocks ^ keys
    product = (mixed & 0xFFFFFFFF) * _shifted(mixed, 32)
    plain = blocks.sum(2)
    return product.sum(2) + plain.view(*plain.shape[:2], 4, 2).flip(-1).view(plain.shape)


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """A shift to the right that brings zeros in."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _words(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.uint64).view(np.int64)).to(device)


def _secret(begin: int, device: torch.device) -> torch.Tensor:
    """8 words of the secret."""
    return torch.from_numpy(np.frombuffer(_SECRET, "<i8", 8, begin).copy()).to(device)


# The end, for 64 bytes a piece, is computed on the host.


def _finished(sums: Words, size: int) -> tuple[int, ...]:
    result: Words = np.full(len(sums), size * _PRIME64_1 & (1 << 64) - 1, dtype=np.uint64)
    secret = np.frombuffer(_SECRET, "<u8", 8, _END_SECRET_AT)
    for pair in range(0, 8, 2):
        result += _folded_product(sums[:, pair] ^ secret[pair], sums[:, pair + 1] ^ secret[pair + 1])
    result = result ^ (result >> np.uint64(37))
    result *= np.uint64(_PRIME_AVALANCHE)
    result = result ^ (result >> np.uint64(32))
    return tuple(map(int, result))


def _folded_product(one: Words, other: Words) -> Words:
    """The two halves of the 128-bit product, xor-ed."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    low_low, low_high = (one & low) * (other & low), (one & low) * (other >> half)
    high_low, high_high = (one >> half) * (other & low), (one >> half) * (other >> half)
    cross = (low_low >> half) + (high_low & low) + low_high
    upper = (high_low >> half) + (cross >> half) + high_high
    lower = (cross << half) | (low_low & low)
    folded: Words = np.bitwise_xor(upper, lower, dtype=np.uint64)
    return folded
