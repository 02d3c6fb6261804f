"""The FUSE face: each handler translates a request and delegates to the tree, the control files or the store.

Every handler is wrapped, when the class is made: KvfsError becomes the errno of the table in `errnos`, anything
unexpected becomes EIO, is counted and logged once; Cancelled passes. Without that, any exception but FUSEError would
end the daemon for everybody (measured).

Concurrency: handlers run as tasks of the FUSE main loop. Only `read` and `getxattr` of a chunk, and what
changes something (`unlink`, `rmdir`, `setxattr`, `removexattr`) wait, and they are bounded (`tier_work`), far below the
`MAX_TASKS` of the main loop, so a hung device does not stop `ls`; so are `write`, `flush`, `rename` and `setattr` of what
is being copied in (`copying_in`). All others run to their end without a checkpoint. What is read is leased from `open`
to `release`, so a chunk that is removed stays readable where it is open.
`flush` answers at once but for files that are being copied in, whose close says whether they proved themselves.
"""

# ruff: noqa: D102 (pyfuse3.Operations says what each handler does)

from __future__ import annotations

import errno
import functools
import inspect
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

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

from kvfs.catalog import NOWHERE, Chunk, ChunkTable
from kvfs.mount.attributes import Attributes
from kvfs.mount.control import ControlFiles
from kvfs.mount.copying_in import CopyingIn
from kvfs.mount.errnos import Faults
from kvfs.mount.handles import Handles, OpenFile
from kvfs.mount.inodes import Inodes
from kvfs.mount.invalidation import Invalidations, Place
from kvfs.mount.listing import Listing, Listings
from kvfs.mount.nodes import Fixed, Node, Role, is_directory, is_growing
from kvfs.mount.staged_names import DraftDirectory, StagedFile
from kvfs.mount.syncing import Syncing
from kvfs.mount.tier_work import TierWork
from kvfs.mount.tree import Tree
from kvfs.mount.xattrs import PREFIX, Xattrs
from kvfs.prefixes import PrefixDirectory, Renamed
from kvfs.residency import Change
from kvfs.store import Store

MAX_TASKS = 1024
BLOCK_BYTES = 4096

Handler = Callable[..., Awaitable[Any]]


def guarded(handler: Handler) -> Handler:
    """A handler that lets only FUSEError and Cancelled out."""

    @functools.wraps(handler)
    async def guard(self: GuardedOperations, *args: Any) -> Any:
        try:
            return await handler(self, *args)
        except FUSEError:
            raise
        except Exception as error:
            raise FUSEError(self.faults.errno_of(handler.__name__, error)) from error

    guard.is_guarded = True  # type: ignore[attr-defined]
    return guard


class GuardedOperations(pyfuse3.Operations):
    """Wraps every asynchronous method that a subclass defines, so that none can be forgotten."""

    faults: Faults

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, value in list(vars(cls).items()):
            if not name.startswith("_") and inspect.iscoroutinefunction(value):
                setattr(cls, name, guarded(value))


