"""The index: batches are whole and durable, and one that cannot be trusted is set aside, never believed."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from kvfs.errors import UsageError
from kvfs.index import FILE_NAME, Batch, ChunkRow, Index, LimitRow, NamespaceRow, PinRow

IDENTITY = bytes(range(16))
NAMESPACE = NamespaceRow(1, "ns", b"{}", 5)


def row(number: int, **changes: int) -> ChunkRow:
    base = ChunkRow(1, number.to_bytes(16, "big"), bytes(16), number, 16, 4096 * (number + 1), 4096, 7, 8, 9)
    return base._replace(**changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An index with a namespace and three chunks."""
    index = Index.open(tmp_path / FILE_NAME, IDENTITY)
    index.commit(Batch(put=[row(0), row(1), row(2)], namespaces=[NAMESPACE]))
    index.close()
    return tmp_path / FILE_NAME


def content(path: Path) -> list[ChunkRow]:
    index = Index.open(path, IDENTITY)
    try:
        return index.chunks()
    finally:
        index.close()


def test_what_was_committed_is_there(path: Path) -> None:
    index = Index.open(path, IDENTITY)
    assert index.chunks() == [row(0), row(1), row(2)]
    assert index.namespaces() == [NAMESPACE]
    index.close()


def test_an_index_of_an_earlier_kvfs_gets_what_it_lacks(path: Path) -> None:
    """Tables that came later are added; nothing is lost, and the version stays, so that the earlier one reads it too."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript("DROP TABLE pins; DROP TABLE limits;")
    index = Index.open(path, IDENTITY)
    assert index.chunks() == [row(0), row(1), row(2)]
    assert (index.pins(), index.limits()) == ([], [])
    index.commit(Batch(pins={(1, row(0).key): 77}, limits={1: LimitRow(1, 5, None)}))
    index.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)


def test_pins_and_limits(path: Path) -> None:
    """The last word counts; what is removed takes its own with it."""
    index = Index.open(path, IDENTITY)
    first, second = (1, row(0).key), (2, row(1).key)
    index.commit(Batch(pins={first: 5, second: 6}, limits={1: LimitRow(1, 5, None), 2: LimitRow(2, None, 7)}))
    index.commit(Batch(pins={first: 8}))
    assert set(index.pins()) == {PinRow(*first, 8), PinRow(*second, 6)}
    index.commit(Batch(pins={second: None}, limits={2: LimitRow(2, None, None)}))
    assert index.pins() == [PinRow(*first, 8)]
    index.commit(Batch(removed={1: "gone"}, put=[row(5)], limits={3: LimitRow(3, 1, 1)}))
    assert (index.namespaces(), index.pins(), index.chunks()) == ([], [], [row(5)])
    assert index.limits() == [LimitRow(2, None, None), LimitRow(3, 1, 1)]
    index.close()


def test_it_is_private(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_batch_does_all_of_it(path: Path) -> None:
    """Deletions come before insertions: a chunk that went and came back in one batch is there."""
    index = Index.open(path, IDENTITY)
    index.commit(Batch(put=[row(1, offset=8 << 20), row(3)], delete=[(1, row(0).key), (1, row(1).key)],
                       used=[(99, 100, 1, row(2).key), (99, 100, 1, b"gone")]))  # fmt: skip
    index.close()
    assert content(path) == [row(1, offset=8 << 20), row(2, last_used_ns=99, hits=100), row(3)]


def test_a_batch_that_fails_does_nothing(path: Path) -> None:
    """All or nothing: the good part of a failed batch is not there either."""
    index = Index.open(path, IDENTITY)
    with pytest.raises(sqlite3.Error):
        index.commit(Batch(put=[row(3), (1, 2)], delete=[(1, row(0).key)]))  # type: ignore[list-item]
    assert index.chunks() == [row(0), row(1), row(2)]
    index.commit(Batch(put=[row(3)]))
    index.close()
    assert len(content(path)) == 4


def test_an_empty_batch_is_false() -> None:
    assert not Batch()
    assert Batch(used=[(1, 1, 1, b"")])


def test_it_survives_without_being_closed(path: Path, tmp_path: Path) -> None:
    """What was committed is in the write-ahead log: a copy taken without a close has it."""
    index = Index.open(path, IDENTITY)
    index.commit(Batch(put=[row(3)]))
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in (FILE_NAME, FILE_NAME + "-wal"):
        (copy / name).write_bytes((path.parent / name).read_bytes())
    assert len(content(copy / FILE_NAME)) == 4
    index.close()


def set_aside(path: Path) -> bool:
    return path.with_name(FILE_NAME + ".set-aside").exists()


@pytest.mark.expect_log("cannot be trusted")
@pytest.mark.parametrize("raw", [b"", b"x" * 100, b"SQLite format 3\0" + b"\xff" * 8000])
def test_what_is_no_database_is_set_aside(path: Path, raw: bytes) -> None:
    """Garbage is kept for whoever wants to look, and a new index begins."""
    path.write_bytes(raw)
    assert content(path) == []
    assert set_aside(path)
    if raw:  # SQLite makes an empty file a database of its own
        assert path.with_name(FILE_NAME + ".set-aside").read_bytes() == raw


@pytest.mark.expect_log("cannot be trusted")
@pytest.mark.parametrize("page", [1, 2, 3, 4])
def test_damaged_pages_are_set_aside(path: Path, page: int) -> None:
    """A page of rubbish in the middle of the file is noticed at the next start."""
    raw = bytearray(path.read_bytes())
    raw[page * 4096 : page * 4096 + 4096] = b"\xa5" * 4096
    path.write_bytes(raw)
    assert content(path) == []
    assert set_aside(path)


@pytest.mark.expect_log("belongs to another volume")
def test_the_index_of_another_volume_is_set_aside(path: Path) -> None:
    """Offsets of one volume mean nothing on another."""
    index = Index.open(path, bytes(16))
    assert index.chunks() == []
    index.close()
    assert set_aside(path)


@pytest.mark.expect_log("never finished")
def test_an_index_that_was_never_finished_is_set_aside(tmp_path: Path) -> None:
    """A crash between creation and schema is not taken for an empty cache of this volume."""
    sqlite3.connect(tmp_path / FILE_NAME).execute("CREATE TABLE facts (x)").connection.close()
    assert content(tmp_path / FILE_NAME) == []


def test_a_newer_version_is_refused_and_kept(path: Path) -> None:
    """A downgrade must not cost the cache."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(UsageError, match="index format 2, this kvfs reads 1"):
        Index.open(path, IDENTITY)
    assert not set_aside(path)
