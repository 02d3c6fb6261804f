"""What a file system request asks of a tier, and may wait for: bounded in number, in line and in time.

A process that waits for an answer of ours cannot be killed (measured), and a thread that hangs in the kernel cannot be
cancelled. So the work is done in a task of its own, which goes on when nobody waits for it any more, and the request is
answered in time whatever the device does.

Concurrency: belongs to the event loop's thread. The chunk is leased until the work has ended.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from kvfs.catalog import Chunk
from kvfs.errors import UnavailableError
from kvfs.store import Store

MAX_AT_WORK = 64
MAX_IN_LINE = 448
DEADLINE_S = 30.0

T = TypeVar("T")


class TierWork:
    """At most `MAX_AT_WORK` pieces of work at a time; `MAX_IN_LINE` stand in line, more fail at once.

    `nursery` outlives the requests.
    """

    def __init__(self, store: Store, nursery: trio.Nursery) -> None:
        self._store = store
        self._nursery = nursery
        self._limiter = trio.CapacityLimiter(MAX_AT_WORK)

    async def run(self, chunk: Chunk | None, work: Callable[[], Awaitable[T]]) -> T:
        """What `work`, on a chunk if one is named, returns or raises; UnavailableError, TooSlowError after `DEADLINE_S`."""
        if self._limiter.statistics().tasks_waiting >= MAX_IN_LINE:
            raise UnavailableError("too many requests wait for a tier")
        done = trio.Event()
        results: list[T] = []
        errors: list[Exception] = []

        async def perform() -> None:
            try:
                async with self._limiter:
                    results.append(await work())
            except Exception as error:  # noqa: BLE001 (raised below, in the task that waits)
                errors.append(error)
            finally:
                if chunk is not None:
                    self._store.release(chunk)
                done.set()

        if chunk is not None:
            self._store.lease(chunk)
        self._nursery.start_soon(perform)
        with trio.fail_after(DEADLINE_S):
            await done.wait()
        if errors:
            raise errors[0]
        return results[0]
