"""The mount of a file system that does nothing but answer, in a process of its own: see `empty_fuse`."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kvfs.mount import mountpoint


@contextlib.contextmanager
def empty_mount(directory: Path, num_names: int = 0) -> Iterator[Path]:
    """Mount it on a directory that is made; so many names are listed there, and none is found."""
    directory.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvfs.tools.bench.empty_fuse", str(directory), str(num_names)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield directory
    finally:
        mountpoint.unmount(str(directory), lazy=True)
        process.wait()
