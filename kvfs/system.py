"""The seam to the operating system and the clock: everything that a crash test or a deterministic test replaces.

One `System` is handed to whoever does I/O on the volume or asks for the time. `kvfs.testing` has systems that fail.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from kvfs import memory


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

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        """pwritev(2); may be short."""
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        """fdatasync(2)."""
        os.fdatasync(fd)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        """posix_fallocate(3)."""
        os.posix_fallocate(fd, offset, length)
