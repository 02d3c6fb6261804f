"""A chain that is copied into too small a place keeps its beginning, in whatever order its files come."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

from kvfs.catalog import NOWHERE, ChunkTable
from kvfs.chunk import Facts, build_header, geometry
from kvfs.copied_in import QUIET_S
from kvfs.errors import CapacityError
from kvfs.keys import KeyChain, key_of
from kvfs.messages import StoreStatus, Tier
from kvfs.pins import FOREVER
from kvfs.store import Store
from kvfs.system import System
from kvfs.testing import (
    chain_of,
    checksums_of,
    new_chunks,
    open_table,
    payload_of,
    sized_namespace,
    store_chain,
    store_chunk,
)

NS = sized_namespace(64 << 10)
OTHER = sized_namespace(64 << 10, "tests/other")
LENGTH = 64 << 10


class Clock(System):
    """Time goes on when the test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


def file_of(chain: KeyChain, position: int) -> bytes:
    geo = geometry(NS, 16)
    payload = payload_of(chain.chains[position], geo)
    parent = key_of(chain.parent_of(position))
    facts = Facts(chain.chains[position], parent, position, 16, 7, checksums_of(payload, geo))
    return build_header(geo, facts) + payload + bytes(geo.pad_bytes)


async def copy_in(store: Store, table: ChunkTable, chain: KeyChain, position: int) -> bool:
    """What the mount does with a file; returns whether there was room."""
    raw = file_of(chain, position)
    staged = store.staging.create(store.catalog.next_inode(), len(raw), len(raw))
    staged.position = position  # as the mount reads it from the first bytes
    try:
        await store.staging.write(staged, 0, raw)
        await store.admit(staged, table, chain.keys[position])
    except CapacityError:
        store.staging.drop(staged)
        return False
    return True


def stored(table: ChunkTable, chain: KeyChain) -> list[int]:
    return [position for position, key in enumerate(chain.keys) if key in table.chunks]


def orders(count: int) -> list[list[int]]:
    mixed = [random.Random(seed).sample(range(count), count) for seed in range(3)]
    return [list(range(count)), list(range(count))[::-1], *mixed]


PLACES: dict[str, dict[str, Any]] = {
    "ram": {"ram": 1 << 20, "nvme": None},
    "nvme": {"ram": 2 << 20, "nvme": 1 << 20},
    "quota": {},
}


@pytest.mark.parametrize("order", orders(24), ids=["head first", "tail first", "mixed 0", "mixed 1", "mixed 2"])
@pytest.mark.parametrize("place", PLACES)
async def test_the_beginning_stays(tmp_path: Path, place: str, order: list[int]) -> None:
    """No hole, and the first is there. What was there before makes way."""
    clock = Clock()
    async with open_table(tmp_path, NS, clock, **PLACES[place]) as (store, table):
        old = chain_of(NS, 10, seed=1)
        await store_chain(store, table, old)
        assert await store.flush()
        clock.now_s += 1
        if place == "quota":
            await store.limits.set_quota(table, 10 * LENGTH)
        chain = chain_of(NS, 24)
        taken = [position for position in order if await copy_in(store, table, chain, position)]
        assert await store.flush()
        left = stored(table, chain)
        assert left == list(range(len(left)))
        assert 8 <= len(left) <= 16
        assert not stored(table, old)
        assert set(left) <= set(taken)


async def test_two_chains_keep_both_their_beginnings(tmp_path: Path) -> None:
    async with open_table(tmp_path, NS) as (store, table):
        await store.limits.set_quota(table, 8 * LENGTH)
        one, two = chain_of(NS, 12), chain_of(NS, 12, seed=1)
        for position in range(11, -1, -1):
            for chain in (one, two):
                await copy_in(store, table, chain, position)
        assert stored(table, one) == stored(table, two) == [0, 1, 2, 3]


