"""The seam to the operating system and the clock: everything that a crash test or a deterministic test replaces.

One `System` is handed to whoever does I/O on the volume or asks for the time. `kvfs.testing` has systems that fail.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence


class System:
    """The real thing. All methods raise OSError as the call beneath them does."""

    def time_ns(self) -> int:
        """Nanoseconds since the epoch."""
        return time.time_ns()

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back."""
        return time.monotonic()

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
