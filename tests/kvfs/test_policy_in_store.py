"""Every policy in a real store: leases, pins and right bytes under pressure; what a chunk keeps when it went; bypass."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import trio

from kvfs.catalog import Chunk, ChunkTable
from kvfs.config import POLICIES
from kvfs.errors import UsageError
from kvfs.index import FILE_NAME
from kvfs.keys import KeyChain
from kvfs.messages import StoreStatus, Tier
from kvfs.opening import open_store
from kvfs.pins import FOREVER
from kvfs.policies.learned import Learned
from kvfs.policies.named import NAMES
from kvfs.store import Store
from kvfs.system import System
from kvfs.testing import (
    DEADLINE_S,
    chain_of,
    new_chunks,
    open_table,
    payload_of,
    read_all,
    settings_in,
    sized_namespace,
    store_chunk,
)

STORED, EXISTS, REFUSED = StoreStatus.STORED, StoreStatus.EXISTS, StoreStatus.REFUSED
_CARELESS = """
from kvfs.policies.lru import LeafFirstLRU

class Careless(LeafFirstLRU):
    def __init__(self, clock):
        super().__init__()

    def victims(self, may_go):
        return iter(list(self._order))
"""
MIB = sized_namespace(1 << 20)
"""Chunks of just under 1 MiB: eight fill a RAM tier of 8 MiB."""


class Later(System):
    """A clock that can be put forward."""

    def __init__(self) -> None:
        self.later_s = 0.0

    def time_ns(self) -> int:
        return super().time_ns() + round(self.later_s * 1e9)

    def monotonic(self) -> float:
        return super().monotonic() + self.later_s


async def store_prompt(store: Store, table: ChunkTable, chain: KeyChain) -> list[StoreStatus]:
    """As an engine does: what is matched is loaded, the rest stored, and the policy told of both."""
    found = store.match(table, chain.keys)
    sources = [chunk.tier for chunk in found]
    for promotion in store.promote([chunk for chunk in found if chunk.tier is Tier.NVME]) if store.has_nvme else ():
        if promotion is not None:
            await promotion.wait_for_layers(4)
    store.touch(found, sources)
    store.release_all(found)
    statuses = []
    for new, key in zip(new_chunks(chain, len(found)), chain.keys[len(found) :], strict=True):
        statuses.append(await store_chunk(store, table, new))
        store.stored([table.chunks[key]] if key in table.chunks else [])
    return statuses


def test_the_settings_know_every_policy() -> None:
    assert tuple(NAMES) == POLICIES


@pytest.mark.parametrize("nvme", [None, pytest.param(20 << 20, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("policy", POLICIES)
async def test_leases_pins_and_bytes_hold_under_every_policy(policy: str, nvme: int | None, tmp_path: Path) -> None:
    """Three times as much is stored as fits, some of it again and again."""
    async with open_table(tmp_path, MIB, policy=policy, nvme=nvme) as (store, table):
        pinned, leased = chain_of(MIB, 2, 100), chain_of(MIB, 2, 101)
        assert await store_prompt(store, table, pinned) == [STORED] * 2
        await store.limits.pin([table.chunks[pinned.keys[1]]], FOREVER)
        assert await store_prompt(store, table, leased) == [STORED] * 2
        held = store.match(table, leased.keys)
        for seed in (1, 2, 3, 1, 2, 4, 5, 1, 6, 7, 1, 8):
            chain = chain_of(MIB, 3, seed)
            await store_prompt(store, table, chain)
            await store.flush()
            assert chain.keys[0] in table.chunks, "a prompt that was just stored lost its head"
        lowest = store.statistics().nvme or store.statistics().ram
        assert lowest.used_bytes <= lowest.capacity_bytes
        assert lowest.num_chunks == len(table.chunks)
        assert store.counters.evictions_nvme + store.counters.evictions_ram > 10
        for chain in (pinned, leased):
            assert all(key in table.chunks for key in chain.keys)
        for chunk in list(table.chunks.values()):
            raw = await read_all(store, chunk)
            geo = table.namespace.derived[chunk.num_tokens]
            store.lease(chunk)
            assert raw[geo.header_bytes :][: geo.payload_bytes] == payload_of((await store.facts(chunk)).chain, geo)
            store.release(chunk)
        store.release_all(held)


@pytest.mark.parametrize("nvme", [None, 9 << 20])
async def test_leased_bytes_stay_whatever_a_policy_says(
    nvme: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's class that does not ask who may go costs stores, and nobody's bytes."""
    tmp_path.joinpath("careless_policy.py").write_text(_CARELESS)
    monkeypatch.syspath_prepend(tmp_path)
    async with open_table(tmp_path, MIB, policy="careless_policy:Careless", nvme=nvme) as (store, table):
        chain = chain_of(MIB, 8)
        assert await store_prompt(store, table, chain) == [STORED] * 8
        held = store.match(table, chain.keys)
        assert await store.flush()
        with trio.fail_after(DEADLINE_S):
            await store_prompt(store, table, chain_of(MIB, 3, 1))
        assert [table.chunks.get(chunk.key) for chunk in held] == held
        for chunk in held:
            assert len(await read_all(store, chunk)) == chunk.length
        store.release_all(held)
        assert await store_prompt(store, table, chain_of(MIB, 3, 2)) == [STORED] * 3


