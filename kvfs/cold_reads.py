"""Cold reads: serving a file read of a chunk that is on NVMe only, without disturbing the RAM tier.

``cp`` and ``grep`` must not teach the policy nor push out what engines use. A chunk that is read through the mount is
read whole into a buffer of its own and verified before its first byte is served; the last few buffers are kept.

Concurrency: belongs to the event loop's thread; single flight by the event in each buffer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import trio

from kvfs.catalog import NOWHERE, Chunk
from kvfs.chunk import geometry
from kvfs.errors import CorruptChunk, KvfsError, UnavailableError
from kvfs.promotion import drop_corrupt
from kvfs.residency import Residency
from kvfs.stripes import Stripes
from kvfs.tiers.nvme import slices
from kvfs.volume import aligned_buffer

MAX_BYTES = 256 << 20


class _Buffer:
    """One chunk's file, once it is ready; without memory before its turn came."""

    def __init__(self) -> None:
        self.view = memoryview(b"")
        self.ready = trio.Event()
        self.error: KvfsError | None = None


class ColdReads:
    """A small cache of verified chunk files outside the arena.

    What is kept and what is being read take `MAX_BYTES` together, or one chunk that is larger; more reads wait in line.
    """

    def __init__(self, residency: Residency, nvme: Stripes) -> None:
        self._residency = residency
        self._nvme = nvme
        self._buffers: OrderedDict[Chunk, _Buffer] = OrderedDict()
        self._line = trio.Lock()
        self._reading_bytes = 0
        self._one_ended = trio.Event()

    def forget(self, chunk: Chunk) -> None:
        """Nobody has the chunk open any more."""
        self._buffers.pop(chunk, None)

    def forget_idle(self, chunks: Iterable[Chunk]) -> None:
        """The same for those of `chunks` that nobody holds."""
        if self._buffers:
            for chunk in chunks:
                if not chunk.leases:
                    self.forget(chunk)

    async def read(self, chunk: Chunk) -> memoryview:
        """The whole verified file of a leased chunk. Raises CorruptChunk (it was dropped) or UnavailableError."""
        buffer = self._buffers.get(chunk)
        if buffer is None:
            buffer = self._buffers[chunk] = _Buffer()
            try:
                async with self._room(chunk.length):
                    await self._fill(chunk, buffer)
            finally:
                if not buffer.ready.is_set():
                    if self._buffers.get(chunk) is buffer:
                        del self._buffers[chunk]
                    if buffer.error is None:  # cancelled: whoever waits has to try again
                        buffer.error = UnavailableError("the read was interrupted")
                    buffer.ready.set()
        else:
            self._buffers.move_to_end(chunk)
            await buffer.ready.wait()
        if buffer.error is not None:
            raise buffer.error
        return buffer.view

    @asynccontextmanager
    async def _room(self, length: int) -> AsyncIterator[None]:
        """Wait until `length` bytes may be read, first come, first served."""
        async with self._line:
            while self._reading_bytes and self._reading_bytes + length > MAX_BYTES:
                await self._one_ended.wait()
            self._reading_bytes += length
        self._trim()
        try:
            yield
        finally:
            self._reading_bytes -= length
            self._one_ended.set()
            self._one_ended = trio.Event()

    def _trim(self) -> None:
        """Drop what was kept longest, until it and what is being read fit."""
        kept = [(chunk, buffer) for chunk, buffer in self._buffers.items() if buffer.ready.is_set()]
        size = self._reading_bytes + sum(len(buffer.view) for _, buffer in kept)
        for chunk, buffer in kept:
            if size <= MAX_BYTES:
                break
            del self._buffers[chunk]
            size -= len(buffer.view)

    async def _fill(self, chunk: Chunk, buffer: _Buffer) -> None:
        buffer.view = aligned_buffer(chunk.length)
        tier = self._nvme.of(chunk).tier
        try:
            for piece in slices(geometry(chunk.table.namespace, chunk.num_tokens)):
                await tier.read(chunk, piece, buffer.view)
                await tier.verify(chunk, piece, buffer.view)
        except CorruptChunk as error:
            drop_corrupt(self._residency, chunk, error)
            buffer.error = error
        except OSError as error:
            self._residency.counters.io_errors += 1
            buffer.error = UnavailableError(f"chunk {chunk.key.hex()} could not be read: {error}")
        else:
            chunk.is_proven = chunk.nvme != NOWHERE
            buffer.ready.set()
