"""Entries of a tier, as policies see them, for tests."""

from __future__ import annotations

import random

from kvfs.policies.hint import Hint


class Item:
    """An entry. `table` maps keys to what is stored, in whatever tier."""

    def __init__(self, table: Table, number: int, above: Item | None, length: int = 4096) -> None:
        self.table = table
        self.number = number
        self.key = random.Random(number).randbytes(16)
        self.parent = above.key if above is not None else b"\0" * 16
        self.position = above.position + 1 if above is not None else 0
        self.length = length
        self.num_tokens = 256
        self.hits = self.returns = 0
        self.hint: Hint | None = None

    def __repr__(self) -> str:
        return f"<{self.number}>"

    def above(self) -> Item | None:
        found = self.table.get(self.parent) if self.position else None
        return found if found is not None and found.position + 1 == self.position else None

    def prefix(self) -> list[Item]:
        found: list[Item] = [self]
        while (above := found[0].above()) is not None:
            found.insert(0, above)
        return found


class Table(dict[bytes, Item]):
    """A namespace; equal to itself only."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


class Time:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def everything(_: Item) -> bool:
    return True
