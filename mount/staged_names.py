"""What is being copied in, by name: staged files, namespaces that have no `namespace.json` yet, and second names.

A *draft* is a namespace that somebody made with mkdir: what is copied into it waits until its namespace.json says what
it is. `cp` takes it for granted that a directory which it has just made is empty, and fails where something has grown there
meanwhile. So until the copy is over, the process that made the draft finds in it only what was made there by name: in its
chunks/ too, where all is that has come into prefixes/ before; `cp` copies in the order of inodes. So does everybody in a
prefixes/ that was made so. To all others the whole namespace is there as soon as its namespace.json is.

`cp -a` also unlinks a file that has a second name before it makes a link of that name, which would remove the chunk it
has just copied. So a chunk that was copied in shows one link until the copy is over, or was silent for a moment.

Concurrency: belongs to the event loop's thread, nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import trio

from kvfs.catalog import Chunk, ChunkTable
from kvfs.keys import Key
from kvfs.mount.invalidation import Place
from kvfs.staging import Staged

MAX_DRAFTS = 64
MAX_DRAFT_DIRECTORIES = 1 << 18  # a directory for each branch of a namespace
MAX_ALIASES = 1024
MAX_LINKS = 1 << 20
QUIET_S = 10.0  # after which a copy of a whole namespace is over, if it does not say so
FRESH_S = 3.0  # the same for links: nobody but `cp -a` minds, and du counts what shows one link under both names


@dataclass(slots=True, eq=False)
class Draft:
    """A namespace to come.

    Attributes:
        name: of its directory.
        created_ns: when it was made; maker: the process that did; touched_s: when something was last done in it, on the monotonic clock.
        table: the namespace that it has become.
        made: which of its fixed directories were made.
        num_open: files in it that are being written.
        limits: values of the attributes that it is to have as a namespace.
        in_chunks: inodes of the chunks that were copied to its chunks/.
    """

    name: str
    created_ns: int
    touched_s: float
    table: ChunkTable | None = None
    made: set[bytes] = field(default_factory=set)
    num_open: int = 0
    limits: dict[str, bytes] = field(default_factory=dict)
    maker: int | None = None
    in_chunks: set[int] = field(default_factory=set)

    def hides(self, name: bytes, viewer: int | None) -> bool:
        """Whether this process does not find this fixed directory yet."""
        return name not in self.made and (self.table is None or self._is_by(viewer))

    def hides_chunk(self, chunk: Chunk, viewer: int | None) -> bool:
        """Whether this process does not find this chunk in chunks/ yet."""
        return self._is_by(viewer) and b"chunks" in self.made and chunk.inode not in self.in_chunks

    def _is_by(self, viewer: int | None) -> bool:
        return viewer is not None and viewer == self.maker


@dataclass(slots=True, eq=False)
class DraftDirectory:
    """A directory of the prefix view of a draft."""

    draft: Draft
    inode: int
    name: bytes


Home = ChunkTable | Draft


@dataclass(slots=True, eq=False)
class StagedFile:
    """A file that is being copied in, or waits.

    Attributes:
        staged: its bytes.
        home: where it is to belong.
        name: the last part of its path; parent_inode: of the directory where it was made.
        created_ns, modified_ns: when it was made; the time that was set, which a namespace.json keeps.
        is_identity: whether it is to be a namespace.json, and no chunk.
        key: of the chunk that it is to be; None while its name does not say.
        num_open: open file handles.
        is_settled: it proved itself, and is closed for good.
        pin: what was asked for as the pin of the chunk.
        original: the stored chunk that was opened to be changed, until that begins.
        lock: whoever proves it holds this.
    """

    staged: Staged
    home: Home
    name: bytes
    parent_inode: int
    created_ns: int
    modified_ns: int | None = None
    is_identity: bool = False
    key: Key | None = None
    num_open: int = 0
    is_settled: bool = False
    pin: bytes | None = None
    original: Chunk | None = None
    lock: trio.Lock = field(default_factory=trio.Lock)

    @property
    def inode(self) -> int:
        """Its number."""
        return self.staged.inode

    @property
    def table(self) -> ChunkTable | None:
        """The namespace that it belongs to, if that is one yet."""
        return self.home.table if isinstance(self.home, Draft) else self.home

    @property
    def is_hidden(self) -> bool:
        """Whether its name says that it is not meant to be anything yet."""
        return self.name.startswith(b".")


@dataclass(frozen=True, slots=True)
class Alias:
    """A second name that a copying program gave a chunk for a moment; `made_s`: when, on the monotonic clock."""

    chunk: Chunk
    made_s: float


class StagedNames:
    """All names of what is being copied in.

    Attributes:
        files, aliases: by the inode of the directory they are in, and name.
        open_files: those that somebody has open.
        drafts: by name.
        num_directories: directories of drafts.

    `now_s` is the system's monotonic clock.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.files: dict[Place, StagedFile] = {}
        self.open_files: set[StagedFile] = set()
        self.num_directories = 0
        self.aliases: dict[Place, Alias] = {}
        self.drafts: dict[str, Draft] = {}
        self._directories: dict[int, dict[bytes, DraftDirectory]] = {}  # by the inode of their parent, and name
        self._links: dict[int, dict[bytes, Chunk]] = {}  # what directories of drafts show, likewise
        self._num_links = 0
        self._now_s = now_s
        self._fresh: dict[ChunkTable, set[int]] = {}  # inodes of what was copied in
        self._fresh_since_s: dict[ChunkTable, float] = {}

    def copied(self, chunk: Chunk) -> None:
        """A chunk was copied in, or was there already."""
        self._fresh.setdefault(chunk.table, set()).add(chunk.inode)
        self._fresh_since_s[chunk.table] = self._now_s()

    def copying_goes_on(self, table: ChunkTable) -> None:
        """Something was made in a namespace, or is about to be."""
        if table in self._fresh:
            self._fresh_since_s[table] = self._now_s()

    def copying_is_over(self, table: ChunkTable) -> None:
        """Nothing more is copied to a namespace; all its chunks have two links."""
        self._fresh.pop(table, None)
        self._fresh_since_s.pop(table, None)

    def is_fresh(self, chunk: Chunk) -> bool:
        """Whether a chunk is part of a copy that is under way."""
        table = chunk.table
        if not self._fresh or chunk.inode not in self._fresh.get(table, ()):
            return False
        if self._now_s() - self._fresh_since_s[table] < FRESH_S:
            return True
        if any(file.table is table for file in self.open_files):  # it may wait long for room
            self.copying_goes_on(table)
            return True
        self.copying_is_over(table)
        return False

    def draft(self, name: str) -> Draft | None:
        """The draft of this name; one that has become a namespace is forgotten when nobody copies to it any more."""
        draft = self.drafts.get(name)
        if draft is None or draft.table is None or draft.num_open or self._now_s() - draft.touched_s < QUIET_S:
            return draft
        self.forget_draft(draft)
        return None

    def find(self, parent_inode: int, name: bytes) -> StagedFile | DraftDirectory | Chunk | None:
        """What a name stands for here, if anything."""
        place = (parent_inode, name)
        directories = self._directories.get(parent_inode)
        found = self.files.get(place) or (directories.get(name) if directories is not None else None)
        if found is not None:
            return found
        alias, links = self.aliases.get(place), self._links.get(parent_inode)
        chunk = alias.chunk if alias is not None else links.get(name) if links is not None else None
        return None if chunk is None or chunk.is_removed else chunk

    def link(self, parent_inode: int, chunk: Chunk) -> None:
        """A chunk was copied to this directory, or linked there; those of drafts show it."""
        if self._num_links < MAX_LINKS and (links := self._links.get(parent_inode)) is not None:
            self._num_links += chunk.file_name.encode() not in links
            links[chunk.file_name.encode()] = chunk

    def listed(self, parent_inode: int) -> Iterator[StagedFile | DraftDirectory | Chunk]:
        """What a directory of a draft shows."""
        yield from self._directories.get(parent_inode, {}).values()
        yield from self._linked(parent_inode)
        for (inode, name), file in self.files.items():
            if inode == parent_inode and not name.startswith(b"."):
                yield file

    def below(self, directory: DraftDirectory) -> Iterator[Chunk]:
        """The chunks that a directory of a draft shows, and all directories in it."""
        waiting = [directory.inode]
        while waiting:
            inode = waiting.pop()
            yield from self._linked(inode)
            waiting.extend(inner.inode for inner in self._directories.get(inode, {}).values())

    def _linked(self, parent_inode: int) -> list[Chunk]:
        links = self._links.get(parent_inode, {})
        for name in [name for name, chunk in links.items() if chunk.is_removed]:
            del links[name]
            self._num_links -= 1
        return [*links.values()]

    def make_directory(self, parent_inode: int, directory: DraftDirectory) -> None:
        """A directory was made in a draft."""
        self._directories.setdefault(parent_inode, {})[directory.name] = directory
        self._links[directory.inode] = {}
        self.num_directories += 1

    def remove_directory(self, parent_inode: int, name: bytes) -> None:
        """It was removed again, if there was one."""
        directory = self._directories.get(parent_inode, {}).pop(name, None)
        if directory is not None:
            self.num_directories -= 1
            self._num_links -= len(self._links.pop(directory.inode, ()))

    def in_draft(self, draft: Draft) -> list[StagedFile]:
        """The files that wait for a draft to become a namespace, and those that are still written under other names."""
        return list(dict.fromkeys(file for file in self.files.values() if file.home is draft))

    def of_table(self, table: ChunkTable) -> set[StagedFile]:
        """The files that are being copied to a namespace, or wait there under names that nobody lists."""
        return {
            file for file in (*self.files.values(), *self.open_files) if file.table is table and not file.is_settled
        }

    def places(self, file: StagedFile) -> list[Place]:
        """All names of a file."""
        return [place for place, other in self.files.items() if other is file]

    def forget(self, file: StagedFile) -> None:
        """A file has no name any more."""
        for place in self.places(file):
            del self.files[place]

    def forget_draft(self, draft: Draft) -> None:
        """A draft is not found any more, nor its directories. Files keep their names."""
        if self.drafts.get(draft.name) is draft:
            del self.drafts[draft.name]
        if draft.table is not None:
            self.copying_is_over(draft.table)
        for parent_inode, directories in list(self._directories.items()):
            for name in [name for name, directory in directories.items() if directory.draft is draft]:
                self.remove_directory(parent_inode, name)
            if not directories:
                del self._directories[parent_inode]
