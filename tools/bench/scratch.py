"""Directories for what a benchmark mounts and stores, gone afterwards; what a killed one left the next run clears away."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvfs.mount import mountpoint

_PREFIX = "kvfs-bench-"
_LOCK = ".in-use"


@contextlib.contextmanager
def scratch_below(directory: Path | None) -> Iterator[Path]:
    """An empty directory that is gone afterwards. It is locked as long as this process, or a daemon in it, lives."""
    parent = Path(directory or tempfile.gettempdir())
    _clear(parent)
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent)).resolve()
    try:
        with open(path / _LOCK, "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def lock_above(path: str) -> str:
    """The lock of the scratch directory that `path` is in; "" if it is in none."""
    return next((str(each / _LOCK) for each in Path(path).parents if (each / _LOCK).exists()), "")


def _clear(parent: Path) -> None:
    """Remove what nobody uses any more, mounts of dead daemons first."""
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), open(path / _LOCK, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_uid != os.geteuid():
                continue
            for mount in mountpoint.mounts():
                if mount.is_ours and Path(mount.path).is_relative_to(path.resolve()):
                    mountpoint.unmount(mount.path, lazy=True)
            shutil.rmtree(path, ignore_errors=True)
