"""The emptiest file system that pyfuse3 can serve: the floor for a look-up, or a listing, through a mount.

Run by `kvfs bench`: `python -m kvfs.tools.bench.empty_fuse DIRECTORY [NUM_NAMES]`.
"""

from __future__ import annotations

import errno
import stat
import sys
from collections.abc import Sequence

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileHandleT, FileNameT, FUSEError, InodeT, ReaddirToken, RequestContext


class Empty(pyfuse3.Operations):
    """A root directory with nothing in it. It lists names, as long as those of chunks, in the shortest way that there is."""

    def __init__(self, num_names: int) -> None:
        super().__init__()
        self._names = [b"%032x.safetensors" % (number * 0x9E3779B97F4A7C15) for number in range(num_names)]

    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        """The root's attributes."""
        entry = EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = pyfuse3.ModeT(stat.S_IFDIR | 0o700)
        return entry

    async def lookup(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> EntryAttributes:
        """Nothing is there."""
        raise FUSEError(errno.ENOENT)

    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        """Of the root; one handle will do."""
        return FileHandleT(inode)

    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        """The names, all with the attributes of one empty file, but for their inodes."""
        entry, names, reply = EntryAttributes(), self._names, pyfuse3.readdir_reply
        for index in range(start_id, len(names)):
            entry.st_ino = InodeT(index + 2)
            if not reply(token, names[index], entry, index + 1):
                return

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        """Nothing was remembered."""


def main() -> None:
    """Serve the directory named on the command line, with so many names in it, until it is unmounted."""
    num_names = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    pyfuse3.init(Empty(num_names), sys.argv[1], {*pyfuse3.default_options, "fsname=kvfs-empty"})
    print("ready", flush=True)
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=True)


if __name__ == "__main__":
    main()
