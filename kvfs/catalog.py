"""The catalog: every chunk that is visible, and where its bytes are. In memory, it is the truth while kvfs runs.

No I/O happens here and nothing waits; `kvfs.index` keeps a durable copy, `kvfs.store` is the only one to change it.

Concurrency: all of it belongs to the event loop's thread. Every method leaves the catalog consistent, so that it is
consistent between any two awaits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import cast

from kvfs.chunk import SUFFIX, geometry
from kvfs.errors import UsageError
from kvfs.keys import Key
from kvfs.messages import Tier
from kvfs.namespace import Namespace
from kvfs.policies.hint import Hint
from kvfs.prefixes import Member, Moves, PrefixDirectory, PrefixTree

NOWHERE = -1
_FIRST_INODE = 1 << 20
_KEY, _LENGTH = attrgetter("key"), attrgetter("length")


class Chunk(Member, eq=False, gc=False):
    """One stored chunk. A million of these exist, so it is made and kept as cheaply as Python can, and shares what it can.

    Attributes:
        table: the chunks of its namespace.
        key, parent: its own key and that of the chunk before it.
        position: index in its chain; num_tokens: tokens it holds.
        length: bytes of the whole file, a multiple of 4096.
        created_ns, last_used_ns: nanoseconds since the epoch; only an engine's load counts as use.
        hits: loads so far; returns: how often it was stored again after an eviction.
        ram, nvme: offset in the arena and in its volume, or NOWHERE. `nvme` is set once the bytes are durable.
        volume: number of the volume that has it, or will.
        is_proven: the extent on the volume was written, or every byte of it verified, since the daemon started.
        hint: what was said of it by somebody who knows more, see `kvfs.hints`; None: nothing.
        leases: holders who rely on the extents; neither is reused while it is above zero.
        is_removed: no longer visible; the extents go when the last lease ends.
        directory, previous, next: its place in the prefix view, kept by `PrefixTree`.
        inode: unique while the daemon runs.
    """

    table: ChunkTable
    num_tokens: int
    length: int
    created_ns: int
    last_used_ns: int
    hits: int = 0
    returns: int = 0
    ram: int = NOWHERE
    nvme: int = NOWHERE
    volume: int = 0
    leases: int = 0
    is_removed: bool = False
    is_proven: bool = False
    hint: Hint | None = None

    @classmethod
    def new(
        cls, table: ChunkTable, key: Key, parent: Key, position: int, num_tokens: int, created_ns: int, inode: int
    ) -> Chunk:
        """A chunk that nobody has used, and that is nowhere yet."""
        length = table.file_bytes(num_tokens)
        return cls(key, parent, position, inode, None, None, None, table, num_tokens, length, created_ns, created_ns)

    def __repr__(self) -> str:
        return f"<Chunk {self.key.hex()} {self.tier.name} position {self.position}>"

    @property
    def tier(self) -> Tier:
        """The fastest tier that has the bytes."""
        if self.ram != NOWHERE:
            return Tier.RAM
        return Tier.NVME if self.nvme != NOWHERE else Tier.NONE

    @property
    def home(self) -> PrefixDirectory[Chunk] | None:
        """The prefix directory it is in."""
        return cast("PrefixDirectory[Chunk] | None", self.directory)

    @property
    def is_dirty(self) -> bool:
        """Whether the bytes are in RAM only."""
        return self.ram != NOWHERE and self.nvme == NOWHERE

    def above(self) -> Chunk | None:
        """The stored chunk that this one is built on."""
        if not self.position:
            return None
        above = self.table.chunks.get(self.parent)
        return above if above is not None and above.position + 1 == self.position else None

    def prefix(self) -> list[Chunk]:
        """What is stored of the chain that leads to this chunk, itself included, head first."""
        found = [self]
        above = self.table.chunks.get(self.parent)
        while above is not None and above.position < found[-1].position:
            found.append(above)
            above = self.table.chunks.get(above.parent)
        found.reverse()
        return found

    @property
    def file_name(self) -> str:
        """The name of the chunk's file."""
        return self.key.hex() + SUFFIX


