"""Storing: how chunks come in, from engines that reserve room and publish, and from files that are copied in.

Nothing is visible before every byte of it has its checksum, seen here or sealed by a trusted client. Both ways end in the
same step, `_make_visible`.

Concurrency: belongs to the event loop's thread. What a reservation or a staged file holds is nobody else's until then;
threads that receive or prove are never abandoned.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from functools import partial

import trio

from kvfs.catalog import Chunk, ChunkTable
from kvfs.chunk import Facts, Geometry, geometry
from kvfs.config import Settings, format_size
from kvfs.errors import CapacityError, UsageError
from kvfs.intake import Handed, Reservation, receive
from kvfs.keys import ChainHash, Key, key_of
from kvfs.limits import Limits
from kvfs.messages import NewChunk, StoreStatus
from kvfs.residency import Residency
from kvfs.staging import Staged, Staging, prove
from kvfs.system import System
from kvfs.write_behind import WriteBehind

log = logging.getLogger(__name__)

_BYTES_A_THREAD = 64 << 20  # of a publish: a thread more for less takes the core from the engine that fills the next
_ROOM_DEADLINE_S = 20.0  # for a copy that is faster than the volume
_MAX_WAITING_FOR_ROOM = 64
_MAX_BYPASSED = 4096  # so many keys a message has at most


class Storing:
    """Attributes: staging: the files that are being copied in.

    `copies` bounds the threads that copy and verify, `writer` makes chunks durable; None for a RAM cache.
    """

    def __init__(
        self,
        settings: Settings,
        system: System,
        residency: Residency,
        limits: Limits,
        writer: WriteBehind | None,
        copies: trio.CapacityLimiter,
    ) -> None:
        self.staging = Staging(residency.ram, self._wait_for_room, system.monotonic)
        self._settings = settings
        self._system = system
        self._residency = residency
        self._limits = limits
        self._writer = writer
        self._copies = copies
        self._counters = residency.counters
        self._events = residency.events
        self._num_waiting_for_room = 0
        self._bypassed: dict[tuple[ChunkTable, bytes], None] = {}  # the last ones, that were not stored since
        self._above: dict[
            tuple[ChunkTable, bytes], Chunk
        ] = {}  # of what is reserved: the deepest it builds on that is there
        self._looked_at: set[ChunkTable] = set()  # whether their chunks fit

    def forget(self, table: ChunkTable) -> None:
        """A namespace was removed."""
        self._looked_at.discard(table)
        for place in [place for place in self._bypassed if place[0] is table]:
            del self._bypassed[place]

    def reserve(self, table: ChunkTable, new: NewChunk) -> Reservation | StoreStatus:
        """Room in RAM for a chunk to come, or why there is none. Raises UsageError for an impossible one."""
        key = key_of(ChainHash(new.chain))
        geo = geometry(table.namespace, new.num_tokens)
        if key in table.chunks:
            self._counters.stores_existing += 1
            return StoreStatus.EXISTS
        parent = _parent(table, Key(new.parent), new.position)
        if parent is None and (table, new.parent) in self._bypassed:
            self._bypass(table, key, new)
            return StoreStatus.REFUSED
        above = self._above.get((table, new.parent)) if parent is None else parent
        why = None if self._fits(geo) else "too_large"
        if why is None and not self._limits.make_room(table, geo.file_bytes, above):
            why = "quota"
        offset = self._residency.room.reserve_ram(geo.file_bytes, above) if why is None else None
        if offset is None:
            if why is None and self._writer is None:
                self._bypass(table, key, new)
            else:
                self._counters.stores_refused += 1
                self._residency.refusals.add(table.directory, key, self._system.time_ns(), why or "pressure")
            return StoreStatus.REFUSED
        if self._bypassed:
            self._bypassed.pop((table, key), None)
        if above is not None:
            self._above[table, key] = above
        table.reserved_bytes += geo.file_bytes
        return Reservation(table, new, key, geo, offset)

    def _bypass(self, table: ChunkTable, key: Key, new: NewChunk) -> None:
        """A RAM cache does without a chunk that would be the first to go; neither does it take what is built on it.

        That it was asked for counts, so that what is asked for again and again gets its place.
        """
        self._counters.stores_refused += 1
        chunk = Chunk.new(table, key, Key(new.parent), new.position, new.num_tokens, self._system.time_ns(), 0)
        self._residency.departures.bypass(chunk)
        self._bypassed[table, key] = None
        if len(self._bypassed) > _MAX_BYPASSED:
            del self._bypassed[next(iter(self._bypassed))]

    def _fits(self, geo: Geometry) -> bool:
        """Whether every tier is as large as a chunk: one that the volume can never hold would stay dirty for ever."""
        return all(geo.file_bytes <= capacity for _, capacity in self._tier_sizes())

    def _tier_sizes(self) -> Iterator[tuple[str, int]]:
        ram, nvme = self._residency.ram, self._residency.nvme
        yield "the RAM tier", ram.extents.capacity
        for stripe in nvme or ():
            yield (
                f"the volume in {stripe.directory}" if len(nvme or ()) > 1 else "the volume",
                stripe.tier.extents.capacity,
            )

    def check_sizes(self, table: ChunkTable) -> None:
        """Say once of a namespace that its chunks can never be stored, and why."""
        if table in self._looked_at:
            return
        self._looked_at.add(table)
        geo = geometry(table.namespace, table.namespace.identity.tokens_per_chunk)
        limits = [(what, geo.file_bytes, size) for what, size in self._tier_sizes()]
        if self._settings.access != "trusted":  # else engines store in place
            limits.append(("a window", geo.payload_bytes, self._settings.window_bytes))
        small = [f"{what} has {format_size(size)}" for what, needed, size in limits if needed > size]
        if small:
            log.warning(
                "%s: a full chunk has %s, but %s: such chunks are refused",
                table.directory, format_size(geo.file_bytes), " and ".join(small),
            )  # fmt: skip
            self._events.append(
                "too_large", namespace=table.directory, chunk_bytes=geo.file_bytes, reason=" and ".join(small)
            )

    def abort(self, reservation: Reservation) -> None:
        """Give a reservation back."""
        self._counters.stores_aborted += 1
        self._free_reserved(reservation)

    async def publish(self, chunks: Sequence[Handed], turn: trio.Event | None = None) -> list[StoreStatus]:
        """Bring the payloads of chunks to their places, verify them and make them visible, in the order given.

        They are received side by side, and become visible together, after `turn`, which has to come: a chunk that came
        before its parent would head a prefix of its own. The reservations are used up, whatever happens.
        """
        created_ns = self._system.time_ns()
        is_good = [handed.is_at_hand and self._receive(handed, created_ns) for handed in chunks]
        queue = deque([(index, handed) for index, handed in enumerate(chunks) if not handed.is_at_hand])
        num_bytes = sum(handed.reservation.geometry.payload_bytes for _, handed in queue)

        def receive_some() -> None:
            while queue:
                try:
                    index, handed = queue.popleft()
                except IndexError:
                    return
                is_good[index] = self._receive(handed, created_ns)

        with trio.CancelScope(shield=True):  # a thread that writes into the arena is never abandoned
            async with trio.open_nursery() as nursery:
                for _ in range(min(len(queue), int(self._copies.total_tokens), 1 + num_bytes // _BYTES_A_THREAD)):
                    nursery.start_soon(partial(trio.to_thread.run_sync, receive_some, limiter=self._copies))
            if turn is not None:
                await turn.wait()
        return [
            self._settle(handed.reservation, created_ns, good) for handed, good in zip(chunks, is_good, strict=True)
        ]

    def _receive(self, handed: Handed, created_ns: int) -> bool:
        """Whether the payload is there and good; in a thread, unless it is at hand."""
        reservation = handed.reservation
        new, geo = reservation.new, reservation.geometry
        view = self._residency.ram.view(reservation.offset, geo.file_bytes)
        facts = Facts(ChainHash(new.chain), Key(new.parent), new.position, new.num_tokens, created_ns, handed.checksums)
        try:
            return receive(geo, facts, handed.source, view)
        except (OSError, UsageError) as error:
            log.warning("a payload could not be received: %s", error)
            return False

    def _settle(self, reservation: Reservation, created_ns: int, is_good: bool) -> StoreStatus:
        if not is_good:
            self._free_reserved(reservation)
            self._counters.stores_bad += 1
            return StoreStatus.BAD
        if reservation.key in reservation.table.chunks:  # somebody was faster
            self._free_reserved(reservation)
            self._counters.stores_existing += 1
            return StoreStatus.EXISTS
        self._make_visible(reservation, created_ns)
        return StoreStatus.STORED

    def stored(self, chunks: Collection[Chunk]) -> None:
        """These chunks were published together. Call it after the reply is out."""
        self._residency.arrived_in_ram(chunks)

    def _make_visible(self, reservation: Reservation, created_ns: int, inode: int | None = None) -> Chunk:
        new = reservation.new
        self._no_longer_reserved(reservation)
        chunk, moves = self._residency.catalog.create(
            reservation.table, reservation.key, Key(new.parent), new.position, new.num_tokens, created_ns, inode
        )
        self._residency.assign(chunk)
        why_it_went = self._residency.departures.recall(chunk)
        self._counters.stores_returned += why_it_went == "evict"
        self._residency.ram.place(chunk, reservation.offset)
        self._counters.stores_published += 1
        self._counters.published_bytes += chunk.length
        self._events.append("publish", namespace=chunk.table.directory, key=chunk.key.hex())
        self._residency.tell_moves(chunk.table, moves)
        self._residency.tell("published", chunk, chunk.home)
        if self._writer is not None:
            is_asked_for = inode is not None or self._residency.pins.is_held(chunk)  # copied in, or pinned
            self._writer.add(chunk, is_used=why_it_went is not None, is_asked_for=is_asked_for)
        return chunk

    def take_over(self, table: ChunkTable, facts: Facts, offset: int) -> Chunk:
        """A chunk that a daemon before this one had in RAM only, proven, at `offset` of the arena: visible, and dirty."""
        chunk, moves = self._residency.catalog.create(
            table, facts.key, facts.parent, facts.position, facts.num_tokens, facts.created_ns
        )
        self._residency.assign(chunk)
        self._residency.ram.place(chunk, offset)
        self._residency.tell_moves(table, moves)
        self._residency.tell("published", chunk, chunk.home)
        if self._writer is not None:
            self._writer.add(chunk, is_used=False, is_asked_for=self._residency.pins.is_held(chunk))
        return chunk

    def _free_reserved(self, reservation: Reservation) -> None:
        self._residency.ram.extents.free(reservation.offset, reservation.geometry.file_bytes)
        self._no_longer_reserved(reservation)

    def _no_longer_reserved(self, reservation: Reservation) -> None:
        reservation.table.reserved_bytes -= reservation.geometry.file_bytes
        self._above.pop((reservation.table, reservation.key), None)

    # copying in

    async def admit(self, staged: Staged, table: ChunkTable, key: Key) -> Chunk:
        """The chunk that a staged file is, visible now; it may have been there before, then the file is dropped.

        Raises CorruptChunk or UsageError if it is not this chunk, CapacityError if the tiers are too small for it; the
        file stays as it was.
        """
        async with self.staging.holding(staged):
            raw = self.staging.view(staged)
            geo, facts = await trio.to_thread.run_sync(prove, table.namespace, key, raw, limiter=self._copies)
            has_room = (
                key in table.chunks
                or not self._fits(geo)
                or await self._limits.make_room_for_copy(table, geo.file_bytes, facts.parent, facts.position)
            )
            if self._residency.catalog.tables.get(table.directory) is not table:
                raise UsageError(f"{table.directory} was removed meanwhile")
            known = table.chunks.get(key)
            if known is not None:
                self._counters.copies_existing += 1
                self._residency.copied_in.brought(known)
                self.staging.drop(staged)
                return known
            _parent(table, facts.parent, facts.position)  # raises if they contradict each other
            if staged.is_over:
                raise UsageError("the file was dropped meanwhile")
            if not self._fits(geo):
                raise CapacityError("a tier is smaller than this chunk")
            if not has_room:
                raise CapacityError(f"{table.directory} has reached its quota")
            table.reserved_bytes += geo.file_bytes
            new = NewChunk(facts.chain, facts.parent, facts.position, facts.num_tokens)
            reservation = Reservation(table, new, key, geo, self.staging.take(staged, geo.file_bytes))
            chunk = self._make_visible(reservation, facts.created_ns, staged.inode)
            self._residency.copied_in.brought(chunk)
        chunk.last_used_ns = max(chunk.created_ns, self._system.time_ns())  # else it would be old before it is used
        self._counters.copies_admitted += 1
        self.stored([chunk])
        return chunk

    async def _wait_for_room(self, length: int, position: int | None) -> int | None:
        """An extent of the arena for what is being copied in, which unlike an engine can wait for the volume."""
        offset = self._residency.room.reserve_ram_for_copy(length, position)
        writer, ram = self._writer, self._residency.ram
        if offset is not None or writer is None or length > ram.extents.capacity:
            return offset
        if self._num_waiting_for_room >= _MAX_WAITING_FOR_ROOM:
            return None
        self._num_waiting_for_room += 1
        try:
            with trio.move_on_after(_ROOM_DEADLINE_S):
                while offset is None and writer.num_dirty:
                    await writer.progress()
                    offset = self._residency.room.reserve_ram_for_copy(length, position)
        finally:
            self._num_waiting_for_room -= 1
        return offset


def _parent(table: ChunkTable, parent: Key, position: int) -> Chunk | None:
    """The chunk that another names as its parent, if it is there. Raises UsageError if it cannot be that."""
    above = table.chunks.get(parent)
    if above is not None and (
        above.position + 1 != position or above.num_tokens != table.namespace.identity.tokens_per_chunk
    ):
        raise UsageError(f"a chunk at position {position} cannot follow the chunk that it names as its parent")
    return above
