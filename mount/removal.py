"""Removal: names that are removed through the mount, and the names of what went in any other way.

The kernel drops the name that it was told to remove. All others of the same chunk, and names of what the store evicts or
moves, it would go on serving: they are handed to `invalidation`.

Concurrency: belongs to the event loop's thread. `unlink` and `rmdir` wait until what they removed is gone for good.
"""

from __future__ import annotations

from kvfs.catalog import Chunk, ChunkTable
from kvfs.mount.copying_in import CopyingIn
from kvfs.mount.inodes import Inodes
from kvfs.mount.invalidation import Invalidations, Place
from kvfs.mount.nodes import Node
from kvfs.mount.tier_work import TierWork
from kvfs.mount.tree import Tree
from kvfs.prefixes import PrefixDirectory, Renamed
from kvfs.residency import Change
from kvfs.store import Store


class Removal:
    """Removes, and tells the kernel."""

    def __init__(
        self,
        store: Store,
        tree: Tree,
        inodes: Inodes,
        invalidations: Invalidations,
        copying: CopyingIn,
        tier: TierWork,
    ) -> None:
        self._store = store
        self._tree = tree
        self._inodes = inodes
        self._invalidations = invalidations
        self._copying = copying
        self._tier = tier
        self._unlinking: dict[int, Place] = {}  # by the chunk's inode: the name that the kernel drops itself

    async def unlink(self, parent: Node, parent_inode: int, name: bytes) -> None:
        """Remove a name of a file; a chunk goes with any of its names. Raises Refused."""
        if self._copying.unlink(parent, name) and not isinstance(self._tree.lookup(parent, name), Chunk):
            return
        chunk = self._tree.chunk_to_unlink(parent, name)
        if chunk is None:
            return
        self._unlinking[chunk.inode] = (parent_inode, name)
        try:
            await self._tier.run(None, lambda: self._store.remove([chunk], "rm"))  # a lease would keep its bytes
        finally:
            self._unlinking.pop(chunk.inode, None)

    async def rmdir(self, parent: Node, name: bytes) -> None:
        """Remove an empty directory. Raises Refused."""
        if self._copying.directories.remove(parent, name):
            return
        node = self._tree.lookup(parent, name)
        table = self._tree.remove_directory(parent, name)
        if node is not None:
            self._copying.directories.removed(node)
        if table is not None:
            self._store.remove_namespace(table)  # before anybody can attach to it
            await self._tier.run(None, self._store.settle)

    def changed(self, kind: Change, chunk: Chunk, directory: PrefixDirectory[Chunk] | None) -> None:
        """A chunk was removed, or moved out of `directory`: the kernel must not go on serving its old names."""
        if kind == "published":
            return
        if self._inodes.get(chunk.inode) is None and (directory is None or not directory.keep):
            return  # the kernel knows neither
        places = self._tree.places(chunk, directory)
        if kind == "moved":
            places = places[1:]  # the name in chunks/ holds
        own = self._unlinking.get(chunk.inode)
        for place in places:
            if place != own:
                self._invalidations.put(place)

    def renamed(self, table: ChunkTable, name: Renamed[Chunk]) -> None:
        """A prefix directory got another name or place."""
        if name.directory.keep:
            self._invalidations.put((self._tree.inode_of(table, name.parent), name.name.encode()))
