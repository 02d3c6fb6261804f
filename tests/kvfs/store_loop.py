"""An event loop in a thread of its own, for tests that are no coroutines; its clock moves only when told to."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio
import trio.lowlevel
import trio.testing

T = TypeVar("T")
HANGS_AFTER_S = 120.0


class Loop:
    """Trio in a thread; its clock moves only when told to."""

    def __init__(self) -> None:
        self.clock = trio.testing.MockClock()
        self._ready = threading.Event()
        self._waiting: set[concurrent.futures.Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="loop of the store")
        self._thread.start()
        self._ready.wait()

    def _run(self) -> None:
        error: BaseException = RuntimeError("the loop ended")
        try:
            trio.run(self._live, clock=self.clock)
        except BaseException as failure:  # noqa: BLE001 - it is told to whoever waits
            error = failure
        self._ready.set()
        for future in list(self._waiting):
            future.set_exception(error)

    async def _live(self) -> None:
        self._end = trio.Event()
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as self._nursery:
            self._ready.set()
            await self._end.wait()

    def start(self, work: Callable[[], Awaitable[T]]) -> concurrent.futures.Future[T]:
        """Begin it in a task; what it raises is in the future, and hurts nothing else."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._waiting.add(future)

        async def task() -> None:
            try:
                value = await work()
            except BaseException as error:
                self._waiting.discard(future)
                future.set_exception(error)
                if not isinstance(error, Exception):
                    raise
            else:
                self._waiting.discard(future)
                future.set_result(value)

        self._token.run_sync_soon(self._nursery.start_soon, task)
        return future

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do it and wait."""
        return self.start(work).result(timeout=HANGS_AFTER_S)

    def run_while_time_passes(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do it and wait, and let every retry come at once."""
        future = self.start(work)
        give_up = time.monotonic() + HANGS_AFTER_S
        while not concurrent.futures.wait([future], timeout=0.005).done and time.monotonic() < give_up:
            self._token.run_sync_soon(self.clock.jump, 31.0)
        return future.result(timeout=0)

    def end(self) -> None:
        """Let it end, and wait."""
        if self._thread.is_alive():
            self._token.run_sync_soon(self._end.set)
        self._thread.join()
