"""The emptiest file system that pyfuse3 can serve: the floor for a look-up through a mount. Run by `kvfs bench`."""

from __future__ import annotations

import errno
import stat
import sys

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileNameT, FUSEError, InodeT, RequestContext


class Empty(pyfuse3.Operations):
    """A root directory with nothing in it."""

    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        """The root's attributes."""
        entry = EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = pyfuse3.ModeT(stat.S_IFDIR | 0o700)
        return entry

    async def lookup(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> EntryAttributes:
        """Nothing is there."""
        raise FUSEError(errno.ENOENT)


def main() -> None:
    """Serve the directory named on the command line until it is unmounted."""
    pyfuse3.init(Empty(), sys.argv[1], {*pyfuse3.default_options, "fsname=kvfs-empty"})
    print("ready", flush=True)
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=True)


if __name__ == "__main__":
    main()
