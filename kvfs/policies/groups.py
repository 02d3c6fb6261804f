"""Groups of entries that are alike: of the same namespace and class, used equally often.

A block of groups belongs to each of the first namespaces, and in each to the first of its classes; all other namespaces
share one block, all other classes of a namespace that of class 0. So the number of groups is bounded, and whoever
invents classes spoils what is learned of his own namespace only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Annotated

import msgspec

from kvfs.errors import UsageError
from kvfs.hints import MAX_CLASS

_NUM_TABLES = 8  # namespaces with groups of their own; all others share the first


class TableGroups(msgspec.Struct, frozen=True):
    """Which groups a namespace has, over a restart: its number, and its classes with groups of their own, in order."""

    number: Annotated[int, msgspec.Meta(ge=1, lt=_NUM_TABLES)]
    classes: list[Annotated[int, msgspec.Meta(ge=1, le=MAX_CLASS)]]


class Groups:
    """Blocks of `size` groups. `size` and `num_classes`, of a namespace and with class 0, are powers of two.

    Attributes:
        size: groups of a block; num: all groups.
        blocks: ``group & blocks`` is the first group of its block; also ``(group - num) & blocks``.
        begun: the groups that an entry may be in by now.
    """

    def __init__(self, size: int, num_classes: int) -> None:
        self.size = size
        self.num = _NUM_TABLES * num_classes * size
        self.blocks = self.num - size
        self.begun = list(range(size))
        self._groups_a_table = num_classes * size
        self._max_classes = num_classes - 1
        self._tables: dict[Hashable, int] = {}  # namespace -> its first group
        self._classes: dict[tuple[Hashable, int], int] = {}  # namespace and class -> likewise

    def first(self, table: Hashable, class_: int = 0) -> int:
        """The first group of the block for a class of a namespace."""
        first = self._tables.get(table)
        if first is None:
            if len(self._tables) == _NUM_TABLES - 1:
                return 0
            first = self._tables[table] = self._groups_a_table * (1 + len(self._tables))
            self.begun += range(first, first + self.size)
        return self._first_of_class(table, class_, first) if class_ else first

    def _first_of_class(self, table: Hashable, class_: int, first: int) -> int:
        found = self._classes.get((table, class_))
        if found is None:
            number = 1 + len(self.classes_of(table))
            if number > self._max_classes:
                return first
            found = self._classes[table, class_] = first + number * self.size
            self.begun += range(found, found + self.size)
        return found

    def of_table(self, table: Hashable) -> list[int]:
        """The groups that entries of a namespace may be in; others may be in them too."""
        first = self._tables.get(table, 0)
        end = first + (self._groups_a_table if first else self.size)
        return [group for group in self.begun if first <= group < end]

    def classes_of(self, table: Hashable) -> list[int]:
        """The classes of a namespace that have groups of their own, in order."""
        return [class_ for known, class_ in self._classes if known == table]

    def learnt(self, name_of: Callable[[Hashable], str]) -> dict[str, TableGroups]:
        """Which groups each namespace has, by its name."""
        return {
            table if isinstance(table, str) else name_of(table): TableGroups(
                first // self._groups_a_table, self.classes_of(table)
            )
            for table, first in self._tables.items()
        }

    def check(self, tables: dict[str, TableGroups]) -> None:
        """Raise UsageError unless these groups are there."""
        if sorted(groups.number for groups in tables.values()) != [*range(1, 1 + len(tables))]:
            raise UsageError("what was learned names groups that there are not")
        for groups in tables.values():
            if len(groups.classes) > min(self._max_classes, len(set(groups.classes))):
                raise UsageError("what was learned names classes that there are not")

    def recall(self, tables: dict[str, TableGroups], table_of: Callable[[str], Hashable | None]) -> None:
        """Go on from there, after `check`. A namespace that is gone keeps its groups, for when it comes."""
        self._tables.clear()
        self._classes.clear()
        del self.begun[self.size :]
        for name, groups in sorted(tables.items(), key=lambda item: item[1].number):
            table = table_of(name)
            known = name if table is None else table
            for class_ in (0, *groups.classes):
                self.first(known, class_)
