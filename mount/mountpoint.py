"""The mount point as the kernel sees it: what is mounted there, whether it answers, clearing and unmounting.

Nothing here knows pyfuse3. Looking at a path below a mount whose daemon is stopped hangs, so whatever touches a mount
that is not known to be alive runs in a thread with a deadline; /proc/self/mountinfo never hangs.

Concurrency: all functions may block and are called from a thread where an event loop runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import re
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

from kvfs.errors import UsageError

logger = logging.getLogger(__name__)

FSTYPE = "fuse.kvfs"
SOURCE = "kvfs"
ANSWER_DEADLINE_S = 2.0
READ_AHEAD_KIB = 1024  # buffered reads of 1 MiB instead of 128 KiB: 0.47 of tmpfs instead of 0.23
_MAX_STALE = 16
_MAX_LINKS = 40  # symbolic links after which the kernel gives up too, path_resolution(7)
_MNT_DETACH = 2  # umount2(2)
_UMOUNT_NOFOLLOW = 8
_DEAD = (errno.ENOTCONN, errno.ECONNABORTED)  # what a mount says whose daemon is gone
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo, see proc_pid_mountinfo(5)."""

    device: str
    path: str
    fstype: str
    source: str

    @property
    def is_ours(self) -> bool:
        """Whether it is a kvfs mount, alive or not."""
        return self.fstype == FSTYPE


def parse_mountinfo(text: str) -> list[Mount]:
    """The mounts in the order of the file: of several at one path the last is on top. Odd lines are left out."""
    mounts = []
    for line in text.split("\n"):  # a name may hold any other character that ends a line somewhere
        fields, _, tail = line.partition(" - ")
        words, kinds = fields.split(" "), tail.split(" ")
        if len(words) >= 6 and len(kinds) >= 2:
            mounts.append(Mount(words[2], _unescape(words[4]), kinds[0], _unescape(kinds[1])))
    return mounts


def mounts() -> list[Mount]:
    """What is mounted now, as this process sees it."""
    return parse_mountinfo(Path("/proc/self/mountinfo").read_bytes().decode("utf-8", "surrogateescape"))


def mount_at(path: str) -> Mount | None:
    """The mount on top at exactly this path."""
    return next((mount for mount in reversed(mounts()) if mount.path == path), None)


def resolve(path: str) -> str:
    """The path as the kernel reports it. What lies in a mount of kvfs, its root included, is not looked at: it may hang."""
    return os.path.join(*reached(path)).rstrip("/") or "/"


def reached(path: str) -> tuple[str, str]:
    """The path with its links resolved, up to the first mount of kvfs on the way; and the rest, which lies in that.

    Nothing in such a mount is looked at, nor its root. The rest has no links resolved. A last link that leads nowhere
    stays: it is no place to make a directory.
    """
    return _reached(path, {mount.path for mount in mounts() if mount.is_ours}, _MAX_LINKS)


def _reached(path: str, ours: set[str], num_links: int) -> tuple[str, str]:
    current = "/"
    waiting = _parts(os.path.join(os.getcwd(), path))
    while waiting:
        if current in ours:
            rest = os.path.normpath("/".join(reversed(waiting)))
            if rest != ".." and not rest.startswith("../"):
                return current, "" if rest == "." else rest
        part = waiting.pop()
        if part == "..":
            current = os.path.dirname(current)
            continue
        step = os.path.join(current, part)
        try:
            target = None if step in ours or num_links <= 0 else os.readlink(step)
        except OSError:
            target = None
        if target is None:
            current = step
            continue
        num_links -= 1
        if not waiting:
            end, rest = _reached(os.path.join(current, target), ours, num_links)
            is_nowhere = not rest and end not in ours and not os.path.lexists(end)
            return (step, "") if is_nowhere else (end, rest)
        waiting += _parts(target)
        current = "/" if target.startswith("/") else current
    return current, ""


