"""Promotion: reading chunks from NVMe into RAM, verified, in parallel, each at most once at a time.

The chunks of one load are read layer by layer across all of them, so that an engine can begin with the first layers
while the last are still on their way.

Concurrency: bookkeeping on the event loop's thread, transfers in the NVMe tier's threads. A promotion goes on when
whoever asked for it is gone: the bytes are as good for the next.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

import trio

from kvfs.catalog import Chunk
from kvfs.chunk import geometry
from kvfs.errors import CorruptChunk, KvfsError, UnavailableError
from kvfs.residency import Residency
from kvfs.tiers.nvme import NvmeTier, slices

log = logging.getLogger(__name__)


class Promotion:
    """One chunk on its way into RAM.

    Attributes:
        chunk: leased until the promotion ends; offset: where in the arena it goes.
        pieces: what is read, in order; the header is in the first.
        layers: how many layers from the first are there, verified.
        error: why it failed, once it did.
        num_left: pieces that are not read yet, or given up.
    """

    def __init__(self, chunk: Chunk, offset: int) -> None:
        self.chunk = chunk
        self.offset = offset
        self.pieces = list(slices(geometry(chunk.table.namespace, chunk.num_tokens)))
        self.layers = 0
        self.error: KvfsError | None = None
        self.num_left = len(self.pieces)
        self._is_there = [False] * len(self.pieces)
        self._next_piece = 0
        self._changed = trio.Event()

    async def wait_for_layers(self, layers: int) -> None:
        """Return when so many layers are there, or the promotion failed."""
        while self.layers < layers and self.error is None:
            await self._changed.wait()

    def arrived(self, number: int) -> None:
        """A piece is there and verified."""
        self._is_there[number] = True
        while self._next_piece < len(self.pieces) and self._is_there[self._next_piece]:
            self.layers = self.pieces[self._next_piece].layers
            self._next_piece += 1

    def notify(self) -> None:
        """Wake whoever waits."""
        self._changed.set()
        self._changed = trio.Event()


class Promoter:
    """Starts promotions and finds those that are under way."""

    def __init__(self, residency: Residency, nvme: NvmeTier, nursery: trio.Nursery) -> None:
        self._residency = residency
        self._nvme = nvme
        self._nursery = nursery
        self._under_way: dict[Chunk, Promotion] = {}

    def start(self, chunks: Iterable[Chunk]) -> list[Promotion | None]:
        """A promotion for each chunk, which is on NVMe only; None where RAM has no room for it now."""
        promotions: list[Promotion | None] = []
        begun: list[Promotion] = []
        for chunk in chunks:
            promotion = self._under_way.get(chunk)
            if promotion is None:
                self._residency.lease(chunk)  # making room must not evict what is to be read
                offset = self._residency.reserve_ram(chunk.length)
                if offset is None:
                    self._residency.counters.promotions_refused += 1
                    self._residency.release(chunk)
                else:
                    promotion = self._under_way[chunk] = Promotion(chunk, offset)
                    begun.append(promotion)
            promotions.append(promotion)
        if begun:
            self._nursery.start_soon(self._read, begun)
        return promotions

    async def _read(self, promotions: list[Promotion]) -> None:
        """Read all pieces, the first of every chunk before the second of any."""
        queue: deque[tuple[Promotion, int]] = deque()
        for number in range(max(len(promotion.pieces) for promotion in promotions)):
            queue.extend((promotion, number) for promotion in promotions if number < len(promotion.pieces))
        async with trio.open_nursery() as nursery:
            for _ in range(min(self._nvme.num_threads, len(queue))):
                nursery.start_soon(self._work, queue)

    async def _work(self, queue: deque[tuple[Promotion, int]]) -> None:
        while queue:
            promotion, number = queue.popleft()
            if promotion.error is None:
                await self._read_piece(promotion, number)
            promotion.num_left -= 1
            if promotion.num_left == 0:
                self._finish(promotion)
            promotion.notify()

    async def _read_piece(self, promotion: Promotion, number: int) -> None:
        chunk, piece = promotion.chunk, promotion.pieces[number]
        buffer = self._residency.ram.view(promotion.offset, chunk.length)
        try:
            await self._nvme.read(chunk, piece, buffer)
            if number:  # the checksums are in the header, and that is in the first piece
                await promotion.wait_for_layers(1)
            if promotion.error is None:
                await self._nvme.verify(chunk, piece, buffer)
                promotion.arrived(number)
        except CorruptChunk as error:
            promotion.error = error
        except OSError as error:
            log.error("chunk %s could not be read: %s", chunk.key.hex(), error)
            self._residency.counters.io_errors += 1
            promotion.error = UnavailableError(f"chunk {chunk.key.hex()} could not be read: {error}")

    def _finish(self, promotion: Promotion) -> None:
        """The last piece is there, or given up; nothing touches the extent any more."""
        chunk, residency = promotion.chunk, self._residency
        del self._under_way[chunk]
        if promotion.error is None:
            residency.counters.promotions += 1
            chunk.is_proven = True
            residency.ram.place(chunk, promotion.offset)
        else:
            residency.free_with_last_lease(chunk, promotion.offset)
            if isinstance(promotion.error, CorruptChunk):
                drop_corrupt(residency, chunk, promotion.error)
        residency.release(chunk)


def drop_corrupt(residency: Residency, chunk: Chunk, error: CorruptChunk) -> None:
    """A chunk is proven bad: count it, say so, and drop it."""
    if chunk.is_removed:
        return
    log.error("chunk %s is corrupt and was dropped: %s", chunk.key.hex(), error)
    residency.counters.corrupt += 1
    residency.discard(chunk, "corrupt")
