"""An ordered dict that never stands still, however large it becomes.

One of Python's has to move all that is in it when it grows, or when much has come and gone: an OrderedDict of 450,000
entries does nothing else for 40 ms. Here only the last `_RECENT` entries are in one; what is older stands in a list
whose links are found in many small dicts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

_RECENT = 16_384  # 1 ms
_NUM_PARTS = 256
PART_MASK = _NUM_PARTS - 1


def in_parts() -> tuple[dict[K, V], ...]:
    """A dict in parts: what belongs to a key is in part ``hash(key) & PART_MASK``."""
    return tuple({} for _ in range(_NUM_PARTS))


class _Link(Generic[K, V]):
    """One of the older entries, between its neighbours."""

    __slots__ = ("after", "before", "key", "value")

    def __init__(self, key: K, value: V, before: _Link[K, V] | None = None) -> None:
        self.key = key
        self.value = value
        self.before = before if before is not None else self
        self.after = self


class Order(Generic[K, V]):
    """Keys with values, the first to come or be moved first. `none` is what a key that is not there has.

    Attributes: size: how many there are; for those who ask very often.

    Invariant: `_links` of the older ones form a circle with `_end`; they come before all of `_recent`.
    """

    def __init__(self, none: V) -> None:
        self.size = 0
        self._none = none
        self._recent: OrderedDict[K, V] = OrderedDict()
        self._links: tuple[dict[K, _Link[K, V]], ...] = ()  # until there are older ones
        self._end: _Link[Any, Any] | None = None

    def __len__(self) -> int:
        return self.size

    def __contains__(self, key: K) -> bool:
        return key in self._recent or (self._end is not None and key in self._links[hash(key) & PART_MASK])

    def __iter__(self) -> Iterator[K]:
        """From the first on; nothing may change meanwhile."""
        if self._end is not None:
            link = self._end.after
            while link is not self._end:
                yield link.key
                link = link.after
        yield from self._recent

    def __reversed__(self) -> Iterator[K]:
        yield from reversed(self._recent)
        if self._end is not None:
            link = self._end.before
            while link is not self._end:
                yield link.key
                link = link.before

    def items(self) -> Iterator[tuple[K, V]]:
        """Keys and values, likewise."""
        if self._end is not None:
            link = self._end.after
            while link is not self._end:
                yield link.key, link.value
                link = link.after
        yield from self._recent.items()

    def get(self, key: K) -> V:
        """The value of a key."""
        if key in self._recent:
            return self._recent[key]
        link = self._links[hash(key) & PART_MASK].get(key) if self._end is not None else None
        return link.value if link is not None else self._none

    def add(self, key: K, value: V) -> None:
        """A key that is not there comes, behind all others."""
        self.size += 1
        recent = self._recent
        recent[key] = value
        if len(recent) > _RECENT:
            self._grow_old()

    def put(self, key: K, value: V) -> None:
        """A key that is there has another value, and the place that it had."""
        if key in self._recent:
            self._recent[key] = value
        else:
            self._links[hash(key) & PART_MASK][key].value = value

    def to_end(self, keys: Sequence[K]) -> None:
        """Move these behind all others, the last one first; those that are not there are skipped."""
        recent = self._recent
        for key in reversed(keys):
            if key in recent:
                recent.move_to_end(key)
            elif self._end is not None and (link := self._links[hash(key) & PART_MASK].pop(key, None)) is not None:
                link.before.after = link.after
                link.after.before = link.before
                recent[key] = link.value
                if len(recent) > _RECENT:
                    self._grow_old()

    def discard(self, key: K) -> bool:
        """A key goes; returns whether it was there."""
        if key in self._recent:
            del self._recent[key]
        elif self._end is not None and (link := self._links[hash(key) & PART_MASK].pop(key, None)) is not None:
            link.before.after = link.after
            link.after.before = link.before
        else:
            return False
        self.size -= 1
        return True

    def pop_first(self) -> None:
        """The first one goes; there must be one."""
        self.discard(next(iter(self)))

    def extend(self, keys: Iterable[K], value: V) -> None:
        """Keys that are not there come, one behind the other."""
        for key in keys:
            self.add(key, value)

    def _grow_old(self) -> None:
        """The first of the recent ones is one of the older ones from now on."""
        if self._end is None:
            self._links = in_parts()
            self._end = _Link(None, None)
        key, value = self._recent.popitem(last=False)
        end = self._end
        link = _Link(key, value, end.before)
        link.after = end
        end.before.after = link
        end.before = link
        self._links[hash(key) & PART_MASK][key] = link
