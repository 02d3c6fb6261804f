"""Looking at a mount from a command: find it, and read it without hanging on a daemon that is stopped.

Concurrency: whatever touches the mount runs in a daemon thread, which is left behind when the daemon does not answer.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvfs.errors import DiskFullError, UnavailableError, UsageError
from kvfs.mount import mountpoint

DEADLINE_S = 3.0
Beat = Callable[[], None]
T = TypeVar("T")


class NotMountedError(UsageError):
    """Nothing is mounted there."""


class GoneError(UnavailableError):
    """The daemon of a mount is dead; the mount is still there."""


def find(path: str) -> str:
    """The mount at `path`, as the kernel names it; raises UsageError if there is none or it is not kvfs.

    Looks at nothing in a mount of kvfs, so it never hangs.
    """
    resolved, rest = mountpoint.reached(path)
    if rest:
        raise UsageError(f"{path} lies inside the mount on {resolved}: name the mount itself")
    mount = mountpoint.mount_at(resolved)
    if mount is None:
        others = all_paths()
        hint = f"; it is mounted on {', '.join(others)}" if others else ""
        raise NotMountedError(f"kvfs is not mounted on {path}{hint}")
    if not mount.is_ours:
        raise UsageError(f"what is mounted on {path} is not kvfs but {mount.fstype}")
    return resolved


def all_paths() -> list[str]:
    """Where kvfs is mounted, in the order of the alphabet. Never hangs."""
    return sorted({mount.path for mount in mountpoint.mounts() if mount.is_ours})


def inside(path: str) -> tuple[str, str] | None:
    """The kvfs mount above `path`, and the rest of the path below it; None if there is none. Never hangs."""
    mount, rest = mountpoint.reached(path)
    return (mount, rest) if rest else None


def ask(path: str, look: Callable[[Beat], T], deadline_s: float = DEADLINE_S) -> T:
    """What `look` returns, called in a thread; long work calls its argument, which says that the mount answers.

    Raises UnavailableError if the mount gave no sign of life for `deadline_s`, and UsageError for what the caller may
    not see. `path` is for the messages.
    """
    results: list[T] = []
    failures: list[BaseException] = []
    last = [time.monotonic()]

    def beat() -> None:
        last[0] = time.monotonic()

    def work() -> None:
        try:
            results.append(look(beat))
        except BaseException as error:  # noqa: BLE001 - it is raised again below, in the thread that waits
            failures.append(error)

    thread = threading.Thread(target=work, daemon=True, name="kvfs-ask")
    thread.start()
    while thread.is_alive() and (left := last[0] + deadline_s - time.monotonic()) > 0:
        thread.join(left)
    if results:
        return results[0]
    if not failures:
        raise UnavailableError(f"the kvfs daemon of {path} has not answered for {deadline_s:g} s: is it stopped?")
    raise _told(path, failures[0]) from failures[0]


def read_status(path: str, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
    """The content of the mount's status.json."""
    raw = ask(path, lambda _: Path(path, ".kvfs/status.json").read_bytes(), deadline_s)
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise UnavailableError(f"the status of {path} cannot be understood: {error}") from error


@contextlib.contextmanager
def changing(path: str) -> Iterator[None]:
    """A change to the mount at `path`: where it is in force but not durable, that is what the error says.

    Raises DiskFullError and UnavailableError for that; every other OSError passes.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC and (full := _full_places(path)):
            raise DiskFullError(
                f"no room is left beside the volume in {', '.join(full)}: this is in force, and will outlive the daemon only "
                "once there is room; free some there"
            ) from error
        if error.errno in (errno.EIO, errno.ETIMEDOUT):
            raise UnavailableError(
                f"a device of {path} fails or does not answer, so this may not outlive the daemon; `kvfs status` says which"
            ) from error
        raise


def _full_places(path: str) -> list[str]:
    """The volumes of a mount beside which there is no room."""
    volumes = read_status(path).get("volumes") or []
    return [str(each.get("directory")) for each in volumes if each.get("is_disk_full")]


def _told(path: str, error: BaseException) -> BaseException:
    if not isinstance(error, OSError):
        return error
    if error.errno in (errno.ENOTCONN, errno.ECONNABORTED):
        return GoneError(f"the kvfs daemon of {path} is gone; `kvfs mount` or `kvfs umount` clears what it left")
    if error.errno in (errno.EACCES, errno.EPERM):
        return UsageError(f"you may not look into {path}: ask root, or whoever mounted it")
    return UnavailableError(f"cannot read {error.filename or path}: {error.strerror}")
