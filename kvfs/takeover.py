"""Takeover: the chunks in the arena of the daemon before us become visible again, each when every byte is verified.

What the record of the arena (`kept`) says is only where to look. Before anything is allocated, all its extents count as
used. Then, beside everything else, the headers are read, and the chunks verified the last used last, in
threads at the speed of memory (4 GiB of 1 MiB chunks, two cores: 0.4 s after the store answers, which it does after
0.36 s, as it does with 1 GiB); each batch is made visible as it is proven. So a mount waits for none of it, whatever the
size of the arena; until its turn a chunk is a miss, or is loaded from NVMe, and its extent cannot be given to another.

A chunk that the index knows, created at the same time, is clean: it gets its copy in RAM back, with the hits, last use and
pin of its row. Any other was dirty: it is made visible as if it had been stored now, and written behind. Its pin was lost,
its hits are, and it was used last when it was created. What does not verify is dropped, counted and told of.

An extent that a trusted client had reserved may be written to by that process as long as it lives: it is not reused
before. Clients that only read attach again and get the same file; what they had loaded from the daemon before ended with
it: `copy` proves the copy, `layer` refuses when the session has ended.

Concurrency: belongs to the event loop's thread; threads get extents that nobody else has.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from kvfs.catalog import NOWHERE, Chunk, ChunkTable
from kvfs.chunk import ALIGNMENT, Facts, Geometry, parse_header, read_claim, verify_payload
from kvfs.config import format_size
from kvfs.errors import CorruptChunk
from kvfs.extents import ExtentAllocator
from kvfs.kept import Record
from kvfs.keys import Key
from kvfs.residency import Change, Residency

log = logging.getLogger(__name__)

_BATCH_BYTES = 64 << 20
_MAX_POSITION = 1 << 32


@dataclass(frozen=True, slots=True)
class Found:
    """A chunk file whose header is good, and not more is known yet. `offset`: of its extent."""

    table: ChunkTable
    geometry: Geometry
    facts: Facts
    offset: int

    @property
    def name(self) -> tuple[str, Key]:
        """Namespace and key."""
        return self.table.directory, self.facts.key


@dataclass(frozen=True, slots=True)
class Extent:
    """An extent of the record that is no chunk, and what is wrong."""

    offset: int
    length: int
    reason: str


class Takeover:
    """One arena that is being taken over.

    Attributes: num_taken, taken_bytes, num_dirty: chunks that are visible again; num_bad: those that were not right;
    is_over: all were looked at; life: cancel it to end the wait for writers after that.

    `admit` makes a chunk visible that is on no volume.
    """

    def __init__(
        self, residency: Residency, record: Record, num_threads: int, admit: Callable[[ChunkTable, Facts, int], Chunk]
    ) -> None:
        self.num_taken = 0
        self.taken_bytes = 0
        self.num_dirty = 0
        self.num_bad = 0
        self.is_over = trio.Event()
        self.life = trio.CancelScope(shield=True)
        self._residency = residency
        self._record = record
        self._admit = admit
        self._limiter = trio.CapacityLimiter(num_threads)
        self._are_headers_read = trio.Event()
        self._waiting: dict[tuple[str, Key], Found] = {}  # what is to be verified
        self._built_on: dict[tuple[str, Key], list[Found]] = {}  # the same, by parent
        self._removed: set[tuple[str, Key]] = set()  # since we began
        self._chunks: list[tuple[int, int]] = []
        self._reserved: list[tuple[int, int, int]] = []

    def claim(self) -> None:
        """Count all extents of the record as used. To be called before anything is allocated."""
        entries = self._record.entries()
        ram = self._residency.ram
        ram.extents = ExtentAllocator(ram.memory.size_bytes, used=[entry[:2] for entry in entries])
        self._chunks = [(offset, length) for offset, length, pid in entries if not pid]
        self._reserved = [entry for entry in entries if entry[2]]
        self._residency.observers.append(self._changed)

    async def settle(self) -> None:
        """Return when what was removed so far is out of the record too, though nobody had looked at it yet."""
        await self._are_headers_read.wait()

    def _changed(self, change: Change, chunk: Chunk, _: object) -> None:
        if change == "removed" and not self.is_over.is_set():
            self._drop((chunk.table.directory, chunk.key))

    def _drop(self, name: tuple[str, Key]) -> None:
        """What is removed while it waits, and what was built on it, must not come back, here or after another kill."""
        names = [name]
        while names:
            name = names.pop()
            if name in self._removed and name not in self._waiting:
                continue
            self._removed.add(name)
            found = self._waiting.pop(name, None)
            if found is not None:
                self._record.clear(found.offset)
            names += [(name[0], each.facts.key) for each in self._built_on.pop(name, ())]

    async def run(self) -> None:
        """Take over what is there; returns when everything was looked at and no writer is left, or `life` ends."""
        try:
            with self.life:
                async with trio.open_nursery() as nursery:
                    for extent in self._reserved:
                        nursery.start_soon(self._await_writer, *extent)
                    await self._take_all()
                    self.is_over.set()
        finally:
            self.is_over.set()
            self._are_headers_read.set()
            self._residency.observers.remove(self._changed)
            for kept in (self._built_on, self._removed, self._waiting):
                kept.clear()

    async def _await_writer(self, offset: int, length: int, pid: int) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            pidfd = None  # it is gone
        if pidfd is not None:
            try:
                await trio.lowlevel.wait_readable(pidfd)
            finally:
                os.close(pidfd)
        self._give_back(offset, length)

    def _give_back(self, offset: int, length: int) -> None:
        self._record.clear(offset)
        self._residency.ram.extents.free(offset, length)

    async def _take_all(self) -> None:
        begin = trio.current_time()
        tables = {
            (table.namespace.fingerprint_hex, table.namespace.rank, table.namespace.num_ranks): table
            for table in self._residency.catalog.tables.values()
        }
        looked: list[Found | Extent] = await self._in_thread(partial(self._read_headers, tables))
        found: list[Found] = []
        for each in looked:
            if isinstance(each, Found):
                found.append(each)
            else:
                self._bad(each)
        found.sort(key=self._last_use)
        for each in found:
            self._waiting[each.name] = each
            self._built_on.setdefault((each.table.directory, each.facts.parent), []).append(each)
        for name in list(self._removed):
            self._drop(name)
        self._are_headers_read.set()
        batch: list[Found] = []
        size = 0
        for number, each in enumerate(found, 1):
            batch.append(each)
            size += each.geometry.file_bytes
            if size >= _BATCH_BYTES or number == len(found):
                await self._take(batch)
                batch, size = [], 0
        if self._chunks:
            log.info(
                "took %d chunks, %s, of the daemon before this one over from RAM, %d of them not on NVMe; "
                "verified in %.1f s",
                self.num_taken, format_size(self.taken_bytes), self.num_dirty, trio.current_time() - begin,
            )  # fmt: skip
            self._residency.events.append("taken_over", chunks=self.num_taken, bad=self.num_bad)

    def _last_use(self, found: Found) -> tuple[int, int]:
        """The order in which chunks come into the policy: the last used last, beginnings of chains before the rest."""
        known = found.table.chunks.get(found.facts.key)
        return known.last_used_ns if known is not None else found.facts.created_ns, found.facts.position

    def _read_headers(self, tables: dict[tuple[str, int, int], ChunkTable]) -> list[Found | Extent]:
        return [self._read_header(tables, offset, length) for offset, length in self._chunks]

    def _read_header(self, tables: dict[tuple[str, int, int], ChunkTable], offset: int, length: int) -> Found | Extent:
        view = self._residency.ram.view(offset, length)
        claim = read_claim(view[:ALIGNMENT])
        if claim is None:
            return Extent(offset, length, "it has no header")
        table = tables.get(claim[:3])
        if table is None:
            return Extent(offset, length, "it is of a namespace that nobody knows")
        try:
            geo, facts = parse_header(table.namespace, view)
        except CorruptChunk as error:
            return Extent(offset, length, str(error))
        if geo.file_bytes != length or facts.position >= _MAX_POSITION:
            return Extent(offset, length, "its header does not fit its place")
        return Found(table, geo, facts, offset)

    async def _take(self, batch: list[Found]) -> None:
        """Verify, in as many threads as there may be, and make visible what is right, parents first."""
        reasons: dict[int, str] = {}
        queue = list(batch)

        def verify_some() -> None:
            while queue:
                try:
                    each = queue.pop()
                except IndexError:
                    return
                try:
                    view = self._residency.ram.view(each.offset, each.geometry.file_bytes)
                    verify_payload(each.geometry, each.facts, view)
                except CorruptChunk as error:
                    reasons[each.offset] = str(error)

        async with trio.open_nursery() as nursery:
            for _ in range(min(len(batch), int(self._limiter.total_tokens))):
                nursery.start_soon(self._in_thread, verify_some)
        taken = []
        for each in batch:
            if each.offset in reasons:
                self._bad(Extent(each.offset, each.geometry.file_bytes, reasons[each.offset]), each)
            elif (chunk := self._placed(each)) is not None:
                taken.append(chunk)
        self._residency.arrived_in_ram(taken)

    def _placed(self, found: Found) -> Chunk | None:
        """The chunk with these bytes, visible; None if it is in RAM already, or another of this key is stored."""
        known = found.table.chunks.get(found.facts.key)
        length = found.geometry.file_bytes
        is_wanted = self._residency.catalog.tables.get(found.table.directory) is found.table
        is_wanted &= self._waiting.pop(found.name, None) is found
        if not is_wanted or (
            known is not None and (known.ram != NOWHERE or known.created_ns != found.facts.created_ns)
        ):
            self._give_back(found.offset, length)
            return None
        if known is None:
            known = self._admit(found.table, found.facts, found.offset)
            self.num_dirty += 1
        else:
            self._residency.ram.place(known, found.offset)
        self.num_taken += 1
        self.taken_bytes += length
        return known

    def _bad(self, extent: Extent, found: Found | None = None) -> None:
        who = found.facts.key.hex() if found is not None else f"at {extent.offset}"
        log.error("chunk %s in RAM is corrupt and was not taken over: %s", who, extent.reason)
        self.num_bad += 1
        self._residency.counters.corrupt += 1
        self._give_back(extent.offset, extent.length)

    async def _in_thread(self, work: Callable[[], object]) -> Any:
        return await trio.to_thread.run_sync(work, limiter=self._limiter)
