"""Rebuilding an index: every whole chunk comes back, nothing else does, and until then all is as it was."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import sqlite3
import struct
import sys
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Self

import pytest
import xxhash

from kvfs.chunk import Facts, build_header, geometry
from kvfs.documents import DIRECTORY as DOCUMENTS
from kvfs.errors import UsageError
from kvfs.index import FILE_NAME as INDEX
from kvfs.index import SET_ASIDE
from kvfs.keys import KeyChain, key_of
from kvfs.namespace import encode
from kvfs.rebuilding import UNFINISHED, rebuild
from kvfs.system import System
from kvfs.testing import (
    FaultySystem,
    chain_of,
    checksums_of,
    open_table,
    sized_namespace,
    store_chain,
)
from kvfs.volume import FILE_NAME as VOLUME

from .volumes import (
    MIB,
    NS,
    Interrupting,
    checked,
    chunk_file,
    content,
    edit_index,
    flip,
    kinds,
    rebuilt,
    rows,
    write,
)


@pytest.mark.parametrize(
    "damage", ["missing", "rubbish", "cut", "of another volume", "whole", "whole, with a log that was not written back"]
)
async def test_a_lost_index_is_restored(tmp_path: Path, chains: list[KeyChain], damage: str) -> None:
    """Every chunk is back, at its place in the prefix view; hits and last use where the index can still be trusted."""
    path = tmp_path / "nvme" / INDEX
    before = await content(tmp_path)
    if damage == "missing":
        path.unlink()
    elif damage == "rubbish":
        path.write_bytes(b"SQLite format 3\0" + os.urandom(8000))
        path.with_name(INDEX + "-wal").write_bytes(os.urandom(5000))
    elif damage == "cut":
        os.truncate(path, 5000)
    elif damage == "of another volume":
        edit_index(tmp_path, "UPDATE facts SET value = x'00' WHERE name = 'volume'")
    elif damage == "whole, with a log that was not written back":
        copy = shutil.copytree(tmp_path / "nvme", tmp_path / "copy")
        with closing(sqlite3.connect(copy / INDEX)) as index:
            index.execute("UPDATE chunks SET hits = 7")
            index.commit()
            for suffix in ("", "-wal"):
                shutil.copy(copy / (INDEX + suffix), path.with_name(INDEX + suffix))
        before = {name: [(key, at, 7) for key, at, _ in each] for name, each in before.items()}
    is_trusted = damage.startswith("whole")
    old = path.read_bytes() if path.exists() else None
    result = rebuilt(tmp_path)
    assert (result.num_chunks, result.num_namespaces, result.num_lost) == (9, 2, 0)
    assert result.num_returned == (0 if is_trusted else 9)
    if old is None:
        assert result.set_aside == ""
    elif not is_trusted:
        assert path.with_name(SET_ASIDE).read_bytes() == old
    assert kinds(checked(tmp_path, payload=True)) == {}
    expected = before if is_trusted else {n: [(key, at, 0) for key, at, _ in each] for n, each in before.items()}
    assert await content(tmp_path) == expected
    async with open_table(tmp_path, MIB) as (_, table):
        first, second, _ = chains
        assert [len(store_prefix) for store_prefix in (table.chunks[c.keys[3]].prefix() for c in (first, second))] == [
            4,
            4,
        ]
        [top] = table.prefixes.directories.values()
        assert top.num_chunks == 2
        assert len(top.subdirectories) == 2
        if not is_trusted:
            assert all(chunk.last_used_ns == chunk.created_ns for chunk in table.chunks.values())
    assert sorted(os.listdir(tmp_path / "nvme")) == sorted(
        {VOLUME, INDEX, DOCUMENTS} | ({SET_ASIDE} if result.set_aside else set())
    )


async def test_other_tables_of_a_trusted_index_stay(tmp_path: Path, chains: list[KeyChain]) -> None:
    """What later versions keep there about chunks, by number of the namespace and key, goes on being true."""
    edit_index(tmp_path, "CREATE TABLE marks (namespace INTEGER, key BLOB)", "INSERT INTO marks VALUES (2, x'55')")
    with closing(sqlite3.connect(tmp_path / "nvme" / INDEX)) as index:
        numbers = index.execute("SELECT * FROM namespaces").fetchall()
    rebuilt(tmp_path)
    with closing(sqlite3.connect(tmp_path / "nvme" / INDEX)) as index:
        assert index.execute("SELECT * FROM marks").fetchall() == [(2, b"\x55")]
        assert index.execute("SELECT * FROM namespaces").fetchall() == numbers


@pytest.mark.parametrize("moment", [1, 2])
@pytest.mark.parametrize("index", ["whole", "rubbish", "missing"])
async def test_ctrl_c_leaves_everything_as_it_was(
    tmp_path: Path, chains: list[KeyChain], moment: int, index: str
) -> None:
    path = tmp_path / "nvme" / INDEX
    if index == "rubbish":
        path.write_bytes(b"x" * 5000)
    elif index == "missing":
        path.unlink()
    before = {path: path.read_bytes() for path in (tmp_path / "nvme").rglob("*") if path.is_file()}
    with pytest.raises(KeyboardInterrupt):
        rebuilt(tmp_path, Interrupting(moment))
    after = {path: path.read_bytes() for path in (tmp_path / "nvme").rglob("*") if path.is_file()}
    assert after == before
    assert rebuilt(tmp_path).num_chunks == 9


class Tracer:
    """Ctrl-C before the `moment`-th line of those functions of a module that are named."""

    def __init__(self, moment: int, module: str, functions: set[str]) -> None:
        self.moment, self.module, self.functions = moment, module, functions

    def __call__(self, frame: FrameType, event: str, _: object) -> Tracer | None:
        if event == "call":
            is_meant = frame.f_globals["__name__"] == self.module and frame.f_code.co_name in self.functions
            return self if is_meant else None
        if event == "line":
            self.moment -= 1
            if not self.moment:
                raise KeyboardInterrupt
        return self

    def __enter__(self) -> Self:
        self.before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)


@pytest.mark.leaves("a descriptor")  # of what was interrupted between opening and keeping it; the process ends then
@pytest.mark.parametrize("index", ["whole", pytest.param("rubbish", marks=pytest.mark.heavy)])
async def test_ctrl_c_at_any_line_leaves_an_index(tmp_path: Path, chains: list[KeyChain], index: str) -> None:
    """While the new one is written and put in its place: it is the old one, or the whole new one, and nothing is left."""
    path = tmp_path / "nvme" / INDEX
    old = b"x" * 5000
    for moment in itertools.count(1):
        if index == "rubbish":
            path.write_bytes(old)
        with Tracer(moment, rebuild.__module__, {"rebuild", "_write", "_put_in_place"}) as tracer:
            try:
                rebuilt(tmp_path)
            except KeyboardInterrupt:
                pass
        assert not [name for name in os.listdir(tmp_path / "nvme") if UNFINISHED in name]
        if index == "whole" or path.read_bytes() != old:
            assert len(rows(tmp_path)) == 9
        if tracer.moment > 0:
            assert moment > 30
            break
    assert len((await content(tmp_path))[MIB.directory]) == 6


@pytest.mark.parametrize("attribute", ["write_error", "sync_error"])
async def test_a_superblock_that_cannot_be_written(tmp_path: Path, chains: list[KeyChain], attribute: str) -> None:
    """The index stays as it was, and a second try does it all."""
    flip(tmp_path, 20)
    system = FaultySystem()
    setattr(system, attribute, errno.EIO)
    before = (tmp_path / "nvme" / INDEX).read_bytes()
    with pytest.raises(OSError, match="Input/output"):
        rebuilt(tmp_path, system=system)
    assert (tmp_path / "nvme" / INDEX).read_bytes() == before
    assert not (tmp_path / "nvme" / UNFINISHED).exists()
    rebuilt(tmp_path)
    assert len((await content(tmp_path))[MIB.directory]) == 6


async def test_what_an_interrupted_rebuild_left_is_harmless(tmp_path: Path, chains: list[KeyChain]) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        (tmp_path / "nvme" / (UNFINISHED + suffix)).write_bytes(b"rubbish" * 1000)
    assert rebuilt(tmp_path).num_chunks == 9
    assert len((await content(tmp_path))[MIB.directory]) == 6


async def test_only_whole_chunks_come_back(tmp_path: Path, chains: list[KeyChain]) -> None:
    """A flipped byte in a header, one in a payload, an erased first block: three chunks less, the others whole."""
    (header, at_header, _), (payload, at_payload, _), (erased, at_erased, _) = rows(tmp_path)[:3]
    flip(tmp_path, at_header + 200)
    flip(tmp_path, at_payload + 500_000)
    write(tmp_path, at_erased, bytes(4096))
    (tmp_path / "nvme" / INDEX).unlink()
    result = rebuilt(tmp_path)
    assert (result.num_chunks, result.num_torn) == (6, 2)
    found = await content(tmp_path)
    assert {header, payload, erased}.isdisjoint(key for key, _, _ in found[MIB.directory])


@pytest.mark.parametrize("is_lost", [False, True])
async def test_what_was_removed_stays_away(tmp_path: Path, chains: list[KeyChain], is_lost: bool) -> None:
    """Its first block was erased. What was evicted only lost its row: it comes back where the index is lost, no sooner,
    for it may be an older copy of something that was removed later.
    """
    (removed, offset, _), (evicted, _, _), *_ = rows(tmp_path)
    write(tmp_path, offset, bytes(4096))
    edit_index(tmp_path, f"DELETE FROM chunks WHERE key IN (x'{removed.hex()}', x'{evicted.hex()}')")
    if is_lost:
        (tmp_path / "nvme" / INDEX).unlink()
    result = rebuilt(tmp_path)
    assert (result.num_chunks, result.num_let_go, result.num_lost) == ((8, 0, 0) if is_lost else (7, 1, 0))
    found = {key for key, _, _ in (await content(tmp_path))[MIB.directory]}
    assert removed not in found
    assert (evicted in found) == is_lost


@pytest.mark.expect_log("is no index|there is no index")
async def test_an_older_copy_of_what_was_removed_stays_away(tmp_path: Path) -> None:
    """A chunk was evicted, stored again and removed by a person; then the index was lost."""
    chain = chain_of(MIB, 1)
    async with open_table(tmp_path, MIB, nvme=8 << 20, ram=8 << 20) as (store, table):
        await store_chain(store, table, chain)
        assert await store.flush()
        for seed in range(1, 8):
            await store_chain(store, table, chain_of(MIB, 1, seed))
            assert await store.flush()
        assert chain.keys[0] not in table.chunks
        await store_chain(store, table, chain)
        assert await store.flush()
        await store.remove([table.chunks[chain.keys[0]]])
        there = set(table.chunks)
    (tmp_path / "nvme" / INDEX).unlink()
    rebuilt(tmp_path)
    async with open_table(tmp_path, MIB, nvme=8 << 20, ram=8 << 20) as (_, table):
        assert set(table.chunks) == there


async def test_a_row_that_cannot_be_true_is_mended(tmp_path: Path, chains: list[KeyChain]) -> None:
    """The index has not let that chunk go: it is there, elsewhere than its row says."""
    key = rows(tmp_path)[1][0]
    edit_index(tmp_path, f"UPDATE chunks SET offset = 5, namespace = 'x' WHERE key = x'{key.hex()}'")
    assert rebuilt(tmp_path).num_chunks == 9
    assert key in {key for key, _, _ in (await content(tmp_path))[MIB.directory]}


@pytest.mark.parametrize("shift", [-(1 << 20) + 8192, -4096, 4096, (1 << 20) - 4096])
async def test_of_two_that_overlap_the_one_that_is_whole(tmp_path: Path, chains: list[KeyChain], shift: int) -> None:
    """A chunk was written over another in part: its header is whole, its bytes are not."""
    at = rows(tmp_path)[2][1]
    chain = chain_of(MIB, 2, 9)
    raw = chunk_file(MIB, chain, 0, 5)
    place = at + shift
    hit = [row for row in rows(tmp_path) if row[1] < place + len(raw) and place < row[1] + row[2]]
    write(tmp_path, place, raw)
    (tmp_path / "nvme" / INDEX).unlink()
    assert rebuilt(tmp_path).num_chunks == 9 - len(hit) + 1
    found = {key for key, _, _ in (await content(tmp_path))[MIB.directory]}
    assert chain.keys[0] in found
    assert not found & {key for key, _, _ in hit}
    assert kinds(checked(tmp_path, payload=True)) == {}


@pytest.mark.parametrize("newer", [0, 1])
async def test_of_two_copies_the_newer(tmp_path: Path, chains: list[KeyChain], newer: int) -> None:
    """A chunk that was evicted and stored again is on the volume twice."""
    chain = chain_of(MIB, 2, 9)
    for place in (0, 1):
        write(tmp_path, (20 + 2 * place) << 20, chunk_file(MIB, chain, 1, 500 if place == newer else 400))
    (tmp_path / "nvme" / INDEX).unlink()
    result = rebuilt(tmp_path)
    assert (result.num_chunks, result.num_doubled) == (10, 1)
    assert (chain.keys[1], (20 + 2 * newer) << 20) in [(key, offset) for key, offset, _ in rows(tmp_path)]
    await content(tmp_path)


async def test_a_header_inside_a_payload_is_no_chunk(tmp_path: Path) -> None:
    """Whatever an engine stores, even the file of another chunk, what lies in a chunk is that chunk's."""
    inner = chunk_file(NS, chain_of(NS, 1), 0, 5)
    geo = geometry(MIB, 16)
    raw = (bytes(4096) + inner + bytes(geo.payload_bytes))[: geo.payload_bytes]
    chain = chain_of(MIB, 1)
    facts = Facts(chain.chains[0], key_of(chain.root), 0, 16, 5, checksums_of(raw, geo))
    async with open_table(tmp_path, MIB) as (store, _):
        store.attach(NS)
    write(tmp_path, 8192, build_header(geo, facts) + raw + bytes(geo.pad_bytes))
    (tmp_path / "nvme" / INDEX).unlink()
    result = rebuilt(tmp_path)
    assert (result.num_chunks, [row[0] for row in rows(tmp_path)]) == (1, chain.keys)


