"""The prefix view: a namespace's chunks as a tree in which ``rm -r`` means what a user hopes.

A directory is a run of chunks up to the next branch and bears the key of its first chunk. Where a run gets a second
continuation it is split: what lay behind the branch moves into a directory of its own, beside the new one. What stands
behind a hole, where a chunk was removed, may have been built on another chunk than the one before the hole: it does not
move, so that a directory never holds what was not built on the chunk whose key it bears.

Chunks that are copied in come in any order. What comes before the chunk that it was built on waits at the top, a
*fragment*; when that chunk comes, the fragment is joined to it: it goes on its run, or becomes a branch. Of two runs
that become one the smaller is moved, so that n chunks in the worst order cost n·log n moves; the directory that stays
is the one that the kernel knows, if it knows only one. Apart from that directories are never merged: a tool that walks
the tree finds each at the path where it saw it, until it is empty.

A chunk knows its directory and its neighbours there (intrusive links: a million chunks are expected).

Concurrency: belongs to the event loop's thread, like the catalog.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, NamedTuple, TypeVar, cast

from msgspec import Struct

from kvfs.keys import Key

M = TypeVar("M", bound="Member")
_NOTHING = Key(b"")  # what an empty directory is built on that nobody knows more of


class Member(Struct, eq=False, gc=False):
    """What the tree needs of a chunk. No collector looks at it: what leaves the tree lets go of its neighbours.

    Attributes:
        key, parent, position: as in the chunk's header.
        inode: unique among chunks and directories.
        directory: where it is, None before and after.
        previous, next: its neighbours there, in order of position.
    """

    key: Key
    parent: Key
    position: int
    inode: int
    directory: PrefixDirectory[Member] | None
    previous: Member | None
    next: Member | None


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
    def depth(self) -> int:
        """How many directories are above it."""
        above, depth = self.parent, 0
        while above is not None:
            above, depth = above.parent, depth + 1
        return depth

    @property
    def is_empty(self) -> bool:
        """Whether it holds neither chunks nor directories."""
        return not self.num_chunks and not self.subdirectories

    @property
    def is_attached(self) -> bool:
        """Whether the tree still has it."""
        return self.tree.siblings(self.parent).get(self.name) is self

    @property
    def weight(self) -> int:
        """What it costs to move all that it holds."""
        return self.num_chunks + len(self.subdirectories)

    def has(self, chunk: M) -> bool:
        """Whether the chunk is in this very directory."""
        return chunk.directory is self

    def chunks(self) -> Iterator[M]:
        """Its chunks in order of position. Do not change the tree while iterating."""
        chunk = self._first
        while chunk is not None:
            yield chunk
            chunk = cast("M | None", chunk.next)

    def branches(self) -> Iterator[M]:
        """The first chunks of the directories inside, where they are there."""
        for directory in self.subdirectories.values():
            first = directory._first
            if first is not None and first.key == directory.key:
                yield first

    def subtree(self) -> Iterator[M]:
        """Its chunks and those of all directories below, parents first."""
        waiting = [self]
        while waiting:
            directory = waiting.pop()
            yield from directory.chunks()
            waiting.extend(directory.subdirectories.values())

    def _link(self, chunk: M) -> None:
        """Put a chunk at its place; almost always an end."""
        before = self._last
        if self._first is not None and self._first.position > chunk.position:
            before = None
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

    def _extend(self, run: list[M]) -> None:
        """Put chunks behind the last one, which is the first of them."""
        here = cast("PrefixDirectory[Member]", self)
        before = run[0]
        for chunk in islice(run, 1, None):
            chunk.previous = before
            before.next = chunk
            chunk.directory = here
            before = chunk
        self._last = before
        self.num_chunks += len(run) - 1

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


class Renamed(NamedTuple, Generic[M]):
    """A name of a directory that does not hold any more: `name` in `parent` (None: the top) was `directory`."""

    parent: PrefixDirectory[M] | None
    name: str
    directory: PrefixDirectory[M]


@dataclass(slots=True)
class Moves(Generic[M]):
    """What moved when a chunk was added.

    Attributes:
        chunks: those that went to another directory, each with the one it was in.
        directories: their old names.
    """

    chunks: list[tuple[M, PrefixDirectory[M]]] = field(default_factory=list)
    directories: list[Renamed[M]] = field(default_factory=list)


class PrefixTree(Generic[M]):
    """All prefix directories of one namespace.

    Attributes:
        name: of the namespace's directory.
        directories: those at the top, by name; their first chunk has no stored parent.

    Invariant: a directory at the top whose first chunk is there does not have that chunk's parent in the tree, unless
    their positions contradict each other.
    """

    def __init__(self, name: str, chunks: dict[Key, M], next_inode: Iterator[int]) -> None:
        self.name = name
        self.directories: dict[str, PrefixDirectory[M]] = {}
        self._chunks = chunks
        self._next_inode = next_inode
        self._waiting: dict[Key, dict[PrefixDirectory[M], None]] = {}  # those at the top, by what they are built on

    def siblings(self, parent: PrefixDirectory[M] | None) -> dict[str, PrefixDirectory[M]]:
        """The directories in `parent`, by name; None: at the top."""
        return self.directories if parent is None else parent.subdirectories

    def add(self, chunk: M) -> Moves[M]:
        """Find a place for a new chunk; returns what was moved to make it."""
        moves: Moves[M] = Moves()
        parent = self._chunks.get(chunk.parent)
        home = cast("PrefixDirectory[M] | None", parent.directory) if parent is not None else None
        rest = self.directories.get(chunk.key.hex())
        if parent is None or home is None:
            self._new_directory(chunk, None)._link(chunk)
        elif rest is not None and rest.num_chunks:  # what is left of a fragment whose first chunk was removed
            rest._link(chunk)
            self._join(parent, moves)
        else:
            self._place(chunk, parent, home, moves)
        self._join(chunk, moves)
        return moves

    def add_run(self, run: list[M]) -> None:
        """The same for chunks of which each is built on the one before, and nothing that is here on one but the last."""
        self.add(run[0])
        home = cast("PrefixDirectory[M]", run[0].directory)
        if home._last is not run[0]:  # positions contradict each other
            for chunk in run[1:]:
                self.add(chunk)
            return
        home._extend(run)
        self._join(run[-1], Moves())

    def make_directory(self, key: Key, parent: PrefixDirectory[M] | None) -> PrefixDirectory[M]:
        """An empty directory for a chunk that may come, in `parent` or at the top; or the one that is there."""
        found = self.siblings(parent).get(key.hex())
        if found is None:
            found = PrefixDirectory(self, key, None, _NOTHING, next(self._next_inode))
            self._attach(found, parent)
        return found

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
            above = current.parent
            self._detach(current)
            went = went or current is directory
            current = above
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

    def _attach(self, directory: PrefixDirectory[M], parent: PrefixDirectory[M] | None) -> None:
        directory.parent = parent
        self.siblings(parent)[directory.name] = directory
        if parent is None:
            self._waiting.setdefault(directory.built_on, {})[directory] = None

    def _detach(self, directory: PrefixDirectory[M]) -> None:
        """Take a directory out of the one it is in; it does not forget where that was."""
        del self.siblings(directory.parent)[directory.name]
        if directory.parent is None:
            waiting = self._waiting[directory.built_on]
            del waiting[directory]
            if not waiting:
                del self._waiting[directory.built_on]

    def _followers(self, chunk: M) -> Iterator[M]:
        """The run behind a chunk, up to the first hole."""
        follower = cast("M | None", chunk.next)
        while follower is not None and follower.parent == chunk.key:
            yield follower
            chunk, follower = follower, cast("M | None", follower.next)

    def _has_branch(self, home: PrefixDirectory[M], chunk: M) -> bool:
        """Whether something that continues `chunk` has a directory of its own in `home`."""
        return any(branch.built_on == chunk.key and not branch.is_empty for branch in home.subdirectories.values())

    def _new_directory(self, first: M, parent: PrefixDirectory[M] | None) -> PrefixDirectory[M]:
        """A directory that bears the key of `first`; one that is there already is taken again."""
        directory = self.make_directory(first.key, parent)
        if directory.built_on != first.parent:
            self._detach(directory)
            directory.built_on = first.parent
            self._attach(directory, parent)
        return directory

    def _place(self, chunk: M, parent: M, home: PrefixDirectory[M], moves: Moves[M]) -> None:
        """Put a chunk behind its parent: at the end of the run, or beside what continues that already."""
        is_branch = self._split(parent, home, moves)
        if is_branch or self._has_branch(home, parent):
            home = self._new_directory(chunk, home)
        home._link(chunk)

    def _split(self, parent: M, home: PrefixDirectory[M], moves: Moves[M]) -> bool:
        """Move what continues `parent` in its run, with the branches there, into a directory inside `home`.

        Returns whether anything did.
        """
        run = [*self._followers(parent)]
        if not run:
            return False
        directory = self._new_directory(run[0], home)
        keys = {chunk.key for chunk in run}
        for branch in [branch for branch in home.subdirectories.values() if branch.built_on in keys]:
            self._move(branch, directory, moves)
        self._move_chunks(run, directory, moves)
        return True

    def _join(self, chunk: M, moves: Moves[M]) -> None:
        """Join the fragments that were waiting for `chunk` to it."""
        waiting = self._waiting.get(chunk.key)
        home = cast("PrefixDirectory[M] | None", chunk.directory)
        if not waiting or home is None:
            return
        fragments = [fragment for fragment in waiting if self._fits(fragment, chunk, home)]
        if not fragments:
            return
        if len(fragments) == 1 and home._last is chunk and not self._has_branch(home, chunk):
            self._concatenate(home, fragments[0], moves)
            return
        self._split(chunk, home, moves)
        for fragment in fragments:
            self._move(fragment, home, moves)

    def _fits(self, fragment: PrefixDirectory[M], chunk: M, home: PrefixDirectory[M]) -> bool:
        """Whether a fragment can be joined to `chunk`: its first chunk is there, and what both say fits together."""
        first = fragment._first
        if first is None or first.key != fragment.key or first.position != chunk.position + 1:
            return False
        above: PrefixDirectory[M] | None = home
        while above is not None:
            if above is fragment:  # a client lied
                return False
            above = above.parent
        return True

    def _concatenate(self, home: PrefixDirectory[M], fragment: PrefixDirectory[M], moves: Moves[M]) -> None:
        """Make one directory of a run and the fragment that continues it; it has the place and the name of the run's."""
        kept, other = home, fragment
        if (bool(fragment.keep), fragment.weight) > (bool(home.keep), home.weight):
            kept, other = fragment, home
        branches = list(home.subdirectories.values())
        moves.directories.append(Renamed(None, fragment.name, fragment))
        self._detach(fragment)
        for branch in list(other.subdirectories.values()):
            self._move(branch, kept, moves)
        self._move_chunks(list(other.chunks()), kept, moves)
        if kept is fragment:
            moves.directories.append(Renamed(home.parent, home.name, home))
            self._detach(home)
            fragment.key, fragment.built_on = home.key, home.built_on
            self._attach(fragment, home.parent)
        self._part(branches, moves)  # holes are filled: some may hang on what has just joined the run

    def _move(self, directory: PrefixDirectory[M], target: PrefixDirectory[M], moves: Moves[M]) -> None:
        """Move a directory into another. Of two that bear the same name there the one without chunks makes way."""
        moves.directories.append(Renamed(directory.parent, directory.name, directory))
        if directory.is_attached:
            self._detach(directory)
        rival = target.subdirectories.get(directory.name)
        if rival is not None and rival.num_chunks:
            directory, rival = rival, directory
        elif rival is not None:
            moves.directories.append(Renamed(target, rival.name, rival))
            self._detach(rival)
        if rival is not None:
            for branch in list(rival.subdirectories.values()):
                self._move(branch, directory, moves)
        if not directory.is_attached:
            self._attach(directory, target)
        if rival is not None and rival.num_chunks:  # what holes left in both
            self._move_chunks(list(rival.chunks()), directory, moves)
            self._part(list(directory.subdirectories.values()), moves)

    def _part(self, branches: list[PrefixDirectory[M]], moves: Moves[M]) -> None:
        """Where one of these branches and a run continue the same chunk, give the run a directory of its own."""
        for branch in branches:
            chunk = self._chunks.get(branch.built_on)
            if chunk is not None and branch.parent is chunk.directory and branch.parent and not branch.is_empty:
                self._split(chunk, branch.parent, moves)

    def _move_chunks(self, chunks: list[M], target: PrefixDirectory[M], moves: Moves[M]) -> None:
        for chunk in chunks:
            directory = cast("PrefixDirectory[M]", chunk.directory)
            directory._unlink(chunk)
            moves.chunks.append((chunk, directory))
        if chunks and target._first is not None and chunks[-1].position <= target._first.position:
            chunks = chunks[::-1]  # each finds its place at the front
        for chunk in chunks:
            target._link(chunk)
