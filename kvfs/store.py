"""The store: the one orchestrator above catalog, tiers, index and policies. It knows neither FUSE nor sockets.

`kvfs.opening` gives a running store; leaving its context flushes what is dirty. What takes time comes in pairs, and
holding the first half is what protects: `reserve` → `publish` | `abort`, `lease` → `release`.

Concurrency: all methods belong to the event loop's thread. Those that are not `async` never wait, and leave everything
consistent; after each `await` inside an `async` one the chunk may have been removed, which its lease makes harmless.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

import trio

from kvfs.admission import Admission
from kvfs.arena import Arena
from kvfs.catalog import NOWHERE, Catalog, Chunk, ChunkTable
from kvfs.chunk import Facts, geometry
from kvfs.cold_reads import ColdReads
from kvfs.config import Settings, VolumeSetting
from kvfs.documents import Document
from kvfs.errors import UnavailableError, UsageError
from kvfs.explaining import explain
from kvfs.heeding import Hints
from kvfs.intake import Handed, Reservation
from kvfs.keys import Key
from kvfs.limits import Limits
from kvfs.messages import Explained, NewChunk, StoreStatus, Tier, Warmth
from kvfs.metrics import render
from kvfs.namespace import Namespace
from kvfs.policy_change import PolicyInForce
from kvfs.prefetch import BY_CHAIN_PRIORITY, Order, Prefetcher, Reason
from kvfs.promotion import Promoter, Promotion
from kvfs.reading import Reading
from kvfs.residency import NameObserver, Observer, Residency
from kvfs.staging import Staged
from kvfs.standing import Standing
from kvfs.statistics import Capacity, Fault, Statistics, Unwritten, gauges
from kvfs.storing import Storing
from kvfs.system import System
from kvfs.volume import Volume
from kvfs.write_behind import WriteBehind

log = logging.getLogger(__name__)

_SAVE_USE_EVERY_S = 10.0
_FLUSH_AT_END_S = 60.0
_FLUSH_OTHERS_S = 5.0
_READ_AHEAD_S = 2.0  # after which a chain is not loaded any more, or was loaded by then
_MAX_NAMESPACES = 4096  # each costs a row, a directory and its geometry, and stays when its last chunk goes


class Store:
    """See the module.

    Attributes: settings, catalog, counters, events, arena, volumes (none for a RAM cache), limits, hints, staging.
    policy: the one in force, which need not be that of the settings any more.
    settle_taken_over: returns when what was removed does not come back by a takeover.
    is_taking_over: whether what a daemon before us left is being looked at.
    unwritten: at the end, what was not on NVMe then; None if all of it was.
    """

    def __init__(
        self,
        settings: Settings,
        system: System,
        residency: Residency,
        nursery: trio.Nursery,
        arena: Arena,
        volumes: Sequence[Volume] = (),
        missing: Sequence[VolumeSetting] = (),
    ) -> None:
        self.settings = settings
        self.system = system
        self.volumes = volumes
        self.arena = arena
        self.counters = residency.counters
        self.events = residency.events
        self.limits = Limits(residency, system)
        policies = [residency.ram.policy, *(stripe.tier.policy for stripe in residency.nvme or ())]
        self.hints = Hints(policies, residency.counters, system.monotonic)
        self.policy = PolicyInForce(residency, settings.policy, system)
        self._residency = residency
        self._copies = trio.CapacityLimiter(settings.io_threads)
        self.settle_taken_over: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        self.is_taking_over = False
        self.unwritten: Unwritten | None = None
        self._used: set[Chunk] = set()
        self._promoter: Promoter | None = None
        self._prefetcher: Prefetcher | None = None
        self._writer: WriteBehind | None = None
        self._cold: ColdReads | None = None
        if residency.nvme is not None:
            self._promoter = Promoter(residency, residency.nvme, nursery)
            self._prefetcher = Prefetcher(residency, self._promoter, system)
            spent = [spent for stripe in residency.nvme if (spent := stripe.commits.spent_before()) is not None]
            last = max(spent, key=lambda spent: (spent.day, spent.num_bytes), default=None)
            admission = Admission(settings.admission, settings.write_budget_bytes, last)
            self._writer = WriteBehind(residency, residency.nvme, admission, system.time_ns)
            self._cold = ColdReads(residency, residency.nvme)
        self._storing = Storing(settings, system, residency, self.limits, self._writer, self._copies)
        self.staging = self._storing.staging
        self._reading = Reading(residency, self._cold, self._copies)
        self._standing = Standing(
            settings, system, residency, self.policy, self.staging, self._writer, missing, arena.kind
        )

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
        return bool(self.volumes)

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
            for stripe in self._residency.nvme or ():
                stripe.put_namespace(table)
            self.events.append("namespace", namespace=table.directory)
            self.remember(table)
        self._storing.check_sizes(table)
        return table

    def remember(self, table: ChunkTable) -> None:
        """Say in the arena what the chunks of a namespace are made of, for whoever takes it over."""
        if self.arena.kept is not None:
            try:
                self.arena.kept.documents.write(Document(table.namespace, table.created_ns))
            except OSError as error:  # its chunks in RAM are lost with the daemon, as those of a memfd are
                log.warning("namespace %s could not be noted in the arena: %s", table.directory, error)

    def remove_namespace(self, table: ChunkTable) -> None:
        """Forget a namespace that holds no chunks and that nobody is attached to; nothing waits, see `settle`."""
        assert not table.chunks
        assert not table.num_sessions
        self.catalog.forget(table)
        self._storing.forget(table)
        self._residency.copied_in.is_over(table)
        self.limits.forget(table)
        self.hints.forget(table)
        self.events.append("namespace_removed", namespace=table.directory)
        if self.arena.kept is not None:
            self.arena.kept.documents.remove(table.directory)
        for stripe in self._residency.nvme or ():
            stripe.remove_namespace(table)

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

    def is_under_way(self, chunk: Chunk) -> bool:
        """Whether a chunk is on its way from NVMe into RAM."""
        return self._promoter is not None and self._promoter.is_under_way(chunk)

    def prefetch(self, chunks: Iterable[Chunk], priority: int, deadline_s: float) -> Order:
        """Bring those of these chunks of one chain that are on NVMe only into RAM, the first first; see `Prefetcher`."""
        assert self._prefetcher is not None
        return self._prefetcher.order(chunks, priority, deadline_s)

    def read_ahead(self, chunks: Sequence[Chunk]) -> Order | None:
        """Bring what a chain is known to go on with, beneath all that requests ask for; see `kvfs.read_ahead`."""
        if self._prefetcher is None or all(chunk.ram != NOWHERE for chunk in chunks):
            return None
        return self._prefetcher.order(chunks, BY_CHAIN_PRIORITY, _READ_AHEAD_S, Reason.CHAIN)

    async def warm(self, chunks: Sequence[Chunk]) -> list[Warmth]:
        """Bring leased chunks into RAM because the operator wants them there; what became of each."""
        if self._prefetcher is None:  # all there is is in RAM
            return [Warmth.GONE if chunk.is_removed else Warmth.THERE for chunk in chunks]
        return await self._prefetcher.warm(chunks)

    def touch(self, chunks: Sequence[Chunk], sources: Sequence[Tier]) -> None:
        """An engine loaded these chunks of one chain, head first. Call it after the reply is out."""
        now_ns = self.system.time_ns()
        for chunk in chunks:
            chunk.hits += 1
            chunk.last_used_ns = now_ns
        if hinted := [chunk for chunk in chunks if chunk.hint is not None]:
            self.hints.used(hinted)
        num_ram = sources.count(Tier.RAM)
        self.counters.loads_ram += num_ram
        self.counters.loads_nvme += len(chunks) - num_ram
        self.counters.loaded_bytes += sum([chunk.length for chunk in chunks])
        if self._prefetcher is not None:
            self._prefetcher.loaded(chunks)
        if self._writer is not None:
            self._writer.used(chunks)
        self._residency.ram.policy.touch(chunks)
        if self._residency.nvme is not None:
            self._residency.nvme.touch(chunks)
            self._used.update(chunks)

    async def read(self, chunk: Chunk, offset: int, size: int) -> memoryview:
        """Verified bytes of the chunk's file; the caller holds a lease. Fewer than `size` at the end.

        Raises CorruptChunk (the chunk was dropped) or UnavailableError.
        """
        return await self._reading.read(chunk, offset, size)

    async def facts(self, chunk: Chunk) -> Facts:
        """What the chunk's header says; the caller holds a lease. Raises as `read` does."""
        return await self._reading.facts(chunk)

    async def examine(self, chunk: Chunk) -> None:
        """A client says that it read wrong bytes: look, and drop what is proven bad."""
        self.lease(chunk)
        try:
            await self._reading.examine(chunk)
        finally:
            self.release(chunk)

    # storing

    def reserve(self, table: ChunkTable, new: NewChunk) -> Reservation | StoreStatus:
        """See `Storing`."""
        return self._storing.reserve(table, new)

    def abort(self, reservation: Reservation) -> None:
        """See `Storing`."""
        self._storing.abort(reservation)

    async def publish(self, chunks: Sequence[Handed], turn: trio.Event | None = None) -> list[StoreStatus]:
        """See `Storing`."""
        return await self._storing.publish(chunks, turn)

    def stored(self, chunks: Collection[Chunk]) -> None:
        """See `Storing`."""
        self.hints.continued(chunks)
        self._storing.stored(chunks)

    async def admit(self, staged: Staged, table: ChunkTable, key: Key) -> Chunk:
        """See `Storing`."""
        chunk = await self._storing.admit(staged, table, key)
        self.hints.continued([chunk])
        return chunk

    def copying_is_over(self, table: ChunkTable) -> None:
        """Nothing more is copied to this namespace: what came is evicted like all else."""
        self._residency.copied_in.is_over(table)

    def take_over(self, table: ChunkTable, facts: Facts, offset: int) -> Chunk:
        """See `Storing`."""
        return self._storing.take_over(table, facts, offset)

    async def sync(self, tables: Iterable[ChunkTable]) -> None:
        """Wait until all that is dirty now in these namespaces is clean, or gone; see `sync_chunks`."""
        if self._writer is not None and self._writer.num_dirty:
            await self.sync_chunks([chunk for table in tables for chunk in table.chunks.values() if chunk.is_dirty])

    async def sync_chunks(self, waiting: list[Chunk]) -> None:
        """Wait until these chunks are clean, or gone. A RAM cache, and what admission keeps from NVMe, has nothing to
        wait for. Raises UnavailableError while the device fails.
        """
        writer, nvme = self._writer, self._residency.nvme
        if writer is None or nvme is None:
            return
        while waiting := [
            chunk
            for chunk in waiting
            if chunk.is_dirty and not chunk.is_removed and chunk not in self._residency.kept_back
        ]:
            if any(nvme.of(chunk).tier.is_degraded for chunk in waiting):
                raise UnavailableError("writing to NVMe fails: what is dirty stays in RAM, and is tried again")
            await writer.progress()

    # removing

    async def remove(self, chunks: Iterable[Chunk], reason: str = "rm") -> None:
        """Remove chunks from every tier. It is durable when this returns; raises UnavailableError if it may not be.

        A rebuild from the volume does not find them, once nobody holds them.
        """
        chunks = sorted(chunks, key=lambda chunk: -chunk.position)  # leaves first: they have no descendants
        for chunk in chunks:
            if not chunk.is_removed:
                self.counters.removals += 1
                self._residency.discard(chunk, reason)
        await self.settle_taken_over()
        await self._residency.settle_and_erase(chunks)

    # looking

    def why(self, id_: int, directory: str, keys: Sequence[Key]) -> Explained:
        """What is known of keys; the reply to `messages.Why`."""
        return explain(id_, self._residency, directory, keys, self.policy)

    def declined(self, table: ChunkTable, keys: Sequence[Key]) -> None:
        """An engine computes what it could load of these."""
        now_ns = self.system.time_ns()
        for key in keys:
            self._residency.refusals.add(table.directory, key, now_ns, "declined")

    def capacity(self) -> Capacity:
        """True size and use, as `df` shows them: of NVMe, or of RAM where there is no NVMe."""
        return self._standing.capacity()

    def statistics(self) -> Statistics:
        """A frozen picture of everything that is counted."""
        return self._standing.statistics()

    def volume_directory(self, chunk: Chunk) -> str | None:
        """The directory of the volume that the chunk is on; None if it is on none."""
        nvme = self._residency.nvme
        return nvme.of(chunk).directory if nvme is not None and chunk.nvme != NOWHERE else None

    def metrics_text(self) -> bytes:
        """The same for Prometheus."""
        return render(self.counters, gauges(self.statistics()))

    # life

    @property
    def notices(self) -> list[str]:
        """What whoever mounts has to know of the start, a sentence each."""
        missing = [each.directory for each in self.statistics().volumes if each.fault is Fault.MISSING]
        said = [f"the volume in {directory} is not there: the cache goes on without it" for directory in missing]
        return [*said, *([str(self.arena.dropped)] if self.arena.dropped is not None else [])]

    def what_is_unwritten(self, *, is_kept: bool) -> Unwritten:
        """What would be lost, or stay in RAM, if the store ended now, and why it is not on NVMe."""
        return self._standing.unwritten(is_kept=is_kept)

    async def flush(self, deadline_s: float = _FLUSH_AT_END_S) -> bool:
        """Wait until nothing is dirty; returns False if the deadline came first."""
        if self._writer is None:
            return True
        end_s = trio.current_time() + deadline_s
        with trio.move_on_at(end_s):
            await self._writer.drain()
            self._save_use()
            await self._residency.settle_and_erase()
            return True
        if len(self.volumes) > 1:  # those whose device works are not to suffer from the other
            with trio.move_on_after(_FLUSH_OTHERS_S), contextlib.suppress(UnavailableError):
                self._save_use()
                await self._residency.settle_and_erase()
        return False

    def run_in(self, nursery: trio.Nursery, life: trio.CancelScope) -> None:
        """Start what makes chunks durable; it lives until `life` is cancelled, though its surroundings be cancelled."""

        async def live() -> None:
            with life:
                async with trio.open_nursery() as inner:
                    inner.start_soon(self.limits.run)
                    if self._prefetcher is not None:
                        inner.start_soon(self._prefetcher.run)
                    for stripe in self._residency.nvme or ():
                        inner.start_soon(stripe.commits.run)
                        inner.start_soon(stripe.eraser.run)
                    if self._writer is not None:
                        inner.start_soon(self._writer.run)
                        inner.start_soon(self._save_use_now_and_then)

        nursery.start_soon(live)

    async def _save_use_now_and_then(self) -> None:
        while True:
            await trio.sleep(_SAVE_USE_EVERY_S)
            self._save_use()

    def _save_use(self) -> None:
        """Hand what was used since the last time to the next transaction."""
        nvme = self._residency.nvme
        if nvme is None:
            return
        dirty: set[Chunk] = set()  # these have no row yet, or one on its way that does not know of the last uses
        for chunk in self._used:
            if chunk.nvme != NOWHERE and not chunk.is_removed:
                nvme.of(chunk).used(chunk)
            elif chunk.is_dirty and not chunk.is_removed:
                dirty.add(chunk)
        self._used = dirty