async def test_a_chunk_across_two_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks longer than what is read at once, and ones that lie across its ends, are found whole."""
    monkeypatch.setattr("kvfs.scanning._SEGMENT_BYTES", 96 << 10)
    monkeypatch.setattr("kvfs.scanning._PIECE_BYTES", 32 << 10)
    middle = sized_namespace(40 << 10)
    async with open_table(tmp_path, MIB) as (store, table):
        await store_chain(store, table, chain_of(MIB, 3))
        await store_chain(store, store.attach(middle), chain_of(middle, 20))
        await store_chain(store, table, chain_of(MIB, 2, 1))
    (tmp_path / "nvme" / INDEX).unlink()
    assert rebuilt(tmp_path).num_chunks == 25
    assert kinds(checked(tmp_path, payload=True)) == {}


async def test_a_truncated_volume_gives_what_it_has(tmp_path: Path, chains: list[KeyChain]) -> None:
    _, offset, length = max(rows(tmp_path), key=lambda row: row[1])
    os.truncate(tmp_path / "nvme" / VOLUME, offset + length - 4096)
    (tmp_path / "nvme" / INDEX).unlink()
    assert rebuilt(tmp_path).num_chunks == 8


async def test_zeros_that_a_copy_made_holes_of(tmp_path: Path) -> None:
    """A copy of the volume without its zeros (cp --sparse) has all chunks, those of zeros too."""
    geo = geometry(MIB, 16)
    chain = chain_of(MIB, 1)
    facts = Facts(chain.chains[0], key_of(chain.root), 0, 16, 5, checksums_of(bytes(geo.payload_bytes), geo))
    async with open_table(tmp_path, MIB):
        pass
    path = tmp_path / "nvme" / VOLUME
    superblock = path.read_bytes()[:4096]
    size = path.stat().st_size
    path.write_bytes(superblock)
    os.truncate(path, size)
    write(tmp_path, 8 << 20, build_header(geo, facts))
    (tmp_path / "nvme" / INDEX).unlink()
    assert rebuilt(tmp_path).num_chunks == 1


async def test_rows_that_could_not_be_read_stay(tmp_path: Path, chains: list[KeyChain]) -> None:
    """An I/O error proves nothing: the row is there after the rebuild, and the chunk when the device works again."""

    class Bad(System):
        def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:  # type: ignore[override]
            if offset <= bad < offset + sum(map(len, buffers)):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().preadv(fd, buffers, offset)

    bad = rows(tmp_path)[1][1] + 300_000
    result = rebuilt(tmp_path, system=Bad())
    assert (result.num_chunks, result.num_unread, result.num_lost) == (9, 1, 0)
    assert result.unreadable_bytes == 64 << 10
    assert len((await content(tmp_path))[MIB.directory]) == 6


# superblocks, other versions, other owners


@pytest.mark.parametrize("index", ["whole", "missing"])
@pytest.mark.parametrize("damage", ["magic", "version", "identity", "checksum", "all of it"])
async def test_a_damaged_superblock_is_mended(tmp_path: Path, chains: list[KeyChain], damage: str, index: str) -> None:
    """Its identity is in the index; without one there is a new identity and a new index."""
    if index == "missing":
        (tmp_path / "nvme" / INDEX).unlink()
    if damage == "all of it":
        write(tmp_path, 0, bytes(4096))
    elif damage == "version":
        write(tmp_path, 8, b"\0")
    else:
        flip(tmp_path, {"magic": 3, "identity": 20, "checksum": 48}[damage])
    report = checked(tmp_path)
    assert kinds(report) == {"superblock": 1} | ({"index": 1} if index == "missing" else {})
    assert {finding.remedy for finding in report.findings} == {"rebuild"}
    result = rebuilt(tmp_path)
    assert result.mended_superblock
    assert result.num_chunks == 9
    assert kinds(checked(tmp_path, payload=True)) == {}
    assert len((await content(tmp_path))[MIB.directory]) == 6


@pytest.mark.parametrize("raw", [b"", b"x" * 10_000, bytes(1 << 20)])
async def test_a_foreign_file_is_left_alone(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "nvme").mkdir()
    path = tmp_path / "nvme" / VOLUME
    path.write_bytes(raw)
    report = checked(tmp_path)
    assert [finding.remedy for finding in report.findings if finding.kind == "superblock"] == [""]
    with pytest.raises(UsageError, match=r"nothing on .* shows that it is a kvfs volume"):
        rebuilt(tmp_path)
    assert path.read_bytes() == raw
    assert os.listdir(tmp_path / "nvme") == [VOLUME]


async def test_a_foreign_file_beside_an_index_is_left_alone(tmp_path: Path, chains: list[KeyChain]) -> None:
    """Somebody put another file in the volume's place: the index does not make it a volume."""
    path = tmp_path / "nvme" / VOLUME
    path.write_bytes(b"x" * 10_000)
    before = (tmp_path / "nvme" / INDEX).read_bytes()
    with pytest.raises(UsageError, match=r"nothing on .* shows that it is a kvfs volume"):
        rebuilt(tmp_path)
    assert (path.read_bytes(), (tmp_path / "nvme" / INDEX).read_bytes()) == (b"x" * 10_000, before)