class ChunkTable:
    """The chunks of one namespace.

    Attributes:
        namespace: what they are; directory: the name of its directory in the mount.
        chunks: by key.
        prefixes: the same chunks as a tree.
        created_ns: when the namespace was first seen.
        numbers: its row in the index of each volume, by the number of the volume; never given to another.
        stored_bytes: of its chunks' files; reserved_bytes: of those to come.
        quota_bytes: most that both may be together; None: no limit.
        max_age_ns: chunks go when neither they nor what is built on them was used for so long; None: they do not.
        num_sessions: clients that are attached to it now; num_attached: how often it was attached to;
            num_stored: how often a chunk of it became visible.
    """

    def __init__(self, namespace: Namespace, created_ns: int, inodes: Iterator[int]) -> None:
        self.namespace = namespace
        self.directory = namespace.directory
        self.chunks: dict[Key, Chunk] = {}
        self.created_ns = created_ns
        self.numbers: dict[int, int] = {}
        self.stored_bytes = 0
        self.reserved_bytes = 0
        self.quota_bytes: int | None = None
        self.max_age_ns: int | None = None
        self.num_sessions = 0
        self.num_attached = 0
        self.num_stored = 0
        self._lengths: dict[int, int] = {}
        self.prefixes: PrefixTree[Chunk] = PrefixTree(self.directory, self.chunks, inodes)

    def file_bytes(self, num_tokens: int) -> int:
        """Size of the file of a chunk with so many tokens."""
        length = self._lengths.get(num_tokens)
        if length is None:
            length = self._lengths[num_tokens] = geometry(self.namespace, num_tokens).file_bytes
        return length


class Catalog:
    """All tables, by directory name.

    Invariant: a chunk is in its table, in one prefix directory, and not removed; or in none of them and removed.
    """

    def __init__(self) -> None:
        self.tables: dict[str, ChunkTable] = {}
        self._inodes = itertools.count(_FIRST_INODE)

    def table(self, namespace: Namespace, now_ns: int) -> ChunkTable:
        """The table of a namespace, made if there is none yet.

        Raises UsageError if the directory belongs to another namespace: the adapter's identity then leaves out
        something that its layout depends on.
        """
        table = self.tables.get(namespace.directory)
        if table is None:
            table = self.tables[namespace.directory] = ChunkTable(namespace, now_ns, self._inodes)
        elif table.namespace != namespace:
            raise UsageError(f"namespace {namespace.directory} is stored with another chunk layout")
        return table

    def forget(self, table: ChunkTable) -> None:
        """Take a table without chunks out of sight."""
        del self.tables[table.directory]

    def create(
        self,
        table: ChunkTable,
        key: Key,
        parent: Key,
        position: int,
        num_tokens: int,
        created_ns: int,
        inode: int | None = None,
    ) -> tuple[Chunk, Moves[Chunk]]:
        """Make a chunk visible; the caller gives it an extent before it waits.

        Returns it, and what moved in the prefix view. `inode` is one of `next_inode`, a new one by default.
        """
        shared = table.chunks.get(parent)
        chunk = Chunk.new(
            table, key, shared.key if shared else parent, position, num_tokens, created_ns, inode or self.next_inode()
        )
        table.chunks[key] = chunk
        table.stored_bytes += chunk.length
        table.num_stored += 1
        return chunk, table.prefixes.add(chunk)

    def take(self, table: ChunkTable, chunks: list[Chunk]) -> None:
        """Make many chunks visible at once that have their extents, and inodes; of two with one key the last.

        They are in no prefix directory yet: `kvfs.planting` finds their places.
        """
        table.chunks.update(zip(map(_KEY, chunks), chunks, strict=True))
        table.stored_bytes = sum(map(_LENGTH, table.chunks.values()))
        table.num_stored += len(chunks)

    @property
    def inodes(self) -> Iterator[int]:
        """Numbers that no chunk and no directory has, or will have."""
        return self._inodes

    def next_inode(self) -> int:
        """A number that no chunk and no directory has, or will have."""
        return next(self._inodes)

    def discard(self, chunk: Chunk) -> PrefixDirectory[Chunk] | None:
        """Take a chunk out of sight; returns the prefix directory it was in."""
        del chunk.table.chunks[chunk.key]
        chunk.table.stored_bytes -= chunk.length
        chunk.is_removed = True
        return chunk.table.prefixes.remove(chunk)

    def chunks(self) -> Iterator[Chunk]:
        """Every visible chunk; the catalog must not change meanwhile."""
        for table in self.tables.values():
            yield from table.chunks.values()

    @property
    def num_chunks(self) -> int:
        """Visible chunks of all namespaces."""
        return sum(len(table.chunks) for table in self.tables.values())


def last_needed(chunks: Iterable[Chunk]) -> dict[Chunk, int]:
    """For chunks on which something was built that was used later than they: when that was. So leaves go first."""
    found: dict[Chunk, int] = {}
    for chunk in sorted(chunks, key=attrgetter("position"), reverse=True):
        above = chunk.table.chunks.get(chunk.parent)
        if above is not None:
            used_ns = found.get(chunk, chunk.last_used_ns)
            if used_ns > found.get(above, above.last_used_ns):
                found[above] = used_ns
    return found
