"""Ghosts as bytes, for the next start: the youngest of every bucket, bounded altogether.

    "kvfs-ghosts/1", padded to 16 bytes | written_ns u64 | forgotten_ns u64 | buckets u32
    | of each bucket its number of ghosts, u8 | all marks | all facts                         (little-endian; see `ghosts`)

A mark says which bucket it belongs to, and is never looked for in another; so what is packed while ghosts come and go has
each at most once where it is found. 131,072 ghosts take 3 MB.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from kvfs.errors import UsageError
from kvfs.ghosts import FACTS, MARK_BYTES, Ghosts, are_facts

MAX_PACKED = 131_072
_FORMAT = b"kvfs-ghosts/1".ljust(16, b"\0")
_HEADER = struct.Struct("<16sQQI")
_STEP = 256  # buckets
_MOST_IN_A_BUCKET = 0xFF


class Packed(NamedTuple):
    """What was unpacked: when it was packed, when the last ghost went that is not in it, and marks and facts of buckets."""

    written_ns: int
    forgotten_ns: int
    buckets: list[tuple[bytes, bytes]]


def pack(ghosts: Ghosts, written_ns: int, most: int = MAX_PACKED) -> Iterator[bytes | None]:
    """In short steps, each of which gives None; the last gives the bytes."""
    lengths, all_marks, all_facts = bytearray(), bytearray(), bytearray()
    forgotten_ns = ghosts.forgotten_ns
    share = min(max(1, most // ghosts.num_buckets), _MOST_IN_A_BUCKET)
    while (number := len(lengths)) < ghosts.num_buckets:
        marks, facts = ghosts.bucket(number)
        num_kept = min(len(marks) // MARK_BYTES, share, most - len(all_marks) // MARK_BYTES)
        num_left = len(marks) // MARK_BYTES - num_kept
        if num_left:
            forgotten_ns = max(forgotten_ns, FACTS.unpack_from(facts, (num_left - 1) * FACTS.size)[0])
        lengths.append(num_kept)
        all_marks += memoryview(marks)[num_left * MARK_BYTES :]
        all_facts += memoryview(facts)[num_left * FACTS.size :]
        if not number % _STEP:
            yield None
    yield b"".join((_HEADER.pack(_FORMAT, written_ns, forgotten_ns, len(lengths)), lengths, all_marks, all_facts))


def unpack(raw: bytes) -> Packed:
    """Raises UsageError for what is nothing that `pack` gave."""
    if len(raw) < _HEADER.size:
        raise UsageError("there is no header")
    form, written_ns, forgotten_ns, num_buckets = _HEADER.unpack_from(raw)
    lengths = raw[_HEADER.size : _HEADER.size + num_buckets]
    num_ghosts = sum(lengths)
    marks_at = _HEADER.size + len(lengths)
    facts_at = marks_at + num_ghosts * MARK_BYTES
    if form != _FORMAT or not num_buckets or len(lengths) != num_buckets:
        raise UsageError("it is of another version")
    if len(raw) != facts_at + num_ghosts * FACTS.size or not are_facts(memoryview(raw)[facts_at:]):
        raise UsageError("it is damaged")
    buckets = []
    for length in lengths:
        marks_end, facts_end = marks_at + length * MARK_BYTES, facts_at + length * FACTS.size
        buckets.append((raw[marks_at:marks_end], raw[facts_at:facts_end]))
        marks_at, facts_at = marks_end, facts_end
    return Packed(written_ns, forgotten_ns, buckets)