async def test_an_empty_volume_with_a_damaged_superblock(tmp_path: Path) -> None:
    """It begins like one, so it is mended, though there is nothing on it."""
    async with open_table(tmp_path, MIB):
        pass
    (tmp_path / "nvme" / INDEX).unlink()
    flip(tmp_path, 30)
    assert rebuilt(tmp_path).mended_superblock
    assert kinds(checked(tmp_path)) == {}


@pytest.mark.parametrize("version", [0, 2])
async def test_another_version_of_the_volume_is_refused(tmp_path: Path, chains: list[KeyChain], version: int) -> None:
    """With what to do. One whose checksum holds is no damage."""
    head = bytearray((tmp_path / "nvme" / VOLUME).read_bytes()[:48])
    head[8:12] = struct.pack("<I", version)
    write(tmp_path, 0, bytes(head) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(head))))
    for work in (checked, rebuilt):
        with pytest.raises(UsageError, match="use the kvfs that made it" if version else "kvfs destroy"):
            work(tmp_path)


async def test_a_newer_index_is_refused_and_kept(tmp_path: Path, chains: list[KeyChain]) -> None:
    edit_index(tmp_path, "PRAGMA user_version = 2")
    before = (tmp_path / "nvme" / INDEX).read_bytes()
    for work in (checked, rebuilt):
        with pytest.raises(UsageError, match="index format 2, this kvfs reads 1; use the kvfs that made it"):
            work(tmp_path)
    assert (tmp_path / "nvme" / INDEX).read_bytes() == before


