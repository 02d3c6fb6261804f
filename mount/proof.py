"""Proof: a staged file becomes what its name says that it is, or is refused and an event says why.

Concurrency: belongs to the event loop's thread. `settle` and `become` wait for the threads that read the files; who
proves a file holds its lock.
"""

from __future__ import annotations

import errno
import logging

from kvfs import namespace as namespaces
from kvfs.catalog import Chunk, ChunkTable
from kvfs.chunk import parse_header
from kvfs.errors import CorruptChunk, FormatError, KvfsError, UsageError
from kvfs.mount.errnos import Refused
from kvfs.mount.inodes import Inodes
from kvfs.mount.staged_names import Draft, Home, StagedFile
from kvfs.mount.tree import Tree
from kvfs.mount.xattrs import parse_pin, set_limit
from kvfs.namespace import MAX_NAMESPACE_JSON_BYTES
from kvfs.store import Store

logger = logging.getLogger(__name__)


class Proof:
    """Lets files be chunks, and drafts namespaces."""

    def __init__(self, store: Store, tree: Tree, inodes: Inodes) -> None:
        self._store = store
        self._tree = tree
        self._names = tree.staged
        self._inodes = inodes

    def drop(self, file: StagedFile) -> None:
        """A file that is wanted no more, with all its names."""
        self._names.forget(file)
        self._store.staging.drop(file.staged)

    async def settle(self, file: StagedFile, home: Home) -> bool:
        """Let a file be what its name says, in `home`; returns False if that has to wait for a namespace.json.

        The caller holds its lock. Raises Refused (EINVAL) or CapacityError.
        """
        if file.is_settled:
            return True
        try:
            if file.is_identity:
                await self._settle_identity(file, home)
            elif isinstance(home, ChunkTable):
                await self._settle_chunk(file, home)
        except (FormatError, UsageError) as error:
            self.tell_refused(file, error)
            raise Refused(errno.EINVAL) from error
        return file.is_settled

    async def _settle_chunk(self, file: StagedFile, table: ChunkTable) -> None:
        assert file.key is not None
        chunk = await self._store.admit(file.staged, table, file.key)
        file.is_settled = True
        self._names.forget(file)
        self._names.copied(chunk)
        self._names.link(file.parent_inode, chunk)
        if isinstance(file.home, Draft) and file.parent_inode == self._tree.namespaces.of(file.home).chunks.inode:
            file.home.in_chunks.add(chunk.inode)
        if chunk.inode == file.inode:
            self._inodes.replace(chunk)
        if file.pin is not None:
            await self._pin(chunk, file.pin)

    async def _pin(self, chunk: Chunk, value: bytes) -> None:
        """What was copied together with its pin gets it, if it may; if not the copy is good all the same."""
        now_ns = self._store.system.time_ns()
        try:
            until_ns = parse_pin(value, now_ns)
            if until_ns > now_ns:
                await self._store.limits.pin([chunk], until_ns)
        except KvfsError as error:
            logger.info("chunk %s was copied in without its pin: %s", chunk.key.hex(), error)

    async def _settle_identity(self, file: StagedFile, home: Home) -> None:
        namespace = namespaces.decode(self._store.staging.read(file.staged, 0, MAX_NAMESPACE_JSON_BYTES))
        name = home.name if isinstance(home, Draft) else home.directory
        if namespace.directory != name:
            raise UsageError(f"it is the namespace.json of {namespace.directory}")
        table = self._store.attach(namespace, file.modified_ns)  # raises if it contradicts what is there
        if file.modified_ns is not None:
            table.created_ns = file.modified_ns
        file.is_settled = True
        self.drop(file)
        if isinstance(home, Draft):
            await self.become(home, table)

    async def become(self, draft: Draft, table: ChunkTable) -> None:
        """A draft is a namespace now: prove what waits, parents first."""
        draft.table = table
        draft.touched_s = self._store.system.monotonic()
        for name, value in draft.limits.items():
            await set_limit(self._store, table, name, value)
        waiting: list[tuple[int, StagedFile]] = []
        for file in self._names.in_draft(draft):
            if file.is_hidden or file.is_identity:
                continue
            position = 0
            try:
                position = parse_header(table.namespace, self._store.staging.view(file.staged))[1].position
            except CorruptChunk:
                pass  # the proof will say it
            waiting.append((position, file))
        for _, file in sorted(waiting, key=lambda pair: pair[0]):
            async with file.lock:
                try:
                    # A rename that was refused meanwhile has taken its name back.
                    # What is open is proven when it is closed: somebody may be writing it anew.
                    if not (file.is_settled or file.is_hidden or file.key is None or file.num_open):
                        await self._settle_chunk(file, table)
                except KvfsError as error:
                    self.tell_refused(file, error)
                    self.drop(file)

    def tell_refused(self, file: StagedFile, error: KvfsError) -> None:
        """Count it, and say why where whoever copies can look."""
        self.tell(file.home, file.name, str(error), is_for_chunks=not file.is_identity)

    def tell(self, home: Home | None, name: bytes, reason: str, *, is_for_chunks: bool) -> None:
        """The same for a name that is not taken; `home` is None in the root."""
        places = [] if home is None else [home.name if isinstance(home, Draft) else home.directory]
        if is_for_chunks:  # the chunk's name; somebody may have meant the one in the prefix view
            places.append("chunks")
        path = "/".join([*places, name.decode("ascii", "backslashreplace")])
        logger.info("%s was copied in and is refused: %s", path, reason)
        self._store.counters.copies_refused += 1
        self._store.events.append("refused", path=path, reason=reason)
