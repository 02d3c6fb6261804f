"""Files that are open: what a descriptor reads, and whether the kernel may keep it.

What is read is leased from `open` to `close`, so a chunk that is removed stays readable where it is open.

Concurrency: belongs to the event loop's thread. `read` waits for a tier, `open` with O_TRUNC, `flush` and `sync` wait too;
all are bounded, see `tier_work`, `copying_in` and `syncing`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable
from typing import NamedTuple

from kvfs.catalog import NOWHERE, Chunk
from kvfs.mount.control import ControlFiles
from kvfs.mount.copying_in import CopyingIn
from kvfs.mount.errnos import Refused
from kvfs.mount.handles import OpenFile
from kvfs.mount.nodes import Fixed, Node, is_directory, is_growing
from kvfs.mount.staged_names import StagedFile
from kvfs.mount.syncing import Syncing
from kvfs.mount.tier_work import TierWork
from kvfs.store import Store


class Opened(NamedTuple):
    """A file that was opened; whether each read of it is to reach us, and else whether the kernel's pages of it hold."""

    file: OpenFile
    is_direct: bool = False
    keeps_pages: bool = False


class Files:
    """Opens, reads and closes."""

    def __init__(
        self, store: Store, control: ControlFiles, copying: CopyingIn, tier: TierWork, syncing: Syncing
    ) -> None:
        self._store = store
        self._control = control
        self._copying = copying
        self._tier = tier
        self._syncing = syncing
        self._pages: set[int] = set()  # inodes of chunks of which the kernel has no pages but the right ones

    async def open(self, node: Node, flags: int) -> Opened:
        """Open a file; the caller closes it. Raises Refused (EISDIR, ENOENT, or what `copying_in` refuses)."""
        if is_directory(node):
            raise Refused(errno.EISDIR)
        if isinstance(node, StagedFile) or flags & os.O_ACCMODE != os.O_RDONLY or flags & (os.O_TRUNC | os.O_APPEND):
            return await self._open_to_change(node, is_cut=bool(flags & os.O_TRUNC))
        if isinstance(node, Chunk):
            if node.is_removed and not node.leases:
                raise Refused(errno.ENOENT)
            self._store.lease(node)
            # Buffered, because safetensors maps chunks shared. A chunk never changes, so the kernel keeps the pages that it
            # has read: dropping 32 MiB takes 4 ms of an open. The first open of a chunk does that all the same: it may
            # have been a staged file, whose pages are not what it was in the end.
            is_known = node.inode in self._pages
            self._pages.add(node.inode)
            return Opened(OpenFile(node, None), keeps_pages=is_known)
        assert isinstance(node, Fixed)
        if is_growing(node):
            return Opened(OpenFile(None, None), is_direct=True)
        content = self._control.constant(node)
        if content is not None:
            return Opened(OpenFile(None, content), keeps_pages=True)
        # Its size shows as 0: only direct I/O reads past it.
        return Opened(OpenFile(None, self._control.snapshot(node)), is_direct=True)

    async def _open_to_change(self, node: Node, *, is_cut: bool) -> Opened:
        """Direct I/O: what is written must not show in the pages of those who read what is there already."""
        staged = self._copying.open(node, is_cut=is_cut)
        if is_cut:
            await self._begin(staged, self._copying.truncate(staged, 0))
        if isinstance(node, Chunk) and (node.leases or not node.is_removed):
            self._store.lease(node)
            return Opened(OpenFile(node, None, staged), is_direct=True)
        content = self._control.constant(node) if isinstance(node, Fixed) else None
        return Opened(OpenFile(None, content, staged), is_direct=True)

    async def _begin(self, staged: StagedFile, work: Awaitable[None]) -> None:
        """The first thing that is done to a file that was opened; if it fails, so does open."""
        try:
            await work
        except BaseException:
            self._copying.release(staged)
            raise

    async def read(self, file: OpenFile, offset: int, size: int) -> bytes | memoryview:
        """At most `size` bytes. Raises Refused (ESTALE), UnavailableError or CorruptChunk."""
        chunk = file.chunk
        if file.staged is not None and chunk is None and file.content is None:
            if not file.staged.staged.is_over:
                return self._store.staging.read(file.staged.staged, offset, size)
            chunk = self._copying.became(file.staged)
            if chunk is None:
                raise Refused(errno.ESTALE)
        if chunk is None:
            content = file.content
            return self._control.read_events(offset, size) if content is None else content[offset : offset + size]
        size = min(size, chunk.length - offset)
        if size <= 0:
            return b""
        if chunk.ram != NOWHERE:  # nothing to wait for
            return await self._store.read(chunk, offset, size)
        return await self._tier.run(chunk, lambda: self._store.read(chunk, offset, size))

    async def flush(self, file: OpenFile) -> None:
        """A descriptor was closed. What is being copied in proves itself now, or is refused."""
        if file.staged is not None:
            await self._copying.flush(file.staged)

    async def sync(self, file: OpenFile) -> None:
        """A chunk is clean when this returns. What is being copied in becomes one when it is closed, not before."""
        if file.chunk is not None:
            await self._syncing.chunk(file.chunk)

    def close(self, file: OpenFile) -> None:
        """The last descriptor is gone."""
        if file.chunk is not None:
            self._store.release(file.chunk)
        if file.staged is not None:
            self._copying.release(file.staged)

    def forgotten(self, inode: int) -> None:
        """The kernel has dropped an inode, and its pages."""
        self._pages.discard(inode)
