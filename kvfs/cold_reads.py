"""Cold reads: serving a file read of a chunk that is on NVMe only, without disturbing the RAM tier.

``cp`` and ``grep`` must not teach the policy nor push out what engines use. A chunk that is read through the mount is
read whole into a buffer of its own and verified before its first byte is served; the last few buffers are kept.

Concurrency: belongs to the event loop's thread; single flight by the event in each buffer.
"""

from __future__ import annotations

from collections import OrderedDict

import trio

from kvfs.catalog import Chunk
from kvfs.chunk import geometry
from kvfs.errors import CorruptChunk, KvfsError, UnavailableError
from kvfs.promotion import drop_corrupt
from kvfs.residency import Residency
from kvfs.tiers.nvme import NvmeTier, slices
from kvfs.volume import aligned_buffer

MAX_BYTES = 256 << 20


class _Buffer:
    def __init__(self, length: int) -> None:
        self.view = aligned_buffer(length)
        self.ready = trio.Event()
        self.error: KvfsError | None = None


class ColdReads:
    """A small cache of verified chunk files outside the arena, at most `MAX_BYTES` and one chunk large."""

    def __init__(self, residency: Residency, nvme: NvmeTier) -> None:
        self._residency = residency
        self._nvme = nvme
        self._buffers: OrderedDict[Chunk, _Buffer] = OrderedDict()

    def forget(self, chunk: Chunk) -> None:
        """Nobody has the chunk open any more."""
        self._buffers.pop(chunk, None)

    async def read(self, chunk: Chunk) -> memoryview:
        """The whole verified file of a leased chunk. Raises CorruptChunk (it was dropped) or UnavailableError."""
        buffer = self._buffers.get(chunk)
        if buffer is None:
            buffer = self._buffers[chunk] = _Buffer(chunk.length)
            self._trim()
            try:
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

    def _trim(self) -> None:
        size = sum(len(buffer.view) for buffer in self._buffers.values())
        while size > MAX_BYTES and len(self._buffers) > 1:
            _, dropped = self._buffers.popitem(last=False)
            size -= len(dropped.view)

    async def _fill(self, chunk: Chunk, buffer: _Buffer) -> None:
        try:
            for piece in slices(geometry(chunk.table.namespace, chunk.num_tokens)):
                await self._nvme.read(chunk, piece, buffer.view)
                await self._nvme.verify(chunk, piece, buffer.view)
        except CorruptChunk as error:
            drop_corrupt(self._residency, chunk, error)
            buffer.error = error
        except OSError as error:
            self._residency.counters.io_errors += 1
            buffer.error = UnavailableError(f"chunk {chunk.key.hex()} could not be read: {error}")
        else:
            buffer.ready.set()
