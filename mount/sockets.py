"""The plain directory in which a daemon's session socket lies, and its lock.

    <socket_directory>/<first 16 hex digits of sha256(mount point)>/session.sock

One mount point has one directory, and the daemon that serves it holds a lock on the directory itself as long as it
lives: the kernel frees the lock however the daemon ends, so what a killed one left behind is taken over.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from kvfs.errors import UsageError
from kvfs.mount import last_words

SOCKET_NAME = "session.sock"
_MAX_SOCKET_BYTES = 107  # sun_path, unix(7), with its closing NUL


def directory_for(mountpoint: str, socket_directory: str) -> str:
    """Where the socket of the daemon on `mountpoint` (resolved) lies."""
    return os.path.join(socket_directory, hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:16])


@contextlib.contextmanager
def socket_directory(mountpoint: str, parent: str, *, is_shared: bool) -> Iterator[str]:
    """Make and lock the directory; gives the path for the socket, and removes both at the end.

    Only the daemon's user may enter, with `is_shared` its group too. Raises UsageError, in one sentence, if another
    daemon holds it or it cannot be made.
    """
    directory = directory_for(mountpoint, parent)
    path = os.path.join(directory, SOCKET_NAME)
    if len(os.fsencode(path)) > _MAX_SOCKET_BYTES:
        raise UsageError(f"{path} is too long for a socket; choose a shorter socket_directory")
    try:
        make_parent(parent)
        descriptor = _lock(directory)
    except OSError as error:
        raise UsageError(f"cannot make {directory} for the session socket: {error.strerror}") from error
    if descriptor is None:
        is_ending = last_words.left(Path(directory)) is not None
        hint = " is ending and writes what is dirty: `kvfs umount` waits for it" if is_ending else " serves it"
        raise UsageError(f"cannot mount on {mountpoint}: another kvfs daemon{hint}")
    try:
        os.fchmod(descriptor, 0o750 if is_shared else 0o700)
        _unlink(path)
        yield path
    finally:
        _unlink(path)
        with contextlib.suppress(OSError):
            os.rmdir(directory)
        os.close(descriptor)


def make_parent(directory: str) -> None:
    """Make the directory for the sockets of all daemons, if need be, and check whose it is.

    Raises UsageError where others could put something in the place of what we put there, and OSError.
    """
    os.makedirs(directory, mode=0o755, exist_ok=True)
    _check_owner(directory)


def _check_owner(directory: str) -> None:
    """Raise UsageError for a directory in which others could put something in the place of what we put there."""
    found = os.stat(directory)
    is_open = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    if found.st_uid not in (0, os.geteuid()) or is_open:
        raise UsageError(f"other users can change {directory}; choose another socket_directory, or mend owner and mode")


def _lock(directory: str) -> int | None:
    """A descriptor that holds the lock on the directory, which is ours; None if another process holds it."""
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        if os.fstat(descriptor).st_uid != os.geteuid():
            os.close(descriptor)
            raise UsageError(f"{directory} belongs to another user; choose another socket_directory")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(directory, descriptor):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        os.close(descriptor)  # its owner removed it between our open and our lock


def _is_still(directory: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(directory, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
