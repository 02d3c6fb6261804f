"""What /proc says of processes, for tests. Whatever is looked at may end or close its files meanwhile: what went is left
out, and what a process that is gone has is nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

_PROC = "/proc"  # paths are text: of those that pathlib makes, each test of kvfs would make hundreds


def _entries(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def pids() -> list[int]:
    """All processes that this one can see."""
    return [int(name) for name in _entries(_PROC) if name.isdigit()]


def open_files(pid: int) -> Iterator[tuple[int, str]]:
    """Each descriptor of a process, and what it leads to: a path as the kernel names it, or the like of "socket:[1]"."""
    directory = f"{_PROC}/{pid}/fd"
    for name in _entries(directory):
        try:
            yield int(name), os.readlink(f"{directory}/{name}")
        except OSError:
            continue


def num_descriptors(pid: int) -> int:
    """How many descriptors a process has."""
    return sum(1 for _ in open_files(pid))


def is_alive(pid: int) -> bool:
    """Whether a process has not ended; one that has may still wait for its parent to ask."""
    state = _read(f"{_PROC}/{pid}/stat").rpartition(b")")[2].split()
    return bool(state) and state[0] not in (b"Z", b"X")


def command_line(pid: int) -> str:
    """The words of a process, a space after each; empty if it has ended."""
    return _read(f"{_PROC}/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace")


def environment(pid: int) -> list[bytes]:
    """The variables that a process was started with, each as NAME=value."""
    return _read(f"{_PROC}/{pid}/environ").split(b"\0")


def maps(pid: int) -> str:
    """What a process has mapped, one area a line."""
    return _read(f"{_PROC}/{pid}/maps").decode("utf-8", "surrogateescape")


def children(pid: int | None = None) -> list[int]:
    """The processes that one, or this one, started and that have not ended, or that nobody waited for."""
    tasks = f"{_PROC}/{'self' if pid is None else pid}/task"
    return [int(child) for task in _entries(tasks) for child in _read(f"{tasks}/{task}/children").split()]
