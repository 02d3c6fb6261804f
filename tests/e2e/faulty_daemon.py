"""A daemon whose devices hang or fail as long as files say so: `python faulty_daemon.py DIRECTORY SECONDS mount …`.

In DIRECTORY: `hang` has the directory of a volume, whose reads, writes, syncs and commits wait while the file is there,
and make `waits`; `fail` one whose writes fail with EIO. SECONDS bound each step of the end, and how long a device may not
answer.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvfs import opening, residency, volume_writer
from kvfs.index import Batch, Index
from kvfs.mount import ending
from kvfs.store import Store
from kvfs.system import System
from kvfs.tools import cli

CONTROL = Path(sys.argv[1])


def is_told(what: str, place: Path) -> bool:
    try:
        return CONTROL.joinpath(what).read_text() == str(place)
    except FileNotFoundError:
        return False


def obey(place: Path) -> None:
    while is_told("hang", place):
        CONTROL.joinpath("waits").touch()
        time.sleep(0.01)


class ToldSystem(System):
    """A system that does as the files say."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        obey(_place(fd))
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        obey(_place(fd))
        if is_told("fail", _place(fd)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        obey(_place(fd))
        super().fdatasync(fd)


def _place(fd: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{fd}")).parent


def main() -> None:
    seconds = float(sys.argv[2])
    commit = Index.commit

    def told_commit(index: Index, batch: Batch) -> None:
        obey(index.path.parent)
        commit(index, batch)

    Index.commit = told_commit  # type: ignore[method-assign]
    Store.flush.__defaults__ = (seconds,)
    opening.System = ToldSystem  # type: ignore[attr-defined]
    residency.PATIENCE_S = volume_writer._HANGS_AFTER_S = seconds
    ending.LAST_S = 3 * seconds
    sys.argv[1:] = sys.argv[3:]
    sys.exit(cli.main())


if __name__ == "__main__":
    main()
