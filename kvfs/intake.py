"""Intake: a payload on its way from a client's window into the arena, copied and verified piece by piece."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

import xxhash

from kvfs.catalog import ChunkTable
from kvfs.chunk import Facts, Geometry, build_header
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


def receive(geo: Geometry, facts: Facts, window_fd: int, window_offset: int, target: memoryview) -> bool:
    """Fill `target`, an extent of the arena, with the chunk whose payload lies in the window.

    Returns whether every layer has the checksum that `facts` gives for it. Runs in a thread. The window is read by
    descriptor: a client that truncates it causes an OSError here and no signal. Raises UsageError for facts that do
    not fit the geometry.
    """
    target[: geo.header_bytes] = build_header(geo, facts)
    shift = window_offset - geo.header_bytes
    for layer, expected in enumerate(facts.checksums):
        begin, end = geo.layer_range(layer)
        digest = xxhash.xxh3_64()
        for start in range(begin, end, _PIECE_BYTES):
            piece = target[start : min(start + _PIECE_BYTES, end)]
            _read_exactly(window_fd, piece, start + shift)
            digest.update(piece)
        if digest.intdigest() != expected:
            return False
    if geo.pad_bytes:
        target[geo.header_bytes + geo.payload_bytes : geo.file_bytes] = bytes(geo.pad_bytes)
    return True


def _read_exactly(fd: int, piece: memoryview, offset: int) -> None:
    done = 0
    while done < len(piece):
        count = os.preadv(fd, [piece[done:]], offset + done)
        if count == 0:
            raise OSError(errno.EIO, "the window ends early")
        done += count
