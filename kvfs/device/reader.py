"""The one interface for reading into an engine's memory: what is done follows from the destination.

Concurrency: a `Reader` is used by any number of threads. `read` and `copy` return when the bytes are there, for every
stream; the caller has seen to it that nothing that was queued before still uses the destination. Nothing of a reader
outlives a fork: the child makes one for itself.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from kvfs.device.destination import Destination, destination_of
from kvfs.device.gpu import Carrier, Gpu, Way
from kvfs.device.host import read_fully
from kvfs.device.slab import Slab
from kvfs.errors import UnavailableError, UsageError
from kvfs.system import System

PIECE_BYTES = 4 << 20
NUM_THREADS = 4  # one thread reads at 0.5 to 0.7 of what four do


@dataclass(frozen=True)
class ReaderStatistics:
    """Bytes so far, by the way they took.

    Attributes:
        read_bytes, copied_bytes: from files, from memory.
        kvikio_bytes: those that kvikio says it carried, by its backend, in this process: GDS or POSIX.
        kvikio_failures: reads for which it was given up.
    """

    read_bytes: Mapping[Way, int] = field(default_factory=dict)
    copied_bytes: Mapping[Way, int] = field(default_factory=dict)
    kvikio_bytes: Mapping[str, int] = field(default_factory=dict)
    kvikio_failures: int = 0


class Reader:
    """Reads files, and copies memory, into host or CUDA memory."""

    def __init__(self, *, system: System | None = None, open_gpu: Callable[[System], Carrier] = Gpu.open) -> None:
        """`open_gpu` is called when the first CUDA destination comes."""
        self._system = System() if system is None else system
        self._open_gpu = open_gpu
        self._gpu: Carrier | None = None
        self._no_gpu = ""
        self._threads = ThreadPoolExecutor(NUM_THREADS, "kvfs-read")
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._read: Counter[Way] = Counter()
        self._copied: Counter[Way] = Counter()

    def read(self, fd: int, parts: Sequence[tuple[int, object]]) -> Way:
        """Fill each destination from its offset of a file, several at a time; returns how.

        All destinations lie on the host, or all on one device; see `destination_of` for what they may be. Raises
        UsageError for what they may not be, OSError, EOFError for a file that is too short, UnavailableError where CUDA
        fails. What is in the destinations then is worth nothing, and nobody writes there any more.
        """
        self._check_process()
        targets = [(offset, destination_of(target)) for offset, target in parts]
        targets = [(offset, target) for offset, target in targets if target.size_bytes]
        if len({target.is_cuda for _, target in targets}) > 1:
            raise UsageError("one read goes to the host or to a GPU, not to both")
        if not targets:
            return Way.HOST
        if not targets[0][1].is_cuda:
            self._read_on_host(fd, targets)
            way = Way.HOST
        else:
            end, length = max(offset + target.size_bytes for offset, target in targets), os.fstat(fd).st_size
            if end > length:  # kvikio would fail for it in words of its own
                raise EOFError(f"the file ends at {length}, {end - length} bytes too early")
            way = self._carrier().read(fd, targets)
        with self._lock:
            self._read[way] += sum(target.size_bytes for _, target in targets)
        return way

    def copy(self, source: memoryview, target: object) -> Way:
        """Fill a destination from host memory of the same size, such as the arena; returns how. Raises as `read`."""
        self._check_process()
        to = destination_of(target)
        source = source.cast("B") if source.nbytes else memoryview(b"")
        if to.size_bytes != source.nbytes:
            raise UsageError(f"{source.nbytes} bytes do not fill {to.size_bytes}")
        way = Way.HOST
        if to.size_bytes and to.is_cuda:
            way = self._carrier().copy(source, to)
        elif to.size_bytes:
            to.view[:] = source
        with self._lock:
            self._copied[way] += to.size_bytes
        return way

    def slab(self, size_bytes: int, device: int) -> Slab:
        """Memory of a CUDA device that is read into at full speed; closed before the reader. Raises UnavailableError."""
        self._check_process()
        return self._carrier().slab(size_bytes, device)

    def _read_on_host(self, fd: int, targets: Sequence[tuple[int, Destination]]) -> None:
        pieces = [
            (offset + begin, target.view[begin : begin + PIECE_BYTES])
            for offset, target in targets
            for begin in range(0, target.size_bytes, PIECE_BYTES)
        ]
        futures = [self._threads.submit(read_fully, fd, at, view, self._system) for at, view in pieces[1:]]
        try:
            for at, view in pieces[:1]:  # this thread would only wait
                read_fully(fd, at, view, self._system)
        finally:
            failures = [error for error in (future.exception() for future in futures) if error is not None]
        if failures:
            raise failures[0]

    def _carrier(self) -> Carrier:
        with self._lock:
            if self._no_gpu:
                raise UnavailableError(self._no_gpu)
            if self._gpu is None:
                try:
                    self._gpu = self._open_gpu(self._system)
                except UnavailableError as error:
                    self._no_gpu = str(error)
                    raise
            return self._gpu

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError("a reader does not outlive a fork: make one in this process")

    def statistics(self) -> ReaderStatistics:
        """Where bytes went so far."""
        with self._lock:
            gpu, read, copied = self._gpu, dict(self._read), dict(self._copied)
        if gpu is None:
            return ReaderStatistics(read, copied)
        return ReaderStatistics(read, copied, gpu.carried(), gpu.num_failures)

    def close(self) -> None:
        """Give everything back; nobody reads any more. In a child of the process that made it nothing happens."""
        if os.getpid() == self._pid:
            self._threads.shutdown()
            if self._gpu is not None:
                self._gpu.close()
                self._gpu = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
