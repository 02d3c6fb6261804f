"""Where what is copied in belongs: the namespace, or the draft of one, that a directory is in.

Concurrency: belongs to the event loop's thread; nothing waits.
"""

from __future__ import annotations

import errno
from typing import NamedTuple

from kvfs.catalog import ChunkTable
from kvfs.mount.errnos import Refused
from kvfs.mount.nodes import MAX_NAME_BYTES, Fixed, Node, Role
from kvfs.mount.staged_names import Draft, DraftDirectory, Home, StagedNames
from kvfs.prefixes import PrefixDirectory
from kvfs.store import Store


class Where(NamedTuple):
    """What a directory belongs to, whether it is for chunks and not for the namespace.json, and the draft it is in."""

    home: Home
    is_for_chunks: bool
    draft: Draft | None = None


class Homes:
    """Finds them. Whoever asks is copying: what is found is not over yet."""

    def __init__(self, store: Store, names: StagedNames) -> None:
        self._store = store
        self._names = names

    def where(self, parent: Node, name: bytes) -> Where:
        """What is made in `parent` belongs to this; raises Refused where nothing can be made."""
        if len(name) > MAX_NAME_BYTES:
            raise Refused(errno.ENAMETOOLONG)
        if isinstance(parent, PrefixDirectory):
            table = self._store.catalog.tables.get(parent.tree.name)
            if table is None or table.prefixes is not parent.tree:
                raise Refused(errno.ENOENT)
            return Where(self.resolved(table), True)
        if isinstance(parent, DraftDirectory):
            return Where(self.resolved(parent.draft), True, parent.draft)
        if isinstance(parent, Fixed) and parent.role in (Role.NAMESPACE, Role.CHUNKS, Role.PREFIXES):
            home = parent.draft or parent.table
            if home is not None:
                return Where(self.resolved(home), parent.role is not Role.NAMESPACE, parent.draft)
        raise Refused(errno.EROFS)

    def resolved(self, home: Home) -> Home:
        """The namespace that a draft has become, or the draft. Raises Refused if it is gone."""
        if isinstance(home, ChunkTable):
            self._names.copying_goes_on(home)
            return home
        home.touched_s = self._store.system.monotonic()
        table = self._store.catalog.tables.get(home.name)
        if table is None and self._names.drafts.get(home.name) is not home:
            raise Refused(errno.ENOENT)
        if table is not None:
            self._names.copying_goes_on(table)
        return table or home
