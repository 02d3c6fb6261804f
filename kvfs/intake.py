"""Intake: a payload that a client handed over, on its way to being a chunk in the arena; every layer is verified."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

import xxhash

from kvfs.catalog import ChunkTable
from kvfs.chunk import Facts, Geometry, build_header, checksum
from kvfs.keys import Key
from kvfs.messages import NewChunk

_PIECE_BYTES = 512 << 10  # copy and checksum of one piece stay in the core's cache


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Room for a chunk that a client is about to hand over; `offset` is that of its extent in the arena."""

    table: ChunkTable
    new: NewChunk
    key: Key
    geometry: Geometry
    offset: int


@dataclass(frozen=True, slots=True)
class WindowSlot:
    """A payload in a window, read by descriptor: a client that truncates its window causes an OSError, no signal."""

    fd: int
    offset: int


@dataclass(frozen=True, slots=True)
class InPlace:
    """A payload that its client wrote where it will stay."""


Source = WindowSlot | InPlace


@dataclass(frozen=True, slots=True)
class Handed:
    """A reserved chunk whose client says that its payload is complete and has these checksums, one a layer."""

    reservation: Reservation
    source: Source
    checksums: tuple[int, ...]


def receive(geo: Geometry, facts: Facts, source: Source, target: memoryview) -> bool:
    """Make `target`, an extent of the arena, the chunk whose payload lies in `source`.

    Returns whether every layer has the checksum that `facts` gives for it. Runs in a thread. Raises OSError, and
    UsageError for facts that do not fit the geometry.
    """
    target[: geo.header_bytes] = build_header(geo, facts)
    for layer, expected in enumerate(facts.checksums):
        begin, end = geo.layer_range(layer)
        if isinstance(source, InPlace):
            found = checksum(target[begin:end])
        else:
            found = _copy(source.fd, source.offset - geo.header_bytes, begin, end, target)
        if found != expected:
            return False
    if geo.pad_bytes:
        target[geo.header_bytes + geo.payload_bytes : geo.file_bytes] = bytes(geo.pad_bytes)
    return True


def _copy(fd: int, shift: int, begin: int, end: int, target: memoryview) -> int:
    """Copy one layer from a window; returns its checksum."""
    digest = xxhash.xxh3_64()
    for start in range(begin, end, _PIECE_BYTES):
        piece = target[start : min(start + _PIECE_BYTES, end)]
        _read_exactly(fd, piece, start + shift)
        digest.update(piece)
    return digest.intdigest()


def _read_exactly(fd: int, piece: memoryview, offset: int) -> None:
    done = 0
    while done < len(piece):
        count = os.preadv(fd, [piece[done:]], offset + done)
        if count == 0:
            raise OSError(errno.EIO, "the window ends early")
        done += count
