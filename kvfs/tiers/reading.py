"""Reading from one volume what was asked for first first, many reads under way at once.

Where the kernel has a queue, reads begin in the thread that asks for them, as far as they may, and one thread collects them
and begins the next; else as many threads as said read one at a time. Such a thread ends when nothing is left, and is never
abandoned: what it reads into belongs to it.

Concurrency: `put` is called by the event loop's thread. What has ended is told by another, in no particular order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import trio

from kvfs.kernel_reads import KernelReads

MAX_UNDER_WAY = 32
MAX_UNDER_WAY_BYTES = 8 << 20
"""Of one volume: enough to keep a device busy, and little for what comes next to wait behind. A virtual device may tell of all
that it was given only when it is through: of 64 pieces of 128 KiB an engine heard 2 ms later than of 32."""

_BEGUN_AT_ONCE, _BEGUN_AT_ONCE_BYTES = 16, 2 << 20
"""By who asks: it takes 0.2 ms, and 0.3 ms until a thread is awake."""


class Read:
    """A range of the volume, as long as `buffer` and at `offset`, that somebody waits for. Attributes: batch: of `Reads`."""

    __slots__ = ("batch", "buffer", "offset")

    def __init__(self, buffer: memoryview, offset: int) -> None:
        self.buffer = buffer
        self.offset = offset
        self.batch: Batch[Any] | None = None

    def is_given_up(self) -> bool:
        """Whether nobody waits for it any more."""
        return False


R = TypeVar("R", bound=Read)
Ended = tuple[R, OSError | None]


class Batch(Generic[R]):
    """What was asked for at once. Attributes: reads: those not begun; most: that may be under way; num_under_way."""

    def __init__(self, reads: Iterator[R], most: int) -> None:
        self.reads = reads
        self.most = most
        self.num_under_way = 0


class Readable(Protocol):
    """What the reads are of, see `kvfs.volume.Volume`."""

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer. Raises OSError."""

    def kernel_reads(self, max_under_way: int) -> KernelReads[Any] | None:
        """A queue for so many reads at once, where there is one."""


class Reads(Generic[R]):
    """What is to be read from one volume, and the threads that do it. `tell` is called by them with what has ended."""

    def __init__(self, volume: Readable, num_threads: int, tell: Callable[[list[Ended[R]]], None]) -> None:
        self._volume = volume
        self._tell = tell
        self._lock = threading.Lock()
        self._batches: list[Batch[R]] = []
        self._queue: KernelReads[R] | None = volume.kernel_reads(MAX_UNDER_WAY)
        self._num_idle = num_threads if self._queue is None else 1
        self._num_bytes = 0  # under way
        self._not_queued: list[R] = []

    def put(self, reads: Iterator[R], most_under_way: int) -> None:
        """Read these, the first first, so many at once and no more, behind what was asked for before."""
        with self._lock:
            self._batches.append(Batch(reads, most_under_way))
            num_threads = self._num_idle if self._queue is None else min(self._num_idle, 1)
            self._num_idle -= num_threads
            if self._queue is not None:
                self._begin(self._queue, _BEGUN_AT_ONCE, _BEGUN_AT_ONCE_BYTES, may_wait=False)
        token = trio.lowlevel.current_trio_token()
        for _ in range(num_threads):
            trio.lowlevel.start_thread_soon(partial(self._work, token), lambda _: None, "kvfs-read")

    def _work(self, token: trio.lowlevel.TrioToken) -> None:
        """In a thread. It may still be ending when the loop has ended: what it told last is waited for, it is not."""
        try:
            if self._queue is None:
                self._one_by_one()
            else:
                self._collect(self._queue)
        except BaseException as defect:  # noqa: BLE001 - it is raised in the loop, and ends the daemon
            token.run_sync_soon(_raise, defect)

    def _next(self) -> R | None:
        """What comes next and may be under way as well, which it then is. The caller has the lock."""
        for batch in list(self._batches):
            if batch.num_under_way < batch.most:
                read = next(batch.reads, None)
                if read is not None:
                    batch.num_under_way += 1
                    read.batch = batch
                    return read
                self._batches.remove(batch)
        return None

    def _one_by_one(self) -> None:
        while True:
            with self._lock:
                read = self._next()
                if read is None:  # whoever reads what is under way goes on with the rest
                    self._num_idle += 1
                    return
            error = None if read.is_given_up() else self._read(read)
            with self._lock:
                _end(read)
            self._tell([(read, error)])

    def _collect(self, queue: KernelReads[R]) -> None:
        while True:
            collected = queue.wait() if queue.num_under_way else []
            with self._lock:
                not_queued, self._not_queued = self._not_queued, []
                for read in [*(read for read, _ in collected), *not_queued]:
                    self._num_bytes -= len(read.buffer)
                    _end(read)
                self._begin(queue, MAX_UNDER_WAY, MAX_UNDER_WAY_BYTES, may_wait=True)
                if not (collected or not_queued or queue.num_under_way or self._not_queued):
                    self._num_idle += 1
                    return
            ended: list[Ended[R]] = [(read, None if read.is_given_up() else self._read(read)) for read in not_queued]
            ended += [(read, None if n == len(read.buffer) else self._read(read)) for read, n in collected]
            self._tell(ended)

    def _begin(self, queue: KernelReads[R], most: int, most_bytes: int, *, may_wait: bool) -> None:
        """Begin so many of what comes next, as far as they may be under way. The caller has the lock."""
        reads: list[R] = []
        room = min(most, MAX_UNDER_WAY - queue.num_under_way)
        while len(reads) < room and self._num_bytes < most_bytes and (read := self._next()) is not None:
            self._num_bytes += len(read.buffer)
            (self._not_queued if read.is_given_up() else reads).append(read)
        self._not_queued += queue.submit(reads, may_wait=may_wait)

    def _read(self, read: R) -> OSError | None:
        """By itself, in this thread; also what the queue did not read whole: this way says what is wrong."""
        try:
            self._volume.read(read.buffer, read.offset)
        except OSError as error:
            return error
        return None


def _raise(defect: BaseException) -> None:
    raise defect


def _end(read: Read) -> None:
    assert read.batch is not None
    read.batch.num_under_way -= 1
