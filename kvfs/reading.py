"""Reading chunks for whoever holds a lease on them, out of RAM or off the volume; what is proven bad is dropped.

Concurrency: belongs to the event loop's thread.
"""

from __future__ import annotations

import logging

import trio

from kvfs.catalog import NOWHERE, Chunk
from kvfs.chunk import Facts, geometry, parse_header, verify_payload
from kvfs.cold_reads import ColdReads
from kvfs.errors import CorruptChunk, UnavailableError
from kvfs.promotion import drop_corrupt
from kvfs.residency import Residency
from kvfs.tiers.nvme import Slice, check_header
from kvfs.volume import aligned_buffer

log = logging.getLogger(__name__)


class Reading:
    """The reads of one store; `copies` bounds the threads that look at what is in RAM."""

    def __init__(self, residency: Residency, cold: ColdReads | None, copies: trio.CapacityLimiter) -> None:
        self._residency = residency
        self._cold = cold
        self._copies = copies

    async def read(self, chunk: Chunk, offset: int, size: int) -> memoryview:
        """See `Store.read`."""
        end = min(offset + size, chunk.length)
        if chunk.ram != NOWHERE:
            return self._residency.ram.view(chunk.ram + offset, max(0, end - offset))
        if self._cold is None or chunk.nvme == NOWHERE:
            raise UnavailableError(f"chunk {chunk.key.hex()} has no bytes")
        return (await self._cold.read(chunk))[offset:end]

    async def facts(self, chunk: Chunk) -> Facts:
        """See `Store.facts`."""
        geo = geometry(chunk.table.namespace, chunk.num_tokens)
        nvme = self._residency.nvme
        if chunk.ram != NOWHERE or nvme is None:
            return parse_header(geo.namespace, await self.read(chunk, 0, geo.header_bytes))[1]
        header = aligned_buffer(geo.header_bytes)
        try:
            await nvme.of(chunk).tier.read(chunk, Slice(0, geo.header_bytes, 0, 0), header)
            return check_header(chunk, header)[1]
        except CorruptChunk as error:
            drop_corrupt(self._residency, chunk, error)
            raise
        except OSError as error:
            self._residency.counters.io_errors += 1
            raise UnavailableError(f"chunk {chunk.key.hex()} could not be read: {error}") from error

    async def examine(self, chunk: Chunk) -> None:
        """See `Store.examine`; the caller holds a lease."""
        try:
            if chunk.ram != NOWHERE:
                view = self._residency.ram.view(chunk.ram, chunk.length)
                await trio.to_thread.run_sync(_verify_whole, chunk, view, limiter=self._copies)
            elif self._cold is not None:
                self._cold.forget(chunk)
                await self._cold.read(chunk)
        except CorruptChunk as error:
            drop_corrupt(self._residency, chunk, error)
        except UnavailableError as error:
            log.warning("chunk %s could not be examined: %s", chunk.key.hex(), error)


def _verify_whole(chunk: Chunk, view: memoryview) -> None:
    geo, facts = check_header(chunk, view)
    verify_payload(geo, facts, view)