@pytest.mark.parametrize("ends", ["told", "silent"])
async def test_when_a_copy_is_over_the_next_takes_its_place(tmp_path: Path, ends: str) -> None:
    """It is over when that is said, as by the time of a directory, or after a while; until then there is no room."""
    clock = Clock()
    async with open_table(tmp_path, NS, clock) as (store, table):
        await store.limits.set_quota(table, 4 * LENGTH)
        one, two = chain_of(NS, 4), chain_of(NS, 4, seed=1)
        for position in range(4):
            assert await copy_in(store, table, one, position)
        assert await store.flush()
        assert not await copy_in(store, table, two, 3)
        if ends == "told":
            store.copying_is_over(table)
        else:
            clock.now_s += QUIET_S
        for position in range(4):
            assert await copy_in(store, table, two, position)
        assert (stored(table, one), stored(table, two)) == ([], [0, 1, 2, 3])


async def test_engines_are_not_refused_for_a_copy(tmp_path: Path) -> None:
    """What they store takes the place of what goes last, too, and of no more than it needs."""
    async with open_table(tmp_path, NS) as (store, table):
        await store.limits.set_quota(table, 40 * LENGTH)
        chain = chain_of(NS, 40)
        for position in range(40):
            assert await copy_in(store, table, chain, position)
        assert await store.flush()
        new = new_chunks(chain_of(NS, 1, seed=1))[0]
        assert await store_chunk(store, table, new) is StoreStatus.STORED
        assert stored(table, chain) == list(range(39))


async def test_a_volume_smaller_than_a_chain_keeps_its_beginning(tmp_path: Path) -> None:
    """As an engine stores it, and though several are evicted at a time."""
    async with open_table(tmp_path, NS, ram=4 << 20, nvme=1 << 20) as (store, table):
        chain = chain_of(NS, 40)
        for new in new_chunks(chain):
            await store_chunk(store, table, new)
            with contextlib.suppress(IndexError):
                store.stored([[*table.chunks.values()][-1]])
        assert await store.flush()
        left = stored(table, chain)
        assert left == list(range(len(left)))
        assert len(left) >= 12


async def test_what_is_copied_in_is_written_though_nobody_has_used_it(tmp_path: Path) -> None:
    """A person wants it kept: the admission rule for what engines store does not hold for it."""
    async with open_table(tmp_path, NS, admission="second-use") as (store, table):
        chain = chain_of(NS, 2)
        assert await copy_in(store, table, chain, 0)
        assert await store.flush()
        assert table.chunks[chain.keys[0]].nvme != NOWHERE
        assert store.statistics().num_kept_back == 0


@pytest.mark.parametrize("place", PLACES)
async def test_what_is_used_while_a_copy_is_under_way_stays(tmp_path: Path, place: str) -> None:
    """A copy that finds no room takes none from what engines have loaded since it began; nor what is pinned of it."""
    clock = Clock()
    async with open_table(tmp_path, NS, clock, **PLACES[place]) as (store, table):
        if place == "quota":
            await store.limits.set_quota(table, 15 * LENGTH)
        hot, chain = chain_of(NS, 3, seed=1), chain_of(NS, 24)
        await store_chain(store, table, hot)
        assert await store.flush()
        for position in range(20, 24):
            assert await copy_in(store, table, chain, position)
        pinned = table.chunks[chain.keys[23]]
        await store.limits.pin([pinned], FOREVER)
        for position in range(20):
            clock.now_s += 1
            store.touch([table.chunks[key] for key in hot.keys], [Tier.RAM] * 3)
            await copy_in(store, table, chain, position)
            assert await store.flush()
        assert stored(table, hot) == [0, 1, 2]
        left = stored(table, chain)
        assert left[-4:] == [20, 21, 22, 23]  # the pinned one, and what leads to it
        rest = [position for position in left if position < 19]  # 19 leads to it, too
        assert rest == list(range(len(rest)))
        assert len(rest) >= 7
