"""Directories that people make in the mount: drafts of namespaces, and prefixes for chunks to come.

Concurrency: belongs to the event loop's thread; nothing waits.
"""

from __future__ import annotations

import errno
import re
from collections import deque

from kvfs import namespace as namespaces
from kvfs.catalog import Chunk, ChunkTable
from kvfs.errors import CapacityError
from kvfs.keys import KEY_BYTES, Key
from kvfs.mount.errnos import Refused
from kvfs.mount.homes import Homes
from kvfs.mount.invalidation import Invalidations
from kvfs.mount.nodes import MAX_NAME_BYTES, Fixed, Node, Role
from kvfs.mount.proof import Proof
from kvfs.mount.staged_names import MAX_DRAFT_DIRECTORIES, MAX_DRAFTS, Draft, DraftDirectory
from kvfs.mount.tree import Tree
from kvfs.prefixes import PrefixDirectory
from kvfs.store import Store

MAX_DEPTH = 128  # of prefix directories that people make; trees of engines are as deep as their prompts branch
MAX_EMPTY_DIRECTORIES = 1 << 16  # of prefixes, which people have made: some 30 MB
_DIRECTORY = re.compile(rb"[0-9a-f]{%d}" % (2 * KEY_BYTES))


class MadeDirectories:
    """Makes and removes them. Of a chunk's home `homes` knows, of what is staged `proof`."""

    def __init__(self, store: Store, tree: Tree, homes: Homes, proof: Proof, invalidations: Invalidations) -> None:
        self._store = store
        self._tree = tree
        self._names = tree.staged
        self._homes = homes
        self._proof = proof
        self._invalidations = invalidations
        self._made: deque[tuple[float, PrefixDirectory[Chunk]]] = deque()

    def make(self, parent: Node, name: bytes, maker: int | None = None) -> Node:
        """A draft of a namespace that this process makes, or a directory of a prefix view for chunks to come."""
        if len(name) > MAX_NAME_BYTES:
            raise Refused(errno.ENAMETOOLONG)
        if isinstance(parent, Fixed) and parent.role is Role.ROOT:
            return self._make_draft(name, maker)
        home, is_for_chunks, draft = self._homes.where(parent, name)
        if isinstance(parent, Fixed) and parent.role is Role.NAMESPACE:
            again = self._tree.namespaces.make_again(draft or home, name)
            nodes = self._tree.namespaces.of(draft or home)
            if draft is not None and name in (nodes.chunks.name, nodes.prefixes.name):
                draft.made.add(name)
                return nodes.chunks if name == nodes.chunks.name else nodes.prefixes
            if again is not None:
                return again
        if not is_for_chunks or (isinstance(parent, Fixed) and parent.role is Role.CHUNKS):
            raise Refused(errno.EPERM)
        if not _DIRECTORY.fullmatch(name):
            self._proof.tell(home, b"prefixes/" + name, "a prefix's name is 32 hex digits", is_for_chunks=False)
            raise Refused(errno.EINVAL)
        if draft is not None:
            if self._names.num_directories >= MAX_DRAFT_DIRECTORIES:
                raise CapacityError("too many directories of namespaces that are being copied in")
            made = DraftDirectory(draft, self._store.catalog.next_inode(), name)
            self._names.make_directory(parent.inode, made)
            return made
        assert isinstance(home, ChunkTable)
        if isinstance(parent, PrefixDirectory) and parent.depth >= MAX_DEPTH:
            raise Refused(errno.ENAMETOOLONG)
        above = parent if isinstance(parent, PrefixDirectory) else None
        if above is not None and not above.is_attached:  # it was joined to another while somebody copies into it
            first = home.chunks.get(above.key)
            above = first.home if first is not None else None
        self._bound_empty_directories()
        directory = home.prefixes.make_directory(Key(bytes.fromhex(name.decode())), above)
        self._made.append((self._now_s(), directory))
        return directory

    def _bound_empty_directories(self) -> None:
        """Raise CapacityError if too many directories that were made have got no chunk."""
        if len(self._made) < MAX_EMPTY_DIRECTORIES:
            return
        self._made = deque(made for made in self._made if made[1].is_attached and made[1].is_empty)
        if len(self._made) >= MAX_EMPTY_DIRECTORIES:
            raise CapacityError("too many directories are empty")

    def remove(self, parent: Node, name: bytes) -> bool:
        """Rmdir of a draft or in one; returns whether it was that."""
        node = self._tree.lookup(parent, name)
        draft = node.draft if isinstance(node, Fixed | DraftDirectory) else None
        if draft is None or node is None or (isinstance(node, Fixed) and draft.table is not None):
            return False
        draft.touched_s = self._now_s()
        files = self._names.in_draft(draft)
        if isinstance(node, Fixed) and node.role is Role.NAMESPACE:
            if files:
                raise Refused(errno.ENOTEMPTY)
            self._names.forget_draft(draft)
        elif any(self._names.listed(node.inode)):
            raise Refused(errno.ENOTEMPTY)
        else:
            draft.made.discard(name)
            self._names.remove_directory(parent.inode, name)
        return True

    def removed(self, node: Node) -> None:
        """A directory went: what is staged in it under names that nobody lists goes too."""
        table = node.table if isinstance(node, Fixed) and node.role is Role.NAMESPACE else None
        for file in list(dict.fromkeys(self._names.files.values())):
            if file.home is table or any(inode == node.inode for inode, _ in self._names.places(file)):
                self._names.forget(file)
                if not file.num_open:
                    self._store.staging.drop(file.staged)

    def _make_draft(self, name: bytes, maker: int | None) -> Node:
        text = name.decode("ascii", "replace")
        if not namespaces.is_directory_name(text):
            self._proof.tell(None, name, "no namespace can have this name", is_for_chunks=False)
            raise Refused(errno.EINVAL)
        if self._tree.lookup(self._tree.root, name) is not None:
            raise Refused(errno.EEXIST)
        if len(self._names.drafts) >= MAX_DRAFTS:
            raise CapacityError("too many namespaces have no namespace.json yet")
        draft = self._names.drafts[text] = Draft(text, self._store.system.time_ns(), self._now_s(), maker=maker)
        return self._tree.namespaces.of(draft).directory

    def expire(self, before_s: float) -> None:
        """Let prefixes go that were made before then and have got no chunk: when the kernel forgets them."""
        while self._made and self._made[0][0] < before_s:
            _, directory = self._made.popleft()
            table = self._store.catalog.tables.get(directory.tree.name)
            if table is not None and directory.is_attached and directory.is_empty:
                parent_inode = self._tree.inode_of(table, directory.parent)
                self._invalidations.put((parent_inode, directory.name.encode()))

    def _now_s(self) -> float:
        return self._store.system.monotonic()
