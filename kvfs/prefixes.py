"""The prefix view: a namespace's chunks as a tree in which ``rm -r`` means what a user hopes.

A directory is a run of chunks up to the next branch and bears the key of its first chunk. Where a run gets a second
continuation it is split: what lay behind the branch moves into a directory of its own, beside the new one. What stands
behind a hole, where a chunk was removed, may have been built on another chunk than the one before the hole: it does not
move, so that a directory never holds what was not built on the chunk whose key it bears. Directories
are never merged: a tool that walks the tree finds each at the path where it saw it, until it is empty.

A chunk knows its directory and its neighbours there (intrusive links: a million chunks are expected).

Concurrency: belongs to the event loop's thread, like the catalog.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar, cast

from kvfs.keys import Key

M = TypeVar("M", bound="Member")


class Member:
    """What the tree needs of a chunk.

    Attributes:
        key, parent, position: as in the chunk's header.
        inode: unique among chunks and directories.
        directory: where it is, None before and after.
        previous, next: its neighbours there, in order of position.
    """

    __slots__ = ("directory", "inode", "key", "next", "parent", "position", "previous")

    def __init__(self, key: Key, parent: Key, position: int, inode: int) -> None:
        self.key = key
        self.parent = parent
        self.position = position
        self.inode = inode
        self.directory: PrefixDirectory[Member] | None = None
        self.previous: Member | None = None
        self.next: Member | None = None


class PrefixDirectory(Generic[M]):
    """A run of chunks, and the branches behind it.

    Attributes:
        tree: whose directory this is.
        key: of its first chunk when it was made; name: the same in hex.
        parent: the directory that holds this one, None at the top.
        built_on: the parent key of that first chunk: where in the parent directory the branch hangs.
        subdirectories: by name.
        inode: unique among chunks and directories.
        keep: how many holders rely on the directory; at zero it goes as soon as it is empty.
    """

    __slots__ = (
        "_first",
        "_last",
        "built_on",
        "inode",
        "keep",
        "key",
        "num_chunks",
        "parent",
        "subdirectories",
        "tree",
    )

    def __init__(
        self, tree: PrefixTree[M], key: Key, parent: PrefixDirectory[M] | None, built_on: Key, inode: int
    ) -> None:
        self.tree = tree
        self.key = key
        self.built_on = built_on
        self.parent = parent
        self.inode = inode
        self.subdirectories: dict[str, PrefixDirectory[M]] = {}
        self.keep = 0
        self.num_chunks = 0
        self._first: M | None = None
        self._last: M | None = None

    def __repr__(self) -> str:
        return f"<PrefixDirectory {self.name} of {self.num_chunks} chunks>"

    @property
    def name(self) -> str:
        """Its name in the parent."""
        return self.key.hex()

    @property
    def is_empty(self) -> bool:
        """Whether it holds neither chunks nor directories."""
        return not self.num_chunks and not self.subdirectories

    @property
    def is_attached(self) -> bool:
        """Whether the tree still has it."""
        siblings = self.parent.subdirectories if self.parent else self.tree.directories
        return siblings.get(self.name) is self

    def has(self, chunk: M) -> bool:
        """Whether the chunk is in this very directory."""
        return chunk.directory is self

    def chunks(self) -> Iterator[M]:
        """Its chunks in order of position. Do not change the tree while iterating."""
        chunk = self._first
        while chunk is not None:
            yield chunk
            chunk = cast("M | None", chunk.next)

    def subtree(self) -> Iterator[M]:
        """Its chunks and those of all directories below, parents first."""
        waiting = [self]
        while waiting:
            directory = waiting.pop()
            yield from directory.chunks()
            waiting.extend(directory.subdirectories.values())

    def _link(self, chunk: M) -> None:
        """Put a chunk at its place; almost always the end."""
        before = self._last
        while before is not None and before.position > chunk.position:
            before = cast("M | None", before.previous)
        after = self._first if before is None else cast("M | None", before.next)
        chunk.previous, chunk.next = before, after
        if before is None:
            self._first = chunk
        else:
            before.next = chunk
        if after is None:
            self._last = chunk
        else:
            after.previous = chunk
        chunk.directory = cast("PrefixDirectory[Member]", self)
        self.num_chunks += 1

    def _unlink(self, chunk: M) -> None:
        before, after = cast("M | None", chunk.previous), cast("M | None", chunk.next)
        if before is None:
            self._first = after
        else:
            before.next = after
        if after is None:
            self._last = before
        else:
            after.previous = before
        chunk.previous = chunk.next = chunk.directory = None
        self.num_chunks -= 1


class PrefixTree(Generic[M]):
    """All prefix directories of one namespace.

    Attributes:
        name: of the namespace's directory.
        directories: those at the top, by name; their first chunk has no stored parent.
    """

    def __init__(self, name: str, chunks: dict[Key, M], next_inode: Iterator[int]) -> None:
        self.name = name
        self.directories: dict[str, PrefixDirectory[M]] = {}
        self._chunks = chunks
        self._next_inode = next_inode

    def add(self, chunk: M) -> list[M]:
        """Find a place for a new chunk; returns the chunks that were moved to another directory to make it."""
        parent = self._chunks.get(chunk.parent)
        home = cast("PrefixDirectory[M] | None", parent.directory) if parent is not None else None
        if parent is None or home is None:
            self._new_directory(chunk, None)._link(chunk)
            return []
        continuation = cast("M | None", parent.next)
        moved: list[M] = []
        if continuation is not None and continuation.parent == parent.key:
            moved = self._split(home, continuation)
        if moved or any(self._continues(branch, parent) for branch in home.subdirectories.values()):
            home = self._new_directory(chunk, home)
        home._link(chunk)
        return moved

    def remove(self, chunk: M) -> PrefixDirectory[M] | None:
        """Take a chunk out; returns the directory it was in, which may have gone with it."""
        directory = cast("PrefixDirectory[M] | None", chunk.directory)
        if directory is not None:
            directory._unlink(chunk)
            self.prune(directory)
        return directory

    def prune(self, directory: PrefixDirectory[M], *, even_if_kept: bool = False) -> bool:
        """Drop a directory that is empty and that nobody keeps, and its parents likewise; returns whether it went."""
        went = False
        current: PrefixDirectory[M] | None = directory
        while current is not None and current.is_empty and current.is_attached:
            if current.keep and not (even_if_kept and current is directory):
                break
            del (current.parent.subdirectories if current.parent else self.directories)[current.name]
            went = went or current is directory
            current = current.parent
        return went

    def descendants(self, chunk: M) -> Iterator[M]:
        """What was built on a chunk, parents first, the chunk itself not included. What a hole cut off is left out."""
        directory = cast("PrefixDirectory[M] | None", chunk.directory)
        if directory is None:
            return
        run = [chunk, *self._followers(chunk)]
        yield from run[1:]
        keys = {member.key for member in run}
        for branch in directory.subdirectories.values():
            if branch.built_on in keys:
                yield from branch.subtree()

    def _followers(self, chunk: M) -> Iterator[M]:
        """The run behind a chunk, up to the first hole."""
        follower = cast("M | None", chunk.next)
        while follower is not None and follower.parent == chunk.key:
            yield follower
            chunk, follower = follower, cast("M | None", follower.next)

    def _continues(self, branch: PrefixDirectory[M], parent: M) -> bool:
        return branch.built_on == parent.key and not branch.is_empty

    def _new_directory(self, first: M, parent: PrefixDirectory[M] | None) -> PrefixDirectory[M]:
        """A directory that bears the key of `first`; one that is there already is taken again."""
        siblings = parent.subdirectories if parent else self.directories
        directory = siblings.get(first.key.hex())
        if directory is None:
            directory = PrefixDirectory(self, first.key, parent, first.parent, next(self._next_inode))
            siblings[directory.name] = directory
        return directory

    def _split(self, home: PrefixDirectory[M], first: M) -> list[M]:
        """Move `first` and what is built on it, with the branches there, into a directory inside `home`."""
        moved = [first, *self._followers(first)]
        directory = self._new_directory(first, home)
        keys = {chunk.key for chunk in moved}
        for branch in [branch for branch in home.subdirectories.values() if branch.built_on in keys]:
            del home.subdirectories[branch.name]
            branch.parent = directory
            directory.subdirectories[branch.name] = branch
        for chunk in moved:
            home._unlink(chunk)
            directory._link(chunk)
        return moved
