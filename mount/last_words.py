"""The files beside its socket in which a daemon that ends says how far it is, and what it could not write.

For commands, which read them without the rest of a daemon. `ending` writes them.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from kvfs.statistics import Unwritten

FILE_NAME = "unwritten.json"
PROGRESS_NAME = "ending.json"


class Left(msgspec.Struct, frozen=True):
    """What a daemon that ends has still to write. Attributes: mountpoint: where it was; pid; num_dirty, dirty_bytes."""

    mountpoint: str
    pid: int
    num_dirty: int
    dirty_bytes: int


def put(path: Path, document: msgspec.Struct) -> None:
    """Write a file that is never seen half. Raises OSError."""
    unfinished = path.with_suffix(".unfinished")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.encode(document))
    unfinished.rename(path)


def left(directory: Path) -> Left | None:
    """What the daemon whose socket lay there has still to write; None if it does not end, or has ended."""
    try:
        return msgspec.json.decode((directory / PROGRESS_NAME).read_bytes(), type=Left)
    except (OSError, msgspec.MsgspecError):
        return None


def said(directory: Path) -> Unwritten | None:
    """What the last daemon whose socket lay there could not write; None if it wrote everything."""
    try:
        return msgspec.json.decode((directory / FILE_NAME).read_bytes(), type=Unwritten)
    except (OSError, msgspec.MsgspecError):
        return None


def take(socket_path: str) -> Unwritten | None:
    """The same; it is said once, but where an arena was kept that has it."""
    directory = Path(socket_path).parent
    found = said(directory)
    if found is not None and not found.is_kept:
        with contextlib.suppress(OSError):
            (directory / FILE_NAME).unlink()
            directory.rmdir()
    return found


def has_said(socket_path: str) -> bool:
    """Whether a daemon has said that it ends without having written everything."""
    return Path(socket_path).with_name(FILE_NAME).exists()
