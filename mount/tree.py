"""What the mount looks like, without FUSE: which names there are, what they stand for and what `stat` says of them.

    /README.txt
    /<namespace>/namespace.json
    /<namespace>/chunks/<key>.safetensors
    /<namespace>/prefixes/<key of the first chunk>/…
    /.kvfs/{session,status.json,metrics,events,config.toml}

What a name stands for is a node, see `nodes`. Both names of a chunk are one node. What the files under `.kvfs` contain is in
`control`; what the kernel knows is in `inodes`.

Concurrency: belongs to the event loop's thread, nothing here waits.
"""

from __future__ import annotations

import errno
import time
from binascii import hexlify
from collections.abc import Callable, Iterable
from typing import Any

from kvfs.catalog import Catalog, Chunk, ChunkTable
from kvfs.chunk import SUFFIX, parse_file_name
from kvfs.mount.errnos import Refused
from kvfs.mount.namespace_nodes import NamespaceNodes
from kvfs.mount.nodes import (
    CHUNK_BLOCK_BYTES,
    CHUNK_MODE,
    DIRECTORIES,
    DIRECTORY_BLOCK_BYTES,
    DIRECTORY_MODE,
    FILE_MODE,
    LINK_MODE,
    MAX_NAME_BYTES,
    TIMEOUT_S,
    Attributes,
    Fixed,
    Node,
    Role,
    is_directory,
    is_growing,
    text_of,
)
from kvfs.mount.staged_names import DraftDirectory, StagedFile, StagedNames
from kvfs.prefixes import PrefixDirectory

ROOT_INODE = 1
_SUFFIX = SUFFIX.encode()


