"""Ghosts over a restart: after an end in order all is known, after a crash what was used how often."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from kvfs.catalog import ChunkTable
from kvfs.explaining import BY_EARLIER_POLICY
from kvfs.index import FILE_NAME
from kvfs.keys import KeyChain
from kvfs.messages import Known, Tier
from kvfs.store import Store
from kvfs.testing import chain_of, open_table, sized_namespace, store_chain

NS = sized_namespace(64 << 10)
HERE = {"ram": 1 << 20, "nvme": 1 << 20}
"""Some 15 chunks in either tier."""


def why(store: Store, table: ChunkTable, chain: KeyChain) -> Known:
    """What is known of the first chunk."""
    return store.why(1, table.directory, chain.keys[:1]).facts[0]


def whole_since(store: Store, table: ChunkTable) -> tuple[int, int]:
    told = store.why(1, table.directory, [])
    return told.whole_since_ns, told.started_ns


async def fill(store: Store, table: ChunkTable, seeds: range) -> None:
    for seed in seeds:
        await store_chain(store, table, chain_of(NS, 2, seed=seed))
        assert await store.flush()


async def lived(directory: Path, volumes: int = 1) -> tuple[int, int]:
    """A daemon that has evicted the chain of seed 1, loaded three times, and removed that of 90; its start and whole-since."""
    async with open_table(directory, NS, **HERE, policy="lru", volumes=volumes) as (store, table):
        first, gone = chain_of(NS, 2, seed=1), chain_of(NS, 1, seed=90)
        await store_chain(store, table, first)
        await store_chain(store, table, gone)
        for _ in range(3):
            found = store.match(table, first.keys)
            store.touch(found, [Tier.RAM] * 2)
            store.release_all(found)
        await store.remove([table.chunks[gone.keys[0]]])
        await fill(store, table, range(2, 40))
        assert (why(store, table, first).why, why(store, table, gone).why) == ("evict", "rm")
        since, started = whole_since(store, table)
        assert since == started
        return started, since


@pytest.mark.parametrize("volumes", [1, 2])
async def test_after_an_end_in_order_all_is_known(tmp_path: Path, volumes: int) -> None:
    """Why it went, since when that is whole, and how often it was used; also at the start after the next."""
    started, _ = await lived(tmp_path, volumes)
    first, gone, never = (chain_of(NS, 2, seed=seed) for seed in (1, 90, 91))
    for _ in range(2):
        async with open_table(tmp_path, NS, **HERE, volumes=volumes) as (store, table):
            assert whole_since(store, table)[0] == started < whole_since(store, table)[1]
            known = why(store, table, first)
            assert (known.tier, known.why, known.hits) == (Tier.NONE, "evict", 3)
            assert known.cause in (BY_EARLIER_POLICY, "unreachable")
            assert known.since_ns >= started
            assert why(store, table, gone).why == "rm"
            assert why(store, table, never).why == ""
    async with open_table(tmp_path, NS, **HERE, volumes=volumes) as (store, table):
        await store_chain(store, table, first)
        chunk = table.chunks[first.keys[0]]
        assert (chunk.hits, chunk.returns) == (3, 1)


async def test_after_a_crash_uses_are_known_and_nothing_is_said(tmp_path: Path) -> None:
    """What was remembered last may have come back, and gone again, before the end: `kvfs why` begins anew."""
    await lived(tmp_path)
    with closing(sqlite3.connect(tmp_path / "nvme" / FILE_NAME)) as connection, connection:  # as it is while one runs
        connection.execute("UPDATE facts SET value = x'' WHERE name LIKE '%end in order%'")
    first = chain_of(NS, 2, seed=1)
    async with open_table(tmp_path, NS, **HERE) as (store, table):
        since, started = whole_since(store, table)
        assert since == started
        assert why(store, table, first) == Known(Tier.NONE)
        await store_chain(store, table, first)
        assert (table.chunks[first.keys[0]].hits, table.chunks[first.keys[0]].returns) == (3, 1)
        await store.remove([table.chunks[first.keys[1]], table.chunks[first.keys[0]]])
        assert why(store, table, first).why == "rm"
    async with open_table(tmp_path, NS, **HERE) as (store, table):  # that end was in order
        assert whole_since(store, table)[0] == started
        assert why(store, table, first).why == "rm"


async def test_a_start_takes_the_mark_of_the_end_away_before_anything_can_go(tmp_path: Path) -> None:
    await lived(tmp_path)
    async with open_table(tmp_path, NS, **HERE):
        with closing(sqlite3.connect(tmp_path / "nvme" / FILE_NAME)) as connection:
            rows = connection.execute("SELECT value FROM facts WHERE name LIKE '%end in order%'").fetchall()
        assert rows == [(b"",)]


@pytest.mark.parametrize("damage", [b"", b"kvfs-ghosts/9", b"kvfs-ghosts/1" + bytes(60)])
async def test_what_cannot_be_understood_is_forgotten(tmp_path: Path, damage: bytes) -> None:
    await lived(tmp_path)
    with closing(sqlite3.connect(tmp_path / "nvme" / FILE_NAME)) as connection, connection:
        connection.execute("UPDATE facts SET value = ? WHERE name LIKE '%: ghosts'", (damage,))
    async with open_table(tmp_path, NS, **HERE) as (store, table):
        since, started = whole_since(store, table)
        assert since == started
        assert why(store, table, chain_of(NS, 1, seed=1)) == Known(Tier.NONE)
        await fill(store, table, range(50, 60))
