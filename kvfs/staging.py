"""Staging: files that are being copied in, and how one proves that it is a chunk.

A staged file lies in an extent of the arena, so that a chunk that proves itself is where it belongs already. Staged
bytes are charged to the RAM tier and bounded: half of the arena, 1,024 files. Nobody but whoever writes a file relies
on it; names, and what becomes of a file when it is closed, are the mount's business.

Concurrency: belongs to the event loop's thread. Whoever writes to a file, or proves it, holds its lock; a file that is
dropped meanwhile keeps its extent until the lock is free.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from kvfs.catalog import NOWHERE
from kvfs.chunk import (
    ALIGNMENT,
    MAX_CHUNK_BYTES,
    MAX_HEADER_BYTES,
    Facts,
    Geometry,
    align,
    parse_header,
    verify_payload,
)
from kvfs.errors import CapacityError, CorruptChunk, UnavailableError, UsageError
from kvfs.keys import Key
from kvfs.namespace import Namespace
from kvfs.tiers.ram import RamTier

MAX_FILES = 1024
MAX_FILE_BYTES = MAX_CHUNK_BYTES + MAX_HEADER_BYTES
_MAX_SHARE = 2  # of the arena: a half
_PIECE_BYTES = 1 << 20
_MAX_WAITING = 16  # writers of one file
_MAX_POSITION, MAX_TIME_NS = 1 << 32, 1 << 63  # what the index can hold


class Staged:
    """One file.

    Attributes:
        inode: the chunk that it becomes has the same.
        limit_bytes: what it can have at most; first_bytes: the size of its first extent.
        size: bytes so far.
        position: in its chain, of the chunk that it is to be; None while nobody knows.
        written_s: when that was changed last, on the system's monotonic clock.
        is_over: it was dropped, or has become a chunk.
    """

    __slots__ = (
        "capacity", "first_bytes", "inode", "is_over", "limit_bytes", "lock", "offset", "position", "size",
        "written_s",
    )  # fmt: skip

    def __init__(self, inode: int, limit_bytes: int, first_bytes: int, now_s: float) -> None:
        self.inode = inode
        self.limit_bytes = limit_bytes
        self.first_bytes = first_bytes
        self.size = 0
        self.position: int | None = None
        self.written_s = now_s
        self.is_over = False
        self.lock = trio.Lock()
        self.offset = NOWHERE
        self.capacity = 0


class Staging:
    """All staged files.

    Attributes:
        num_files: how many there are; size_bytes: of their extents.

    `room` gives an extent of the arena for a file at this position of its chain, waiting for a while if it must, or None.
    """

    def __init__(
        self,
        ram: RamTier,
        room: Callable[[int, int | None], Awaitable[int | None]],
        now_s: Callable[[], float],
    ) -> None:
        self.num_files = 0
        self.size_bytes = 0
        self._ram = ram
        self._room = room
        self._now_s = now_s

    def create(self, inode: int, limit_bytes: int, first_bytes: int) -> Staged:
        """A new file, empty. Raises CapacityError if there are too many."""
        if self.num_files >= MAX_FILES:
            raise CapacityError(f"{MAX_FILES} files are being copied in already")
        self.num_files += 1
        return Staged(inode, limit_bytes, first_bytes, self._now_s())

    async def write(self, staged: Staged, offset: int, piece: bytes | memoryview) -> None:
        """Put bytes into a file; a gap before them is zeros.

        Raises CapacityError if there is no room, UsageError past the limit or for a file that is over.
        """
        async with self.holding(staged):
            end = offset + len(piece)
            await self._grow(staged, end)
            view = self._ram.view(staged.offset, staged.capacity)
            if offset > staged.size:
                await _beside(_zero, view[staged.size : offset])
            view[offset:end] = piece
            staged.size = max(staged.size, end)
            staged.written_s = self._now_s()

    async def truncate(self, staged: Staged, size: int) -> None:
        """Cut a file, or lengthen it with zeros. Raises as `write` does."""
        async with self.holding(staged):
            if size > staged.size:
                await self._grow(staged, size)
                await _beside(_zero, self._ram.view(staged.offset, staged.capacity)[staged.size : size])
            staged.size = size
            staged.written_s = self._now_s()

    def read(self, staged: Staged, offset: int, size: int) -> bytes:
        """Bytes of a file; fewer than `size` at its end."""
        return bytes(self.view(staged)[offset : offset + size])

    def view(self, staged: Staged) -> memoryview:
        """The whole content, nothing of a file that is over; for a thread, hold the file meanwhile."""
        return memoryview(b"") if staged.offset == NOWHERE else self._ram.view(staged.offset, staged.size)

    def drop(self, staged: Staged) -> None:
        """A file that nobody wants any more. Its room is given back, at the latest when nobody holds it."""
        if not staged.is_over:
            staged.is_over = True
            self.num_files -= 1
        if not staged.lock.locked():
            self._free(staged)

    def fit(self, staged: Staged) -> None:
        """Give back what the extent of a file that waits has beyond its size."""
        length = align(staged.size)
        if staged.lock.locked() or length >= staged.capacity:
            return
        if not length:
            self._free(staged)
        else:
            self._ram.extents.free(staged.offset + length, staged.capacity - length)
            self.size_bytes -= staged.capacity - length
            staged.capacity = length

    def take(self, staged: Staged, length: int) -> int:
        """The extent of a file that has proven to be a chunk of `length` bytes: from now on it is the caller's."""
        offset = staged.offset
        if staged.capacity > length:
            self._ram.extents.free(offset + length, staged.capacity - length)
        self.size_bytes -= staged.capacity
        staged.offset, staged.capacity, staged.size = NOWHERE, 0, 0
        self.drop(staged)
        return offset

    @asynccontextmanager
    async def holding(self, staged: Staged) -> AsyncIterator[None]:
        """Nobody else writes to the file, and its extent stays. Raises UsageError if it is over."""
        if staged.lock.statistics().tasks_waiting >= _MAX_WAITING:
            raise UnavailableError("too many write to one file")
        async with staged.lock:
            try:
                if staged.is_over:
                    raise UsageError("this file is closed for good")
                yield
            finally:
                if staged.is_over:
                    self._free(staged)

    async def _grow(self, staged: Staged, needed: int) -> None:
        """Make the extent of a file that is held large enough; what is asked for again and again doubles."""
        if needed > staged.limit_bytes:
            raise UsageError(f"no file here is larger than {staged.limit_bytes} bytes")
        if needed <= staged.capacity:
            return
        wanted = max(align(needed), min(2 * staged.capacity, align(staged.limit_bytes)))
        if not staged.capacity:
            wanted = max(wanted, align(staged.first_bytes))
        if self.size_bytes - staged.capacity + wanted > self._ram.extents.capacity // _MAX_SHARE:
            raise CapacityError("half of the RAM tier holds files that are being copied in")
        self.size_bytes += wanted  # before the wait, so that many at once cannot pass the bound
        try:
            offset = await self._room(wanted, staged.position)
        except BaseException:
            self.size_bytes -= wanted
            raise
        if offset is None:
            self.size_bytes -= wanted
            raise CapacityError("there is no room in RAM for what is being copied in")
        target, source = self._ram.view(offset, staged.size), self.view(staged)
        await _beside(_copy, target, source)
        size = staged.size
        self._free(staged)
        staged.size = size
        staged.offset, staged.capacity = offset, wanted
        if staged.is_over:
            raise UsageError("this file was dropped meanwhile")

    def _free(self, staged: Staged) -> None:
        if staged.capacity:
            self._ram.extents.free(staged.offset, staged.capacity)
            self.size_bytes -= staged.capacity
        staged.offset, staged.capacity, staged.size = NOWHERE, 0, 0


