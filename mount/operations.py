"""The FUSE face: each handler translates a request and delegates to the tree, the control files or the store.

What they raise becomes an errno, see `guarding`.

Concurrency: handlers run as tasks of the FUSE main loop. Only `read` and `getxattr` of a chunk, and what
changes something (`unlink`, `rmdir`, `setxattr`, `removexattr`) wait, and they are bounded (`tier_work`), far below the
`MAX_TASKS` of the main loop, so a hung device does not stop `ls`; so are `write`, `flush`, `rename` and `setattr` of what
is being copied in (`copying_in`). All others run to their end without a checkpoint, but that `readdir` and `releasedir` of a
crowd give others a turn. `flush` answers at once but for files that are being copied in, whose close says whether they proved themselves.
"""

# ruff: noqa: D102 (pyfuse3.Operations says what each handler does)

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Sequence
from typing import cast

import pyfuse3
import trio
from pyfuse3 import (
    EntryAttributes,
    FileHandleT,
    FileInfo,
    FileNameT,
    FlagT,
    FUSEError,
    InodeT,
    ModeT,
    ReaddirToken,
    RequestContext,
    SetattrFields,
    StatvfsData,
    XAttrNameT,
)

from kvfs.catalog import Chunk
from kvfs.mount.attributes import Attributes
from kvfs.mount.control import ControlFiles
from kvfs.mount.copying_in import CopyingIn
from kvfs.mount.errnos import Faults
from kvfs.mount.files import Files
from kvfs.mount.guarding import GuardedOperations
from kvfs.mount.handles import Handles, OpenFile
from kvfs.mount.inodes import Inodes
from kvfs.mount.invalidation import Invalidations
from kvfs.mount.listing import Listing, Listings
from kvfs.mount.nodes import Fixed, Node, Role, is_directory
from kvfs.mount.removal import Removal
from kvfs.mount.staged_names import StagedFile
from kvfs.mount.syncing import Syncing
from kvfs.mount.tier_work import TierWork
from kvfs.mount.tree import Tree
from kvfs.mount.xattr_requests import XattrRequests
from kvfs.store import Store

MAX_TASKS = 1024
BLOCK_BYTES = 4096


