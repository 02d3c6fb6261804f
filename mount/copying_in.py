"""Copying in: what becomes of files that people make in the mount; of directories see `made_directories`.

A file is *staged* until it proves itself. One that has the name of a chunk proves it when it is closed, one whose name
begins with "." when it is renamed; what does not is refused with EINVAL, and is gone when it is closed. An event says
why. A namespace comes into being by mkdir of its name and a namespace.json of that very identity; chunks that come
before the namespace.json wait, and are proven when it comes.

Concurrency: belongs to the event loop's thread. `write`, `truncate`, `flush` and `rename` may wait, for room, for a
thread that proves, or for each other; each looks again at what it relies on after that.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable

from kvfs.catalog import Chunk, ChunkTable
from kvfs.chunk import geometry, parse_file_name, parse_header
from kvfs.errors import CapacityError, CorruptChunk
from kvfs.keys import Key
from kvfs.mount.errnos import Refused
from kvfs.mount.homes import Homes
from kvfs.mount.inodes import Inodes
from kvfs.mount.invalidation import Invalidations
from kvfs.mount.made_directories import MadeDirectories
from kvfs.mount.nodes import Fixed, Node, Role
from kvfs.mount.proof import Proof
from kvfs.mount.staged_names import (
    MAX_ALIASES,
    Alias,
    Draft,
    DraftDirectory,
    Home,
    StagedFile,
)
from kvfs.mount.tree import Tree
from kvfs.namespace import MAX_NAMESPACE_JSON_BYTES
from kvfs.staging import MAX_FILE_BYTES, MAX_TIME_NS
from kvfs.store import Store

MAX_AGE_S = 600.0  # of a staged file that nobody writes to, of a draft, of a second name
_COPY_BYTES = 1 << 20
_FIRST_BYTES = 64 << 10  # of a file of which nobody knows how large it will be
_RENAME_NOREPLACE = 1  # rename(2)
_ALIAS = re.compile(rb"Cu[A-Za-z0-9_-]{6}|\..+")  # as cp and rsync name what they are about to rename
_JSON = b"namespace.json"
_CHUNK_NAME = "its key, 32 hex digits, and .safetensors"


class CopyingIn:
    """See the module. The callers translate for the kernel; what is refused raises Refused.

    Attributes: directories: those that people make.
    """

    def __init__(self, store: Store, tree: Tree, inodes: Inodes, invalidations: Invalidations) -> None:
        self._store = store
        self._tree = tree
        self._names = tree.staged
        self._proof = Proof(store, tree, inodes)
        self._homes = Homes(store, tree.staged)
        self.directories = MadeDirectories(store, tree, self._homes, self._proof, invalidations)

    # files

    def create(self, parent: Node, name: bytes) -> StagedFile:
        """A new file, open for writing; one with the name of a chunk has no name before it is proven."""
        home, is_for_chunks, draft = self._homes.where(parent, name)
        key = _key(name)
        is_hidden = name.startswith(b".")
        if is_for_chunks and key is None and not is_hidden:
            self._proof.tell(home, name, f"a chunk's name is {_CHUNK_NAME}", is_for_chunks=True)
            raise Refused(errno.EINVAL)
        if not is_for_chunks and name != _JSON and not is_hidden:
            self._proof.tell(home, name, "only namespace.json, chunks and prefixes are here", is_for_chunks=False)
            raise Refused(errno.EPERM)
        if (parent.inode, name) in self._names.files:
            raise Refused(errno.EEXIST)
        file = self._new(home, name, parent.inode, is_identity=not is_for_chunks, key=key if is_for_chunks else None)
        if draft is not None:
            file.home = draft
            draft.num_open += 1
        if is_hidden:
            self._names.files[parent.inode, name] = file
        return file

    def open(self, node: Node, *, is_cut: bool = False) -> StagedFile:
        """A file that is there: a staged one itself; of a chunk or a namespace.json a new one that may take its place.

        That of a chunk, which the caller leases, begins with the chunk's content unless it is cut.
        """
        if isinstance(node, StagedFile):
            if node.staged.is_over:
                raise Refused(errno.ENOENT)
            node.num_open += 1
            self._names.open_files.add(node)
            if isinstance(node.home, Draft):
                node.home.num_open += 1
            return node
        if isinstance(node, Chunk):
            file = self._new(node.table, node.file_name.encode(), node.inode, key=node.key)
            file.original = None if is_cut or (node.is_removed and not node.leases) else node
            return file
        if isinstance(node, Fixed) and node.role is Role.NAMESPACE_JSON and node.table is not None:
            return self._new(node.table, _JSON, node.inode, is_identity=True)
        raise Refused(errno.EROFS)

    async def write(self, file: StagedFile, offset: int, piece: bytes) -> None:
        """Put bytes into a file. Raises CapacityError too."""
        self._check_changeable(file, offset + len(piece))
        await self._begin_copy(file, lambda original: not offset and len(piece) >= original.length)
        if not offset and file.table is not None and not file.is_identity:
            try:
                file.staged.position = parse_header(file.table.namespace, piece)[1].position
            except CorruptChunk:
                pass  # only the first bytes of a header have come, or the proof will say what it is
        try:
            await self._store.staging.write(file.staged, offset, piece)
        except CapacityError as error:
            self._proof.tell_refused(file, error)
            raise

    async def truncate(self, file: StagedFile, size: int) -> None:
        """Cut or lengthen a file. Raises CapacityError too."""
        self._check_changeable(file, size)
        await self._begin_copy(file, lambda _: not size)
        if size != file.staged.size:
            await self._store.staging.truncate(file.staged, size)

    async def _begin_copy(self, file: StagedFile, is_replaced: Callable[[Chunk], bool]) -> None:
        """Something is about to be written over a stored chunk: copy it first, unless all of it is replaced at once."""
        original = file.original
        if original is None:
            return
        async with file.lock:
            if file.original is not original:  # somebody else has written meanwhile
                return
            if not is_replaced(original):
                for begin in range(0, original.length, _COPY_BYTES):
                    await self._store.staging.write(
                        file.staged, begin, await self._store.read(original, begin, _COPY_BYTES)
                    )
            file.original = None

    async def flush(self, file: StagedFile) -> None:
        """A descriptor of a file was closed: if it has a name to prove, it must prove it now.

        An empty one need not: the shell closes a duplicate before the program has written anything.
        """
        if not _has_to_prove(file):
            return
        async with file.lock:
            if not _has_to_prove(file):  # it was renamed meanwhile
                return
            is_waiting = not await self._proof.settle(file, self._homes.resolved(file.home))
            if is_waiting and not self._names.places(file):
                self._names.files[file.parent_inode, file.name] = file

    def release(self, file: StagedFile) -> None:
        """A file handle is gone. What has neither proven itself nor a name to be found by goes with the last."""
        file.num_open -= 1
        if isinstance(file.home, Draft):
            file.home.num_open -= 1
            file.home.touched_s = self._now_s()
        if file.num_open:
            return
        self._names.open_files.discard(file)
        is_wanted = file.staged.size or file.is_hidden or file.table is None  # nothing comes of an empty chunk
        if self._names.places(file) and is_wanted:
            self._store.staging.fit(file.staged)
        else:
            self._proof.drop(file)

    # names

    async def rename(self, parent: Node, name: bytes, new_parent: Node, new_name: bytes, flags: int) -> None:
        """Give a staged file another name: the right one proves it, and it stays staged if it does not."""
        node = self._tree.lookup(parent, name)
        if node is None:
            raise Refused(errno.ENOENT)
        target, is_for_chunks, _ = self._homes.where(new_parent, new_name)
        if flags & ~_RENAME_NOREPLACE:
            raise Refused(errno.EINVAL)
        if isinstance(node, Chunk):
            if node.table is not target:
                raise Refused(errno.EXDEV)
            if self._names.aliases.pop((parent.inode, name), None) is None or new_name != node.file_name.encode():
                raise Refused(errno.EPERM)
            return
        if not isinstance(node, StagedFile):
            raise Refused(errno.EPERM)
        if self._names.files.get((new_parent.inode, new_name)) is node:
            return  # two names of one file: rename(2) does nothing
        if new_name != node.name and len(self._names.places(node)) > 1:
            reason = "it waits under two names, and cannot get a third"
            self._proof.tell(node.home, name, reason, is_for_chunks=is_for_chunks)
            raise Refused(errno.EPERM)
        if self._homes.resolved(node.home) is not target:
            raise Refused(errno.EXDEV)
        if node.is_identity is is_for_chunks:
            raise Refused(errno.EPERM)
        if not new_name.startswith(b"."):
            if (is_for_chunks and _key(new_name) is None) or (not is_for_chunks and new_name != _JSON):
                names = _CHUNK_NAME if is_for_chunks else _JSON.decode()
                self._proof.tell(target, new_name, f"it can only be {names}", is_for_chunks=is_for_chunks)
                raise Refused(errno.EINVAL)
            async with node.lock:
                before = node.name, node.key, node.parent_inode
                node.name, node.key, node.parent_inode = new_name, _key(new_name), new_parent.inode
                try:
                    if await self._proof.settle(node, target):
                        return
                except BaseException:
                    node.name, node.key, node.parent_inode = before
                    raise
        node.name = new_name
        self._names.files.pop((parent.inode, name), None)
        self._put(new_parent, node)

    def link(self, node: Node, parent: Node, name: bytes) -> Node:
        """A second name for a chunk: its own in another directory, which the tree decides on, or one for a moment."""
        where = self._homes.where(parent, name)
        if isinstance(node, Chunk) and not node.is_removed and where.home is node.table and where.is_for_chunks:
            if name == node.file_name.encode():
                if self._tree.lookup(parent, name) is not None:
                    raise Refused(errno.EEXIST)
                self._names.link(parent.inode, node)
                return node
            if _ALIAS.fullmatch(name):
                if len(self._names.aliases) >= MAX_ALIASES:
                    raise CapacityError("too many second names")
                self._names.aliases[parent.inode, name] = Alias(node, self._now_s())
                self._names.copied(node)
                return node
        if isinstance(node, StagedFile) and where.home is self._homes.resolved(node.home) and name == node.name:
            if (parent.inode, name) in self._names.files:
                raise Refused(errno.EEXIST)
            self._put(parent, node)
            return node
        raise Refused(errno.EXDEV if isinstance(node, Chunk) and where.home is not node.table else errno.EPERM)

    def unlink(self, parent: Node, name: bytes) -> bool:
        """Remove a name of a staged file, or a second one of a chunk; returns whether it was one."""
        if isinstance(parent, Fixed | DraftDirectory) and parent.draft is not None:
            parent.draft.touched_s = self._now_s()  # who removes finds what it has seen, to the end
        if self._names.aliases.pop((parent.inode, name), None) is not None:
            return True
        file = self._names.files.pop((parent.inode, name), None)
        if file is None:
            return False
        if not file.num_open and not self._names.places(file):
            self._store.staging.drop(file.staged)
        return True

    # what is being copied

    def is_under_way(self, node: Node) -> bool:
        """Whether somebody is copying this in now, or was a moment ago."""
        if isinstance(node, Chunk):
            return self._names.is_fresh(node)
        return isinstance(node, StagedFile | DraftDirectory) or (isinstance(node, Fixed) and node.draft is not None)

    def touched(self, node: Node, modified_ns: int | None) -> None:
        """Attributes were set, the time of the last modification perhaps.

        Of the directory of a namespace that is the last thing that `cp -a`, tar and `kvfs import` do. A namespace.json keeps its
        time, so that rsync finds it as it left it; a chunk has the time when it was first stored.
        """
        if isinstance(node, Fixed) and node.role is Role.NAMESPACE and node.table is not None:
            if node.draft is not None:
                self._names.forget_draft(node.draft)
            self._names.copying_is_over(node.table)
            self._store.copying_is_over(node.table)
        if modified_ns is None or not 0 <= modified_ns < MAX_TIME_NS:
            return
        if isinstance(node, StagedFile):
            node.modified_ns = modified_ns
        elif isinstance(node, Fixed) and node.role is Role.NAMESPACE_JSON and node.table is not None:
            node.table.created_ns = modified_ns

    def became(self, file: StagedFile) -> Chunk | None:
        """The chunk that a staged file has become, or was dropped for; None if there is none (any more)."""
        home = self._homes.resolved(file.home)
        return home.chunks.get(file.key) if isinstance(home, ChunkTable) and file.key is not None else None

    # ageing

    async def expire(self) -> None:
        """Drop what was left behind: nobody has it open, and nothing was done to it for `MAX_AGE_S`."""
        before_s = self._now_s() - MAX_AGE_S
        for draft in list(self._names.drafts.values()):
            table = self._store.catalog.tables.get(draft.name)
            files = self._names.in_draft(draft)
            if table is not None and draft.table is None:  # an engine said what it is
                await self._proof.become(draft, table)
            elif table is not None:
                self._names.draft(draft.name)
            elif draft.touched_s < before_s and not any(file.num_open for file in files):
                for file in files:
                    self._proof.drop(file)
                self._names.forget_draft(draft)
        for file in list(dict.fromkeys(self._names.files.values())):
            is_waiting = isinstance(file.home, Draft) and file.home.table is None and not file.is_hidden
            if not file.num_open and file.staged.written_s < before_s and not is_waiting:
                self._proof.drop(file)
        for place, alias in list(self._names.aliases.items()):
            if alias.made_s < before_s:
                del self._names.aliases[place]
        self.directories.expire(before_s)

    # helpers

    def _now_s(self) -> float:
        return self._store.system.monotonic()

    def _new(
        self, home: Home, name: bytes, parent_inode: int, *, is_identity: bool = False, key: Key | None = None
    ) -> StagedFile:
        limit, first = MAX_FILE_BYTES, _FIRST_BYTES
        if is_identity:
            limit = MAX_NAMESPACE_JSON_BYTES
        elif isinstance(home, ChunkTable):
            limit = first = geometry(home.namespace, home.namespace.identity.tokens_per_chunk).file_bytes
        staged = self._store.staging.create(self._store.catalog.next_inode(), limit, first)
        now_ns = self._store.system.time_ns()
        file = StagedFile(staged, home, name, parent_inode, now_ns, None, is_identity, key, num_open=1)
        self._names.open_files.add(file)
        return file

    def _put(self, parent: Node, file: StagedFile) -> None:
        """Give a file a name; what had it is gone."""
        before = self._names.files.get((parent.inode, file.name))
        self._names.files[parent.inode, file.name] = file
        if before is not None and before is not file and not before.num_open and not self._names.places(before):
            self._store.staging.drop(before.staged)

    def _check_changeable(self, file: StagedFile, size: int) -> None:
        if file.is_settled or file.staged.is_over:
            raise Refused(errno.EPERM)  # chunks do not change
        if size > file.staged.limit_bytes:
            what = "a namespace.json" if file.is_identity else "a chunk here"
            reason = f"{what} has at most {file.staged.limit_bytes} bytes"
            self._proof.tell(file.home, file.name, reason, is_for_chunks=not file.is_identity)
            raise Refused(errno.EFBIG)


def _has_to_prove(file: StagedFile) -> bool:
    """Whether a file is to be what its name says, now that it is closed."""
    return not (file.is_hidden or file.is_settled or file.staged.is_over) and bool(file.staged.size)


def _key(name: bytes) -> Key | None:
    return parse_file_name(name.decode("ascii", "surrogateescape"))
