"""Work on one piece after the other, by the thread that asked for it and by others that help it.

Helpers stay, asleep, for the next time: to start a thread takes the one that starts it 0.3 ms, to wake one nothing. One
that gets no core costs nothing either but the piece that it holds: whoever is free takes the next, and nobody waits for
a helper that has not begun. A forked child has helpers of its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Generic, TypeVar

P = TypeVar("P")


# To wake a helper takes up to 0.4 ms, as long as 3 MiB.
_MIN_SHARED_BYTES = 16 << 20


def helpers_for(num_bytes: int) -> int:
    """How many helpers are worth it to copy so many bytes: one, or none without a second core."""
    return int(num_bytes >= _MIN_SHARED_BYTES and len(os.sched_getaffinity(0)) > 1)


def for_each(pieces: Iterator[P], work: Callable[[P], None], num_helpers: int) -> None:
    """Call `work` with each piece, none of which is None, in this thread and in up to `num_helpers` more; `pieces` is advanced by one at a time.

    What either raises first is raised here, once all threads have stopped; no piece is begun after it.
    """
    job = _Job(pieces, work)
    _helpers.call(job, num_helpers)
    try:
        job.work_on()
    finally:
        job.wait_for_helpers()
    if job.failure is not None:
        raise job.failure


class _Job(Generic[P]):
    """Attributes: failure: the first that a piece, or the work on it, raised."""

    def __init__(self, pieces: Iterator[P], work: Callable[[P], None]) -> None:
        self.failure: BaseException | None = None
        self._pieces = pieces
        self._work = work
        self._taking = threading.Lock()
        self._is_over = False
        self._helping = threading.Condition()
        self._process = os.getpid()
        self._num_helping = 0

    def work_on(self) -> None:
        """Work until no piece is left or something failed."""
        try:
            while (piece := self._take()) is not None:
                self._work(piece)
        except BaseException as error:  # noqa: BLE001 - `for_each` raises it again
            self._is_over = True
            self.failure = self.failure or error

    def _take(self) -> P | None:
        with self._taking:
            piece = None if self._is_over else next(self._pieces, None)
            if piece is None:
                self._is_over = True
            return None if self._is_over else piece  # another thread may have failed meanwhile

    def help_out(self) -> None:
        """The same by a helper."""
        with self._helping:
            self._num_helping += 1
        try:
            self.work_on()
        finally:
            with self._helping:
                self._num_helping -= 1
                self._helping.notify_all()

    def wait_for_helpers(self) -> None:
        """Return when no helper works on it, and none will."""
        self._is_over = True
        if os.getpid() != self._process:  # forked by what was done with a piece: the helpers are not here
            return
        with self._helping:
            while self._num_helping:
                self._helping.wait()


class _Helpers:
    """Threads that wait for something to do."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job[object]] = SimpleQueue()
        self._num_threads = 0
        self._lock = threading.Lock()

    def call(self, job: _Job[P], num_helpers: int) -> None:
        """Have so many look at the job when they can."""
        with self._lock:
            for _ in range(self._num_threads, num_helpers):
                threading.Thread(target=self._wait_for_jobs, name="kvfs-help", daemon=True).start()
                self._num_threads += 1
        for _ in range(num_helpers):
            self._jobs.put(job)  # type: ignore[arg-type]  # whatever its pieces are

    def _wait_for_jobs(self) -> None:
        while True:
            self._jobs.get().help_out()


_helpers = _Helpers()


def _forget_after_fork() -> None:
    global _helpers  # noqa: PLW0603 - the threads of a parent are not in its child
    _helpers = _Helpers()


os.register_at_fork(after_in_child=_forget_after_fork)
