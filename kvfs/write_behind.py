"""Write-behind: dirty chunks go from RAM to NVMe in the background, in the order in which they came.

Clean means durable: write, then sync the volume, then commit the index; only then is a chunk reported clean and may
leave RAM. If the device fails the tier is degraded: the chunks stay dirty in RAM, may be evicted from there like those
of a RAM cache, and the writes are tried again.

What `Admission` turns away is kept back, in RAM only, and judged again when it is used or held.

Concurrency: two tasks, one writes groups, one makes them durable, in the same order, all that are written at once: a
commit takes tens of milliseconds beside the writes of the next groups, which must not wait for it. The chunks of a
group are leased meanwhile, so that their bytes stay where they are.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter

import trio

from kvfs.admission import Admission, Verdict
from kvfs.catalog import NOWHERE, Chunk
from kvfs.commits import Commits
from kvfs.errors import UnavailableError
from kvfs.index import ChunkRow
from kvfs.residency import Residency
from kvfs.tiers.nvme import NvmeTier

log = logging.getLogger(__name__)

_MAX_GROUP_CHUNKS = 256
_MAX_GROUP_BYTES = 256 << 20
_MAX_WRITTEN_GROUPS = 3  # that wait for the one before them to be durable
_MAX_RUN_BYTES, _MAX_RUN_CHUNKS = 8 << 20, 256
_FIRST_RETRY_S, _LAST_RETRY_S = 0.5, 30.0


@dataclass(slots=True)
class _Group:
    """Chunks that are written together.

    Attributes: chunks: leased; pairs: those that got an extent, with its offset; left: those for which there was no room;
    put: those whose row is committed.
    """

    chunks: list[Chunk]
    pairs: list[tuple[Chunk, int]] = field(default_factory=list)
    left: list[Chunk] = field(default_factory=list)
    put: set[Chunk] = field(default_factory=set)


class WriteBehind:
    """The queue of dirty chunks.

    Attributes: dirty_bytes, num_dirty: what is waiting or being written.
    """

    def __init__(
        self, residency: Residency, nvme: NvmeTier, commits: Commits, admission: Admission, now_ns: Callable[[], int]
    ) -> None:
        self.admission = admission
        self._now_ns = now_ns  # since the epoch
        self._residency = residency
        self._nvme = nvme
        self._commits = commits
        self._queue: deque[Chunk] = deque()
        self._changed = trio.Event()
        self._is_awaited = False
        self._retry_s = _FIRST_RETRY_S
        self._retry_at = 0.0  # of trio's clock
        self.dirty_bytes = 0
        self.num_dirty = 0
        residency.on_held = self._judge_again

    def add(self, chunk: Chunk, *, is_used: bool, is_asked_for: bool) -> None:
        """A chunk was published and is in RAM only. For the rest see `Admission.admit`."""
        if self._is_admitted(chunk, is_used=is_used, is_asked_for=is_asked_for):
            self._append(chunk)
        else:
            self._residency.keep_back(chunk)

    def used(self, chunks: Iterable[Chunk]) -> None:
        """An engine loaded these chunks."""
        if self._residency.num_kept_back:
            for chunk in chunks:
                if self._residency.is_kept_back(chunk):
                    self._judge_again(chunk)

    def _judge_again(self, chunk: Chunk) -> None:
        if self._is_admitted(chunk, is_used=True, is_asked_for=self._residency.pins.is_held(chunk)):
            self._residency.no_longer_kept_back(chunk)
            self._append(chunk)

    def _is_admitted(self, chunk: Chunk, *, is_used: bool, is_asked_for: bool) -> bool:
        now_ns = self._now_ns()
        verdict = self.admission.admit(chunk.length, now_ns, is_used=is_used, is_asked_for=is_asked_for)
        if verdict is Verdict.ADMITTED:
            if self.admission.budget_bytes is not None:
                self._commits.spent(self.admission.spent_on(now_ns))
        elif verdict is Verdict.UNUSED:
            self._residency.counters.not_admitted_unused += 1
        else:
            self._residency.counters.not_admitted_budget += 1
        return verdict is Verdict.ADMITTED

    def _append(self, chunk: Chunk) -> None:
        self._queue.append(chunk)
        self.num_dirty += 1
        self.dirty_bytes += chunk.length
        self._notify()

    def _notify(self) -> None:
        """Wake whoever waits for a change; with nobody waiting this costs nothing, and it is called for each chunk."""
        if self._is_awaited:
            self._is_awaited = False
            self._changed.set()
            self._changed = trio.Event()

    async def drain(self) -> None:
        """Wait until nothing is dirty. Waits for ever while the device fails: bound it."""
        while self.num_dirty:
            await self.progress()

    async def progress(self) -> None:
        """Wait until a chunk became dirty or clean."""
        self._is_awaited = True
        await self._changed.wait()

    async def run(self) -> None:
        """Write group after group, for ever: while some are made durable the next are being written."""
        send, receive = trio.open_memory_channel[_Group](_MAX_WRITTEN_GROUPS)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write_groups, send)
            nursery.start_soon(self._finish_groups, receive)

    async def _write_groups(self, send: trio.MemorySendChannel[_Group]) -> None:
        while True:
            while not self._queue:
                await self.progress()
            await trio.sleep_until(self._retry_at)
            group = _Group(self._take_group())
            try:
                offsets = await self._residency.reserve_nvme(group.chunks)
                group.left = group.chunks[len(offsets) :]
                group.pairs = [pair for pair in zip(group.chunks, offsets, strict=False) if pair[1] != NOWHERE]
                await self._transfer(group.pairs)
            except (OSError, UnavailableError) as error:
                self._failed(group, error)
            else:
                await send.send(group)

    async def _finish_groups(self, receive: trio.MemoryReceiveChannel[_Group]) -> None:
        async for first in receive:
            groups = [first]
            with contextlib.suppress(trio.WouldBlock):
                while True:
                    groups.append(receive.receive_nowait())
            try:
                await self._nvme.sync()
                for group in groups:
                    for chunk, offset in group.pairs:
                        if not chunk.is_removed:
                            self._commits.put(_row(chunk, offset))
                            group.put.add(chunk)
                await self._commits.flush()
            except (OSError, UnavailableError) as error:
                for group in reversed(groups):  # each goes to the front of the queue
                    self._failed(group, error)
            else:
                for group in groups:
                    self._finished(group)

    def _failed(self, group: _Group, error: Exception) -> None:
        """Nothing of the group is durable; it is tried again, later and later."""
        if not self._nvme.is_degraded:
            log.error("writing to NVMe fails, trying again: %s", error)
            self._residency.events.append("degraded", reason=str(error))
        self._nvme.is_degraded = True
        self._residency.counters.io_errors += 1
        for chunk, offset in group.pairs:
            if chunk.is_removed:
                self._residency.free_on_nvme(chunk, offset)
            else:
                self._nvme.extents.free(offset, chunk.length)
        self._return_group(group.chunks, group.chunks)
        self._try_later()

    def _finished(self, group: _Group) -> None:
        """The group is durable, but for what the volume has no room for."""
        for chunk, offset in group.pairs:
            self._became_clean(chunk, offset, was_put=chunk in group.put)
        self._residency.arrived(self._nvme.policy, [chunk for chunk, _ in group.pairs])
        self._return_group(group.chunks, group.left)
        if group.left:
            self._try_later()
            return
        self._retry_s = _FIRST_RETRY_S
        if self._nvme.is_degraded:
            log.warning("writing to NVMe works again")
            self._residency.events.append("recovered")
            self._nvme.is_degraded = False

    def _try_later(self) -> None:
        self._retry_at = trio.current_time() + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)

    def _take_group(self) -> list[Chunk]:
        """The oldest dirty chunks that are still wanted, leased."""
        group: list[Chunk] = []
        size = 0
        while self._queue and len(group) < _MAX_GROUP_CHUNKS and (not group or size < _MAX_GROUP_BYTES):
            chunk = self._queue.popleft()
            if chunk.is_removed:
                self._no_longer_dirty(chunk)
                continue
            self._residency.lease(chunk)
            group.append(chunk)
            size += chunk.length
        if any(self._residency.copied_in.depth(chunk) is not None for chunk in group):
            group.sort(key=attrgetter("position"))  # of what came by copying the beginning stays
        return group

    def _return_group(self, group: list[Chunk], left: list[Chunk]) -> None:
        kept = set(left)
        for chunk in group:
            if chunk in kept and not chunk.is_removed:
                continue
            self._no_longer_dirty(chunk)
        self._queue.extendleft(chunk for chunk in reversed(left) if not chunk.is_removed)
        self._notify()
        for chunk in group:
            self._residency.release(chunk)

    def _no_longer_dirty(self, chunk: Chunk) -> None:
        self.num_dirty -= 1
        self.dirty_bytes -= chunk.length
        self._notify()

    async def _transfer(self, pairs: list[tuple[Chunk, int]]) -> None:
        """Write chunks, neighbours on the volume together. Raises OSError if any of it fails."""
        queue = deque(_runs(pairs))
        failures: list[OSError] = []

        def work() -> None:  # in a thread, for the whole queue: a hop for each write costs more than a small write
            while queue and not failures:
                try:
                    run = queue.popleft()
                except IndexError:
                    return
                views = [self._residency.ram.view(chunk.ram, chunk.length) for chunk, _ in run]
                try:
                    self._nvme.volume.write(views, run[0][1])
                except OSError as error:
                    failures.append(error)

        async with trio.open_nursery() as nursery:
            for _ in range(min(self._nvme.num_threads, len(queue))):
                nursery.start_soon(self._nvme.in_thread, work)
        if failures:
            raise failures[0]
        self._residency.counters.written_bytes += sum(chunk.length for chunk, _ in pairs)

    def _became_clean(self, chunk: Chunk, offset: int, *, was_put: bool) -> None:
        if not chunk.is_removed:
            self._nvme.place(chunk, offset)
            self._residency.placed_on_nvme(chunk)
            return
        if was_put:  # it was removed while the row was being written
            self._commits.delete(chunk.table.number, chunk.key)
        self._residency.free_on_nvme(chunk, offset)


def _runs(pairs: list[tuple[Chunk, int]]) -> list[list[tuple[Chunk, int]]]:
    """The pairs, in runs that lie one after the other on the volume, each about 8 MiB at most."""
    runs: list[list[tuple[Chunk, int]]] = []
    size = end = 0
    for chunk, offset in sorted(pairs, key=itemgetter(1)):
        if not runs or offset != end or size + chunk.length > _MAX_RUN_BYTES or len(runs[-1]) == _MAX_RUN_CHUNKS:
            runs.append([])
            size = 0
        runs[-1].append((chunk, offset))
        end = offset + chunk.length
        size += chunk.length
    return runs


def _row(chunk: Chunk, offset: int) -> ChunkRow:
    return ChunkRow(
        chunk.table.number, chunk.key, chunk.parent, chunk.position, chunk.num_tokens, offset, chunk.length,
        chunk.created_ns, chunk.last_used_ns, chunk.hits,
    )  # fmt: skip
