"""The seam to the operating system and the clock: everything that a crash test or a deterministic test replaces.

One `System` is handed to whoever does I/O on the volume or asks for the time. `kvfs.testing` has systems that fail.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvfs import memory
from kvfs.kernel_reads import KernelReads


class System:
    """The real thing. All methods raise OSError as the call beneath them does."""

    def time_ns(self) -> int:
        """Nanoseconds since the epoch."""
        return time.time_ns()

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back."""
        return time.monotonic()

    def available_memory(self) -> int | None:
        """Bytes that this process may still take, as far as the kernel and its memory cgroups say; None if they do not."""
        return memory.available()

    def free_bytes(self, fd: int) -> int | None:
        """Bytes that are free on the file system of `fd`; None where it does not know its size."""
        found = os.fstatvfs(fd)
        free = found.f_bfree if os.geteuid() == 0 else found.f_bavail
        return free * found.f_frsize if found.f_blocks else None

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """preadv(2); may be short."""
        return os.preadv(fd, buffers, offset)

    def kernel_reads(self, fd: int, max_under_way: int) -> KernelReads[Any] | None:
        """A queue for so many reads of a file at once; None where there is none, or where another `preadv` has to see all."""
        if type(self).preadv is not System.preadv:
            return None
        try:
            return KernelReads(fd, max_under_way)
        except (OSError, KeyError):
            return None

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        """pwritev(2); may be short."""
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        """fdatasync(2)."""
        os.fdatasync(fd)

    def rename(self, old: Path, new: Path) -> None:
        """rename(2); the new name is durable once `sync_directory` has returned."""
        os.rename(old, new)

    def sync_directory(self, path: Path) -> None:
        """fsync(2) of a directory: its names are durable when this returns.

        One that we may not read, or whose file system cannot do it, is left to the system.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except PermissionError:
            return
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(fd)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        """posix_fallocate(3)."""
        os.posix_fallocate(fd, offset, length)
