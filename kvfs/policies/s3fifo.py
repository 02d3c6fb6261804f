"""S3-FIFO, touched from tail to head: a small queue that most entries never leave, a main one, and ghosts.

After Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. The sizes are shares of the most entries
that there were so far. Where an eviction passes entries that were used, they move: that is done at the next call, since
`victims` itself changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic

from kvfs.policies.base import E, Mark, mark_of
from kvfs.policies.order import Order

_SMALL_SHARE = 0.1
_GHOST_SHARE = 0.9
_MOST = 3
_GONE = -1
_MOVES_AT = 2  # uses after which an entry of the small queue goes to the main one


class S3FIFO(Generic[E]):
    """Both queues map an entry to its uses since it came or was passed, `_MOST` at most."""

    def __init__(self) -> None:
        self._small: Order[E, int] = Order(_GONE)
        self._main: Order[E, int] = Order(_GONE)
        self._ghosts: Order[Mark, None] = Order(None)
        self._passed: list[E] = []
        self._size = 0

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def insert(self, entry: E) -> None:
        """See `Policy`."""
        self._move_passed()
        self._size = max(self._size, len(self) + 1)
        mark = mark_of(entry)
        (self._main if self._ghosts.discard(mark) else self._small).add(entry, 0)

    def touch(self, prefix: Sequence[E]) -> None:
        """See `Policy`."""
        self._move_passed()
        for entry in reversed(prefix):
            queue = self._small if entry in self._small else self._main
            uses = queue.get(entry)
            if _GONE < uses < _MOST:
                queue.put(entry, uses + 1)

    def built_on(self, prefix: Sequence[E]) -> None:
        """See `Policy`: what came together, and was not used since, goes from tail to head."""
        self._move_passed()
        self._small.to_end([entry for entry in prefix if self._small.get(entry) == 0])

    def bypassed(self, entry: E) -> None:
        """See `Policy`: nothing is learned from it."""

    def remove(self, entry: E) -> None:
        """See `Policy`."""
        self._move_passed()
        if self._small.discard(entry):
            mark = mark_of(entry)
            self._ghosts.discard(mark)
            self._ghosts.add(mark, None)
            if len(self._ghosts) > _GHOST_SHARE * self._size:
                self._ghosts.pop_first()
        else:
            self._main.discard(entry)

    def victims(self, may_go: Callable[[E], bool]) -> Iterator[E]:
        """See `Policy`."""
        self._move_passed()
        if not self._small or len(self._main) > (1 - _SMALL_SHARE) * self._size:
            yield from self._of_main(may_go)
            yield from self._of_small(may_go)
        else:
            yield from self._of_small(may_go)
            yield from self._of_main(may_go)

    def _of_small(self, may_go: Callable[[E], bool]) -> Iterator[E]:
        used: list[E] = []
        for entry, uses in self._small.items():
            if uses >= _MOVES_AT:
                self._passed.append(entry)
                used.append(entry)
            elif may_go(entry):
                yield entry
        for entry in used:
            if may_go(entry):
                yield entry

    def _of_main(self, may_go: Callable[[E], bool]) -> Iterator[E]:
        for rounds in range(_MOST + 1):
            for entry, uses in self._main.items():
                if uses > rounds:
                    self._passed.append(entry)
                elif uses == rounds and may_go(entry):
                    yield entry

    def _move_passed(self) -> None:
        """What an eviction passed over goes to the end of the main queue, with a use less."""
        if not self._passed:
            return
        for entry in self._passed:
            if self._small.discard(entry):
                self._main.add(entry, 0)
            elif (uses := self._main.get(entry)) > 0:
                self._main.put(entry, uses - 1)
                self._main.to_end((entry,))
        self._passed.clear()