class Tree:
    """The namespace of the mount.

    Attributes:
        catalog: where chunks and prefix directories come from.
        root: the node of the mount point.
        staged: what is being copied in.
        namespaces: the fixed nodes of each namespace.

    `file_size` gives the size of the fixed files (0 for those whose content is made when they are opened), `now_s` is
    the system's monotonic clock.
    """

    def __init__(
        self,
        catalog: Catalog,
        file_size: Callable[[Fixed], int],
        started_ns: int,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.catalog = catalog
        self.staged = StagedNames(now_s)
        self._file_size = file_size
        self._started_ns = started_ns
        self.root = Fixed(Role.ROOT, ROOT_INODE, b"")
        self._control = [
            Fixed(role, 4 + number, name)
            for number, (role, name) in enumerate(
                [
                    (Role.SESSION, b"session"), (Role.STATUS, b"status.json"), (Role.METRICS, b"metrics"),
                    (Role.EVENTS, b"events"), (Role.CONFIG, b"config.toml"),
                ]
            )
        ]  # fmt: skip
        self._top = [Fixed(Role.README, 2, b"README.txt"), Fixed(Role.CONTROL, 3, b".kvfs")]
        self._always = {node.inode: node for node in [self.root, *self._top, *self._control]}
        self.namespaces = NamespaceNodes(catalog, self.staged)

    def fixed(self, inode: int) -> Fixed | None:
        """The fixed node of an inode."""
        return self._always.get(inode) or self.namespaces.node(inode)

    def lookup(self, parent: Node, name: bytes, viewer: int | None = None) -> Node | None:
        """What `name` stands for in `parent`; None if there is no such name, for this process at least.

        Raises Refused (ENOTDIR, ENAMETOOLONG).
        """
        if len(name) > MAX_NAME_BYTES:
            raise Refused(errno.ENAMETOOLONG)
        if not is_directory(parent):
            raise Refused(errno.ENOTDIR)
        if (staged := self.staged.find(parent.inode, name)) is not None:
            return self._stored(parent, name) or staged  # what is proven comes before what is not yet
        if isinstance(parent, PrefixDirectory):
            return self._in_prefix(parent, name)
        if isinstance(parent, DraftDirectory):
            return None
        assert isinstance(parent, Fixed)
        if parent.role is Role.CHUNKS:
            chunk = None if parent.table is None else _chunk(parent.table, name)
            return None if chunk is None or _hides(parent, chunk, viewer) else chunk
        if parent.role is Role.PREFIXES:
            table = parent.table
            return table.prefixes.directories.get(text_of(name)) if table is not None and _is_whole(parent) else None
        if parent.role is Role.ROOT and (nodes := self.namespaces.named(name)) is not None:
            return nodes.directory
        fixed = self._top if parent.role is Role.ROOT else self.entries(parent, viewer)
        return next((node for node in fixed if self.name(node) == name), None)

    def entries(self, directory: Node, viewer: int | None = None) -> list[Node]:
        """What a directory holds now, as this process is to see it; raises Refused (ENOTDIR).

        What was built on a chunk comes before it, so that `rm -r` works from the leaves up: removing a chunk first
        would make orphans of all that follow, one by one.
        """
        if isinstance(directory, PrefixDirectory):
            return [*directory.subdirectories.values(), *reversed([*directory.chunks()])]
        if isinstance(directory, DraftDirectory):
            return [*self.staged.listed(directory.inode)]
        if isinstance(directory, Fixed):
            table, draft = directory.table, directory.draft
            match directory.role:
                case Role.ROOT:
                    return [
                        *self._top,
                        *(self.namespaces.of(table).directory for table in self.catalog.tables.values()),
                    ]
                case Role.CONTROL:
                    return [*self._control]
                case Role.NAMESPACE:
                    return [*self.namespaces.shown(table or draft, viewer)]
                case Role.CHUNKS:
                    chunks: Iterable[Chunk] = reversed(table.chunks.values()) if table is not None else ()
                    if draft is not None:
                        chunks = (chunk for chunk in chunks if not draft.hides_chunk(chunk, viewer))
                    return [*self.staged.listed(directory.inode), *chunks]
                case Role.PREFIXES if table is not None and _is_whole(directory):
                    return [*table.prefixes.directories.values()]
                case Role.PREFIXES:
                    return [*self.staged.listed(directory.inode)]
        raise Refused(errno.ENOTDIR)

    def holds(self, parent: Node, node: Node) -> bool:
        """Whether an entry that `parent` had is still there."""
        if isinstance(node, Chunk):
            return not node.is_removed and (not isinstance(parent, PrefixDirectory) or _home(node) is parent)
        if isinstance(node, PrefixDirectory):
            return node.is_attached and (node.parent is parent or (node.parent is None and isinstance(parent, Fixed)))
        if isinstance(node, StagedFile | DraftDirectory):
            return self.staged.find(parent.inode, node.name) is node
        return self.namespaces.is_there(node)

    def name(self, node: Node) -> bytes:
        """The last part of a node's path."""
        if isinstance(node, Chunk):
            return hexlify(node.key) + _SUFFIX
        return node.name.encode() if isinstance(node, PrefixDirectory) else node.name

    def attributes(self, node: Node) -> Attributes:
        """What `stat` says of a node. A removed chunk that somebody still holds has no links left."""
        if isinstance(node, Chunk):
            created, is_fresh = node.created_ns, self.staged.is_fresh(node)
            return Attributes(
                node.inode, CHUNK_MODE, 0 if node.is_removed else 1 if is_fresh else 2, node.length, CHUNK_BLOCK_BYTES,
                created, node.last_used_ns, created, 0 if is_fresh else TIMEOUT_S,
            )  # fmt: skip
        if isinstance(node, PrefixDirectory):
            # Touches go from the tail of a prefix to its head: the first chunk was used last.
            first = next(node.chunks(), None)
            created, used = (first.created_ns, first.last_used_ns) if first else (self._started_ns, self._started_ns)
            links = 2 + len(node.subdirectories) if node.is_attached else 0
            return Attributes(
                node.inode, DIRECTORY_MODE, links, 0, DIRECTORY_BLOCK_BYTES, created, used, created, TIMEOUT_S
            )
        if isinstance(node, StagedFile):
            then, size = node.created_ns, node.staged.size
            modified = then if node.modified_ns is None else node.modified_ns
            return Attributes(node.inode, CHUNK_MODE, 1, size, CHUNK_BLOCK_BYTES, modified, then, then, 0)
        if isinstance(node, DraftDirectory):
            then = node.draft.created_ns
            return Attributes(node.inode, DIRECTORY_MODE, 2, 0, DIRECTORY_BLOCK_BYTES, then, then, then, 0)
        origin = node.table or node.draft
        then = origin.created_ns if origin is not None else self._started_ns
        if node.role in DIRECTORIES:
            links = 2 if self.namespaces.is_there(node) else 0
            return Attributes(node.inode, DIRECTORY_MODE, links, 0, DIRECTORY_BLOCK_BYTES, then, then, then, TIMEOUT_S)
        modes = {Role.SESSION: LINK_MODE, Role.NAMESPACE_JSON: CHUNK_MODE}
        mode = modes.get(node.role, FILE_MODE)
        size = self._file_size(node)
        return Attributes(node.inode, mode, 1, size, 4096, then, then, then, 0 if is_growing(node) else TIMEOUT_S)

    def chunk_to_unlink(self, parent: Node, name: bytes) -> Chunk | None:
        """The chunk that `unlink` removes; None for a namespace.json, which is out of sight then.

        Raises Refused (ENOENT, EISDIR, EPERM for what is always there, or EBUSY while a client is attached).
        """
        node = self.lookup(parent, name)
        if node is None:
            raise Refused(errno.ENOENT)
        if isinstance(node, Chunk):
            return node
        if isinstance(node, Fixed) and node.role is Role.NAMESPACE_JSON:  # who takes it all away may begin with it
            self.namespaces.hide(node)
            return None
        raise Refused(errno.EISDIR if is_directory(node) else errno.EPERM)

    def remove_directory(self, parent: Node, name: bytes) -> ChunkTable | None:
        """`rmdir` of a prefix directory, or a namespace, that is empty. A namespace is so without chunks.

        Returns the namespace that the caller has to remove, before it waits. Raises Refused (ENOENT, ENOTDIR,
        ENOTEMPTY, EPERM for what is always there, or EBUSY for a namespace that a client is attached to).
        """
        node = self.lookup(parent, name)
        if node is None:
            raise Refused(errno.ENOENT)
        if not is_directory(node):
            raise Refused(errno.ENOTDIR)
        if isinstance(node, PrefixDirectory):
            if not node.is_empty:
                raise Refused(errno.ENOTEMPTY)
            node.tree.prune(node, even_if_kept=True)
            return None
        table = node.table if isinstance(node, Fixed) else None
        if table is None:
            raise Refused(errno.EPERM)
        if table.chunks:
            raise Refused(errno.ENOTEMPTY)
        assert isinstance(node, Fixed)
        self.namespaces.hide(node)
        if node.role is not Role.NAMESPACE:
            return None
        self.namespaces.remove(table)
        return table

    def places(self, chunk: Chunk, directory: PrefixDirectory[Chunk] | None) -> list[tuple[int, bytes]]:
        """Both names of a chunk that is, or was, in `directory`: inode of the parent, and name."""
        name = self.name(chunk)
        found = [(self.namespaces.of(chunk.table).chunks.inode, name)]
        if directory is not None:
            found.append((directory.inode, name))
        return found

    def inode_of(self, table: ChunkTable, directory: PrefixDirectory[Chunk] | None) -> int:
        """The inode of a prefix directory; None: of the one that holds those at the top."""
        return self.namespaces.of(table).prefixes.inode if directory is None else directory.inode

    def _stored(self, parent: Node, name: bytes) -> Chunk | None:
        """The chunk that is stored under this name."""
        if isinstance(parent, PrefixDirectory):
            node = self._in_prefix(parent, name)
            return node if isinstance(node, Chunk) else None
        table = parent.draft.table if isinstance(parent, DraftDirectory) else None
        if isinstance(parent, Fixed) and parent.role is Role.CHUNKS:
            table = parent.table
        return None if table is None else _chunk(table, name)

    def _in_prefix(self, parent: PrefixDirectory[Chunk], name: bytes) -> Node | None:
        text = text_of(name)
        key = parse_file_name(text)
        if key is None:
            return parent.subdirectories.get(text)
        tables = self.catalog.tables.get(parent.tree.name)
        chunk = tables.chunks.get(key) if tables is not None else None
        return chunk if chunk is not None and _home(chunk) is parent else None


def _hides(chunks: Fixed, chunk: Chunk, viewer: int | None) -> bool:
    """Whether a process does not find a chunk in a chunks/ that it has made yet."""
    return chunks.draft is not None and chunks.draft.hides_chunk(chunk, viewer)


def _is_whole(node: Fixed) -> bool:
    """Whether a directory of a namespace shows all there is, and not only what whoever copies has made."""
    return node.draft is None or node.name not in node.draft.made


def _chunk(table: ChunkTable, name: bytes) -> Chunk | None:
    key = parse_file_name(text_of(name))
    return None if key is None else table.chunks.get(key)


def _home(chunk: Chunk) -> Any:
    """The prefix directory of a chunk; the tree is generic, and a chunk does not know its own type there."""
    return chunk.directory
