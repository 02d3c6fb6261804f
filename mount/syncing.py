"""fsync: waiting until chunks are clean, as long as it takes (a full RAM tier may be minutes); how many wait is bounded.

Concurrency: belongs to the event loop's thread.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from kvfs.catalog import Chunk, ChunkTable
from kvfs.mount.errnos import Refused
from kvfs.store import Store

_MAX_SYNCING = 64


class Syncing:
    """Those who wait. Methods raise Refused (EAGAIN) if too many do, and UnavailableError while the device fails."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._num_waiting = 0

    async def chunk(self, chunk: Chunk) -> None:
        """Until the chunk is clean."""
        if chunk.is_dirty:
            with self._waiting():
                await self._store.sync_chunks([chunk])

    async def tables(self, tables: Iterable[ChunkTable]) -> None:
        """Until all that is dirty now in these namespaces is clean."""
        with self._waiting():
            await self._store.sync(tables)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        if self._num_waiting >= _MAX_SYNCING:
            raise Refused(errno.EAGAIN)
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
