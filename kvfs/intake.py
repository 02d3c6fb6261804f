"""Intake: a payload that a client handed over, on its way to being a chunk in the arena.

What comes through a window is copied, and each layer of the copy checked against the client's checksum, or its checksum
taken where the client sent none. A payload that was written in place is not read again if its client sealed it: such a
client could write there at any later time as well, and whoever loads the chunk looks for himself.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

import xxhash

from kvfs import hashing
from kvfs.catalog import ChunkTable
from kvfs.chunk import Facts, Geometry, build_header, layer_checksums
from kvfs.copying import PIECE_BYTES, runs
from kvfs.keys import Key
from kvfs.messages import NewChunk


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
    """A reserved chunk whose client says that its payload is complete and has these checksums, one a layer, or none."""

    reservation: Reservation
    source: Source
    checksums: tuple[int, ...]

    @property
    def is_at_hand(self) -> bool:
        """Whether nothing is left to do with the payload: `receive` takes microseconds."""
        return isinstance(self.source, InPlace) and bool(self.checksums)


def receive(geo: Geometry, facts: Facts, source: Source, target: memoryview) -> bool:
    """Make `target`, an extent of the arena, the chunk whose payload lies in `source`.

    Returns whether every layer has the checksum that `facts` gives for it, if it gives any. Runs in a thread, unless
    `is_at_hand`. Raises OSError, and UsageError for facts that do not fit the geometry.
    """
    payload = target[geo.header_bytes : geo.header_bytes + geo.payload_bytes]
    if isinstance(source, WindowSlot):
        found = _copy(geo, source, payload)
    else:
        found = facts.checksums or layer_checksums(geo, payload)
    if facts.checksums and facts.checksums != found:
        return False
    if geo.pad_bytes:
        target[geo.header_bytes + geo.payload_bytes : geo.file_bytes] = bytes(geo.pad_bytes)
    whole = Facts(facts.chain, facts.parent, facts.position, facts.num_tokens, facts.created_ns, found)
    target[: geo.header_bytes] = build_header(geo, whole)
    return True


def _copy(geo: Geometry, source: WindowSlot, payload: memoryview) -> tuple[int, ...]:
    """Copy all layers from a window; returns the checksums of the copy."""
    bounds = geo.bounds
    found: list[int] = []
    for first, stop in runs(geo, 0, len(geo.layers)):
        begin, end = bounds[first], bounds[stop]
        if end - begin > PIECE_BYTES:
            found.append(_copy_long(source, begin, end, payload))
        else:
            _read_exactly(source.fd, payload[begin:end], source.offset + begin)
            found += hashing.checksums(payload, bounds[first : stop + 1])
    return tuple(found)


def _copy_long(source: WindowSlot, begin: int, end: int, payload: memoryview) -> int:
    """Copy a layer that is longer than a piece; returns the checksum of the copy."""
    digest = xxhash.xxh3_64()
    for start in range(begin, end, PIECE_BYTES):
        piece = payload[start : min(start + PIECE_BYTES, end)]
        _read_exactly(source.fd, piece, source.offset + start)
        digest.update(piece)
    return digest.intdigest()


def _read_exactly(fd: int, piece: memoryview, offset: int) -> None:
    done = 0
    while done < len(piece):
        count = os.preadv(fd, [piece[done:]], offset + done)
        if count == 0:
            raise OSError(errno.EIO, "the window ends early")
        done += count
