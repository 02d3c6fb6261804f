"""Promotion: reading chunks from NVMe into RAM, verified, in parallel, each at most once at a time.

The chunks of one load are read layer by layer across all of them, so that an engine can begin with the first layers
while the last are still on their way.

Concurrency: bookkeeping on the event loop's thread, transfers in the threads of the chunk's volume. A promotion goes on when
whoever asked for it is gone: the bytes are as good for the next.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

import trio

from kvfs.catalog import Chunk
from kvfs.errors import CorruptChunk, KvfsError, UnavailableError
from kvfs.residency import Residency
from kvfs.stripes import Stripes
from kvfs.tiers.nvme import NvmeTier, Slice, verify

log = logging.getLogger(__name__)


class Promotion:
    """One chunk on its way into RAM.

    Attributes:
        chunk: leased until the promotion ends; offset: where in the arena it goes; buffer: the same bytes.
        pieces: what is read, in order; the header is in the first.
        layers: how many layers from the first are there, verified.
        error: why it failed, once it did.
        num_left: pieces that are not read yet, or given up.
        watchers: called with the promotion when a piece of it has ended.
        has_header, has_failed: set, from a thread, when the first piece is there or given up; when any was given up.
    """

    def __init__(self, chunk: Chunk, offset: int, buffer: memoryview, pieces: Sequence[Slice]) -> None:
        self.chunk = chunk
        self.offset = offset
        self.buffer = buffer
        self.pieces = pieces
        self.layers = 0
        self.error: KvfsError | None = None
        self.num_left = len(self.pieces)
        self.watchers: set[Callable[[Promotion], None]] = set()
        self.has_header = threading.Event()
        self.has_failed = False
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
        for watcher in self.watchers:
            watcher(self)


class Promoter:
    """Starts promotions and finds those that are under way."""

    def __init__(self, residency: Residency, nvme: Stripes, nursery: trio.Nursery) -> None:
        self._residency = residency
        self._nvme = nvme
        self._nursery = nursery
        self._under_way: dict[Chunk, Promotion] = {}

    def is_under_way(self, chunk: Chunk) -> bool:
        """Whether this chunk is on its way into RAM."""
        return chunk in self._under_way

    def start(
        self, chunks: Iterable[Chunk], *, is_asked_for: bool = True, spared: Collection[Chunk] = ()
    ) -> list[Promotion | None]:
        """A promotion for each chunk, which is on NVMe only; None where RAM has no room for it now.

        That is counted, unless nobody waits for them yet. What is `spared` is not evicted for them.
        """
        promotions: list[Promotion | None] = []
        begun: list[Promotion] = []
        for chunk in chunks:
            promotion = self._under_way.get(chunk)
            if promotion is None:
                self._residency.lease(chunk)  # making room must not evict what is to be read
                offset = self._residency.room.reserve_ram(chunk.length, spared=spared)
                if offset is None:
                    self._residency.counters.promotions_refused += is_asked_for
                    self._residency.release(chunk)
                else:
                    buffer = self._residency.ram.view(offset, chunk.length)
                    pieces = self._nvme.of(chunk).tier.pieces(chunk)
                    promotion = self._under_way[chunk] = Promotion(chunk, offset, buffer, pieces)
                    begun.append(promotion)
            promotions.append(promotion)
        if begun:
            for stripe in self._nvme.holding([promotion.chunk for promotion in begun]):
                there = [promotion for promotion in begun if promotion.chunk.volume == stripe.number]
                self._nursery.start_soon(self._read, stripe.tier, there)
        return promotions

    async def _read(self, tier: NvmeTier, promotions: list[Promotion]) -> None:
        """Read all pieces from one volume, the first of every chunk before the second of any."""
        queue: deque[tuple[Promotion, int]] = deque()
        for number in range(max(len(promotion.pieces) for promotion in promotions)):
            queue.extend((promotion, number) for promotion in promotions if number < len(promotion.pieces))
        token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as nursery:
            for _ in range(min(tier.num_threads, len(queue))):
                nursery.start_soon(tier.in_thread, self._read_pieces, tier, queue, token)
        if any(self._under_way.get(promotion.chunk) is promotion for promotion in promotions):
            raise AssertionError("a promotion never ended")

    def _read_pieces(self, tier: NvmeTier, queue: deque[tuple[Promotion, int]], token: trio.lowlevel.TrioToken) -> None:
        """In a thread: read and verify piece after piece; hopping back for each would cost a tenth of the speed."""
        while True:
            try:
                promotion, number = queue.popleft()
            except IndexError:
                trio.from_thread.run_sync(int)  # what was handed to the loop before this has been carried out
                return
            error = self._read_piece(tier, promotion, number)
            token.run_sync_soon(self._piece_ended, promotion, number, error)

    def _read_piece(self, tier: NvmeTier, promotion: Promotion, number: int) -> KvfsError | None:
        chunk, piece = promotion.chunk, promotion.pieces[number]
        try:
            if not promotion.has_failed:
                tier.read_now(chunk, piece, promotion.buffer)
                if number:  # the checksums are in the header, and another thread may still be reading that
                    promotion.has_header.wait()
                if not promotion.has_failed:
                    verify(chunk, piece, promotion.buffer)
        except CorruptChunk as error:
            promotion.has_failed = True
            return error
        except OSError as error:
            promotion.has_failed = True  # nobody may take a header that could not be read for a wrong one
            log.error("chunk %s could not be read: %s", chunk.key.hex(), error)
            return UnavailableError(f"chunk {chunk.key.hex()} could not be read: {error}")
        finally:
            if number == 0:
                promotion.has_header.set()
        return None

    def _piece_ended(self, promotion: Promotion, number: int, error: KvfsError | None) -> None:
        if error is not None and promotion.error is None:
            promotion.error = error
            self._residency.counters.io_errors += isinstance(error, UnavailableError)
        if promotion.error is None:
            promotion.arrived(number)
        promotion.num_left -= 1
        if promotion.num_left == 0:
            self._finish(promotion)
        promotion.notify()

    def _finish(self, promotion: Promotion) -> None:
        """The last piece is there, or given up; nothing touches the extent any more."""
        chunk, residency = promotion.chunk, self._residency
        del self._under_way[chunk]
        if promotion.error is None:
            residency.counters.promotions += 1
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