# namespaces nobody knows


def lose_namespace(directory: Path) -> None:
    (directory / "nvme" / DOCUMENTS / f"{NS.directory}.json").unlink()
    (directory / "nvme" / INDEX).unlink()


async def test_chunks_of_an_unknown_namespace_are_told_of(tmp_path: Path, chains: list[KeyChain]) -> None:
    """Their headers name a fingerprint, and no layout. The namespace.json of the mount, put there, brings them back."""
    lose_namespace(tmp_path)
    result = rebuilt(tmp_path)
    assert (result.num_chunks, result.unknown) == (6, {f"{NS.fingerprint_hex} rank 0 of 1": 3})
    (tmp_path / "nvme" / DOCUMENTS / f"{NS.directory}.json").write_bytes(encode(NS))
    result = rebuilt(tmp_path)
    assert (result.num_chunks, result.num_returned, result.unknown) == (9, 3, {})
    assert len((await content(tmp_path))[NS.directory]) == 3


async def test_a_namespace_that_only_a_damaged_index_knows(tmp_path: Path, chains: list[KeyChain]) -> None:
    """Volumes of an earlier version have no documents: what can be read of the old index does as well."""
    shutil.rmtree(tmp_path / "nvme" / DOCUMENTS)
    edit_index(tmp_path, "UPDATE facts SET value = x'00' WHERE name = 'volume'")
    assert rebuilt(tmp_path).num_chunks == 9
    assert len(os.listdir(tmp_path / "nvme" / DOCUMENTS)) == 2
    assert len((await content(tmp_path))[NS.directory]) == 3


