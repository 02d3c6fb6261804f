"""The seam to the operating system and the clock: everything that a crash test or a deterministic test replaces.

One `System` is handed to whoever does I/O on the volume or asks for the time. `kvfs.testing` has systems that fail.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path


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
        limits = [*_cgroup_limits()]
        with contextlib.suppress(OSError, ValueError, StopIteration):
            lines = Path("/proc/meminfo").read_text().splitlines()
            limits.append(next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) << 10)
        return min(limits, default=None)

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


def _cgroup_limits() -> Iterator[int]:
    """The memory limits that hold for this process, cgroups(7), version 2."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, path = line.split(":", 2)
        if number != "0":
            continue
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # "max" is no number
                yield int((directory / "memory.max").read_text())
            if directory == root:
                return
