"""Copying layers and taking their checksums in one go, piece by piece: what was just written is read again from the
core's cache.

The checksum is that of the copy, not of the original, so it proves what its reader will use. It is also the faster
order: 256 KiB copied and then hashed run at 9.0 GB/s beside 10.5 for the bare copy, hashed and then copied at 7.8.

The interpreter is given up for each piece that is copied, so that other threads of an engine go on, and a second one can
copy beside this. It is not given up for the checksum of a short layer: two threads that hand it to each other after every
few microseconds are slower than one (1 MiB chunks of 16 layers: 0.87 of a bare copy by one, beside 1.15).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import xxhash

from kvfs.addresses import address_of
from kvfs.chunk import Geometry

PIECE_BYTES = 512 << 10  # larger ones are slower, also for bare copies (10.9 GB/s against 9.9 for 32 MiB)

_move = ctypes.CDLL(None).memmove
_move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move.restype = ctypes.c_void_p


def runs(geo: Geometry, first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Layers `first` to before `stop`, cut into as many at a time as make a piece, or one that is longer."""
    return _runs(geo.bounds, first, stop)


def _runs(bounds: Sequence[int], first: int, stop: int) -> Iterator[tuple[int, int]]:
    while first < stop:
        after = first + 1
        while after < stop and bounds[after + 1] - bounds[first] <= PIECE_BYTES:
            after += 1
        yield first, after
        first = after


@lru_cache(maxsize=1024)
def _pieces(bounds: tuple[int, ...], first: int, stop: int) -> tuple[tuple[int, int, tuple[slice, ...]], ...]:
    """Begin and end of each run, and its layers, in bytes from where layer `first` begins."""
    base = bounds[first]
    return tuple(
        (
            bounds[layer] - base,
            bounds[after] - base,
            tuple(slice(begin - base, end - base) for begin, end in pairwise(bounds[layer : after + 1])),
        )
        for layer, after in _runs(bounds, first, stop)
    )


def copy_layers(geo: Geometry, first: int, stop: int, source: memoryview, target: memoryview) -> list[int]:
    """Copy layers `first` to before `stop` of a payload; returns the checksum of each, of what is in `target` now.

    Both views are of bytes, begin where layer `first` does, and are at least as long as those layers together; raises
    ValueError for one that is not.
    """
    size = geo.bounds[stop] - geo.bounds[first]
    if source.nbytes < size or target.nbytes < size or target.readonly:
        raise ValueError(f"{size} bytes of {source.nbytes} cannot be copied into {target.nbytes}")
    source_at, target_at = address_of(source), address_of(target)
    take = xxhash.xxh3_64_intdigest
    found: list[int] = []
    for begin, end, layers in _pieces(geo.bounds, first, stop):
        if end - begin > PIECE_BYTES:
            found.append(_copy_long(source_at + begin, target_at + begin, target[begin:end]))
        else:
            _move(target_at + begin, source_at + begin, end - begin)
            found += [take(target[layer]) for layer in layers]
    return found


def _copy_long(source_at: int, target_at: int, target: memoryview) -> int:
    """Copy one layer that is longer than a piece; returns its checksum."""
    digest = xxhash.xxh3_64()
    for start in range(0, len(target), PIECE_BYTES):
        piece = target[start : start + PIECE_BYTES]
        _move(target_at + start, source_at + start, len(piece))
        digest.update(piece)
    return digest.intdigest()