@pytest.mark.expect_log("there is no index of the chunks|cannot be trusted")
async def test_after_a_start_without_the_index(tmp_path: Path, chains: list[KeyChain]) -> None:
    """The daemon ran and stored with an empty index; what it did not write over comes back beside that."""
    (tmp_path / "nvme" / INDEX).write_bytes(b"x" * 5000)
    async with open_table(tmp_path, MIB) as (store, table):
        await store_chain(store, table, chain_of(MIB, 3, 5))
    result = rebuilt(tmp_path)
    assert (result.num_chunks, result.num_returned) == (12, 9)
    async with open_table(tmp_path, MIB) as (store, table):
        assert store.capacity().used_bytes == sum(length for _, _, length in rows(tmp_path))
        assert len(table.chunks) == 9


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
async def test_root_leaves_everything_to_the_owner_of_the_volume(tmp_path: Path, chains: list[KeyChain]) -> None:
    """The daemon runs as its own user, and has to be able to open what root has mended."""
    for path in [tmp_path / "nvme", *(tmp_path / "nvme").rglob("*")]:
        os.chown(path, 4321, 4322)
    shutil.rmtree(tmp_path / "nvme" / DOCUMENTS)
    rebuilt(tmp_path)
    for path in (tmp_path / "nvme").rglob("*"):
        assert (path.stat().st_uid, path.stat().st_gid) == (4321, 4322), path
