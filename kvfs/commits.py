"""Group commit: what many tasks want durable in the index goes there in one transaction after the other.

An extent handed to `free_later` becomes free after a commit that began later, and so after the one that deletes its
chunk: never is an extent reused that a crash could still find in the index.

Concurrency: belongs to the event loop's thread; the transaction runs in a thread while the next round gathers.
"""

from __future__ import annotations

import errno
import logging
import sqlite3
from collections.abc import Callable

import trio

from kvfs import namespace as namespaces
from kvfs.admission import Spent
from kvfs.documents import Document, Documents
from kvfs.errors import DiskFullError, UnavailableError
from kvfs.index import Batch, ChunkRow, Index, LimitRow, NamespaceRow

log = logging.getLogger(__name__)

_RETRY_S = 1.0


class _Round:
    """What the next transaction will hold, and who waits for it."""

    def __init__(self) -> None:
        self.batch = Batch()
        self.extents: list[tuple[int, int, Callable[[int, int], None]]] = []
        self.done = trio.Event()
        self.error: sqlite3.Error | OSError | None = None


class Commits:
    """The queue in front of the index. `run` must be running for anything to become durable.

    The documents of namespaces, where they are kept, are durable before the rows of their namespaces are.

    Attributes: is_disk_full: the last transaction failed for want of room; began: when the one that is under way did, of
    trio's clock, None if none is.
    """

    def __init__(self, index: Index, documents: Documents | None = None) -> None:
        self._index = index
        self._documents = documents
        self._round = _Round()
        self._wake = trio.Event()
        self._limiter = trio.CapacityLimiter(1)
        self._is_failing = False
        self.is_disk_full = False
        self.began: float | None = None

    def put(self, row: ChunkRow) -> None:
        """A chunk became clean. If the commit fails the row is forgotten: the caller learns of it from `flush`."""
        self._round.batch.put.append(row)

    def delete(self, namespace: int, key: bytes) -> None:
        """A chunk is gone, and with it a row that is on its way. Tried again until it succeeds."""
        batch = self._round.batch
        batch.put = [row for row in batch.put if (row.namespace, row.key) != (namespace, key)]
        batch.delete.append((namespace, key))
        self._wake.set()

    def pin(self, namespace: int, key: bytes, until_ns: int | None) -> None:
        """A chunk's pin ends then, or it has none any more. Tried again until it succeeds, or is asked otherwise."""
        self._round.batch.pins[namespace, key] = until_ns
        self._wake.set()

    def used(self, last_used_ns: int, hits: int, namespace: int, key: bytes) -> None:
        """A chunk was loaded. Goes with the next transaction, whenever that is."""
        self._round.batch.used.append((last_used_ns, hits, namespace, key))

    def spent(self, spent: Spent) -> None:
        """What was admitted to NVMe today. Goes with the next transaction, whenever that is."""
        self._round.batch.spent = spent

    def learnt(self, tier: str, learnt: bytes) -> None:
        """What the policy of a tier has learned. Goes with the next transaction, whenever that is."""
        self._round.batch.learnt[tier] = learnt

    def spent_before(self) -> Spent | None:
        """What the index says of that; None if nothing was."""
        return self._index.spent()

    def add_namespace(self, row: NamespaceRow) -> None:
        """A namespace came into being."""
        self._round.batch.namespaces.append(row)
        self._wake.set()

    def limit(self, row: LimitRow) -> None:
        """What a namespace may be. Tried again until it succeeds, or is asked otherwise."""
        self._round.batch.limits[row.namespace] = row
        self._wake.set()

    def remove_namespace(self, number: int, directory: str) -> None:
        """A namespace is gone, with all that was said of it; "" if it had no name. Tried again until it succeeds."""
        self._round.batch.removed[number] = directory
        self._wake.set()

    def free_later(self, offset: int, length: int, free: Callable[[int, int], None]) -> None:
        """Let `free` have an extent once no durable row can name it."""
        self._round.extents.append((offset, length, free))
        self._wake.set()

    async def flush(self) -> None:
        """Wait until all that was asked for so far is durable. Raises UnavailableError if the index failed.

        Waits for ever while the device hangs: bound it.
        """
        current = self._round
        self._wake.set()
        await current.done.wait()
        if current.error is not None and _says_full(current.error):
            raise DiskFullError(
                f"the file system of {self._index.path} is full: what was asked for is in force, and durable once there is room"
            )
        if current.error is not None:
            raise UnavailableError(f"the index could not be written: {current.error}")

    async def run(self) -> None:
        """Commit round after round, for ever."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            await self._commit_round()

    async def _commit_round(self) -> None:
        current, self._round = self._round, _Round()
        self.began = trio.current_time()
        try:
            if current.batch:
                await trio.to_thread.run_sync(self._commit, current.batch, limiter=self._limiter)
        except (sqlite3.Error, OSError) as error:
            if not self._is_failing:
                log.error("the index could not be written, trying again: %s", error)
            self._is_failing = True
            self.is_disk_full = _says_full(error)
            current.error = error
            self._keep_for_next_round(current)
            current.done.set()
            self.began = None
            await trio.sleep(_RETRY_S)
            self._wake.set()
            return
        self.began = None
        if self._is_failing and current.batch:
            log.info("the index can be written again")
            self._is_failing = self.is_disk_full = False
        for offset, length, free in current.extents:
            free(offset, length)
        current.done.set()

    def _commit(self, batch: Batch) -> None:
        if self._documents is not None:
            for row in batch.namespaces:
                self._documents.write(Document(namespaces.decode(row.document), row.created_ns))
        self._index.commit(batch)
        if self._documents is not None:
            for directory in set(batch.removed.values()) - {row.directory for row in batch.namespaces} - {""}:
                try:
                    self._documents.remove(directory)
                except (
                    OSError
                ) as error:  # no reason to call the transaction a failure: a document without rows does no harm
                    log.warning("the document of namespace %s could not be removed: %s", directory, error)

    def _keep_for_next_round(self, failed: _Round) -> None:
        batch = self._round.batch
        batch.delete[:0] = failed.batch.delete
        batch.used[:0] = failed.batch.used
        batch.namespaces[:0] = failed.batch.namespaces
        batch.removed = failed.batch.removed | batch.removed
        batch.pins = failed.batch.pins | batch.pins
        batch.limits = failed.batch.limits | batch.limits
        batch.spent = batch.spent or failed.batch.spent
        batch.learnt = failed.batch.learnt | batch.learnt
        self._round.extents[:0] = failed.extents


def _says_full(error: sqlite3.Error | OSError) -> bool:
    """Whether it was for want of room."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