class Operations(GuardedOperations):
    """All requests of the kernel.

    Attributes:
        tree, control, inodes, faults: see there.
        invalidations: names that the kernel is to drop.
        copying: what becomes of what people make here.

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
        self._store = store
        self._xattrs = Xattrs(store, tree.staged)
        self._attributes = Attributes(tree)
        self._listings = Listings(tree, self._attributes, self.inodes, EntryAttributes)
        self._handles = Handles()
        self._unlinking: dict[int, Place] = {}  # by the chunk's inode: the name that the kernel drops itself
        self._pages: set[int] = set()  # inodes of chunks of which the kernel has no pages but the right ones
        self._tier = TierWork(store, nursery)
        self._syncing = Syncing(store)

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
                self._pages.discard(inode)

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
        node = self._node(inode)
        if is_directory(node):
            raise FUSEError(errno.EISDIR)
        if isinstance(node, StagedFile) or flags & os.O_ACCMODE != os.O_RDONLY or flags & (os.O_TRUNC | os.O_APPEND):
            staged = self.copying.open(node, is_cut=bool(flags & os.O_TRUNC))
            if flags & os.O_TRUNC:
                await self._begin(staged, self.copying.truncate(staged, 0))
            if isinstance(node, Chunk) and (node.leases or not node.is_removed):
                self._store.lease(node)
                return self._staged_handle(staged, node)
            return self._staged_handle(staged, None, self.control.constant(node) if isinstance(node, Fixed) else None)
        if isinstance(node, Chunk):
            if node.is_removed and not node.leases:
                raise FUSEError(errno.ENOENT)
            self._store.lease(node)
            # Buffered, because safetensors maps chunks shared. A chunk never changes, so the kernel keeps the pages that it
            # has read: dropping 32 MiB takes 4 ms of an open. The first open of a chunk does that all the same: it may
            # have been a staged file, whose pages are not what it was in the end.
            is_known = inode in self._pages
            self._pages.add(inode)
            return FileInfo(fh=self._add(OpenFile(node, None)), keep_cache=is_known)
        assert isinstance(node, Fixed)
        if is_growing(node):
            return FileInfo(fh=self._add(OpenFile(None, None)), direct_io=True, keep_cache=False)
        content = self.control.constant(node)
        if content is not None:
            return FileInfo(fh=self._add(OpenFile(None, content)), keep_cache=True)
        # Its size shows as 0: only direct I/O reads past it.
        return FileInfo(fh=self._add(OpenFile(None, self.control.snapshot(node))), direct_io=True, keep_cache=False)

    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        file = self._handles.file(fh)
        chunk = file.chunk
        if file.staged is not None and chunk is None and file.content is None:
            if not file.staged.staged.is_over:
                return self._store.staging.read(file.staged.staged, off, size)
            chunk = self.copying.became(file.staged)
            if chunk is None:
                raise FUSEError(errno.ESTALE)
        if chunk is None:
            return self.control.read_events(off, size) if file.content is None else file.content[off : off + size]
        size = min(size, chunk.length - off)
        if size <= 0:
            return b""
        # Any buffer will do; pyfuse3's annotation says bytes.
        if chunk.ram != NOWHERE:  # nothing to wait for
            return cast(bytes, await self._store.read(chunk, off, size))
        return cast(bytes, await self._tier.run(chunk, lambda: self._store.read(chunk, off, size)))

    async def release(self, fh: FileHandleT) -> None:
        file = self._handles.pop(fh)
        if isinstance(file, OpenFile):
            self._close(file)

    def _close(self, file: OpenFile) -> None:
        if file.chunk is not None:
            self._store.release(file.chunk)
        if file.staged is not None:
            self.copying.release(file.staged)

    # removal

    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        parent = self._node(parent_inode)
        if self.copying.unlink(parent, name) and not isinstance(self.tree.lookup(parent, name), Chunk):
            return
        chunk = self.tree.chunk_to_unlink(parent, name)
        if chunk is None:
            return
        self._unlinking[chunk.inode] = (parent_inode, name)
        try:
            await self._tier.run(None, lambda: self._store.remove([chunk], "rm"))  # a lease would keep its bytes
        finally:
            self._unlinking.pop(chunk.inode, None)

    async def rmdir(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        parent = self._node(parent_inode)
        if self.copying.directories.remove(parent, name):
            return
        node = self.tree.lookup(parent, name)
        table = self.tree.remove_directory(parent, name)
        if node is not None:
            self.copying.directories.removed(node)
        if table is not None:
            self._store.remove_namespace(table)  # before anybody can attach to it
            await self._tier.run(None, self._store.settle)

    async def expire(self) -> None:
        """Let go of what nobody relies on any more; to be called now and then. A defect here must not end the mount."""
        self.inodes.expire(trio.current_time())
        await self.copying.expire()

    def changed(self, kind: Change, chunk: Chunk, directory: PrefixDirectory[Chunk] | None) -> None:
        """A chunk was removed, or moved out of `directory`: the kernel must not go on serving its old names."""
        if kind == "published":
            return
        if self.inodes.get(chunk.inode) is None and (directory is None or not directory.keep):
            return  # the kernel knows neither
        places = self.tree.places(chunk, directory)
        if kind == "moved":
            places = places[1:]  # the name in chunks/ holds
        own = self._unlinking.get(chunk.inode)
        for place in places:
            if place != own:
                self.invalidations.put(place)

    def renamed(self, table: ChunkTable, name: Renamed[Chunk]) -> None:
        """A prefix directory got another name or place."""
        if name.directory.keep:
            self.invalidations.put((self.tree.inode_of(table, name.parent), name.name.encode()))

    def close(self) -> None:
        """After the main loop: give back the leases of whoever had files open when the mount went."""
        for file in self._handles.pop_files():
            self._close(file)
        self.inodes.forget_all()

    # extended attributes

    async def getxattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> bytes:
        own = _own_xattr(name)
        if own is None:
            # `ls -l` asks for ACLs; told that there are none here at all, it asks once and not for every file
            # (90 against 8 µs a file).
            raise FUSEError(pyfuse3.ENOATTR if name.startswith(b"user.") else errno.ENOTSUP)
        node = self._node(inode)
        if own == "checksum" and isinstance(node, Chunk) and not node.is_removed:
            checksum = self._xattrs.checksum_nowait(node)
            if checksum is not None:
                return checksum
            return await self._tier.run(node, lambda: self._xattrs.read_checksum(node))
        value = self._xattrs.value_nowait(node, own)
        if value is None:
            raise FUSEError(pyfuse3.ENOATTR)
        return value.encode()

    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[XAttrNameT]:
        return [(PREFIX + name).encode() for name in self._xattrs.names(self._node(inode))]

    async def setxattr(self, inode: InodeT, name: XAttrNameT, value: bytes, ctx: RequestContext) -> None:
        node = self._node(inode)
        own = _own_xattr(name)
        if own is not None and self.copying.is_under_way(node):  # cp -a and rsync -X bring those of what they copy
            if isinstance(node, DraftDirectory) and own == "pin":
                await self._tier.run(None, self._xattrs.change_pin([*self.tree.staged.below(node)], value))
                return
            if self._xattrs.keep_for_later(node, own, value):
                return
        await self._change_xattr(inode, name, value)

    async def removexattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> None:
        await self._change_xattr(inode, name, None)

    async def _change_xattr(self, inode: InodeT, name: XAttrNameT, value: bytes | None) -> None:
        own = _own_xattr(name)
        if own is None:
            raise FUSEError(errno.ENOTSUP)
        await self._tier.run(None, self._xattrs.change(self._node(inode), own, value))

    # copying in

    async def create(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, flags: FlagT, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        staged = self.copying.create(self._node(parent_inode), name)
        return self._staged_handle(staged), self._entry(staged)

    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        await self.copying.write(self._handles.staged(fh), off, buf)
        return len(buf)

    async def flush(self, fh: FileHandleT) -> None:
        staged = self._handles.file(fh).staged
        if staged is not None:
            await self.copying.flush(staged)

    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        """A chunk is clean when this returns. What is being copied in becomes one when it is closed, not before."""
        chunk = self._handles.file(fh).chunk
        if chunk is not None:
            await self._syncing.chunk(chunk)

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

    def _staged_handle(self, staged: StagedFile, chunk: Chunk | None = None, content: bytes | None = None) -> FileInfo:
        """Direct I/O: what is written must not show in the pages of those who read what is there already."""
        return FileInfo(fh=self._add(OpenFile(chunk, content, staged)), direct_io=True, keep_cache=False)

    async def _begin(self, staged: StagedFile, work: Awaitable[None]) -> None:
        """The first thing that is done to a file that was opened; if it fails, so does open."""
        try:
            await work
        except BaseException:
            self.copying.release(staged)
            raise


def _own_xattr(name: bytes) -> str | None:
    """The name of one of our attributes without its prefix."""
    text = name.decode("ascii", "replace")
    return text.removeprefix(PREFIX) if text.startswith(PREFIX) else None


def _read_only(name: bytes) -> FUSEError:
    return FUSEError(errno.ENAMETOOLONG if len(name) > 255 else errno.EROFS)
