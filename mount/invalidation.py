"""Names that went away inside the daemon, to be dropped by the kernel at once instead of after their timeout.

An invalidation blocks while the kernel works on the same directory, possibly waiting for an answer of ours. So it is
never made from the event loop's thread: names are queued, and one thread at a time hands a batch to the kernel.

Concurrency: `put` belongs to the loop's thread and never waits. The queue is bounded: what does not fit is counted
and left to the entry timeout (a second). While `run` is cancelled its thread is waited for, so the FUSE main loop must
go on until `run` has ended.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import trio

logger = logging.getLogger(__name__)

MAX_QUEUED = 1 << 16  # some 10 MB of names; an eviction run takes no more at once
_BATCH = 256

Place = tuple[int, bytes]
"""Inode of the parent directory, and a name in it."""


class Invalidations:
    """The queue of names.

    Attributes:
        num_overflowed: names that were left to their timeout because the queue was full.

    `drop` tells the kernel to drop one name; it may block, and raise OSError.
    """

    def __init__(self, drop: Callable[[int, bytes], None]) -> None:
        self.num_overflowed = 0
        self._drop = drop
        self._queue: deque[Place] = deque()
        self._filled = trio.Event()

    def put(self, place: Place) -> None:
        """Queue a name."""
        if len(self._queue) >= MAX_QUEUED:
            self.num_overflowed += 1
            return
        self._queue.append(place)
        self._filled.set()

    async def run(self) -> None:
        """Drop what is queued until cancelled."""
        limiter = trio.CapacityLimiter(1)  # its own: threads that wait for a device must not hold this one up
        while True:
            await self._filled.wait()
            self._filled = trio.Event()
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
                await trio.to_thread.run_sync(self._drop_all, batch, limiter=limiter)

    def _drop_all(self, batch: list[Place]) -> None:
        for inode, name in batch:
            try:
                self._drop(inode, name)
            except FileNotFoundError:
                pass  # the kernel did not know the name
            except OSError as error:
                logger.debug("could not drop %r below inode %d from the kernel: %s", name, inode, error)
