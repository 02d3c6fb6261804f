"""Write-behind: dirty chunks go from RAM to NVMe in the background, in the order in which they came.

Clean means durable: write, then sync the volume, then commit the index; only then is a chunk reported clean and may
leave RAM. If the device fails the tier is degraded: the chunks stay dirty in RAM, may be evicted from there like those
of a RAM cache, and the writes are tried again.

Concurrency: one task. The chunks it writes are leased meanwhile, so that their bytes stay where they are.
"""

from __future__ import annotations

import logging
from collections import deque

import trio

from kvfs.catalog import Chunk
from kvfs.commits import Commits
from kvfs.errors import UnavailableError
from kvfs.index import ChunkRow
from kvfs.residency import Residency
from kvfs.tiers.nvme import NvmeTier

log = logging.getLogger(__name__)

_MAX_GROUP_CHUNKS = 256
_MAX_GROUP_BYTES = 256 << 20
_FIRST_RETRY_S, _LAST_RETRY_S = 0.5, 30.0


class WriteBehind:
    """The queue of dirty chunks.

    Attributes: dirty_bytes, num_dirty: what is waiting or being written.
    """

    def __init__(self, residency: Residency, nvme: NvmeTier, commits: Commits) -> None:
        self._residency = residency
        self._nvme = nvme
        self._commits = commits
        self._queue: deque[Chunk] = deque()
        self._changed = trio.Event()
        self.dirty_bytes = 0
        self.num_dirty = 0

    def add(self, chunk: Chunk) -> None:
        """A chunk was published and is in RAM only."""
        self._queue.append(chunk)
        self.num_dirty += 1
        self.dirty_bytes += chunk.length
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def drain(self) -> None:
        """Wait until nothing is dirty. Waits for ever while the device fails: bound it."""
        while self.num_dirty:
            await self._changed.wait()

    async def run(self) -> None:
        """Write group after group, for ever."""
        retry_s = _FIRST_RETRY_S
        while True:
            while not self._queue:
                await self._changed.wait()
            group = self._take_group()
            try:
                left = await self._write_group(group)
            except (OSError, UnavailableError) as error:
                if not self._nvme.is_degraded:
                    log.error("writing to NVMe fails, trying again: %s", error)
                    self._residency.events.append("degraded", reason=str(error))
                self._nvme.is_degraded = True
                self._residency.counters.io_errors += 1
                left = group
            else:
                if self._nvme.is_degraded and not left:
                    log.warning("writing to NVMe works again")
                    self._residency.events.append("recovered")
                    self._nvme.is_degraded = False
            self._return_group(group, left)
            if left:
                await trio.sleep(retry_s)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)
            else:
                retry_s = _FIRST_RETRY_S

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
        return group

    def _return_group(self, group: list[Chunk], left: list[Chunk]) -> None:
        kept = set(left)
        for chunk in group:
            if chunk in kept and not chunk.is_removed:
                continue
            self._no_longer_dirty(chunk)
        self._queue.extendleft(chunk for chunk in reversed(left) if not chunk.is_removed)
        for chunk in group:
            self._residency.release(chunk)

    def _no_longer_dirty(self, chunk: Chunk) -> None:
        self.num_dirty -= 1
        self.dirty_bytes -= chunk.length
        self._notify()

    async def _write_group(self, group: list[Chunk]) -> list[Chunk]:
        """Make a group clean; returns those for which the volume has no room. Raises OSError, UnavailableError."""
        offsets = await self._residency.reserve_nvme(chunk.length for chunk in group)
        pairs = list(zip(group, offsets, strict=False))
        try:
            await self._transfer(pairs)
            await self._nvme.sync()
            for chunk, offset in pairs:
                if not chunk.is_removed:
                    self._commits.put(_row(chunk, offset))
            put = {chunk for chunk, _ in pairs if not chunk.is_removed}
            await self._commits.flush()
        except (OSError, UnavailableError):
            for chunk, offset in pairs:
                self._nvme.extents.free(offset, chunk.length)
            raise
        for chunk, offset in pairs:
            self._became_clean(chunk, offset, was_put=chunk in put)
        self._residency.arrived(self._nvme.policy, [chunk for chunk, _ in pairs])
        return group[len(pairs) :]

    async def _transfer(self, pairs: list[tuple[Chunk, int]]) -> None:
        queue = deque(pairs)
        failures: list[OSError] = []

        async def work() -> None:
            while queue and not failures:
                chunk, offset = queue.popleft()
                try:
                    await self._nvme.write(self._residency.ram.view(chunk.ram, chunk.length), offset)
                except OSError as error:
                    failures.append(error)
                else:
                    self._residency.counters.written_bytes += chunk.length

        async with trio.open_nursery() as nursery:
            for _ in range(min(self._nvme.num_threads, len(queue))):
                nursery.start_soon(work)
        if failures:
            raise failures[0]

    def _became_clean(self, chunk: Chunk, offset: int, *, was_put: bool) -> None:
        if not chunk.is_removed:
            chunk.is_proven = True
            self._nvme.place(chunk, offset)
            return
        if was_put:  # it was removed while the row was being written
            self._commits.delete(chunk.table.number, chunk.key)
        self._commits.free_later(offset, chunk.length)


def _row(chunk: Chunk, offset: int) -> ChunkRow:
    return ChunkRow(
        chunk.table.number, chunk.key, chunk.parent, chunk.position, chunk.num_tokens, offset, chunk.length,
        chunk.created_ns, chunk.last_used_ns, chunk.hits,
    )  # fmt: skip
