"""How much memory there is for the RAM tier: what the kernel has left, and what the memory cgroups allow.

Everything here reads /proc and /sys below a root that a test replaces; what does not exist there limits nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_RESERVE_SHARE = 20  # one part in so many stays free: for page tables, 0.2 % a process, and for the rest of the machine


class _Group(NamedTuple):
    """The files of a memory cgroup, and the names of its reclaimable pages in its statistics."""

    limit: str
    usage: str
    reclaimable: tuple[str, str]


# memory.rst of cgroup-v1 and cgroup-v2.rst in the kernel's documentation; shared memory is in neither list of files.
_VERSION_1 = _Group("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_VERSION_2 = _Group("memory.max", "memory.current", ("inactive_file", "active_file"))


def largest_arena(available: int, window_bytes: int) -> int:
    """The most that an arena may take of `available` bytes.

    Windows are made when engines come, so one is counted: a cache that cannot hand out even that is of no use.
    """
    return max(0, available - available // _RESERVE_SHARE - window_bytes)


def available(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take without bringing the kernel to kill somebody; None if nothing says so."""
    limits = [*_cgroups(root)]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        limits.append(next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) << 10)
    return min(limits, default=None)


def _cgroups(root: Path) -> Iterator[int]:
    """What is left in each memory cgroup that holds this process, cgroups(7).

    In a container the path may be that of the host, of which only the top is to be seen: the container's own.
    """
    try:
        lines = (root / "proc/self/cgroup").read_bytes().decode(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            top, group = root / "sys/fs/cgroup", _VERSION_2
        elif "memory" in controllers.split(","):
            top, group = root / "sys/fs/cgroup/memory", _VERSION_1
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            with contextlib.suppress(OSError, ValueError):  # "max" is no number
                yield _left(top.joinpath(*parts[:depth]), group)


def _left(directory: Path, group: _Group) -> int:
    limit, usage = (int((directory / name).read_text()) for name in (group.limit, group.usage))
    with contextlib.suppress(OSError, ValueError):
        facts = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        usage -= sum(int(facts.get(name, 0)) for name in group.reclaimable)
    return max(0, limit - max(0, usage))
