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
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kvfs.catalog import Catalog, Chunk, ChunkTable
from kvfs.chunk import SUFFIX, parse_file_name
from kvfs.mount.errnos import Refused
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
)
from kvfs.mount.staged_names import Draft, DraftDirectory, StagedFile, StagedNames
from kvfs.prefixes import PrefixDirectory

ROOT_INODE = 1
FIRST_TABLE_INODE = 1 << 10
LAST_FIXED_INODE = (1 << 20) - 1  # the catalog numbers chunks and prefix directories from 1 << 20 on
_SUFFIX = SUFFIX.encode()
MAX_GONE = 4096  # fixed nodes that were removed; who still stands in an older one gets ESTALE


class TableNodes(NamedTuple):
    """The fixed nodes of one namespace, in the order in which they are listed: who copies it wants to know first what it is."""

    directory: Fixed
    json: Fixed
    chunks: Fixed
    prefixes: Fixed


class _Hidden(NamedTuple):
    """Names of a namespace that were removed. They are there again when it is used again.

    Attributes: roles: which; uses: of the table at that time.
    """

    roles: set[Role]
    uses: tuple[int, int]


class Tree:
    """The namespace of the mount.

    Attributes:
        catalog: where chunks and prefix directories come from.
        root: the node of the mount point.
        staged: what is being copied in.

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
        self._fixed = {node.inode: node for node in [self.root, *self._top, *self._control]}
        self._tables: dict[bytes, TableNodes] = {}
        self._hidden: dict[ChunkTable, _Hidden] = {}
        self._last_inode = FIRST_TABLE_INODE - 1
        self._gone: deque[Fixed] = deque()  # what the kernel may still ask for

    def fixed(self, inode: int) -> Fixed | None:
        """The fixed node of an inode."""
        node = self._fixed.get(inode) if inode <= LAST_FIXED_INODE else None
        if node is None or node.draft is None or self._is_given_up(node):
            return node
        # It may have become a namespace, or be a draft no more.
        return next((now for now in self.nodes(node.draft) if now.role is node.role), None)

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
            return table.prefixes.directories.get(_text(name)) if table is not None and _is_whole(parent) else None
        if parent.role is Role.ROOT and (nodes := self._nodes_of(name)) is not None:
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
                    return [*self._top, *(self.nodes(table).directory for table in self.catalog.tables.values())]
                case Role.CONTROL:
                    return [*self._control]
                case Role.NAMESPACE:
                    return [*self._shown(table or draft, viewer)]
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
        return self._is_there(node)

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
            links = 2 if self._is_there(node) else 0
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
            self._hide(node)
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
        self._hide(node)
        if node.role is not Role.NAMESPACE:
            return None
        del self._hidden[table]
        self._retire(self._tables.pop(name))
        return table

    def make_again(self, home: ChunkTable | Draft, name: bytes) -> Fixed | None:
        """Let a directory of a namespace that was removed be there again; None if it was not."""
        nodes = self.nodes(home)
        table = nodes.directory.table
        hidden = self._hidden.get(table) if table is not None else None
        node = next((node for node in (nodes.chunks, nodes.prefixes) if node.name == name), None)
        if hidden is None or node is None or node.role not in hidden.roles:
            return None
        hidden.roles.discard(node.role)
        again = self._new(node.role, name, table, node.draft)  # with a new inode, see `nodes`
        self._tables[nodes.directory.name] = TableNodes(*(again if other is node else other for other in nodes))
        return again

    def places(self, chunk: Chunk, directory: PrefixDirectory[Chunk] | None) -> list[tuple[int, bytes]]:
        """Both names of a chunk that is, or was, in `directory`: inode of the parent, and name."""
        name = self.name(chunk)
        found = [(self.nodes(chunk.table).chunks.inode, name)]
        if directory is not None:
            found.append((directory.inode, name))
        return found

    def inode_of(self, table: ChunkTable, directory: PrefixDirectory[Chunk] | None) -> int:
        """The inode of a prefix directory; None: of the one that holds those at the top."""
        return self.nodes(table).prefixes.inode if directory is None else directory.inode

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
        text = _text(name)
        key = parse_file_name(text)
        if key is None:
            return parent.subdirectories.get(text)
        tables = self.catalog.tables.get(parent.tree.name)
        chunk = tables.chunks.get(key) if tables is not None else None
        return chunk if chunk is not None and _home(chunk) is parent else None

    def _nodes_of(self, name: bytes) -> TableNodes | None:
        text = _text(name)
        home = self.catalog.tables.get(text) or self._draft(text)
        return None if home is None else self.nodes(home)

    def _draft(self, name: str) -> Draft | None:
        """The draft of this name, if it is still one, or has become the namespace that is there."""
        draft = self.staged.draft(name)
        if draft is not None and draft.table is not None and self.catalog.tables.get(name) is not draft.table:
            self.staged.forget_draft(draft)  # the namespace was removed
            return None
        return draft

    def nodes(self, home: ChunkTable | Draft | None) -> TableNodes:
        """The fixed nodes of a namespace; they get their inodes when it is first seen, as a draft perhaps."""
        assert home is not None
        text = home.directory if isinstance(home, ChunkTable) else home.name
        table, draft, name = self.catalog.tables.get(text), self._draft(text), text.encode()
        if table is None and draft is None and isinstance(home, Draft):
            draft = home  # it was given up; the kernel still knows it
        nodes = self._tables.get(name)
        if nodes is None or nodes.directory.table is not table or nodes.directory.draft is not draft:
            if table is None:
                self._forget_given_up()
            former = nodes if nodes is not None and nodes.directory.draft is not None else None
            nodes = self._tables[name] = TableNodes(
                *(
                    self._new(role, label, table, draft, former[index].inode if former else None)
                    for index, (role, label) in enumerate(
                        [
                            (Role.NAMESPACE, name), (Role.NAMESPACE_JSON, b"namespace.json"), (Role.CHUNKS, b"chunks"),
                            (Role.PREFIXES, b"prefixes"),
                        ]
                    )
                )
            )  # fmt: skip
        hidden = self._hidden.get(table) if table is not None else None
        if table is not None and hidden is not None and hidden.uses != _uses(table):
            del self._hidden[table]
            # With new inodes: the kernel looks up nothing more in a directory that it has seen removed.
            nodes = self._tables[name] = TableNodes(
                *(
                    self._new(node.role, node.name, table, draft) if node.role in hidden.roles else node
                    for node in nodes
                )
            )
        return nodes

    def _is_given_up(self, node: Fixed) -> bool:
        """Whether a node is of a draft that came to nothing."""
        draft = node.draft
        if draft is None or node.table is not None or draft.table is not None or draft.name in self.catalog.tables:
            return False
        return self.staged.drafts.get(draft.name) is not draft

    def _forget_given_up(self) -> None:
        """Let go of the names of drafts that came to nothing; called when there is one more draft, 64 at a time at most."""
        for name, nodes in [*self._tables.items()]:
            if self._is_given_up(nodes.directory):
                self._retire(self._tables.pop(name))

    def _retire(self, nodes: TableNodes) -> None:
        """These nodes have no name any more. The kernel may hold some; the last of them are kept."""
        self._gone.extend(nodes)
        while len(self._gone) > MAX_GONE:
            node = self._gone.popleft()
            if self._fixed.get(node.inode) is node:
                del self._fixed[node.inode]

    def _new(
        self, role: Role, name: bytes, table: ChunkTable | None, draft: Draft | None, inode: int | None = None
    ) -> Fixed:
        """A node with an inode that no other has had for long, or the one that is given."""
        if inode is not None:
            node = self._fixed[inode] = Fixed(role, inode, name, table, draft)
            return node
        for _ in range(FIRST_TABLE_INODE, LAST_FIXED_INODE + 1):
            self._last_inode = max(FIRST_TABLE_INODE, (self._last_inode + 1) % (LAST_FIXED_INODE + 1))
            former = self._fixed.get(self._last_inode)
            if former is None or not self._is_there(former):
                node = self._fixed[self._last_inode] = Fixed(role, self._last_inode, name, table, draft)
                return node
        raise Refused(errno.ENFILE)  # the store takes a hundredth of so many namespaces

    def _shown(self, home: ChunkTable | Draft | None, viewer: int | None = None) -> list[Fixed]:
        """What the directory of a namespace holds."""
        nodes = self.nodes(home)
        table = nodes.directory.table
        hidden = self._hidden.get(table) if table is not None else None
        return [
            node for node in nodes[1:] if _is_made(node, viewer) and (hidden is None or node.role not in hidden.roles)
        ]

    def _hide(self, node: Fixed) -> None:
        """A name of a namespace is removed."""
        table = node.table
        assert table is not None
        if table.num_sessions:
            raise Refused(errno.EBUSY)
        self._hidden.setdefault(table, _Hidden(set(), _uses(table))).roles.add(node.role)

    def _is_there(self, node: Fixed) -> bool:
        """Whether a fixed node can be reached by its name."""
        table = node.table
        if table is None:
            return node.draft is None or self._draft(node.draft.name) is node.draft
        if self.catalog.tables.get(table.directory) is not table:
            return False
        nodes = self._tables.get(table.directory.encode())
        return nodes is not None and (node is nodes.directory or node in self._shown(table))


def _uses(table: ChunkTable) -> tuple[int, int]:
    """How often the namespace was attached to, and stored in."""
    return table.num_attached, table.num_stored


def _is_made(node: Fixed, viewer: int | None) -> bool:
    """Whether this part of a namespace is there for a process."""
    if node.role is Role.NAMESPACE_JSON:
        return node.table is not None
    return node.draft is None or not node.draft.hides(node.name, viewer)


def _hides(chunks: Fixed, chunk: Chunk, viewer: int | None) -> bool:
    """Whether a process does not find a chunk in a chunks/ that it has made yet."""
    return chunks.draft is not None and chunks.draft.hides_chunk(chunk, viewer)


def _is_whole(node: Fixed) -> bool:
    """Whether a directory of a namespace shows all there is, and not only what whoever copies has made."""
    return node.draft is None or node.name not in node.draft.made


def _text(name: bytes) -> str:
    """A name as the catalog has it. What is no ASCII is no name of ours, and stays different from all of them."""
    return name.decode("ascii", "surrogateescape")


def _chunk(table: ChunkTable, name: bytes) -> Chunk | None:
    key = parse_file_name(_text(name))
    return None if key is None else table.chunks.get(key)


def _home(chunk: Chunk) -> Any:
    """The prefix directory of a chunk; the tree is generic, and a chunk does not know its own type there."""
    return chunk.directory