def _parts(path: str) -> list[str]:
    """The names in a path, the first one last."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def prepare(path: str) -> str:
    """Make `path` ready to be mounted on, and return it resolved.

    A mount that a dead daemon left is cleared; a directory that is missing is made. Raises UsageError, in one
    sentence, for what cannot be mounted on.
    """
    path = resolve(path)
    number = _clear_stale(path)
    if number == errno.ENOENT:
        _make(path)
    elif number:
        raise UsageError(f"cannot mount on {path}: {os.strerror(number)}")
    _check_empty(path)
    return path


def answers(path: str, deadline_s: float = ANSWER_DEADLINE_S) -> bool:
    """Whether a mount says something other than that its daemon is gone, within the deadline."""
    return _probe(path, deadline_s) not in (None, *_DEAD)


def unmount(path: str, *, lazy: bool = False) -> bool:
    """Unmount `path`; False if it is busy (never with `lazy`) or may not be unmounted."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
        return bool(libc.umount2(os.fsencode(path), flags) == 0)
    try:
        command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", path]
        return subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL).returncode == 0
    except OSError as error:
        logger.warning("cannot run fusermount3: %s", error.strerror)
        return False


def raise_read_ahead(path: str, kib: int = READ_AHEAD_KIB) -> None:
    """Let the kernel read further ahead on the mount at `path`. Only root may; others go without."""
    mount = mount_at(path)
    if mount is None:
        return
    setting = Path(f"/sys/class/bdi/{mount.device}/read_ahead_kb")
    try:
        setting.write_text(f"{kib}\n")
    except OSError as error:
        logger.info("read-ahead of %s stays as it is: %s", path, error.strerror)


def _probe(path: str, deadline_s: float = ANSWER_DEADLINE_S) -> int | None:
    """0 if `path` can be looked at, else the errno; None if there was no answer within the deadline.

    Asks for statfs, which always reaches the daemon: the attributes of a dead mount's root stay cached for a second.
    """
    result: list[int] = []

    def look() -> None:
        try:
            os.statvfs(path)
            result.append(0)
        except OSError as error:
            result.append(error.errno or errno.EIO)

    thread = threading.Thread(target=look, daemon=True, name="kvfs-probe")
    thread.start()
    thread.join(deadline_s)
    return result[0] if result else None


def _clear_stale(path: str) -> int:
    """Clear what dead daemons left at `path`; returns what `_probe` says then. Raises UsageError for a live mount."""
    for _ in range(_MAX_STALE):
        mount = mount_at(path)
        number = _probe(path)
        is_ours = mount is not None and mount.is_ours
        if number is None:
            whose = "a kvfs daemon that is mounted" if is_ours else "what is mounted"
            raise UsageError(f"{whose} on {path} does not answer; end it first")
        if not is_ours:
            return number
        if number not in _DEAD:
            raise UsageError(f"kvfs is already mounted on {path}")
        logger.warning("clearing the mount on %s that a dead daemon left", path)
        if not unmount(path, lazy=True):
            break
    raise UsageError(f"cannot clear the mount on {path} that a dead daemon left")


def _make(path: str) -> None:
    try:
        os.makedirs(path)
    except OSError as error:
        raise UsageError(f"cannot make the directory {path}: {error.strerror}") from error


def _check_empty(path: str) -> None:
    try:
        with os.scandir(path) as entries:
            if next(entries, None) is not None:
                raise UsageError(f"{path} is not empty; kvfs mounts on an empty directory")
    except NotADirectoryError as error:
        raise UsageError(f"{path} is not a directory") from error
    except OSError as error:
        raise UsageError(f"cannot look into {path}: {error.strerror}") from error


def _unescape(word: str) -> str:
    """Blanks and backslashes are written as \\ooo."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), word)


def remove_if_empty(path: str) -> None:
    """Remove a directory that nobody uses any more."""
    with contextlib.suppress(OSError):
        os.rmdir(path)
