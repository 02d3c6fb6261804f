"""Ghosts: what is remembered of chunks that went, bounded in number.

A ghost says when a chunk went, why, and how often it had been loaded, so that a chunk that comes back goes on where it
was, and so that "it was here, why is it gone?" has an answer. No I/O, no waiting.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_GHOSTS = 65_536
"""Some 25 MB at most."""


@dataclass(frozen=True, slots=True)
class Ghost:
    """A chunk that went: when (nanoseconds since the epoch), why ("evict", "rm", "corrupt"), its hits until then."""

    gone_ns: int
    why: str
    hits: int


class Ghosts:
    """The chunks that went last, by namespace directory and key."""

    def __init__(self, limit: int = MAX_GHOSTS) -> None:
        self._limit = limit
        self._ghosts: OrderedDict[tuple[str, bytes], Ghost] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ghosts)

    def add(self, directory: str, key: bytes, ghost: Ghost) -> None:
        """Remember a chunk; the oldest ghost makes room."""
        self._ghosts[directory, key] = ghost
        self._ghosts.move_to_end((directory, key))
        if len(self._ghosts) > self._limit:
            self._ghosts.popitem(last=False)

    def get(self, directory: str, key: bytes) -> Ghost | None:
        """What is remembered of a chunk."""
        return self._ghosts.get((directory, key))

    def pop(self, directory: str, key: bytes) -> Ghost | None:
        """The same, and forget it: the chunk came back."""
        return self._ghosts.pop((directory, key), None)
