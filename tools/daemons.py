"""Daemons whose mount is not there: those that end, and still write what is dirty, and those that have not mounted yet.

A daemon holds the directory of its socket open, and locked, as long as it lives (`mount.sockets`), and the directory is
named by the mount point: so /proc says which daemon belongs to a mount point, wherever its sockets lie.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvfs.config import format_size
from kvfs.mount import last_words
from kvfs.mount.sockets import SOCKET_NAME, directory_for
from kvfs.tools.words import format_count

_PROC = Path("/proc")
_NAME = re.compile(r"[0-9a-f]{16}")


class Unmounted(NamedTuple):
    """A daemon that is alive.

    Attributes: pid; directory: of its socket; left: what it has to write if it ends, None if it does not yet.
    """

    pid: int
    directory: Path
    left: last_words.Left | None

    @property
    def socket_path(self) -> str:
        """Where its socket is, or was."""
        return str(self.directory / SOCKET_NAME)

    def sentence(self, path: str) -> str:
        """For people: what it does, without a mount on `path`."""
        who = f"the daemon of {path} (process {self.pid})"
        if self.left is None:
            return f"{who} is alive, and nothing is mounted: it starts, or files in a mount that was taken away are still open"
        if not self.left.num_dirty:
            return f"{who} is ending: all it had is written"
        size = format_size(self.left.dirty_bytes)
        return f"{who} is ending: {format_count(self.left.num_dirty, 'chunk')}, {size}, are still to be written to NVMe"


def of_mountpoint(path: str, proc: Path = _PROC) -> Unmounted | None:
    """The daemon of a mount point (resolved) on which nothing is mounted, as far as this user may see it."""
    name = os.path.basename(directory_for(path, ""))
    for pid, directory in _held(proc):
        if directory.name == name:
            return Unmounted(pid, directory, last_words.left(directory))
    return None


def ending_now(proc: Path = _PROC) -> list[tuple[str, Unmounted]]:
    """All that end, with their mount points."""
    found = {}
    for pid, directory in _held(proc):
        left = last_words.left(directory)
        if left is not None and left.pid == pid:
            found[left.mountpoint] = Unmounted(pid, directory, left)
    return sorted(found.items())


def _held(proc: Path) -> Iterator[tuple[int, Path]]:
    """Directories that processes have open and that bear names like those of sockets' directories."""
    for process in proc.glob("[0-9]*"):
        try:
            names = os.listdir(process / "fd")
        except OSError:  # of somebody else, or it has ended
            continue
        for name in names:
            try:
                target = os.readlink(process / "fd" / name)
            except OSError:
                continue
            if target.startswith("/") and _NAME.fullmatch(os.path.basename(target)):
                yield int(process.name), Path(target)
