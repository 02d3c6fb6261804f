"""The NVMe tier: which chunk has which extent of the volume, and direct reads and writes of whole chunks.

Concurrency: the bookkeeping belongs to the event loop's thread; transfers run in at most `num_threads` threads of this
volume's own, so that a device that hangs takes no other thread with it; what loads wait for is read beside them, see
`tiers.reading`. A transfer is never abandoned: its buffer belongs to it until it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import trio

from kvfs import chunk as chunk_format
from kvfs.catalog import NOWHERE, Chunk, ChunkTable
from kvfs.errors import CorruptChunk
from kvfs.extents import ExtentAllocator
from kvfs.kernel_reads import KernelReads
from kvfs.policies import Holding, Policy
from kvfs.volume import SUPERBLOCK_BYTES

_MIN_CUT_BYTES = 320 << 10  # a file up to so long is read at once
_MIN_FIRST_BYTES = 64 << 10
_MIN_SLICE_BYTES = 128 << 10
_MAX_SLICE_BYTES = 2 << 20
_FIRST_TOGETHER_BYTES = 4 << 20
_MIN_TOGETHER_BYTES = 1 << 20
_NUM_SLICES = 8
_MOST_TOGETHER = _FIRST_TOGETHER_BYTES // _MIN_FIRST_BYTES  # of more chunks the pieces are as of so many
_MAX_REMEMBERED = 1024
_VICTIMS_AT_ONCE = 64
_TIMES_WANTED = 4  # so much room is made at once: commits are not free


@dataclass(frozen=True, slots=True)
class Slice:
    """A piece of a chunk file that is read at once: bytes `begin` to `end`, after which layers below `layers` are there."""

    begin: int
    end: int
    first_layer: int
    layers: int


def slices(geo: chunk_format.Geometry, num_chunks: int = 1) -> Iterator[Slice]:
    """The pieces of a chunk file, in order, if so many are read together: whole layers, cut at multiples of 4096.

    All pieces of one number are read before the next, and then an engine can go on with their layers. A computation that
    takes as long as the load ends later than it by what is waited for first and what comes at once: so there are about
    eight pieces, the first ones small (64 chunks of 1 MiB in 16 layers: 1, 1, 2, 2, … layers), as far as a MiB is read in
    between (telling of it takes as long as reading half of one), and none is larger than 2 MiB.

    An os_page that holds the end of one piece and the begin of the next is in both: pieces are read side by side, and
    each has all bytes that its layers are judged by, but for the header.
    """
    least = max(_MIN_SLICE_BYTES, _MIN_TOGETHER_BYTES // num_chunks)
    if geo.file_bytes <= max(_MIN_CUT_BYTES, least * 5 // 4):
        yield Slice(0, geo.file_bytes, 0, len(geo.layers))
        return
    most = max(least, min(_MAX_SLICE_BYTES, geo.payload_bytes // _NUM_SLICES))
    least_first = min(most // 2, max(_MIN_FIRST_BYTES, _FIRST_TOGETHER_BYTES // num_chunks))
    begin = first = 0
    for layer in range(len(geo.layers)):
        end = geo.layer_range(layer)[1]
        is_last = layer == len(geo.layers) - 1
        left = geo.file_bytes - begin
        wanted = min(most, max(least_first, min(begin // 2, max(least, left // 3))))
        if (end - begin >= wanted and geo.file_bytes - end >= least // 2) or is_last:
            stop = geo.file_bytes if is_last else chunk_format.align(end)
            yield Slice(begin, stop, first, layer + 1)
            begin, first = end - end % chunk_format.ALIGNMENT, layer + 1


class Device(Protocol):
    """What the tier needs of a volume, see `kvfs.volume.Volume`."""

    @property
    def capacity(self) -> int:
        """Bytes of the whole, superblock included."""

    @property
    def is_direct(self) -> bool:
        """Whether it is read and written past the page cache."""

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer. Raises OSError."""

    def kernel_reads(self, max_under_way: int) -> KernelReads[Any] | None:
        """A queue for so many reads at once, where there is one."""

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Write the buffers, one behind the other. Raises OSError."""

    def sync(self) -> None:
        """Make what was written durable. Raises OSError."""

    def is_in_place(self) -> bool:
        """Whether its files are where they were."""


class NvmeTier:
    """The volume, what is free in it, and who goes first.

    Attributes:
        volume, extents, policy: chunks in the policy are exactly the visible ones with an extent here.
        is_degraded: the last write failed or does not end; chunks may leave RAM without one.
    """

    def __init__(self, volume: Device, num_threads: int, policy: Policy[Chunk]) -> None:
        self.volume = volume
        self.extents = ExtentAllocator(volume.capacity - SUPERBLOCK_BYTES, base=SUPERBLOCK_BYTES)
        self.policy: Holding[Chunk] = Holding(policy)
        self.is_degraded = False
        self.num_threads = num_threads
        self.limiter = trio.CapacityLimiter(num_threads)
        self._pieces: dict[tuple[ChunkTable, int, int], tuple[Slice, ...]] = {}

    def pieces(self, chunk: Chunk, num_chunks: int) -> tuple[Slice, ...]:
        """How a chunk is read, beside so many; see `slices`."""
        which = (chunk.table, chunk.num_tokens, min(num_chunks, _MOST_TOGETHER))
        known = self._pieces.get(which)
        if known is None:
            if len(self._pieces) >= _MAX_REMEMBERED:
                self._pieces.clear()
            known = tuple(slices(chunk_format.geometry(chunk.table.namespace, chunk.num_tokens), which[2]))
            self._pieces[which] = known
        return known

    async def in_thread(self, work: Callable[..., None], *arguments: object) -> None:
        """Run transfers in one of the tier's threads."""
        await trio.to_thread.run_sync(work, *arguments, limiter=self.limiter)

    async def read(self, chunk: Chunk, piece: Slice, buffer: memoryview) -> None:
        """Read one piece of a leased chunk into its place in `buffer`, as long as the chunk. Raises OSError."""
        await self.in_thread(self.read_now, chunk, piece, buffer)

    def read_now(self, chunk: Chunk, piece: Slice, buffer: memoryview) -> None:
        """The same, by a thread that may block."""
        self.volume.read(buffer[piece.begin : piece.end], chunk.nvme + piece.begin)

    async def verify(self, chunk: Chunk, piece: Slice, buffer: memoryview) -> None:
        """Verify the layers of a piece that was read; the first piece must be there. Raises CorruptChunk."""
        await self.in_thread(verify, chunk, piece, buffer)

    def least_worthy(self, wanted: int, may_go: Callable[[Chunk], bool]) -> list[Chunk]:
        """Who has to go so that `wanted` bytes, and some for those that come next, will be free; empty if nobody may."""
        victims: list[Chunk] = []
        found = 0
        for victim in islice(self.policy.victims(may_go), _VICTIMS_AT_ONCE):
            victims.append(victim)
            found += victim.length
            if found >= _TIMES_WANTED * wanted:
                break
        return victims

    def place(self, chunk: Chunk, offset: int) -> None:
        """The extent at `offset` now durably holds this chunk."""
        chunk.nvme = offset
        chunk.is_proven = True
        if not chunk.is_removed:
            self.policy.insert(chunk)

    def forget(self, chunk: Chunk) -> tuple[int, int] | None:
        """Take the chunk out; returns its extent, which the caller frees when nothing durable names it any more."""
        self.policy.remove(chunk)
        if chunk.nvme == NOWHERE:
            return None
        extent = (chunk.nvme, chunk.length)
        chunk.nvme = NOWHERE
        chunk.is_proven = False
        return extent


def verify(chunk: Chunk, piece: Slice, buffer: memoryview) -> None:
    """See `NvmeTier.verify`."""
    verify_piece(*check_header(chunk, buffer), piece, buffer)


def verify_piece(geo: chunk_format.Geometry, facts: chunk_format.Facts, piece: Slice, buffer: memoryview) -> None:
    """The same, with a header that was looked at already."""
    chunk_format.verify_layers(geo, facts, buffer, piece.first_layer, piece.layers)
    if piece.layers == len(geo.layers):
        chunk_format.verify_pad(geo, buffer)


def check_header(chunk: Chunk, buffer: memoryview) -> tuple[chunk_format.Geometry, chunk_format.Facts]:
    """The facts of the chunk file in `buffer`; raises CorruptChunk unless they are those of this very chunk."""
    geo, facts = chunk_format.parse_header(chunk.table.namespace, buffer)
    if (facts.key, facts.parent, facts.position, facts.num_tokens) != (
        chunk.key, chunk.parent, chunk.position, chunk.num_tokens,
    ):  # fmt: skip
        raise CorruptChunk("these are the bytes of another chunk")
    return geo, facts
