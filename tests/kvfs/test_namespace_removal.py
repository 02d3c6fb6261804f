"""A namespace that is removed is gone for good, with all that was said of it, and may come back as a new one."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from kvfs.errors import UsageError
from kvfs.index import FILE_NAME
from kvfs.pins import FOREVER
from kvfs.testing import chain_of, open_table, store_chain, tiny_namespace

NS, OTHER = tiny_namespace(), tiny_namespace("tests/other")


def rows(directory: Path) -> dict[str, int]:
    with contextlib.closing(sqlite3.connect(directory / "nvme" / FILE_NAME)) as index:
        return {
            table: index.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("namespaces", "chunks", "pins", "limits")
        }


async def test_it_is_gone_after_a_restart(tmp_path: Path) -> None:
    async with open_table(tmp_path, NS) as (store, table):
        await store_chain(store, table, chain_of(NS, 3))
        assert await store.flush()
        await store.limits.pin([*table.chunks.values()], FOREVER)
        await store.limits.set_quota(table, 1 << 30)
        other = store.attach(OTHER)
        await store.remove([*table.chunks.values()])
        store.remove_namespace(table)
        await store.settle()
        assert rows(tmp_path) == {"namespaces": 1, "chunks": 0, "pins": 0, "limits": 0}
        with pytest.raises(UsageError, match="was removed"):
            await store.limits.set_quota(table, 1 << 30)
        assert set(store.catalog.tables) == {other.directory}
    async with open_table(tmp_path, OTHER) as (store, _):
        assert set(store.catalog.tables) == {other.directory}


async def test_it_comes_back_as_another(tmp_path: Path) -> None:
    """At once, in one transaction; with a number that nobody had."""
    chain = chain_of(NS, 2)
    async with open_table(tmp_path, NS) as (store, table):
        for _ in range(3):
            numbers = {store.attach(OTHER).numbers[0]}
            await store_chain(store, table, chain)
            await store.remove([*table.chunks.values()])
            store.remove_namespace(table)
            again = store.attach(NS)
            assert again is not table
            assert again.numbers[0] not in numbers | {table.numbers[0]}
            table = again
        await store_chain(store, table, chain)
    assert rows(tmp_path) == {"namespaces": 2, "chunks": 2, "pins": 0, "limits": 0}
    async with open_table(tmp_path, NS) as (store, table):
        assert len(table.chunks) == 2


async def test_what_is_held_of_it_stays_readable(tmp_path: Path) -> None:
    """A file that is open outlives its chunk, and the namespace."""
    chain = chain_of(NS, 1)
    async with open_table(tmp_path, NS) as (store, table):
        await store_chain(store, table, chain)
        [chunk] = table.chunks.values()
        store.lease(chunk)
        await store.remove([chunk])
        store.remove_namespace(table)
        await store.settle()
        assert len(await store.read(chunk, 0, chunk.length)) == chunk.length
        store.release(chunk)
        assert await store.flush()
        assert store.statistics().ram.used_bytes == 0
