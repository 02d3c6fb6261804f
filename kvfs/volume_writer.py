"""The writer of one volume: its dirty chunks, in the order in which they came, group after group. See `write_behind`.

Concurrency: one task takes groups and has each written by a task of its own, one makes them durable, in the same order,
all that are written at once: a commit takes tens of milliseconds beside the writes of the next groups, which must not wait
for it. A group is taken when the one before has no write left to begin: what is still in flight of it goes on beside the
first writes of the next, so that the device never waits. The chunks of a group are leased meanwhile, so that their bytes
stay where they are.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter

import trio

from kvfs.catalog import NOWHERE, Chunk
from kvfs.errors import DiskFullError, UnavailableError
from kvfs.residency import Residency
from kvfs.statistics import Fault
from kvfs.stripes import Stripe

log = logging.getLogger(__name__)

_MAX_GROUP_CHUNKS = 256
_MAX_GROUP_BYTES = 256 << 20
_MAX_WRITING_GROUPS = 2
_MAX_WRITTEN_GROUPS = 3  # that wait for the one before them to be durable
_MAX_RUN_BYTES, _MAX_RUN_CHUNKS = 8 << 20, 256
_FIRST_RETRY_S, _LAST_RETRY_S = 0.5, 30.0
_HANGS_AFTER_S = 20.0  # without a run written, a sync or a commit that ended
_LOOK_FOR_FILES_S = 10.0  # where nothing is written; what is written is looked for with each sync
_FULL = (errno.ENOSPC, errno.EDQUOT)
_GONE = "its files were removed, or its disk was unmounted"


class Progress:
    """Wakes whoever waits for a chunk to become dirty or clean."""

    def __init__(self) -> None:
        self._changed = trio.Event()
        self._is_awaited = False

    def notify(self) -> None:
        """Something changed; with nobody waiting this costs nothing, and it is called for each chunk."""
        if self._is_awaited:
            self._is_awaited = False
            self._changed.set()
            self._changed = trio.Event()

    async def wait(self) -> None:
        """Return at the next change."""
        self._is_awaited = True
        await self._changed.wait()


@dataclass(slots=True)
class _Group:
    """Chunks that are written together.

    Attributes: chunks: leased; pairs: those that got an extent, with its offset; left: those for which there was no room;
    put: those whose row is committed; is_begun: no write is left to begin; before: whether the group before it is handed on
    to be made durable, or failed; is_handed_on: the same of this one.
    """

    chunks: list[Chunk]
    before: trio.Event
    pairs: list[tuple[Chunk, int]] = field(default_factory=list)
    left: list[Chunk] = field(default_factory=list)
    put: set[Chunk] = field(default_factory=set)
    is_begun: trio.Event = field(default_factory=trio.Event)
    is_handed_on: trio.Event = field(default_factory=trio.Event)


class VolumeWriter:
    """The queue of dirty chunks of a volume.

    Attributes: stripe; dirty_bytes, num_dirty: what is waiting or being written; failure: why the last write failed, or does
    not end, "" if it does; fault: the same for programs.
    """

    def __init__(self, residency: Residency, stripe: Stripe, progress: Progress) -> None:
        self.stripe = stripe
        self.dirty_bytes = 0
        self.num_dirty = 0
        self.failure = ""
        self.fault = Fault.NONE
        self._residency = residency
        self._tier = stripe.tier
        self._progress = progress
        self._queue: deque[Chunk] = deque()
        self._retry_s = _FIRST_RETRY_S
        self._retry_at = 0.0  # of trio's clock
        self._num_under_way = 0  # groups that are written, or made durable
        self._num_steps = 0  # of these that ended

    def append(self, chunk: Chunk) -> None:
        """A chunk is to be written."""
        self._queue.append(chunk)
        self.num_dirty += 1
        self.dirty_bytes += chunk.length
        self._progress.notify()

    async def run(self) -> None:
        """Write group after group, for ever: while some are made durable the next are being written."""
        send, receive = trio.open_memory_channel[_Group](_MAX_WRITTEN_GROUPS)
        writing = trio.Semaphore(_MAX_WRITING_GROUPS)
        before = trio.Event()
        before.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._finish_groups, receive)
            nursery.start_soon(self._watch)
            nursery.start_soon(self._watch_files)
            while True:
                await writing.acquire()
                while not self._queue:
                    await self._progress.wait()
                await trio.sleep_until(self._retry_at)
                group = _Group(self._take_group(), before)
                before = group.is_handed_on
                nursery.start_soon(self._write_group, group, send, writing)
                await group.is_begun.wait()

    async def _watch(self) -> None:
        """Notice a device that neither does nor refuses what it was asked: its chunks may leave RAM unwritten, too."""
        seen, since = -1, 0.0
        while True:
            if not self._num_under_way or seen != self._num_steps:
                seen, since = self._num_steps, trio.current_time()
            elif trio.current_time() - since >= _HANGS_AFTER_S:
                self._is_failing(f"the device has not answered for {_HANGS_AFTER_S:g} s", Fault.DEVICE)
            await trio.sleep(_HANGS_AFTER_S / 8)

    async def _watch_files(self) -> None:
        """Notice that the files are gone, or there again, also where nothing is written."""
        limiter = trio.CapacityLimiter(1)  # of its own: a device that hangs takes this one only
        while True:
            await trio.sleep(_LOOK_FOR_FILES_S)
            is_in_place = await trio.to_thread.run_sync(
                self._tier.volume.is_in_place, limiter=limiter, abandon_on_cancel=True
            )
            if not is_in_place:
                self._is_failing(_GONE, Fault.GONE)
            elif self.fault is Fault.GONE and not self.num_dirty:
                self._works_again()

    @contextlib.contextmanager
    def _under_way(self) -> Iterator[None]:
        self._num_under_way += 1
        try:
            yield
        finally:
            self._num_under_way -= 1
            self._num_steps += 1

    async def _write_group(self, group: _Group, send: trio.MemorySendChannel[_Group], writing: trio.Semaphore) -> None:
        """Write a group, then have it made durable after the one before it."""
        try:
            offsets = await self._residency.room.reserve_nvme(self.stripe, group.chunks)
            group.left = group.chunks[len(offsets) :]
            group.pairs = [pair for pair in zip(group.chunks, offsets, strict=False) if pair[1] != NOWHERE]
            with self._under_way():
                await self._transfer(group)
        except (OSError, UnavailableError) as error:
            self._failed(group, error)
        else:
            await group.before.wait()
            await send.send(group)
        finally:
            group.is_begun.set()
            group.is_handed_on.set()
            writing.release()

    async def _finish_groups(self, receive: trio.MemoryReceiveChannel[_Group]) -> None:
        async for first in receive:
            groups = [first]
            with contextlib.suppress(trio.WouldBlock):
                while True:
                    groups.append(receive.receive_nowait())
            try:
                with self._under_way():
                    await self._tier.in_thread(self._sync)
                    for group in groups:
                        for chunk, offset in group.pairs:
                            if not chunk.is_removed:
                                self.stripe.commits.put(self.stripe.row(chunk, offset))
                                group.put.add(chunk)
                    await self.stripe.commits.flush()
            except (OSError, UnavailableError) as error:
                for group in reversed(groups):  # each goes to the front of the queue
                    self._failed(group, error)
            else:
                for group in groups:
                    self._finished(group)

    def _sync(self) -> None:
        """Make durable what was written; what is written to files without names never is. Raises OSError."""
        self._tier.volume.sync()
        if not self._tier.volume.is_in_place():
            raise FileNotFoundError(errno.ENOENT, _GONE)

    def _failed(self, group: _Group, error: Exception) -> None:
        """Nothing of the group is durable; it is tried again, later and later."""
        if isinstance(error, FileNotFoundError):
            self._is_failing(_GONE, Fault.GONE)
        elif isinstance(error, DiskFullError) or (isinstance(error, OSError) and error.errno in _FULL):
            self._is_failing(str(error), Fault.DISK_FULL)
        else:
            self._is_failing(str(error), Fault.DEVICE)
        self._residency.counters.io_errors += 1
        for chunk, offset in group.pairs:
            if chunk.is_removed:
                self._residency.free_on_nvme(chunk, offset)
            else:
                self._tier.extents.free(offset, chunk.length)
        self._return_group(group.chunks, group.chunks)
        self._try_later()

    def _is_failing(self, reason: str, fault: Fault) -> None:
        is_news = not self._tier.is_degraded or fault is not self.fault
        self.failure, self.fault = reason, fault
        if is_news:
            log.error("writing to NVMe fails, trying again: %s (the volume in %s)", reason, self.stripe.directory)
            self._residency.events.append("degraded", volume=self.stripe.directory, reason=reason)
        self._tier.is_degraded = True

    def _finished(self, group: _Group) -> None:
        """The group is durable, but for what the volume has no room for."""
        for chunk, offset in group.pairs:
            self._became_clean(chunk, offset, was_put=chunk in group.put)
        self._residency.arrived_on_nvme([chunk for chunk, _ in group.pairs])
        self._return_group(group.chunks, group.left)
        if group.left:
            self._try_later()
            return
        if not group.pairs:  # all of it was removed before it could be written: that says nothing of the device
            return
        self._retry_s = _FIRST_RETRY_S
        self._works_again()

    def _works_again(self) -> None:
        if self._tier.is_degraded:
            log.warning("writing to NVMe works again (the volume in %s)", self.stripe.directory)
            self._residency.events.append("recovered", volume=self.stripe.directory)
            self._tier.is_degraded = False
        self.failure, self.fault = "", Fault.NONE

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
        self._progress.notify()
        for chunk in group:
            self._residency.release(chunk)

    def _no_longer_dirty(self, chunk: Chunk) -> None:
        self.num_dirty -= 1
        self.dirty_bytes -= chunk.length
        self._progress.notify()

    async def _transfer(self, group: _Group) -> None:
        """Write the chunks of a group, neighbours on the volume together. Raises OSError if any of it fails."""
        queue = deque(_runs(group.pairs))
        failures: list[OSError] = []

        def work() -> None:  # in a thread, for the whole queue: a hop for each write costs more than a small write
            while queue and not failures:
                try:
                    run = queue.popleft()
                except IndexError:
                    return
                views = [self._residency.ram.view(chunk.ram, chunk.length) for chunk, _ in run]
                try:
                    self._tier.volume.write(views, run[0][1])
                    self._num_steps += 1
                except OSError as error:
                    failures.append(error)

        async def work_in_thread() -> None:
            await self._tier.in_thread(work)
            if not failures:
                group.is_begun.set()

        async with trio.open_nursery() as nursery:
            for _ in range(min(self._tier.num_threads, len(queue))):
                nursery.start_soon(work_in_thread)
        if failures:
            raise failures[0]
        self._residency.counters.written_bytes += sum(chunk.length for chunk, _ in group.pairs)

    def _became_clean(self, chunk: Chunk, offset: int, *, was_put: bool) -> None:
        if not chunk.is_removed:
            self._tier.place(chunk, offset)
            self._residency.placed_on_nvme(chunk)
            return
        if was_put:  # it was removed while the row was being written
            self.stripe.delete(chunk)
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