async def _beside(work: Callable[..., None], target: memoryview, *sources: memoryview) -> None:
    """Fill memory whose file is held; in a thread if that takes long, so that others are answered meanwhile."""
    if len(target) <= _PIECE_BYTES:
        work(target, *sources)
    else:
        await trio.to_thread.run_sync(work, target, *sources)


def _zero(target: memoryview) -> None:
    zeros = bytes(min(_PIECE_BYTES, len(target)))
    for begin in range(0, len(target), _PIECE_BYTES):
        piece = target[begin : begin + _PIECE_BYTES]
        piece[:] = zeros[: len(piece)]


def _copy(target: memoryview, source: memoryview) -> None:
    for begin in range(0, len(target), _PIECE_BYTES):  # each holds the interpreter for a tenth of a millisecond
        target[begin : begin + _PIECE_BYTES] = source[begin : begin + _PIECE_BYTES]


def prove(namespace: Namespace, key: Key, raw: memoryview) -> tuple[Geometry, Facts]:
    """What a file says of itself that is, byte for byte, the namespace's chunk of this key. May run in a thread.

    Raises CorruptChunk for the first thing that is wrong. Proven is that the bytes are what somebody once stored under
    this key, not that a model computed them.
    """
    if len(raw) < ALIGNMENT:
        raise CorruptChunk(f"it has {len(raw)} bytes, fewer than any chunk's header")
    geo, facts = parse_header(namespace, raw)
    if facts.key != key:
        raise CorruptChunk(f"it is the chunk {facts.key.hex()}")
    if len(raw) != geo.file_bytes:
        raise CorruptChunk(f"it has {len(raw)} bytes instead of {geo.file_bytes}")
    if not (0 <= facts.position < _MAX_POSITION and 0 <= facts.created_ns < MAX_TIME_NS):
        raise CorruptChunk("its position or its time is impossible")
    verify_payload(geo, facts, raw)
    return geo, facts
