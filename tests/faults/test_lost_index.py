"""A volume whose index is lost: the daemon begins empty and says so, and keeps what can be brought back."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from kvfs import namespace as namespaces
from kvfs import unclaimed
from kvfs.documents import DIRECTORY as DOCUMENTS
from kvfs.errors import UsageError
from kvfs.index import FILE_NAME as INDEX
from kvfs.index import Index
from kvfs.keys import KeyChain
from kvfs.testing import chain_of, new_chunks, open_table, sized_namespace, store_chain, store_chunk, tiny_namespace
from kvfs.volume import FILE_NAME as VOLUME

MIB = sized_namespace(1 << 20)
TINY = tiny_namespace()
SAID = "there is no index of the chunks .* fsck .* --rebuild"


@pytest.fixture
async def chain(tmp_path: Path) -> KeyChain:
    """Four chunks on a volume whose index is gone."""
    chain = chain_of(MIB, 4)
    async with open_table(tmp_path, MIB) as (store, table):
        await store_chain(store, table, chain)
    (tmp_path / "nvme" / INDEX).unlink()
    return chain


def is_on_volume(directory: Path, chain: KeyChain) -> list[bool]:
    """Which chunks' headers are still there."""
    raw = (directory / "nvme" / VOLUME).read_bytes()
    return [f'"key":"{key.hex()}"'.encode() in raw for key in chain.keys]


@pytest.mark.expect_log(SAID)
async def test_what_is_there_is_not_written_over(tmp_path: Path, chain: KeyChain) -> None:
    """New chunks go where nothing was; that is so after another start, too, which has nothing to say."""
    async with open_table(tmp_path, MIB) as (store, table):
        assert table.chunks == {}
        assert store.capacity().used_bytes == 0
        await store_chain(store, table, chain_of(MIB, 3, 1))
    async with open_table(tmp_path, MIB) as (store, table):
        assert len(table.chunks) == 3
        await store_chain(store, table, chain_of(MIB, 3, 2))
    assert is_on_volume(tmp_path, chain) == [True] * 4


async def test_only_the_first_start_says_so(
    tmp_path: Path, chain: KeyChain, caplog: pytest.LogCaptureFixture, expect_log: object
) -> None:
    assert callable(expect_log)
    expect_log(SAID)
    num_said = []
    for _ in range(2):
        caplog.clear()
        async with open_table(tmp_path, MIB):
            num_said.append(sum("--rebuild" in record.message for record in caplog.records))
    assert num_said == [1, 0]


@pytest.mark.expect_log(SAID)
async def test_where_there_is_no_other_room_the_end_goes_first(
    tmp_path: Path, chain: KeyChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full cache goes on storing; nothing of its own is evicted for what nobody can load."""
    monkeypatch.setattr(unclaimed, "PIECE_BYTES", 1 << 20)
    async with open_table(tmp_path, MIB) as (store, table):
        for new in new_chunks(chain_of(MIB, 29, 1)):
            await store_chunk(store, table, new)
            await store.flush()
        assert store.counters.evictions_nvme == 0
        assert len(table.chunks) == 29
    there = is_on_volume(tmp_path, chain)
    assert there[:2] == [True, True]
    assert not there[3]
    index = Index.open_trusted(tmp_path / "nvme" / INDEX, None)
    try:
        used = [(row.offset, row.length) for row in index.chunks()]
        left = index.unclaimed()
    finally:
        index.close()
    assert all(a + b <= c or c + d <= a for a, b in used for c, d in left)


async def test_an_index_that_was_lost_before_anything_was_stored(tmp_path: Path) -> None:
    """Nothing is on the volume, so nothing is said and nothing held back."""
    async with open_table(tmp_path, MIB):
        pass
    (tmp_path / "nvme" / INDEX).unlink()
    async with open_table(tmp_path, MIB) as (store, _):
        assert store.capacity().used_bytes == 0
    index = Index.open_trusted(tmp_path / "nvme" / INDEX, None)
    assert index.unclaimed() == []
    index.close()


async def test_a_directory_of_documents_that_cannot_be_read(tmp_path: Path) -> None:
    """One sentence, and nothing is dropped for want of a document."""
    async with open_table(tmp_path, MIB) as (store, table):
        await store_chain(store, table, chain_of(MIB, 2))
    shutil.rmtree(tmp_path / "nvme" / DOCUMENTS)
    (tmp_path / "nvme" / DOCUMENTS).touch()
    with pytest.raises(UsageError, match=r"cannot open the documents of the namespaces in .*: Not a directory"):
        async with open_table(tmp_path, MIB):
            pass
    (tmp_path / "nvme" / DOCUMENTS).unlink()
    async with open_table(tmp_path, MIB) as (_, table):
        assert len(table.chunks) == 2


@pytest.mark.expect_log("the index could not be written|writing to NVMe")
async def test_a_document_that_cannot_be_written(tmp_path: Path) -> None:
    """As long as that is so the namespace has no row, and no chunk of it is called clean; then all is made up for."""
    async with open_table(tmp_path, MIB) as (store, _):
        await store.flush()
        (tmp_path / "nvme" / DOCUMENTS / f"{TINY.directory}.json").mkdir()
        table = store.attach(TINY)
        await store_chain(store, table, chain_of(TINY, 2))
        assert not await store.flush(1.5)
        assert store.statistics().num_dirty == 2
        (tmp_path / "nvme" / DOCUMENTS / f"{TINY.directory}.json").rmdir()
        assert await store.flush(60)
        assert (tmp_path / "nvme" / DOCUMENTS / f"{TINY.directory}.json").is_file()


@pytest.mark.expect_log("is mended with its document")
async def test_a_bare_namespace_json_is_believed_where_the_row_is_damaged_only(tmp_path: Path) -> None:
    """It has no checksum: of a layout that somebody changed by hand the row is right, and the document is written anew."""
    chain = chain_of(TINY, 2)
    async with open_table(tmp_path, TINY) as (store, table):
        await store_chain(store, table, chain)
    path = tmp_path / "nvme" / DOCUMENTS / f"{TINY.directory}.json"
    before = path.read_bytes()
    path.write_bytes(namespaces.encode(TINY).replace(b"F32", b"F16"))
    async with open_table(tmp_path, TINY) as (_, table):
        assert len(table.chunks) == 2
    assert path.read_bytes() == before
    path.write_bytes(namespaces.encode(TINY))
    with closing(sqlite3.connect(tmp_path / "nvme" / INDEX)) as index, index:
        index.execute("UPDATE namespaces SET document = x'00'")
    async with open_table(tmp_path, TINY) as (_, table):
        assert len(table.chunks) == 2
