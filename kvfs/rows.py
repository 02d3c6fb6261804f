"""Rows of chunks that are read from an index: columns of a million, and which of them can be true of their namespace.

SQLite stores any type in any column, and a flipped bit is seen by nobody: a row is believed when all that it says fits
the namespace and the volume. To ask that of each row costs more than all else that a start does with it, so all of a
namespace are asked at once, column by column, and one by one only where something is wrong among them.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from typing import Any

import msgspec

from kvfs.chunk import ALIGNMENT, geometry
from kvfs.errors import UsageError
from kvfs.index import ChunkRow, Index, PackedRows
from kvfs.keys import KEY_BYTES, Key
from kvfs.namespace import Namespace
from kvfs.volume import SUPERBLOCK_BYTES

MAX_POSITION = 1 << 32
MAX_HITS = 1 << 48
_MANY = 8192
_SOME_KEYS = struct.Struct(f"{KEY_BYTES}s" * _MANY)
_numbers = msgspec.json.Decoder(list[int]).decode


class ChunkColumns:
    """The rows of one number of a namespace, the columns of `ChunkRow` as lists.

    Attributes:
        number: of the namespace, an integer.
        columns: all others, in order.
        are_odd: whether something in them may be of the wrong kind.
    """

    def __init__(self, number: int, columns: Sequence[list[Any]], *, are_odd: bool = False) -> None:
        self.number = number
        self.columns = columns
        self.are_odd = are_odd
        (
            self.keys, self.parents, self.positions, self.nums_tokens, self.offsets, self.lengths, self.created_ns,
            self.last_used_ns, self.hits,
        ) = columns  # fmt: skip

    def __len__(self) -> int:
        return len(self.keys)

    def row(self, place: int) -> ChunkRow:
        """One of the rows."""
        return ChunkRow(self.number, *[column[place] for column in self.columns])

    def without(self, places: Iterable[int]) -> ChunkColumns:
        """The other rows; all that are odd have to be among those left out."""
        stays = [True] * len(self)
        for place in places:
            stays[place] = False
        return self.map(lambda column: compress(column, stays))

    def map(self, change: Callable[[list[Any]], Iterable[Any]]) -> ChunkColumns:
        """The same done with each list."""
        return ChunkColumns(self.number, [list(change(column)) for column in self.columns])


def read_rows(index: Index) -> Iterator[ChunkColumns]:
    """The rows of all chunks in an index, namespace by namespace, as they were stored. Raises sqlite3.Error."""
    for number in index.numbers():
        num_rows = index.num_chunks(number)
        try:
            found = _unpacked(number, index.packed_chunks(number, num_rows))
        except (sqlite3.DataError, msgspec.MsgspecError):  # too much for one piece, or none of ours
            found = None
        if found is None or len(found) != num_rows:
            rows = index.chunks_of(number)
            found = ChunkColumns(number, [list(column) for column in zip(*rows, strict=True)][1:], are_odd=True)
        yield found


def _unpacked(number: int, parts: Iterable[PackedRows]) -> ChunkColumns | None:
    """The columns of all parts; None if some are shorter than others.

    They share what they can: a million of anything takes 32 MB, and 64 MB if it is a key.
    """
    all_columns: list[list[Any]] = [[] for _ in ChunkRow._fields[1:]]
    shared: dict[int, int] = {}
    for packed in parts:
        keys, parents = _keys(packed.keys), _keys(packed.parents)
        found: dict[str, list[Any]] = {name: _numbers(f"[{text or ''}]") for name, text in packed.numbers.items()}
        if packed.size is not None:
            found["num_tokens"], found["length"] = ([value] * len(keys) for value in packed.size)
        columns: list[list[Any]] = [keys, parents, *(found[name] for name in ChunkRow._fields[3:])]
        if any(len(column) != len(keys) for column in columns):
            return None
        before = all_columns[0][-1:] or [None]
        columns[1] = [key if key == parent else parent for key, parent in zip(before + keys, parents, strict=False)]
        columns[2] = [*map(shared.setdefault, found["position"], found["position"])]
        columns[7] = [
            used if used != created else created
            for used, created in zip(found["last_used_ns"], found["created_ns"], strict=True)
        ]
        for column, more in zip(all_columns, columns, strict=True):
            column += more
    return ChunkColumns(number, all_columns)


def _keys(packed: bytes) -> list[Key]:
    """The keys in a buffer of many."""
    found: list[Any] = []
    whole = len(packed) - len(packed) % _SOME_KEYS.size
    for begin in range(0, whole, _SOME_KEYS.size):
        found += _SOME_KEYS.unpack_from(packed, begin)
    found += [packed[begin : begin + KEY_BYTES] for begin in range(whole, len(packed), KEY_BYTES)]
    return found


def split_true(rows: ChunkColumns, namespace: Namespace, capacity: int) -> tuple[ChunkColumns, list[ChunkRow]]:
    """The rows that can be true of chunks of this namespace, on a volume of so many bytes, and those that cannot."""
    if not rows.are_odd and _all_fit(rows, namespace, capacity):
        return rows, []
    untrue = [place for place in range(len(rows)) if not fits(rows.row(place), namespace, capacity)]
    return rows.without(untrue), [rows.row(place) for place in untrue]


def _all_fit(rows: ChunkColumns, namespace: Namespace, capacity: int) -> bool:
    """Whether all of these rows of keys and integers can be true. May say no where only their extremes do not fit together."""
    sizes = {*zip(rows.nums_tokens, rows.lengths, strict=True)}
    return (
        all(length == _length(namespace, num_tokens) for num_tokens, length in sizes)
        and min(rows.positions, default=0) >= 0
        and max(rows.positions, default=0) < MAX_POSITION
        and min(rows.hits, default=0) >= 0
        and max(rows.hits, default=0) < MAX_HITS
        and min(rows.offsets, default=SUPERBLOCK_BYTES) >= SUPERBLOCK_BYTES
        and max(rows.offsets, default=0) + max(rows.lengths, default=0) <= capacity
        and not any(map((ALIGNMENT - 1).__and__, rows.offsets))
    )


def fits(row: ChunkRow, namespace: Namespace, capacity: int) -> bool:
    """Whether a row can be true of a chunk of this namespace, on a volume of so many bytes."""
    numbers = (row.namespace, *row[3:])
    if not (is_key(row.key) and is_key(row.parent) and all(isinstance(number, int) for number in numbers)):
        return False
    length = _length(namespace, row.num_tokens)
    if length is None or length != row.length:
        return False
    if not (0 <= row.position < MAX_POSITION and 0 <= row.hits < MAX_HITS):
        return False
    return row.offset % ALIGNMENT == 0 and SUPERBLOCK_BYTES <= row.offset <= capacity - length


def is_key(value: object) -> bool:
    """Whether what stands in a column can be a key."""
    return isinstance(value, bytes) and len(value) == KEY_BYTES


def _length(namespace: Namespace, num_tokens: int) -> int | None:
    """Bytes of a chunk file with so many tokens; None if there is none."""
    try:
        return geometry(namespace, num_tokens).file_bytes
    except UsageError:
        return None
