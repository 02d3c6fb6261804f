"""Scanning a volume for chunks: everything that a header begins, whose every byte is as its header says.

A chunk may begin at every 4096th byte. Since each byte of it is proven, no two that are found overlap: one that was
written over in part is not whole. What lies in a whole chunk is its payload, and is not looked at for headers.

Concurrency: a generator for one thread; it reads ahead in threads of its own.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvfs.chunk import ALIGNMENT, Facts, geometry, parse_header, read_claim, verify_payload
from kvfs.errors import CorruptChunk, UsageError
from kvfs.namespace import Namespace
from kvfs.volume import Volume, align_down, aligned_buffer

Place = tuple[str, int, int]
"""Fingerprint, rank, number of ranks: what a header says of its namespace."""

_SEGMENT_BYTES = 64 << 20
_PIECE_BYTES = 4 << 20
_SMALL_PIECE_BYTES = 64 << 10  # what is given up around an unreadable place
_THREADS = 4


class Track(Protocol):
    """Who is told how far long work has come, and may end it with an exception."""

    def begin(self, what: str, total_bytes: int) -> None:
        """Work on so many bytes begins."""

    def advance(self, num_bytes: int) -> None:
        """So many more are done."""


class Found(NamedTuple):
    """A whole chunk: bytes `offset` to `offset + length` of the volume."""

    offset: int
    length: int
    namespace: Namespace
    facts: Facts


@dataclass
class Tally:
    """What a scan met beside whole chunks.

    Attributes:
        torn: headers behind which not every byte is as they say: written over, or damaged.
        unknown: headers by namespace of which nobody knows what its chunks are made of.
        unreadable: (offset, length) of what the device did not give.
    """

    torn: int = 0
    unknown: Counter[Place] = field(default_factory=Counter)
    unreadable: list[tuple[int, int]] = field(default_factory=list)


def by_place(namespaces: Iterable[Namespace]) -> dict[Place, list[Namespace]]:
    """Namespaces as a scan wants them. Two that differ in their layout alone are both tried."""
    found: dict[Place, list[Namespace]] = {}
    for namespace in namespaces:
        known = found.setdefault((namespace.fingerprint_hex, namespace.rank, namespace.num_ranks), [])
        if namespace not in known:
            known.append(namespace)
    return found


def ranges(volume: Volume, reach: int = 0) -> list[tuple[int, int]]:
    """(begin, end) of what is to be read: what was written, and `reach` more, for zeros need not be on the disk."""
    joined: list[tuple[int, int]] = []
    limit = align_down(os.fstat(volume.fd).st_size)
    for begin, end in volume.written():
        end = min(end + reach, limit)
        if joined and begin <= joined[-1][1]:
            begin = joined.pop()[0]
        joined.append((begin, end))
    return joined


def longest(known: Mapping[Place, list[Namespace]]) -> int:
    """Bytes of the longest chunk of these namespaces."""
    each = itertools.chain.from_iterable(known.values())
    return max((geometry(namespace, namespace.identity.tokens_per_chunk).file_bytes for namespace in each), default=0)


def has_chunks(volume: Volume) -> bool:
    """Whether any header of a chunk is on the volume. Reads up to the first one."""
    buffer = aligned_buffer(_PIECE_BYTES)
    for begin, end in ranges(volume):
        for offset in range(begin, end, _PIECE_BYTES):
            view = buffer[: min(_PIECE_BYTES, end - offset)]
            _read(volume, view, offset, [])
            if any(read_claim(view[at : at + ALIGNMENT]) for at in range(0, len(view), ALIGNMENT)):
                return True
    return False


def scan(volume: Volume, known: Mapping[Place, list[Namespace]], tally: Tally, track: Track) -> Iterator[Found]:
    """Every whole chunk on the volume, by offset."""
    reach = longest(known)
    track.begin("reading the volume", sum(end - begin for begin, end in ranges(volume, reach)))
    buffers = (aligned_buffer(reach + _SEGMENT_BYTES), aligned_buffer(reach + _SEGMENT_BYTES))
    with ThreadPoolExecutor(_THREADS, "kvfs-scan") as pool:
        try:
            for begin, end in ranges(volume, reach):
                yield from _Range(volume, known, tally, track.advance, reach, buffers, pool).scan(begin, end)
        finally:
            pool.shutdown(cancel_futures=True)


@dataclass
class _Range:
    """The scan of one range. The buffers are used in turn: one is looked at while the other is filled.

    A segment lies behind the first `reach` bytes of its buffer; there is put what the last segment left, a chunk that
    goes on in this one.
    """

    volume: Volume
    known: Mapping[Place, list[Namespace]]
    tally: Tally
    advance: Callable[[int], None]
    reach: int
    buffers: tuple[memoryview, memoryview]
    pool: ThreadPoolExecutor

    def scan(self, begin: int, end: int) -> Iterator[Found]:
        waiting = self._start(0, begin, end)
        left = 0
        for turn, base in enumerate(range(begin, end, _SEGMENT_BYTES)):
            size = min(_SEGMENT_BYTES, end - base)
            for future in waiting:
                future.result()
            waiting = self._start(1 - turn % 2, base + size, end)
            view = self.buffers[turn % 2][self.reach - left : self.reach + size]
            at = 0
            while at < len(view):
                found = self._look(view[at:], base - left + at, is_last=base + size == end)
                if found is None:
                    at += ALIGNMENT
                elif isinstance(found, Found):
                    yield found
                    at += found.length
                else:
                    break
            left = len(view) - at
            self.buffers[1 - turn % 2][self.reach - left : self.reach] = view[at:]
            self.advance(size)

    def _start(self, turn: int, base: int, end: int) -> list[Future[None]]:
        stop = min(base + _SEGMENT_BYTES, end)
        futures = []
        for offset in range(base, stop, _PIECE_BYTES):
            at = self.reach + offset - base
            view = self.buffers[turn][at : at + min(_PIECE_BYTES, stop - offset)]
            futures.append(self.pool.submit(_read, self.volume, view, offset, self.tally.unreadable))
        return futures

    def _look(self, view: memoryview, offset: int, *, is_last: bool) -> Found | bool | None:
        """The chunk at the begin of `view`; None if there is none, True if more is needed to tell."""
        claim = read_claim(view[:ALIGNMENT])
        if claim is None:
            return None
        place = (claim.fingerprint, claim.rank, claim.num_ranks)
        candidates = self.known.get(place)
        if not candidates:
            self.tally.unknown[place] += 1
            return None
        for namespace in candidates:
            try:
                length = geometry(namespace, claim.num_tokens).file_bytes
                if length > len(view) and length <= self.reach and not is_last:
                    return True
                if length > len(view):
                    continue
                geo, facts = parse_header(namespace, view)
                verify_payload(geo, facts, view)
            except (CorruptChunk, UsageError):
                continue
            return Found(offset, length, namespace, facts)
        self.tally.torn += 1
        return None


def _read(volume: Volume, view: memoryview, offset: int, unreadable: list[tuple[int, int]]) -> None:
    """Read; what the device does not give is zeros, which prove nothing good."""
    try:
        volume.read(view, offset)
    except OSError:
        if len(view) <= _SMALL_PIECE_BYTES:
            view[:] = bytes(len(view))
            unreadable.append((offset, len(view)))
            return
        for at in range(0, len(view), _SMALL_PIECE_BYTES):
            _read(volume, view[at : at + _SMALL_PIECE_BYTES], offset + at, unreadable)
