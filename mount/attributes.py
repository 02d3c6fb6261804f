"""What the kernel is told of a node: the tree's attributes, as those of files of the daemon's user."""

from __future__ import annotations

import os
from typing import Protocol, TypeVar

from kvfs.catalog import Chunk
from kvfs.mount.nodes import SECTOR_BYTES, TIMEOUT_S, Node
from kvfs.mount.staged_names import DraftDirectory, StagedFile
from kvfs.mount.tree import Tree


class Entry(Protocol):
    """What of pyfuse3.EntryAttributes is filled in."""

    st_ino: int
    st_mode: int
    st_nlink: int
    st_uid: int
    st_gid: int
    st_size: int
    st_blksize: int
    st_blocks: int
    st_mtime_ns: int
    st_atime_ns: int
    st_ctime_ns: int
    entry_timeout: float
    attr_timeout: float


E = TypeVar("E", bound=Entry)


class Attributes:
    """Fills in attributes."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._uid, self._gid = os.geteuid(), os.getegid()

    def fill(self, entry: E, node: Node) -> E:
        """The same entry, with what is true of the node now."""
        inode, mode, links, size, block_bytes, modified_ns, used_ns, created_ns, timeout_s = self._tree.attributes(node)
        entry.st_ino = inode
        entry.st_mode = mode
        entry.st_nlink = links
        entry.st_uid, entry.st_gid = self._uid, self._gid
        entry.st_size = size
        entry.st_blksize = block_bytes
        entry.st_blocks = -(-size // SECTOR_BYTES)
        entry.st_mtime_ns = modified_ns
        entry.st_atime_ns = used_ns
        entry.st_ctime_ns = created_ns
        entry.entry_timeout = 0 if isinstance(node, StagedFile | DraftDirectory) else TIMEOUT_S
        entry.attr_timeout = timeout_s
        return entry

    def fill_next_chunk(self, entry: E, chunk: Chunk) -> E:
        """The same for a chunk, in an entry that was filled in for another a moment ago: what may differ, in a third of the time."""
        is_fresh = self._tree.staged.is_fresh(chunk)
        entry.st_ino = chunk.inode
        entry.st_nlink = 1 if is_fresh else 2
        entry.st_size = chunk.length
        entry.st_blocks = -(-chunk.length // SECTOR_BYTES)
        entry.st_mtime_ns = entry.st_ctime_ns = chunk.created_ns
        entry.st_atime_ns = chunk.last_used_ns
        entry.attr_timeout = 0 if is_fresh else TIMEOUT_S
        return entry
