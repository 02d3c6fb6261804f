"""The store: the one orchestrator above catalog, tiers, index and policies. It knows neither FUSE nor sockets.

`kvfs.opening` gives a running store; leaving its context flushes what is dirty. What takes time comes in pairs, and
holding the first half is what protects: `reserve` → `publish` | `abort`, `lease` → `release`.

Concurrency: all methods belong to the event loop's thread. Those that are not `async` never wait, and leave everything
consistent; after each `await` inside an `async` one the chunk may have been removed, which its lease makes harmless.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial

import trio

from kvfs import namespace as namespaces
from kvfs.catalog import NOWHERE, Catalog, Chunk, ChunkTable
from kvfs.chunk import Facts, Geometry, geometry, parse_header, verify_payload
from kvfs.cold_reads import ColdReads
from kvfs.config import Settings, format_size
from kvfs.errors import CapacityError, CorruptChunk, UnavailableError, UsageError
from kvfs.index import NamespaceRow
from kvfs.intake import Handed, Reservation, receive
from kvfs.keys import ChainHash, Key, key_of
from kvfs.limits import Limits
from kvfs.messages import NewChunk, StoreStatus, Tier
from kvfs.metrics import Counters, render
from kvfs.namespace import Namespace
from kvfs.promotion import Promoter, Promotion, drop_corrupt
from kvfs.residency import NameObserver, Observer, Residency
from kvfs.staging import Staged, Staging, prove
from kvfs.statistics import Capacity, Statistics, TierStatistics, gauges
from kvfs.system import System
from kvfs.tiers.nvme import Slice, check_header
from kvfs.volume import Volume, aligned_buffer
from kvfs.write_behind import WriteBehind

log = logging.getLogger(__name__)

_SAVE_USE_EVERY_S = 10.0
_FLUSH_AT_END_S = 60.0
_BYTES_A_THREAD = (
    64 << 20
)  # of a publish: a thread more for less takes the core from the engine that is to fill the next
_ROOM_DEADLINE_S = 20.0  # for a copy that is faster than the volume
_MAX_WAITING_FOR_ROOM = 64
_MAX_NAMESPACES = 4096  # each costs a row, a directory and its geometry, and stays when its last chunk goes


class Store:
    """See the module.

    Attributes: settings, catalog, counters, events, arena, volume (None for a RAM cache), limits, staging.
    """

    def __init__(
        self, settings: Settings, system: System, residency: Residency, nursery: trio.Nursery, volume: Volume | None
    ) -> None:
        self.settings = settings
        self.system = system
        self.volume = volume
        self.arena = residency.ram.arena
        self.counters = residency.counters
        self.events = residency.events
        self.limits = Limits(residency, system)
        self._residency = residency
        self._copies = trio.CapacityLimiter(settings.io_threads)
        self._num_waiting_for_room = 0
        self.staging = Staging(residency.ram, self._wait_for_room, system.monotonic)
        self._used: set[Chunk] = set()
        self._last_number = 0  # of a namespace
        self._looked_at: set[ChunkTable] = set()  # whether their chunks fit
        self._promoter: Promoter | None = None
        self._writer: WriteBehind | None = None
        self._cold: ColdReads | None = None
        if residency.nvme is not None and residency.commits is not None:
            self._promoter = Promoter(residency, residency.nvme, nursery)
            self._writer = WriteBehind(residency, residency.nvme, residency.commits)
            self._cold = ColdReads(residency, residency.nvme)

    @property
    def catalog(self) -> Catalog:
        """What is visible. For reading."""
        return self._residency.catalog

    @property
    def on_change(self) -> list[Observer]:
        """Callbacks for chunks that are published, moved or removed."""
        return self._residency.observers

    @property
    def on_renamed(self) -> list[NameObserver]:
        """Callbacks for names of prefix directories that stand for something else, or nothing, now."""
        return self._residency.name_observers

    @property
    def has_nvme(self) -> bool:
        """Whether there is a tier that outlives the daemon."""
        return self.volume is not None

    # namespaces

    def attach(self, namespace: Namespace, created_ns: int | None = None) -> ChunkTable:
        """The table of a namespace; one that is new is as old as said, or as now. Raises UsageError for one that is impossible or contradicts what is stored."""
        namespace.check()
        geometry(namespace, namespace.identity.tokens_per_chunk)
        tables = self.catalog.tables
        is_known = namespace.directory in tables
        if not is_known and len(tables) >= _MAX_NAMESPACES:
            raise UsageError(f"there are {_MAX_NAMESPACES} namespaces already, and no more are taken")
        table = self.catalog.table(namespace, self.system.time_ns() if created_ns is None else created_ns)
        table.num_attached += 1
        if not is_known:
            self._last_number = 1 + max(self._last_number, *(other.number for other in tables.values()))
            table.number = self._last_number
            if self._residency.commits is not None:
                document = namespaces.encode(namespace)
                row = NamespaceRow(table.number, table.directory, document, table.created_ns)
                self._residency.commits.add_namespace(row)
            self.events.append("namespace", namespace=table.directory)
        self._check_sizes(table)
        return table

    def remove_namespace(self, table: ChunkTable) -> None:
        """Forget a namespace that holds no chunks and that nobody is attached to; nothing waits, see `settle`."""
        assert not table.chunks
        assert not table.num_sessions
        self.catalog.forget(table)
        self._looked_at.discard(table)
        self.events.append("namespace_removed", namespace=table.directory)
        if self._residency.commits is not None:
            self._residency.commits.remove_namespace(table.number, table.directory)

    async def settle(self) -> None:
        """Wait until what was removed so far is gone for good. Raises UnavailableError if it may not be."""
        await self._residency.settle()

    # finding and loading

    def match(self, table: ChunkTable, keys: Sequence[Key]) -> list[Chunk]:
        """The chunks of the longest stored prefix of `keys`, leased."""
        found: list[Chunk] = []
        for chunk in map(table.chunks.get, keys):
            if chunk is None:
                break
            found.append(chunk)
        self._residency.lease_all(found)
        self.counters.matches += 1
        self.counters.matched_chunks += len(found)
        return found

    def lease(self, chunk: Chunk) -> None:
        """Hold a chunk's bytes: neither evicted nor reused, even after a removal."""
        self._residency.lease(chunk)

    def release(self, chunk: Chunk) -> None:
        """End one hold."""
        self._residency.release(chunk)
        if not chunk.leases and self._cold is not None:
            self._cold.forget(chunk)

    def lease_all(self, chunks: Collection[Chunk]) -> None:
        """Hold the bytes of many."""
        self._residency.lease_all(chunks)

    def release_all(self, chunks: Collection[Chunk]) -> None:
        """End one hold of each."""
        self._residency.release_all(chunks)
        if self._cold is not None:
            self._cold.forget_idle(chunks)

    def promote(self, chunks: Iterable[Chunk]) -> list[Promotion | None]:
        """Bring leased chunks that are on NVMe only into RAM; None where there is no room."""
        assert self._promoter is not None
        return self._promoter.start(chunks)

    def touch(self, chunks: Sequence[Chunk], sources: Sequence[Tier]) -> None:
        """An engine loaded these chunks of one chain, head first. Call it after the reply is out."""
        now_ns = self.system.time_ns()
        for chunk in chunks:
            chunk.hits += 1
            chunk.last_used_ns = now_ns
        num_ram = sources.count(Tier.RAM)
        self.counters.loads_ram += num_ram
        self.counters.loads_nvme += len(chunks) - num_ram
        self.counters.loaded_bytes += sum([chunk.length for chunk in chunks])
        self._residency.ram.policy.touch(chunks)
        if self._residency.nvme is not None:
            self._residency.nvme.policy.touch(chunks)
            self._used.update(chunks)

    async def read(self, chunk: Chunk, offset: int, size: int) -> memoryview:
        """Verified bytes of the chunk's file; the caller holds a lease. Fewer than `size` at the end.

        Raises CorruptChunk (the chunk was dropped) or UnavailableError.
        """
        end = min(offset + size, chunk.length)
        if chunk.ram != NOWHERE:
            return self._residency.ram.view(chunk.ram + offset, max(0, end - offset))
        if self._cold is None or chunk.nvme == NOWHERE:
            raise UnavailableError(f"chunk {chunk.key.hex()} has no bytes")
        return (await self._cold.read(chunk))[offset:end]

    async def facts(self, chunk: Chunk) -> Facts:
        """What the chunk's header says; the caller holds a lease. Raises as `read` does."""
        geo = geometry(chunk.table.namespace, chunk.num_tokens)
        nvme = self._residency.nvme
        if chunk.ram != NOWHERE or nvme is None:
            return parse_header(geo.namespace, await self.read(chunk, 0, geo.header_bytes))[1]
        header = aligned_buffer(geo.header_bytes)
        try:
            await nvme.read(chunk, Slice(0, geo.header_bytes, 0, 0), header)
            return check_header(chunk, header)[1]
        except CorruptChunk as error:
            drop_corrupt(self._residency, chunk, error)
            raise
        except OSError as error:
            self.counters.io_errors += 1
            raise UnavailableError(f"chunk {chunk.key.hex()} could not be read: {error}") from error

    async def examine(self, chunk: Chunk) -> None:
        """A client says that it read wrong bytes: look, and drop what is proven bad."""
        self.lease(chunk)
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
        finally:
            self.release(chunk)

    # storing

    def reserve(self, table: ChunkTable, new: NewChunk) -> Reservation | StoreStatus:
        """Room in RAM for a chunk to come, or why there is none. Raises UsageError for an impossible one."""
        key = key_of(ChainHash(new.chain))
        geo = geometry(table.namespace, new.num_tokens)
        if key in table.chunks:
            self.counters.stores_existing += 1
            return StoreStatus.EXISTS
        parent = _parent(table, Key(new.parent), new.position)
        fits = self._fits(geo) and self.limits.make_room(table, geo.file_bytes, parent)
        offset = self._residency.reserve_ram(geo.file_bytes) if fits else None
        if offset is None:
            self.counters.stores_refused += 1
            return StoreStatus.REFUSED
        table.reserved_bytes += geo.file_bytes
        return Reservation(table, new, key, geo, offset)

    def _fits(self, geo: Geometry) -> bool:
        """Whether every tier is as large as a chunk: one that the volume can never hold would stay dirty for ever."""
        return all(geo.file_bytes <= capacity for _, capacity in self._tier_sizes())

    def _tier_sizes(self) -> Iterator[tuple[str, int]]:
        ram, nvme = self._residency.ram, self._residency.nvme
        yield "the RAM tier", ram.extents.capacity
        if nvme is not None:
            yield "the volume", nvme.extents.capacity

    def _check_sizes(self, table: ChunkTable) -> None:
        """Say once of a namespace that its chunks can never be stored, and why."""
        if table in self._looked_at:
            return
        self._looked_at.add(table)
        geo = geometry(table.namespace, table.namespace.identity.tokens_per_chunk)
        limits = [(what, geo.file_bytes, size) for what, size in self._tier_sizes()]
        if self.settings.access != "trusted":  # else engines store in place
            limits.append(("a window", geo.payload_bytes, self.settings.window_bytes))
        small = [f"{what} has {format_size(size)}" for what, needed, size in limits if needed > size]
        if small:
            log.warning(
                "%s: a full chunk has %s, but %s: such chunks are refused",
                table.directory, format_size(geo.file_bytes), " and ".join(small),
            )  # fmt: skip
            self.events.append(
                "too_large", namespace=table.directory, chunk_bytes=geo.file_bytes, reason=" and ".join(small)
            )

    def abort(self, reservation: Reservation) -> None:
        """Give a reservation back."""
        self.counters.stores_aborted += 1
        self._free_reserved(reservation)

    async def publish(self, chunks: Sequence[Handed], turn: trio.Event | None = None) -> list[StoreStatus]:
        """Bring the payloads of chunks to their places, verify them and make them visible, in the order given.

        They are received side by side, and become visible together, after `turn`, which has to come: a chunk that came
        before its parent would head a prefix of its own. The reservations are used up, whatever happens.
        """
        created_ns = self.system.time_ns()
        num_bytes = sum(handed.reservation.geometry.payload_bytes for handed in chunks)
        queue = deque(enumerate(chunks))
        is_good = [False] * len(chunks)

        def receive_some() -> None:
            while queue:
                try:
                    index, handed = queue.popleft()
                except IndexError:
                    return
                is_good[index] = self._receive(handed, created_ns)

        with trio.CancelScope(shield=True):  # a thread that writes into the arena is never abandoned
            async with trio.open_nursery() as nursery:
                for _ in range(min(len(chunks), int(self._copies.total_tokens), 1 + num_bytes // _BYTES_A_THREAD)):
                    nursery.start_soon(partial(trio.to_thread.run_sync, receive_some, limiter=self._copies))
            if turn is not None:
                await turn.wait()
        return [
            self._settle(handed.reservation, created_ns, good) for handed, good in zip(chunks, is_good, strict=True)
        ]

    def _receive(self, handed: Handed, created_ns: int) -> bool:
        """In a thread: whether the payload is there and good."""
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
            self.counters.stores_bad += 1
            return StoreStatus.BAD
        if reservation.key in reservation.table.chunks:  # somebody was faster
            self._free_reserved(reservation)
            self.counters.stores_existing += 1
            return StoreStatus.EXISTS
        self._make_visible(reservation, created_ns)
        return StoreStatus.STORED

    def stored(self, chunks: Collection[Chunk]) -> None:
        """These chunks were published together. Call it after the reply is out."""
        self._residency.arrived(self._residency.ram.policy, chunks)

    def _make_visible(self, reservation: Reservation, created_ns: int, inode: int | None = None) -> Chunk:
        new = reservation.new
        reservation.table.reserved_bytes -= reservation.geometry.file_bytes
        chunk, moves = self.catalog.create(
            reservation.table, reservation.key, Key(new.parent), new.position, new.num_tokens, created_ns, inode
        )
        self._residency.ram.place(chunk, reservation.offset)
        ghost = self._residency.ghosts.pop(chunk.table.directory, chunk.key)
        if ghost is not None:
            chunk.hits = ghost.hits
            self.counters.stores_returned += ghost.why == "evict"
        self.counters.stores_published += 1
        self.counters.published_bytes += chunk.length
        self.events.append("publish", namespace=chunk.table.directory, key=chunk.key.hex())
        self._residency.tell_moves(chunk.table, moves)
        self._residency.tell("published", chunk, chunk.home)
        if self._writer is not None:
            self._writer.add(chunk)
        return chunk

    def _free_reserved(self, reservation: Reservation) -> None:
        self._residency.ram.extents.free(reservation.offset, reservation.geometry.file_bytes)
        reservation.table.reserved_bytes -= reservation.geometry.file_bytes

    # copying in

    async def admit(self, staged: Staged, table: ChunkTable, key: Key) -> Chunk:
        """The chunk that a staged file is, visible now; it may have been there before, then the file is dropped.

        Raises CorruptChunk or UsageError if it is not this chunk, CapacityError if the tiers are too small for it; the
        file stays as it was.
        """
        async with self.staging.holding(staged):
            raw = self.staging.view(staged)
            geo, facts = await trio.to_thread.run_sync(prove, table.namespace, key, raw, limiter=self._copies)
            if self.catalog.tables.get(table.directory) is not table:
                raise UsageError(f"{table.directory} was removed meanwhile")
            known = table.chunks.get(key)
            if known is not None:
                self.counters.copies_existing += 1
                self.staging.drop(staged)
                return known
            parent = _parent(table, facts.parent, facts.position)
            if staged.is_over:
                raise UsageError("the file was dropped meanwhile")
            if not self._fits(geo):
                raise CapacityError("a tier is smaller than this chunk")
            if not self.limits.make_room(table, geo.file_bytes, parent):
                raise CapacityError(f"{table.directory} has reached its quota")
            table.reserved_bytes += geo.file_bytes
            new = NewChunk(facts.chain, facts.parent, facts.position, facts.num_tokens)
            reservation = Reservation(table, new, key, geo, self.staging.take(staged, geo.file_bytes))
            chunk = self._make_visible(reservation, facts.created_ns, staged.inode)
        chunk.last_used_ns = max(chunk.created_ns, self.system.time_ns())  # else it would be old before it is used
        self.counters.copies_admitted += 1
        self.stored([chunk])
        return chunk

    async def _wait_for_room(self, length: int) -> int | None:
        """An extent of the arena for what is being copied in, which unlike an engine can wait for the volume."""
        offset = self._residency.reserve_ram(length)
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
                    offset = self._residency.reserve_ram(length)
        finally:
            self._num_waiting_for_room -= 1
        return offset

    # removing

    async def remove(self, chunks: Iterable[Chunk], reason: str = "rm") -> None:
        """Remove chunks from every tier. It is durable when this returns; raises UnavailableError if it may not be.

        A rebuild from the volume does not find them, once nobody holds them.
        """
        for chunk in sorted(chunks, key=lambda chunk: -chunk.position):  # leaves first: they have no descendants
            if not chunk.is_removed:
                self.counters.removals += 1
                self._residency.discard(chunk, reason)
        await self._residency.settle_and_erase()

    # looking

    def capacity(self) -> Capacity:
        """True size and use, as `df` shows them: of NVMe, or of RAM where there is no NVMe."""
        tier = self._residency.nvme or self._residency.ram
        dirty = self._writer.dirty_bytes if self._writer is not None else 0
        used = min(tier.extents.used_bytes + dirty, tier.extents.capacity)
        return Capacity(tier.extents.capacity, used, self.catalog.num_chunks)

    def statistics(self) -> Statistics:
        """A frozen picture of everything that is counted."""
        ram, nvme = self._residency.ram, self._residency.nvme
        counters = {name: getattr(self.counters, name) for name in Counters.__slots__}
        return Statistics(
            num_chunks=self.catalog.num_chunks,
            num_namespaces=len(self.catalog.tables),
            dirty_bytes=self._writer.dirty_bytes if self._writer else 0,
            num_dirty=self._writer.num_dirty if self._writer else 0,
            num_leases=self._residency.num_leases,
            num_ghosts=len(self._residency.ghosts),
            num_pinned=len(self._residency.pins),
            held_bytes=self._residency.pins.held_bytes,
            num_staging=self.staging.num_files,
            staging_bytes=self.staging.size_bytes,
            ram=TierStatistics(ram.extents.capacity, ram.extents.used_bytes, len(ram.policy), self.arena.kind),
            nvme=TierStatistics(
                nvme.extents.capacity, nvme.extents.used_bytes, len(nvme.policy),
                "direct" if nvme.volume.is_direct else "buffered", nvme.is_degraded,
            ) if nvme else None,
            counters=counters,
        )  # fmt: skip

    def metrics_text(self) -> bytes:
        """The same for Prometheus."""
        return render(self.counters, gauges(self.statistics()))

    # life

    async def flush(self, deadline_s: float = _FLUSH_AT_END_S) -> bool:
        """Wait until nothing is dirty; returns False if the deadline came first."""
        if self._writer is None or self._residency.commits is None:
            return True
        with trio.move_on_after(deadline_s):
            await self._writer.drain()
            self._save_use()
            await self._residency.settle_and_erase()
            return True
        return False

    def run_in(self, nursery: trio.Nursery, life: trio.CancelScope) -> None:
        """Start what makes chunks durable; it lives until `life` is cancelled, though its surroundings be cancelled."""

        async def live() -> None:
            with life:
                async with trio.open_nursery() as inner:
                    inner.start_soon(self.limits.run)
                    if self._writer is not None and self._residency.commits is not None:
                        inner.start_soon(self._residency.commits.run)
                        if self._residency.eraser is not None:
                            inner.start_soon(self._residency.eraser.run)
                        inner.start_soon(self._writer.run)
                        inner.start_soon(self._save_use_now_and_then)

        nursery.start_soon(live)

    async def _save_use_now_and_then(self) -> None:
        while True:
            await trio.sleep(_SAVE_USE_EVERY_S)
            self._save_use()

    def _save_use(self) -> None:
        """Hand what was used since the last time to the next transaction."""
        commits = self._residency.commits
        if commits is None:
            return
        dirty: set[Chunk] = set()  # these have no row yet, or one on its way that does not know of the last uses
        for chunk in self._used:
            if chunk.nvme != NOWHERE and not chunk.is_removed:
                commits.used(chunk.last_used_ns, chunk.hits, chunk.table.number, chunk.key)
            elif chunk.is_dirty and not chunk.is_removed:
                dirty.add(chunk)
        self._used = dirty


def _parent(table: ChunkTable, parent: Key, position: int) -> Chunk | None:
    """The chunk that another names as its parent, if it is there. Raises UsageError if it cannot be that."""
    above = table.chunks.get(parent)
    if above is not None and (
        above.position + 1 != position or above.num_tokens != table.namespace.identity.tokens_per_chunk
    ):
        raise UsageError(f"a chunk at position {position} cannot follow the chunk that it names as its parent")
    return above


def _verify_whole(chunk: Chunk, view: memoryview) -> None:
    geo, facts = check_header(chunk, view)
    verify_payload(geo, facts, view)
