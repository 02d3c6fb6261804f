"""Who listens to what engines ask for: `kvfs record`. Nobody waits for a listener: what it does not fetch in time is lost.

Concurrency: belongs to the event loop's thread; nothing waits.
"""

from __future__ import annotations

from collections import deque

from kvfs.catalog import ChunkTable
from kvfs.keys import KEY_BYTES
from kvfs.messages import MAX_BATCH, Heard

_MAX_WAITING_BYTES = 16 << 20  # 2,500 prompts of 100k tokens; a listener asks several times a second
_OVERHEAD_BYTES = 300  # of a request beside its keys
_REPLY_BYTES = KEY_BYTES * MAX_BATCH + 48 * 1024  # below what a message may have
_MAX_LISTENERS = 8


class Ear:
    """What one listener has not fetched yet."""

    def __init__(self) -> None:
        self._waiting: deque[Heard] = deque()
        self._num_bytes = 0
        self._num_lost = 0

    def add(self, heard: Heard) -> None:
        """Keep a request, or count it as lost."""
        size = len(heard.keys) + _OVERHEAD_BYTES
        if self._num_bytes + size > _MAX_WAITING_BYTES:
            self._num_lost += 1
            return
        self._waiting.append(heard)
        self._num_bytes += size

    def take(self) -> tuple[tuple[Heard, ...], int, bool]:
        """As many as a message has room for, how many were lost since the last time, and whether there are more."""
        taken: list[Heard] = []
        room = _REPLY_BYTES
        while self._waiting and (size := len(self._waiting[0].keys) + _OVERHEAD_BYTES) <= room:
            taken.append(self._waiting.popleft())
            room -= size
            self._num_bytes -= size
        lost, self._num_lost = self._num_lost, 0
        return tuple(taken), lost, bool(self._waiting)


class Listeners:
    """All who listen now."""

    def __init__(self) -> None:
        self._ears: list[Ear] = []

    def __bool__(self) -> bool:
        return bool(self._ears)

    def add(self) -> Ear | None:
        """Somebody listens from now on; None if there are too many already."""
        if len(self._ears) >= _MAX_LISTENERS:
            return None
        ear = Ear()
        self._ears.append(ear)
        return ear

    def remove(self, ear: Ear) -> None:
        """That one went."""
        self._ears.remove(ear)

    def heard(self, time_ns: int, session: int, table: ChunkTable, keys: bytes, num_found: int) -> None:
        """An engine asked for a prefix."""
        heard = Heard(time_ns, session, table.directory, table.namespace.identity.tokens_per_chunk, num_found, keys)
        for ear in self._ears:
            ear.add(heard)
