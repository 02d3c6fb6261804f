"""Files read into GPU memory by kvikio: the only module that imports it.

kvikio decides for each file whether GPUDirect Storage carries the bytes or its own pinned buffers do; `carried` says
which it was, as kvikio itself counted. It opens by path, so descriptors are handed over as ``/proc/self/fd/N``: the
same file, if this process may open it. Opening costs a registration with cuFile, so files stay open: the last
`MAX_OPEN`, and all that are being read.

kvikio's futures hold neither file nor memory; whoever drops one early crashes. So `read` waits for all of them, come
what may, and the caller keeps the memory until it returns.

Concurrency: any thread; the lock guards the handles alone. Nothing here survives a fork, see `reader`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from kvfs.device.destination import Destination
from kvfs.errors import UnavailableError

MAX_OPEN = 16
NUM_THREADS = 8
TASK_BYTES = 16 << 20  # cuFile's own largest direct transfer
INSTALL = "pip install 'kvfs[gds]' for a torch built for CUDA 13, 'kvfs[gds-cu12]' for CUDA 12"


def import_kvikio() -> ModuleType:
    """The module kvikio. Raises UnavailableError that says what to install.

    What is missing beneath it shows as ImportError, OSError or, from cuda.pathfinder, as RuntimeError.
    """
    try:
        importlib.import_module("kvikio.defaults")
        return importlib.import_module("kvikio")
    except (ImportError, RuntimeError, OSError) as error:
        raise UnavailableError(f"kvikio cannot be imported ({str(error).splitlines()[0]}): {INSTALL}") from error


@dataclass(eq=False)
class _Handle:
    file: Any
    num_users: int = 0


class KvikioFiles:
    """Open files, and the monitor that counts what kvikio carries. Made only where CUDA is known to be there."""

    def __init__(self, kvikio: ModuleType, max_open: int = MAX_OPEN) -> None:
        self._kvikio = kvikio
        self._max_open = max_open
        self._handles: OrderedDict[tuple[int, int], _Handle] = OrderedDict()  # the longest unused first
        self._lock = threading.Lock()
        monitor = getattr(kvikio, "SummaryMonitor", None)  # since 26.10
        self._monitor: Any = None if monitor is None else monitor()

    @classmethod
    def open(cls, max_open: int = MAX_OPEN) -> KvikioFiles:
        """Import kvikio and set what its defaults get wrong for chunks, where nobody has set it. Raises UnavailableError."""
        kvikio = import_kvikio()
        if "CUFILE_LOGFILE_PATH" not in os.environ and "CUFILE_ENV_PATH_JSON" not in os.environ:
            log = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kvfs", "cufile.log")
            with contextlib.suppress(OSError):
                log.parent.mkdir(parents=True, exist_ok=True)
                os.environ["CUFILE_LOGFILE_PATH"] = str(log)  # else cuFile writes one into the working directory
        defaults = kvikio.defaults
        if not {"KVIKIO_NTHREADS", "KVIKIO_NUM_THREADS"} & os.environ.keys() and defaults.get("num_threads") == 1:
            defaults.set("num_threads", NUM_THREADS)
        if "KVIKIO_TASK_SIZE" not in os.environ:
            defaults.set("task_size", TASK_BYTES)
        return cls(kvikio, max_open)

    def read(self, fd: int, parts: Sequence[tuple[int, Destination]]) -> None:
        """Fill the destinations, each from its offset, all at the same time.

        They have to be whole in the file: kvikio knows no short reads. Raises UnavailableError.
        """
        with self._opened(fd) as file:
            futures: list[Any] = []
            failure: Exception | None = None
            try:
                for offset, target in parts:
                    futures.append(file.pread(target, size=target.size_bytes, file_offset=offset))
            except (RuntimeError, ValueError, TypeError) as error:
                failure = error
            for future, (_, target) in zip(futures, parts, strict=False):
                try:
                    count = future.get()
                    if count != target.size_bytes:
                        failure = failure or RuntimeError(f"{count} of {target.size_bytes} bytes came")
                except RuntimeError as error:
                    failure = failure or error
        if failure is not None:
            raise UnavailableError(f"kvikio could not read: {_first_line(failure)}") from failure

    @contextlib.contextmanager
    def _opened(self, fd: int) -> Iterator[Any]:
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino)  # of an open file, so nobody else gets the number meanwhile
        with self._lock:
            handle = self._handles.pop(key, None)
            if handle is None:
                try:
                    handle = _Handle(self._kvikio.CuFile(f"/proc/self/fd/{fd}", "r"))
                except RuntimeError as error:
                    raise UnavailableError(f"kvikio could not open the file: {_first_line(error)}") from error
            self._handles[key] = handle
            handle.num_users += 1
        try:
            yield handle.file
        finally:
            with self._lock:
                handle.num_users -= 1
                self._close_oldest()

    def _close_oldest(self) -> None:
        idle = [key for key, handle in self._handles.items() if not handle.num_users]
        for key in idle[: max(0, len(self._handles) - self._max_open)]:
            self._handles.pop(key).file.close()

    @property
    def num_open(self) -> int:
        """Files that are open now."""
        return len(self._handles)

    def register(self, memory: Destination) -> bool:
        """Make an allocation known to cuFile, so that it writes there without a bounce; whether that worked."""
        try:
            self._kvikio.memory_register(memory)
        except RuntimeError:
            return False
        return True

    def deregister(self, memory: Destination) -> None:
        """Undo `register`, before the memory is freed: the driver may deadlock otherwise."""
        with contextlib.suppress(RuntimeError):
            self._kvikio.memory_deregister(memory)

    def carried(self) -> dict[str, int]:
        """Bytes that kvikio carried in this process, for whomever, by its own word for the backend; those that did.

        GDS went through cuFile, POSIX through kvikio's buffers. Empty before kvikio 26.10, which counts nothing.
        """
        if self._monitor is None:
            return {}
        backends = self._monitor.get().by_backend
        return {name: total["bytes_transferred"] for name, total in backends.items() if total["num_ops"]}

    def close(self) -> None:
        """Close all files; nobody reads any more."""
        with self._lock:
            for handle in self._handles.values():
                handle.file.close()
            self._handles.clear()


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:2]) or type(error).__name__
