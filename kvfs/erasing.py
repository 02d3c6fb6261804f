"""Erasing: what went cannot be brought back by a scan of the volume.

The first block of a chunk's extent, which proves what the rest is, is overwritten with zeros: after the commit that
deletes the chunk's row, so that a crash leaves no row without its chunk, and before the extent is free. The rest of the
bytes stay until the extent is used again. That is so for every chunk that goes, whatever the reason: of a chunk that was
evicted, stored again and then removed by a person, the older copy must not come back.

Only who asks for it waits until that is durable; whatever was erased before is durable then too.

Concurrency: belongs to the event loop's thread; the writes run in a thread of the NVMe tier, a batch at a time.
"""

from __future__ import annotations

import logging

import trio

from kvfs.chunk import ALIGNMENT
from kvfs.metrics import Counters
from kvfs.tiers.nvme import NvmeTier
from kvfs.volume import aligned_buffer

log = logging.getLogger(__name__)


class Eraser:
    """The extents that are to be erased and freed. `run` must be running for that to happen."""

    def __init__(self, nvme: NvmeTier, counters: Counters) -> None:
        self._nvme = nvme
        self._counters = counters
        self._queue: list[tuple[int, int]] = []
        self._zeros = aligned_buffer(ALIGNMENT)
        self._changed = trio.Event()
        self._num_put = 0
        self._num_done = 0
        self._num_synced = 0
        self._num_to_sync = 0

    def put(self, offset: int, length: int) -> None:
        """Erase an extent that no committed row names any more, and free it."""
        self._queue.append((offset, length))
        self._num_put += 1
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def free(self) -> None:
        """Wait until what was put so far is free. Waits for ever while the device hangs: bound it."""
        wanted = self._num_put
        while self._num_done < wanted:
            await self._changed.wait()

    async def flush(self) -> None:
        """Wait until what was put so far is erased, durably. Waits for ever while the device hangs: bound it."""
        wanted = self._num_put
        if self._num_synced < wanted:
            self._num_to_sync = wanted
            self._notify()
        while self._num_synced < wanted:
            await self._changed.wait()

    async def run(self) -> None:
        """Erase batch after batch, for ever."""
        while True:
            while not self._queue and self._num_synced >= self._num_to_sync:
                await self._changed.wait()
            extents, self._queue = self._queue, []
            is_durable = self._num_synced < self._num_to_sync
            try:
                await self._nvme.in_thread(self._erase, [offset for offset, _ in extents], is_durable)
            except OSError as error:
                self._counters.io_errors += 1
                log.error(
                    "headers of removed chunks could not be erased, a scan of the volume may find them: %s", error
                )
            for extent in extents:
                self._nvme.extents.free(*extent)
            self._num_done += len(extents)
            if is_durable:
                self._num_synced = self._num_done
            self._notify()

    def _erase(self, offsets: list[int], is_durable: bool) -> None:
        for offset in offsets:
            self._nvme.volume.write([self._zeros], offset)
        if is_durable:
            self._nvme.volume.sync()
