"""Starts that cannot succeed end with one sentence, and cost nothing that was stored."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from kvfs import config
from kvfs.config import VolumeSetting
from kvfs.errors import ConfigError, UsageError
from kvfs.index import FILE_NAME as INDEX
from kvfs.opening import open_store
from kvfs.system import System
from kvfs.testing import chain_of, settings_in, store_chain, tiny_namespace

NS = tiny_namespace()


class SmallMachine(System):
    """A machine with 1 MiB to spare."""

    def available_memory(self) -> int | None:
        return 1 << 20


async def sentence(directory: Path, system: System | None = None, **settings: int | str) -> str:
    """What a start that must be refused says."""
    with pytest.raises(UsageError) as refused:
        async with open_store(msgspec.structs.replace(settings_in(directory), **settings), system):
            pass
    return str(refused.value)


async def test_more_ram_than_there_is(tmp_path: Path) -> None:
    """An arena is filled at once: one that does not fit is refused before the kernel has to kill somebody."""
    said = await sentence(tmp_path, SmallMachine(), ram_bytes=8 << 20)
    assert said == "ram is 8.0 MiB, but only 1.0 MiB of memory are free"
    assert not (tmp_path / "nvme").exists()


def test_the_memory_of_this_machine_is_known() -> None:
    available = System().available_memory()
    assert available is not None
    assert available > 1 << 20


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/kvfs"])
async def test_a_volume_directory_that_cannot_be_made(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    said = await sentence(tmp_path, nvme=(VolumeSetting(str(tmp_path / place), 32 << 20),))
    assert said.startswith("cannot open the volume in ")
    assert place in said


async def test_a_volume_larger_than_the_file_system_can_hold(tmp_path: Path) -> None:
    assert "nvme" in await sentence(tmp_path, nvme=(VolumeSetting(str(tmp_path / "nvme"), 900 << 40),))
    assert list((tmp_path / "nvme").iterdir()) == []


@pytest.mark.heavy
async def test_an_index_that_somebody_locks_is_kept(tmp_path: Path) -> None:
    """A lock says nothing of what is in the index: the start is refused, and the next finds everything."""
    async with open_store(settings_in(tmp_path)) as store:
        await store_chain(store, store.attach(NS), chain_of(NS, 3))
    path = tmp_path / "nvme" / INDEX
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        assert await sentence(tmp_path) == f"cannot open the index {path}: database is locked"
        other.execute("ROLLBACK")
    assert not path.with_name(INDEX + ".set-aside").exists()
    async with open_store(settings_in(tmp_path)) as store:
        assert len(store.attach(NS).chunks) == 3


@pytest.mark.expect_log("1 rows of the index cannot be true")
@pytest.mark.parametrize("column", ["key", "parent"])
async def test_a_text_that_is_no_utf8_where_a_key_should_be(tmp_path: Path, column: str) -> None:
    """One flipped bit makes a blob of SQLite a text: that chunk is forgotten, the others stay."""
    async with open_store(settings_in(tmp_path)) as store:
        await store_chain(store, store.attach(NS), chain_of(NS, 3))
    with closing(sqlite3.connect(tmp_path / "nvme" / INDEX)) as index, index:
        index.execute(f"UPDATE chunks SET {column} = CAST(x'{'ff' * 16}' AS TEXT) WHERE position = 1")
    async with open_store(settings_in(tmp_path)) as store:
        assert sorted(chunk.position for chunk in store.attach(NS).chunks.values()) == [0, 2]


@pytest.mark.expect_log("cannot be trusted|no index of the chunks that are on the volume in .* fsck .* --rebuild")
@pytest.mark.parametrize(
    "damaged", [b"last_used_nr INTEGER", b"last_used_n\xff INTEGER", b"(\xff\xff\xff\xff\xff(((((((((((((("]
)
async def test_an_index_without_a_column_is_set_aside(tmp_path: Path, damaged: bytes) -> None:
    """A flipped bit in the schema renames a column; what cannot be asked any more is no index."""
    async with open_store(settings_in(tmp_path)) as store:
        await store_chain(store, store.attach(NS), chain_of(NS, 3))
    path = tmp_path / "nvme" / INDEX
    path.write_bytes(path.read_bytes().replace(b"last_used_ns INTEGER", damaged))
    async with open_store(settings_in(tmp_path)) as store:
        assert store.attach(NS).chunks == {}
    assert path.with_name(INDEX + ".set-aside").exists()


@pytest.mark.parametrize(
    "text", ["ram = " + "[" * 5000, "ram = " + "9" * 5000, f"ram = '{'9' * 5000}MiB'", f"ram = '{'9' * 400}.5GiB'"]
)
def test_a_file_of_settings_that_means_nothing(tmp_path: Path, text: str) -> None:
    """Whatever stands in the file, an operator gets a sentence."""
    path = tmp_path / "kvfs.toml"
    path.write_text(f"mountpoint = '/mnt/kvfs'\n{text}\n")
    with pytest.raises(ConfigError, match=r"kvfs\.toml"):
        config.load(path, {})
