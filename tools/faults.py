"""What is wrong with the volumes of a mount, and what to do about it, for people: `kvfs status` and `kvfs doctor` say it.

How much room is missing is looked up beside the volume, in a thread that is left behind if the device hangs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvfs.config import format_size
from kvfs.errors import KvfsError
from kvfs.statistics import Fault
from kvfs.tools import mounted
from kvfs.volume import FILE_NAME

INDEX_ROOM_BYTES = 16 << 20
"""What an index wants beside its volume: SQLite's log has 4 MiB between two checkpoints (1,000 pages), rows 200 B a chunk."""


class Trouble(NamedTuple):
    """One volume that does not work. Attributes: directory; word: for a table; what: is so; advice: what to do."""

    directory: str
    word: str
    what: str
    advice: str


def troubles(document: dict[str, Any]) -> Iterator[Trouble]:
    """Those of all volumes in a status.json, in its order; a daemon of an earlier version tells less."""
    volumes = document.get("volumes")
    for volume in volumes if isinstance(volumes, list) else ():
        if isinstance(volume, dict) and (found := trouble(volume)) is not None:
            yield found


def trouble(volume: dict[str, Any]) -> Trouble | None:
    """What is wrong with one volume."""
    directory = str(volume.get("directory", "?"))
    fault = volume.get("fault") or _fault_before(volume)
    if fault == Fault.MISSING:
        return Trouble(
            directory,
            "missing",
            "it was not there at the start, so the cache goes on without what is on it",
            f"mount its disk and start the cache again; or begin a new one with `kvfs format {directory} SIZE`",
        )
    if fault == Fault.GONE:
        return Trouble(
            directory,
            "gone",
            "its files were removed, or its disk was unmounted, under the daemon: what is stored stays in RAM, and ends with it",
            "put them back where they were; or unmount, and mount again, which begins a new volume",
        )
    if fault == Fault.DISK_FULL:
        return Trouble(
            directory,
            "disk full",
            f"its file system is full{_missing(directory)}: what is stored stays in RAM until there is room",
            f"free room beside {directory}, it is tried again by itself; or mount with a smaller volume in another place",
        )
    if fault:
        return Trouble(
            directory, "device fails", "its device fails, or does not answer: what is stored stays in RAM",
            "see the daemon's log, and dmesg; if it is dead, mount without it",
        )  # fmt: skip
    return None


def _fault_before(volume: dict[str, Any]) -> str:
    if volume.get("kind") == "missing":
        return Fault.MISSING
    if volume.get("is_disk_full"):
        return Fault.DISK_FULL
    return Fault.DEVICE if volume.get("is_degraded") else Fault.NONE


def missing_bytes(directory: Path) -> tuple[int, int]:
    """What is free for the volume there, and how much more it wants, with room for its index. Raises OSError."""
    found = os.statvfs(directory)
    free = (found.f_bfree if os.geteuid() == 0 else found.f_bavail) * found.f_frsize
    file = os.stat(directory / FILE_NAME)
    holes = max(
        0, file.st_size - file.st_blocks * 512
    )  # of a volume that lies where nothing is allocated before it is written
    return free, max(0, holes + INDEX_ROOM_BYTES - free)


def _missing(directory: str) -> str:
    try:
        free, missing = mounted.ask(directory, lambda _: missing_bytes(Path(directory)))
    except (KvfsError, OSError):  # it may not be looked at by whoever asks
        return ""
    return f", {format_size(free)} are free and {format_size(missing)} missing" if missing else ""
