"""The fixed nodes of namespaces: the directory of each, and what is always in it.

They get their inodes when a namespace is first seen, as a draft perhaps, and keep them while it is there. Those that a
person removed are *hidden*: they are there again, with new inodes, when the namespace is used again.

Concurrency: belongs to the event loop's thread, nothing here waits.
"""

from __future__ import annotations

import errno
from collections import deque
from typing import NamedTuple

from kvfs.catalog import Catalog, ChunkTable
from kvfs.mount.errnos import Refused
from kvfs.mount.nodes import Fixed, Role, text_of
from kvfs.mount.staged_names import Draft, StagedNames

FIRST_TABLE_INODE = 1 << 10
LAST_FIXED_INODE = (1 << 20) - 1  # the catalog numbers chunks and prefix directories from 1 << 20 on
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


class NamespaceNodes:
    """By the name of the namespace's directory, and by inode. `names` knows what is being copied in."""

    def __init__(self, catalog: Catalog, names: StagedNames) -> None:
        self._catalog = catalog
        self._names = names
        self._fixed: dict[int, Fixed] = {}
        self._tables: dict[bytes, TableNodes] = {}
        self._hidden: dict[ChunkTable, _Hidden] = {}
        self._last_inode = FIRST_TABLE_INODE - 1
        self._gone: deque[Fixed] = deque()  # what the kernel may still ask for

    def node(self, inode: int) -> Fixed | None:
        """The fixed node of an inode."""
        node = self._fixed.get(inode) if inode <= LAST_FIXED_INODE else None
        if node is None or node.draft is None or self._is_given_up(node):
            return node
        # It may have become a namespace, or be a draft no more.
        return next((now for now in self.of(node.draft) if now.role is node.role), None)

    def named(self, name: bytes) -> TableNodes | None:
        """Those of the namespace, or draft, whose directory has this name; None if there is none."""
        text = text_of(name)
        home = self._catalog.tables.get(text) or self._draft(text)
        return None if home is None else self.of(home)

    def of(self, home: ChunkTable | Draft | None) -> TableNodes:
        """The fixed nodes of a namespace; they get their inodes when it is first seen, as a draft perhaps."""
        assert home is not None
        text = home.directory if isinstance(home, ChunkTable) else home.name
        table, draft, name = self._catalog.tables.get(text), self._draft(text), text.encode()
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

    def remove(self, table: ChunkTable) -> None:
        """A namespace, hidden before, is gone."""
        del self._hidden[table]
        self._retire(self._tables.pop(table.directory.encode()))

    def _is_given_up(self, node: Fixed) -> bool:
        """Whether a node is of a draft that came to nothing."""
        draft = node.draft
        if draft is None or node.table is not None or draft.table is not None or draft.name in self._catalog.tables:
            return False
        return self._names.drafts.get(draft.name) is not draft

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
            if former is None or not self.is_there(former):
                node = self._fixed[self._last_inode] = Fixed(role, self._last_inode, name, table, draft)
                return node
        raise Refused(errno.ENFILE)  # the store takes a hundredth of so many namespaces

    def shown(self, home: ChunkTable | Draft | None, viewer: int | None = None) -> list[Fixed]:
        """What the directory of a namespace holds."""
        nodes = self.of(home)
        table = nodes.directory.table
        hidden = self._hidden.get(table) if table is not None else None
        return [
            node for node in nodes[1:] if _is_made(node, viewer) and (hidden is None or node.role not in hidden.roles)
        ]

    def hide(self, node: Fixed) -> None:
        """A name of a namespace is removed."""
        table = node.table
        assert table is not None
        if table.num_sessions:
            raise Refused(errno.EBUSY)
        self._hidden.setdefault(table, _Hidden(set(), _uses(table))).roles.add(node.role)

    def is_there(self, node: Fixed) -> bool:
        """Whether a fixed node can be reached by its name."""
        table = node.table
        if table is None:
            return node.draft is None or self._draft(node.draft.name) is node.draft
        if self._catalog.tables.get(table.directory) is not table:
            return False
        nodes = self._tables.get(table.directory.encode())
        return nodes is not None and (node is nodes.directory or node in self.shown(table))

    def make_again(self, home: ChunkTable | Draft, name: bytes) -> Fixed | None:
        """Let a directory of a namespace that was removed be there again; None if it was not."""
        nodes = self.of(home)
        table = nodes.directory.table
        hidden = self._hidden.get(table) if table is not None else None
        node = next((node for node in (nodes.chunks, nodes.prefixes) if node.name == name), None)
        if hidden is None or node is None or node.role not in hidden.roles:
            return None
        hidden.roles.discard(node.role)
        again = self._new(node.role, name, table, node.draft)  # with a new inode, see `nodes`
        self._tables[nodes.directory.name] = TableNodes(*(again if other is node else other for other in nodes))
        return again

    def _draft(self, name: str) -> Draft | None:
        """The draft of this name, if it is still one, or has become the namespace that is there."""
        draft = self._names.draft(name)
        if draft is not None and draft.table is not None and self._catalog.tables.get(name) is not draft.table:
            self._names.forget_draft(draft)  # the namespace was removed
            return None
        return draft


def _uses(table: ChunkTable) -> tuple[int, int]:
    """How often the namespace was attached to, and stored in."""
    return table.num_attached, table.num_stored


def _is_made(node: Fixed, viewer: int | None) -> bool:
    """Whether this part of a namespace is there for a process."""
    if node.role is Role.NAMESPACE_JSON:
        return node.table is not None
    return node.draft is None or not node.draft.hides(node.name, viewer)
