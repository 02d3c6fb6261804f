"""Copying layers and taking their checksums in one go, piece by piece: what was just written is read again from the
core's cache.

The checksum is that of the copy, not of the original, so it proves what its reader will use. It is also the faster
order: 256 KiB copied and then hashed run at 9.0 GB/s beside 10.5 for the bare copy, hashed and then copied at 7.8.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import xxhash

from kvfs.chunk import Geometry

PIECE_BYTES = 512 << 10  # larger ones are slower, also for bare copies (10.9 GB/s against 9.9 for 32 MiB)


def runs(geo: Geometry, first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Layers `first` to before `stop`, cut into as many at a time as make a piece, or one that is longer."""
    bounds = geo.bounds
    while first < stop:
        after = first + 1
        while after < stop and bounds[after + 1] - bounds[first] <= PIECE_BYTES:
            after += 1
        yield first, after
        first = after


def copy_layers(geo: Geometry, first: int, stop: int, source: memoryview, target: memoryview) -> list[int]:
    """Copy layers `first` to before `stop` of a payload; returns the checksum of each, of what is in `target` now.

    Both views begin where layer `first` does, and are at least as long as those layers together.
    """
    bounds = geo.bounds
    base = bounds[first]
    take = xxhash.xxh3_64_intdigest
    found: list[int] = []
    for layer, after in runs(geo, first, stop):
        begin, end = bounds[layer] - base, bounds[after] - base
        if end - begin > PIECE_BYTES:
            found.append(_copy_long(begin, end, source, target))
        else:
            target[begin:end] = source[begin:end]
            pairs = itertools.pairwise(bounds[layer : after + 1])
            found += [take(target[start - base : behind - base]) for start, behind in pairs]
    return found


def _copy_long(begin: int, end: int, source: memoryview, target: memoryview) -> int:
    """Copy one layer that is longer than a piece; returns its checksum."""
    digest = xxhash.xxh3_64()
    for start in range(begin, end, PIECE_BYTES):
        stop = min(start + PIECE_BYTES, end)
        piece = target[start:stop]
        piece[:] = source[start:stop]
        digest.update(piece)
    return digest.intdigest()
