"""Promotion: reading chunks from NVMe into RAM, verified, in parallel, each at most once at a time.

The chunks of one load are read layer by layer across all of them, so that an engine can begin with the first layers
while the last are still on their way.

Concurrency: bookkeeping on the event loop's thread; reads begin there, and are collected and verified in a thread of the
chunk's volume (see `tiers.reading`). A promotion goes on when whoever asked for it is gone: the bytes are as good for the
next.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import trio

from kvfs.catalog import NOWHERE, Chunk
from kvfs.chunk import Facts, Geometry
from kvfs.errors import CorruptChunk, KvfsError, UnavailableError
from kvfs.residency import Residency
from kvfs.stripes import Stripes
from kvfs.tiers.nvme import Slice, check_header, verify_piece
from kvfs.tiers.reading import Read, Reads

log = logging.getLogger(__name__)

_MOST_UNDER_WAY = 2
"""Pieces of one chunk: devices serve all at once, and end them at once, and there would be nothing to copy meanwhile."""

_JUDGED_AT_ONCE = 16
"""Pieces, before they are told of: clients copy these while the next are judged."""


class Promotion:
    """One chunk on its way into RAM.

    Attributes:
        chunk: leased until the promotion ends; offset: where in the arena it goes; buffer: the same bytes.
        pieces: what is read, in order; the header is in the first.
        layers: how many layers from the first are there, verified.
        error: why it failed, once it did.
        num_left: pieces that are not read yet, or given up.
        watchers: called with the promotion when a piece of it has ended.
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
        self.judge = Judge(chunk, buffer, pieces)
        self._is_there = [False] * len(self.pieces)
        self._next_piece = 0
        self._changed: trio.Event | None = None  # if anybody waits for it

    async def wait_for_layers(self, layers: int) -> None:
        """Return when so many layers are there, or the promotion failed."""
        while self.layers < layers and self.error is None:
            await self._change()

    async def wait_for_end(self) -> None:
        """Return when every piece was read, or given up."""
        while self.num_left:
            await self._change()

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = trio.Event()
        await self._changed.wait()

    def arrived(self, number: int) -> None:
        """A piece is there and verified."""
        self._is_there[number] = True
        while self._next_piece < len(self.pieces) and self._is_there[self._next_piece]:
            self.layers = self.pieces[self._next_piece].layers
            self._next_piece += 1

    def notify(self) -> None:
        """Wake whoever waits."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None
        for watcher in self.watchers:
            watcher(self)


class Judge:
    """Verifies the pieces of one chunk, in whatever order and by whichever thread they come.

    Attributes: has_failed: a piece is wrong, or could not be read: nobody needs the others.
    """

    def __init__(self, chunk: Chunk, buffer: memoryview, pieces: Sequence[Slice]) -> None:
        self.has_failed = False
        self._chunk = chunk
        self._buffer = buffer
        self._pieces = pieces
        self._lock = threading.Lock()
        self._has_first = False
        self._waiting: list[tuple[int, OSError | None]] = []  # for the first, which has the checksums
        self._header: tuple[Geometry, Facts] | None = None

    def hear(self, number: int, error: OSError | None) -> list[tuple[int, KvfsError | None]]:
        """A piece was read, or could not be; returns what is judged now, each piece with what is wrong with it."""
        with self._lock:
            self.has_failed = (
                self.has_failed or error is not None
            )  # a header not read must not be taken for a wrong one
            self._waiting.append((number, error))
            self._has_first = self._has_first or number == 0
            if not self._has_first:
                return []
            heard, self._waiting = self._waiting, []
        return [(number, self._verdict(number, error)) for number, error in heard]

    def _verdict(self, number: int, error: OSError | None) -> KvfsError | None:
        key = self._chunk.key.hex()
        if error is not None:
            log.error("chunk %s could not be read: %s", key, error)
            return UnavailableError(f"chunk {key} could not be read: {error}")
        if self.has_failed:
            return None
        try:
            if self._header is None:
                self._header = check_header(self._chunk, self._buffer)
            verify_piece(*self._header, self._pieces[number], self._buffer)
        except CorruptChunk as wrong:
            self.has_failed = True
            return wrong
        return None


class _PieceRead(Read):
    """A piece of a promotion that is to be read."""

    __slots__ = ("number", "promotion")

    def __init__(self, promotion: Promotion, number: int) -> None:
        piece = promotion.pieces[number]
        super().__init__(promotion.buffer[piece.begin : piece.end], promotion.chunk.nvme + piece.begin)
        self.promotion = promotion
        self.number = number

    def is_given_up(self) -> bool:
        return self.promotion.judge.has_failed


class Promoter:
    """Starts promotions and finds those that are under way."""

    def __init__(self, residency: Residency, nvme: Stripes, nursery: trio.Nursery) -> None:
        self._residency = residency
        self._nvme = nvme
        self._nursery = nursery
        self._under_way: dict[Chunk, Promotion] = {}
        self._token = trio.lowlevel.current_trio_token()
        self._reads = {
            stripe.number: Reads(stripe.tier.volume, stripe.tier.num_threads, self._were_read) for stripe in nvme
        }

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
        chunks = list(chunks)
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
                    pieces = self._nvme.of(chunk).tier.pieces(chunk, len(chunks))
                    promotion = self._under_way[chunk] = Promotion(chunk, offset, buffer, pieces)
                    begun.append(promotion)
            promotions.append(promotion)
        if begun:
            self._nursery.start_soon(_stay, begun)
            for stripe in self._nvme.holding([promotion.chunk for promotion in begun]):
                there = [promotion for promotion in begun if promotion.chunk.volume == stripe.number]
                self._reads[stripe.number].put(_in_order(there), _MOST_UNDER_WAY * len(there))
        return promotions

    def _were_read(self, ended: list[tuple[_PieceRead, OSError | None]]) -> None:
        """In a thread of the volume: judge what was read, and say so to the loop."""
        for begin in range(0, len(ended), _JUDGED_AT_ONCE):
            judged = [
                (read.promotion, number, wrong)
                for read, error in ended[begin : begin + _JUDGED_AT_ONCE]
                for number, wrong in read.promotion.judge.hear(read.number, error)
            ]
            if judged:
                self._token.run_sync_soon(self._pieces_ended, judged)

    def _pieces_ended(self, judged: list[tuple[Promotion, int, KvfsError | None]]) -> None:
        for promotion, number, error in judged:
            self._piece_ended(promotion, number, error)
        for promotion in {promotion for promotion, _, _ in judged}:
            promotion.notify()

    def _piece_ended(self, promotion: Promotion, number: int, error: KvfsError | None) -> None:
        if error is not None and promotion.error is None:
            promotion.error = error
            self._residency.counters.io_errors += isinstance(error, UnavailableError)
        if promotion.error is None:
            promotion.arrived(number)
        promotion.num_left -= 1
        if promotion.num_left == 0:
            self._finish(promotion)

    def _finish(self, promotion: Promotion) -> None:
        """The last piece is there, or given up; nothing touches the extent any more."""
        chunk, residency = promotion.chunk, self._residency
        del self._under_way[chunk]
        if promotion.error is None:
            residency.counters.promotions += 1
            residency.ram.place(chunk, promotion.offset)
            chunk.is_proven = chunk.nvme != NOWHERE
        else:
            residency.free_with_last_lease(chunk, promotion.offset)
            if isinstance(promotion.error, CorruptChunk):
                drop_corrupt(residency, chunk, promotion.error)
        residency.release(chunk)


def _in_order(promotions: Sequence[Promotion]) -> Iterator[_PieceRead]:
    """All pieces, the first of every chunk before the second of any."""
    for number in range(max(len(promotion.pieces) for promotion in promotions)):
        for promotion in promotions:
            if number < len(promotion.pieces):
                yield _PieceRead(promotion, number)


async def _stay(promotions: Sequence[Promotion]) -> None:
    """Return when nothing is read into their memory any more, whatever is cancelled meanwhile."""
    with trio.CancelScope(shield=True):
        for promotion in promotions:
            await promotion.wait_for_end()


def drop_corrupt(residency: Residency, chunk: Chunk, error: CorruptChunk) -> None:
    """A chunk is proven bad: count it, say so, and drop it."""
    if chunk.is_removed:
        return
    log.error("chunk %s is corrupt and was dropped: %s", chunk.key.hex(), error)
    residency.counters.corrupt += 1
    residency.discard(chunk, "corrupt")
