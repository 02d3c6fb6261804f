"""Rows of chunks in bulk: what is read and believed is what looking at one row after the other says, whatever is damaged."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs import index as index_module
from kvfs.chunk import geometry
from kvfs.index import FILE_NAME, Batch, ChunkRow, Index
from kvfs.namespace import Identity, LayerRun, Namespace, TensorSpec
from kvfs.rows import MAX_POSITION, ChunkColumns, fits, read_rows, split_true

IDENTITY = bytes(range(16))
SPEC = TensorSpec("k", "U8", (16, 8), 0)
NAMESPACE = Namespace(Identity("model", "1", "U8", "bench", 1, 1, 8, 16), (LayerRun(1, (SPEC,)),))
LENGTH = geometry(NAMESPACE, 16).file_bytes
CAPACITY = 1 << 40


def row(number: int, **changes: int) -> ChunkRow:
    """Each is built on the one before; the higher the number the earlier it was stored."""
    key, parent = number.to_bytes(16, "big"), (number - 1).to_bytes(16, "big")
    base = ChunkRow(
        1, key, parent, number, 16, LENGTH * (number + 1), LENGTH, 10**18 - number, 10**18 + number, number % 3
    )
    return base._replace(**changes)


@pytest.fixture(params=["at once", "in parts"])
def index(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    if request.param == "in parts":
        monkeypatch.setattr(index_module, "_A_PART", 2)
    index = Index.open(tmp_path / FILE_NAME, IDENTITY)
    yield index
    index.close()


def believed(index: Index, capacity: int = CAPACITY) -> tuple[list[ChunkRow], list[ChunkRow]]:
    """All rows that can be true and all that cannot, as a start sees them; in no order."""
    true: list[ChunkRow] = []
    untrue = index.misnumbered()
    for rows in read_rows(index):
        good, bad = split_true(rows, NAMESPACE, capacity)
        true += all_rows(good)
        untrue += bad
    return sorted(true), untrue


def all_rows(rows: ChunkColumns) -> list[ChunkRow]:
    return [rows.row(place) for place in range(len(rows))]


def one_by_one(index: Index, capacity: int = CAPACITY) -> tuple[list[ChunkRow], list[ChunkRow]]:
    rows = index.chunks()
    true = [row for row in rows if fits(row, NAMESPACE, capacity)]
    return sorted(true), [row for row in rows if row not in true]


def test_many_rows_come_as_they_were_stored(index: Index) -> None:
    """More than are unpacked at once, and in the order of the times when they were stored, not of their keys."""
    rows = [row(number) for number in range(1, 20_000)]
    index.commit(Batch(put=rows))
    [found] = read_rows(index)
    assert all_rows(found) == rows[::-1]
    good, bad = split_true(found, NAMESPACE, CAPACITY)
    assert good is found
    assert bad == []


def test_rows_share_what_is_equal(index: Index) -> None:
    """A key that is the parent in the next row, and times of what was never used, are there once."""
    index.commit(Batch(put=[row(number, created_ns=10**18 + number) for number in range(1, 1000)]))
    [found] = read_rows(index)
    assert all(parent is key for parent, key in zip(found.parents[1:], found.keys, strict=False))
    assert all(used is created for used, created in zip(found.last_used_ns, found.created_ns, strict=True))


def test_rows_of_several_namespaces_and_sizes(index: Index) -> None:
    short = geometry(NAMESPACE, 3).file_bytes
    rows = [row(1), row(2, num_tokens=3, length=short), row(3, namespace=2), row(4, namespace=1 << 40)]
    index.commit(Batch(put=rows))
    assert [(found.number, len(found)) for found in read_rows(index)] == [(1, 2), (2, 1), (1 << 40, 1)]
    assert believed(index) == (sorted(rows), [])


def test_rows_of_one_time_are_in_one_part_and_none_is_in_two(index: Index) -> None:
    """Whole prompts are stored in an instant, and all of an index may be."""
    rows = [row(number, created_ns=10**18 + number // each) for each in (7, 100) for number in range(1, 100)]
    for those in (rows[:99], rows[99:]):
        index.commit(Batch(put=those))
        [found] = read_rows(index)
        assert all_rows(found) == those


def test_an_empty_index_has_no_rows(index: Index) -> None:
    assert list(read_rows(index)) == []


DAMAGE = [
    "key = CAST(key AS TEXT)", "key = substr(key, 2)", "key = CAST(key || x'00' AS BLOB)", "key = position", "parent = NULL",
    "parent = CAST(parent AS TEXT)", "parent = 2.5", "parent = x''", "position = -1", f"position = {MAX_POSITION}",
    "position = 'first'", "position = NULL", "position = 1.5", "num_tokens = 0", "num_tokens = 17", "num_tokens = x'10'",
    "offset = offset + 1", "offset = 0", "offset = -4096", f"offset = {CAPACITY}", "offset = NULL",
    "offset = '1,2'", "length = length + 4096", "length = ''", "created_ns = 'now'", "created_ns = NULL", "created_ns = 0.5",
    "created_ns = x'00'",
    "last_used_ns = 1e300", "last_used_ns = x'00'", "hits = NULL", "hits = ']'", "hits = 0.5", "hits = -5", f"hits = {(1 << 63) - 1}",
    "namespace = 'one'",
    "namespace = x'01'", "namespace = 1.5",
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_rows_are_found_among_good_ones(index: Index, tmp_path: Path, damage: str) -> None:
    """Two of ten rows are damaged: these and no others are not believed, and they are told apart by their keys."""
    index.commit(Batch(put=[row(number) for number in range(1, 11)]))
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection, connection:
        connection.execute(f"UPDATE chunks SET {damage} WHERE position IN (3, 7)")
    true, untrue = believed(index)
    assert (true, sorted(map(repr, untrue))) == (one_by_one(index)[0], sorted(map(repr, one_by_one(index)[1])))
    assert len(true) == 8


def test_what_lies_behind_the_end_of_the_volume_is_not_believed(index: Index) -> None:
    index.commit(Batch(put=[row(number) for number in range(1, 11)]))
    end = LENGTH * 9
    true, untrue = believed(index, end)
    assert len(true) == 7
    assert (true, sorted(untrue)) == (one_by_one(index, end)[0], sorted(one_by_one(index, end)[1]))