class Operations(GuardedOperations):
    """All requests of the kernel.

    Attributes:
        tree, control, inodes, faults: see there.
        invalidations: names that the kernel is to drop.
        copying: what becomes of what people make here.
        removal: what was removed here, or anywhere else, and has to be out of the kernel's sight.

    `nursery` is for work that outlives the request it was begun for; it ends after the main loop.
    """

    supports_dot_lookup = False

    def __init__(self, store: Store, tree: Tree, control: ControlFiles, faults: Faults, nursery: trio.Nursery) -> None:
        super().__init__()
        self.tree = tree
        self.control = control
        self.faults = faults
        self.inodes = Inodes()
        self.invalidations = Invalidations(pyfuse3.invalidate_entry)
        self.copying = CopyingIn(store, tree, self.inodes, self.invalidations)
        self._syncing = Syncing(store)
        tier = TierWork(store, nursery)
        self.removal = Removal(store, tree, self.inodes, self.invalidations, self.copying, tier)
        self._store = store
        self._xattrs = XattrRequests(store, tree.staged, self.copying, tier)
        self._attributes = Attributes(tree)
        self._listings = Listings(tree, self._attributes, self.inodes, EntryAttributes)
        self._files = Files(store, control, self.copying, tier, self._syncing)
        self._handles = Handles()

    # names and attributes

    async def lookup(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> EntryAttributes:
        node = self.tree.lookup(self._node(parent_inode), name, ctx.pid)
        if node is None:
            raise FUSEError(errno.ENOENT)  # without a negative timeout: engines make names appear
        entry = self._entry(node)
        self._listings.looked_up(parent_inode, entry.st_ino)
        if isinstance(node, Chunk) and self.tree.staged.find(parent_inode, name) is node:
            entry.entry_timeout = (
                0  # a second name goes when it is renamed, and the kernel would take the new one for true
            )
        return entry

    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        return self._attributes.fill(EntryAttributes(), self._node(inode))

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        now_s = trio.current_time()
        for inode, count in inode_list:
            self.inodes.forget(inode, count, now_s)
            if self.inodes.get(inode) is None:
                self._files.forgotten(inode)

    async def readlink(self, inode: InodeT, ctx: RequestContext) -> FileNameT:
        node = self._node(inode)
        if not isinstance(node, Fixed) or node.role is not Role.SESSION:
            raise FUSEError(errno.EINVAL)
        return os.fsencode(self.control.socket_path)

    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        capacity = self._store.capacity()
        total, used = capacity.total_bytes // BLOCK_BYTES, -(-capacity.used_bytes // BLOCK_BYTES)
        stat = StatvfsData()
        stat.f_bsize = stat.f_frsize = BLOCK_BYTES
        stat.f_blocks = total
        stat.f_bfree = stat.f_bavail = max(0, total - used)
        stat.f_files = capacity.num_chunks + stat.f_bfree  # a chunk takes a block at least
        stat.f_ffree = stat.f_favail = stat.f_bfree
        stat.f_namemax = 255
        return stat

    # directories

    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        node = self._node(inode)
        if not is_directory(node):
            raise FUSEError(errno.ENOTDIR)
        return self._add(self._listings.open(node, inode, ctx.pid))

    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        reply = functools.partial(pyfuse3.readdir_reply, token)
        await self._listings.send(self._handles.directory(fh), start_id, reply)

    async def releasedir(self, fh: FileHandleT) -> None:
        listing = self._handles.directory(fh)
        self._handles.pop(fh)
        await self._listings.close(listing)

    # files

    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        opened = await self._files.open(self._node(inode), flags)
        return FileInfo(fh=self._add(opened.file), direct_io=opened.is_direct, keep_cache=opened.keeps_pages)

    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        # Any buffer will do; pyfuse3's annotation says bytes.
        return cast(bytes, await self._files.read(self._handles.file(fh), off, size))

    async def release(self, fh: FileHandleT) -> None:
        file = self._handles.pop(fh)
        if isinstance(file, OpenFile):
            self._files.close(file)

    # removal

    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        await self.removal.unlink(self._node(parent_inode), parent_inode, name)

    async def rmdir(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        await self.removal.rmdir(self._node(parent_inode), name)

    async def expire(self) -> None:
        """Let go of what nobody relies on any more; to be called now and then. A defect here must not end the mount."""
        self.inodes.expire(trio.current_time())
        await self.copying.expire()

    def close(self) -> None:
        """After the main loop: give back the leases of whoever had files open when the mount went."""
        for file in self._handles.pop_files():
            self._files.close(file)
        self.inodes.forget_all()

    # extended attributes

    async def getxattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> bytes:
        return await self._xattrs.get(self._node(inode), name)

    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[XAttrNameT]:
        return [XAttrNameT(name) for name in self._xattrs.listed(self._node(inode))]

    async def setxattr(self, inode: InodeT, name: XAttrNameT, value: bytes, ctx: RequestContext) -> None:
        await self._xattrs.set(self._node(inode), name, value)

    async def removexattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> None:
        await self._xattrs.change(self._node(inode), name, None)

    # copying in

    async def create(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, flags: FlagT, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        staged = self.copying.create(self._node(parent_inode), name)
        handle = self._add(OpenFile(None, None, staged))
        return FileInfo(fh=handle, direct_io=True, keep_cache=False), self._entry(staged)

    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        await self.copying.write(self._handles.staged(fh), off, buf)
        return len(buf)

    async def flush(self, fh: FileHandleT) -> None:
        await self._files.flush(self._handles.file(fh))

    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        await self._files.sync(self._handles.file(fh))

    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        """All chunks of the namespace are clean when this returns, or those of all namespaces, from elsewhere.

        This stands in for `sync -f`: Linux does not pass syncfs(2) on to a FUSE server that is not virtiofs.
        """
        node = self._handles.directory(fh).node
        table = node.table if isinstance(node, Fixed) else None
        await self._syncing.tables([table] if table is not None else [*self._store.catalog.tables.values()])

    async def setattr(
        self, inode: InodeT, attr: EntryAttributes, fields: SetattrFields, fh: FileHandleT | None, ctx: RequestContext
    ) -> EntryAttributes:
        """Only sizes of what is being copied in change. Owners, modes and times are those of the mount and of the chunk.

        Setting them succeeds: `cp -p` and `tar` must not fail for that. Whose file it is the kernel has checked.
        """
        node = self._node(inode)
        if fields.update_size:
            if fh is not None:
                await self.copying.truncate(self._handles.staged(fh), attr.st_size)
            elif isinstance(node, StagedFile):
                await self.copying.truncate(node, attr.st_size)
            else:
                raise FUSEError(errno.EPERM if isinstance(node, Chunk) else errno.EROFS)
        self.copying.touched(node, attr.st_mtime_ns if fields.update_mtime else None)
        return self._attributes.fill(EntryAttributes(), node)

    async def rename(
        self, parent_inode_old: InodeT, name_old: FileNameT, parent_inode_new: InodeT, name_new: FileNameT,
        flags: FlagT, ctx: RequestContext,
    ) -> None:  # fmt: skip
        old, new = self._node(parent_inode_old), self._node(parent_inode_new)
        await self.copying.rename(old, name_old, new, name_new, flags)

    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        entry = self._entry(self.copying.link(self._node(inode), self._node(new_parent_inode), new_name))
        entry.entry_timeout = 0  # whether the name is there the tree decides
        return entry

    async def mkdir(self, parent_inode: InodeT, name: FileNameT, mode: ModeT, ctx: RequestContext) -> EntryAttributes:
        return self._entry(self.copying.directories.make(self._node(parent_inode), name, ctx.pid))

    async def mknod(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        raise _read_only(name)

    async def symlink(
        self, parent_inode: InodeT, name: FileNameT, target: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        raise _read_only(name)

    # helpers

    def _node(self, inode: int) -> Node:
        node = self.tree.fixed(inode) or self.inodes.get(inode)
        if node is None:
            raise FUSEError(errno.ESTALE)
        return node

    def _entry(self, node: Node) -> EntryAttributes:
        """Attributes for a reply that raises the kernel's lookup count."""
        entry = self._attributes.fill(EntryAttributes(), node)
        if not isinstance(node, Fixed):
            self.inodes.remember(node)
        return entry

    def _add(self, opened: OpenFile | Listing) -> FileHandleT:
        return FileHandleT(self._handles.add(opened))


def _read_only(name: bytes) -> FUSEError:
    return FUSEError(errno.ENAMETOOLONG if len(name) > 255 else errno.EROFS)