async def test_uses_survive_an_eviction(tmp_path: Path) -> None:
    """Loads are remembered, and that it came back; what a person removed was not asked for again."""
    async with open_table(tmp_path, MIB, policy="lru", nvme=None) as (store, table):
        chain = chain_of(MIB, 1, 0)
        for _ in range(3):
            await store_prompt(store, table, chain)
        chunk = table.chunks[chain.keys[0]]
        assert (chunk.hits, chunk.returns) == (2, 0)
        for seed in range(1, 10):
            await store_prompt(store, table, chain_of(MIB, 1, seed))
        assert chain.keys[0] not in table.chunks
        await store_prompt(store, table, chain)
        chunk = table.chunks[chain.keys[0]]
        assert (chunk.hits, chunk.returns) == (2, 1)
        await store.remove([chunk])
        await store_prompt(store, table, chain)
        chunk = table.chunks[chain.keys[0]]
        assert (chunk.hits, chunk.returns) == (2, 1)


async def test_a_ram_cache_does_without_the_rest_of_what_cannot_earn_its_place(tmp_path: Path) -> None:
    """A prompt longer than the cache: what does not fit is bypassed, with all that is built on it, and evicts nothing."""
    async with open_table(tmp_path, MIB, nvme=None) as (store, table):
        chain = chain_of(MIB, 12, 0)
        assert await store_prompt(store, table, chain) == [STORED] * 8 + [REFUSED] * 4
        assert store.match(table, chain.keys) == [table.chunks[key] for key in chain.keys[:8]]
        store.release_all(list(table.chunks.values()))
        assert store.counters.evictions_ram == 0
        assert store.counters.stores_refused == 4
        ghost = store._residency.ghosts.get(table.directory, chain.keys[11])
        assert ghost is not None
        assert (ghost.why, ghost.returns) == ("bypass", 0)
        await store_prompt(store, table, chain)
        ghost = store._residency.ghosts.get(table.directory, chain.keys[11])
        assert ghost is not None
        assert (ghost.why, ghost.returns) == ("bypass", 1)
        await store.remove(list(table.chunks.values()))
        other = chain_of(MIB, 8, 1)
        assert await store_prompt(store, table, other) == [STORED] * 8
        await store.remove(list(table.chunks.values()))
        assert await store_prompt(store, table, chain_of(MIB, 8, 0)) == [STORED] * 8


async def test_a_policy_that_there_is_not_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be imported"):
        async with open_store(settings_in(tmp_path, policy="no.such:Policy")):
            pass


@pytest.mark.parametrize("damage", [None, b"", b'{"format":"kvfs-learned/9"}'])
async def test_what_was_learned_is_there_after_a_restart(damage: bytes | None, tmp_path: Path) -> None:
    """With the chunks and their ages; what cannot be understood is forgotten, and everything works all the same."""

    def orders(store: Store) -> list[Learned[Chunk]]:
        residency = store._residency
        assert residency.nvme is not None
        (stripe,) = residency.nvme
        found = [residency.ram.policy._order, stripe.tier.policy._order]
        assert all(isinstance(order, Learned) for order in found)
        return found  # type: ignore[return-value]

    system = Later()
    async with open_table(tmp_path, MIB, system, policy="learned", nvme=20 << 20) as (store, table):
        for seed in (1, 2, 1, 3, 1, 4, 1, 5, 6, 7, 1, 2, 8, 9, 1, 10):
            await store_prompt(store, table, chain_of(MIB, 3, seed))
            assert await store.flush()
            system.later_s += 40.0
        used = [order._reuse.learnt().used for order in orders(store)]
        assert all(any(map(any, one)) for one in used)
    if damage is not None:
        with closing(sqlite3.connect(tmp_path / "nvme" / FILE_NAME)) as connection, connection:
            connection.execute("UPDATE facts SET value = ? WHERE name LIKE 'learnt %'", (damage,))
    async with open_table(tmp_path, MIB, system, policy="learned", nvme=20 << 20) as (store, table):
        nvme = orders(store)[1]
        if damage is None:
            assert [order._reuse.learnt().used for order in orders(store)] == used
            assert any(map(any, nvme._reuse.index))
        else:
            assert not any(map(any, nvme._reuse.learnt().used))
        ages = [nvme._now() - node.last for part in nvme._forest.parts for node in part.values()]
        assert len(ages) == len(table.chunks) > 10
        assert max(ages) > 200.0
        await store_prompt(store, table, chain_of(MIB, 3, 1))
    async with open_table(tmp_path, MIB, system, policy="arc", nvme=20 << 20) as (store, table):
        await store_prompt(store, table, chain_of(MIB, 3, 11))
