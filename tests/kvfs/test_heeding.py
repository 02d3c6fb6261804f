"""Hints in a real store, and over a session: whose they are, what they change, and what ends them."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from kvfs.catalog import Chunk, ChunkTable
from kvfs.client import Client
from kvfs.errors import UsageError
from kvfs.heeding import MAX_EXPECTED, is_closed
from kvfs.hints import CLEAR, Said, parse
from kvfs.keys import KeyChain
from kvfs.mount.session import serve_sessions
from kvfs.store import Store
from kvfs.testing import (
    chain_of,
    eventually,
    new_chunks,
    open_table,
    plain_mount,
    sized_namespace,
    socket_path,
    store_chain,
    store_chunk,
    tiny_namespace,
)

MIB = sized_namespace(1 << 20)
"""Chunks of just under 1 MiB: eight fill a RAM tier of 8 MiB."""
CLOSED = Said(is_closed=True)


def closed_in(table: ChunkTable) -> list[int]:
    return sorted(chunk.position for chunk in table.chunks.values() if is_closed(chunk))


def load(store: Store, table: ChunkTable, chain: KeyChain, end: int) -> None:
    """As an engine does."""
    found = store.match(table, chain.keys[:end])
    store.touch(found, [chunk.tier for chunk in found])
    store.release_all(found)


@pytest.mark.parametrize("nvme", [None, 16 << 20])
async def test_what_is_closed_goes_first_and_takes_its_own_tail_only(nvme: int | None, tmp_path: Path) -> None:
    async with open_table(tmp_path, MIB, ram=8 << 20, nvme=nvme) as (store, table):
        kept, over = chain_of(MIB, 3, seed=1), chain_of(MIB, 3, seed=2)
        for chain in (kept, over):
            await store_chain(store, table, chain)
            store.stored([table.chunks[key] for key in chain.keys])
        await store.flush()
        assert await store.hints.give(table, over.keys, CLOSED) == 3
        assert closed_in(table) == [0, 1, 2]
        victims = store._residency.ram.policy.victims(lambda _: True)
        assert [next(victims).key for _ in range(3)] == over.keys[::-1]
        load(store, table, over, 2)
        assert closed_in(table) == [2], "the end was not used"
        assert store.counters.hints_closed_used == 2
        assert await store.hints.give(table, over.keys, Said(is_closed=False)) == 3
        assert closed_in(table) == []


async def test_a_chain_that_goes_on_is_closed_no_more(tmp_path: Path) -> None:
    async with open_table(tmp_path, MIB, ram=8 << 20) as (store, table):
        chain = chain_of(MIB, 4)
        news = new_chunks(chain)
        for new in news[:3]:
            await store_chunk(store, table, new)
        await store.hints.give(table, chain.keys, CLOSED)
        assert closed_in(table) == [0, 1, 2]
        await store_chunk(store, table, news[3])
        store.stored([table.chunks[chain.keys[3]]])
        assert closed_in(table) == []


async def test_a_hint_that_comes_before_the_policy_hears_of_the_last_chunk_stays(tmp_path: Path) -> None:
    async with open_table(tmp_path, MIB, ram=8 << 20) as (store, table):
        chain = chain_of(MIB, 3)
        await store_chain(store, table, chain)
        await store.hints.give(table, chain.keys, CLOSED)
        store.stored([table.chunks[key] for key in chain.keys])
        assert closed_in(table) == [0, 1, 2]


async def test_what_is_named_from_the_middle_on_leaves_the_rest_alone(tmp_path: Path) -> None:
    async with open_table(tmp_path, MIB, ram=8 << 20) as (store, table):
        chain = chain_of(MIB, 4)
        await store_chain(store, table, chain)
        assert await store.hints.give(table, chain.keys[2:], Said(9, None, True)) == 2
        assert closed_in(table) == [2, 3]
        classes = {chunk.position: chunk.hint.class_ for chunk in table.chunks.values() if chunk.hint}
        assert classes == {2: 9, 3: 9}
        assert await store.hints.give(table, [b"x" * 16, *chain.keys], CLOSED) == 0
        await store.hints.set_all([table.chunks[key] for key in chain.keys], CLEAR)
        assert all(chunk.hint is None for chunk in table.chunks.values())


async def test_a_use_ends_what_was_expected(tmp_path: Path) -> None:
    async with open_table(tmp_path, MIB, ram=8 << 20, policy="learned") as (store, table):
        chain = chain_of(MIB, 2)
        await store_chain(store, table, chain)
        await store.hints.give(table, chain.keys, Said(expect_s=60.0, class_=4))
        last = table.chunks[chain.keys[1]]
        assert last.hint is not None
        assert last.hint.until_s > store.system.monotonic()
        load(store, table, chain, 2)
        assert [chunk.hint.class_ for chunk in table.chunks.values() if chunk.hint] == [4, 4]
        assert last.hint.until_s < 0
        assert store.counters.hints_expect_met == 1


async def test_a_namespace_expects_no_more_than_it_may(tmp_path: Path) -> None:
    """Those beyond are refused and counted; what was used makes room."""
    async with open_table(tmp_path, MIB, ram=8 << 20) as (store, table):
        chain = chain_of(MIB, 2)
        await store_chain(store, table, chain)
        first, second = (table.chunks[key] for key in chain.keys)
        others = [Chunk.new(table, key_of_number(number), first.key, 9, 16, 0, 0) for number in range(MAX_EXPECTED - 1)]
        store.hints._expected[table] = dict.fromkeys([*others, first], store.system.monotonic() + 60)
        for chunk in others:
            chunk.hint = None
        store.hints._purged_at_s[table] = store.system.monotonic()
        await store.hints.set_all([second], Said(expect_s=60.0))
        assert second.hint is None
        assert store.counters.hints_refused == 1
        store.hints._purged_at_s.clear()
        await store.hints.set_all([second], Said(expect_s=60.0))
        assert second.hint is not None


def key_of_number(number: int) -> bytes:
    return number.to_bytes(16, "big")


async def test_hints_over_a_session(tmp_path: Path) -> None:
    """They count for the client's namespace: the same keys in another one are another's."""
    mine, other = tiny_namespace("mine"), tiny_namespace("other")
    async with (
        open_table(tmp_path, mine, ram=8 << 20, policy="learned") as (store, table),
        trio.open_nursery() as nursery,
    ):
        theirs = store.attach(other)
        mount = plain_mount(tmp_path)
        await nursery.start(serve_sessions, store, socket_path(tmp_path))
        chain = chain_of(mine, 3)
        for each in (table, theirs):
            await store_chain(store, each, chain)
        with Client(mount, mine, deadline_s=60.0) as client:
            await trio.to_thread.run_sync(client.hint, chain.chains, Said(5, 60.0))
            await eventually(lambda: all(chunk.hint is not None for chunk in table.chunks.values()))
            await trio.to_thread.run_sync(client.hint, chain.chains, CLOSED)
            await eventually(lambda: closed_in(table) == [0, 1, 2])
            assert all(chunk.hint is None for chunk in theirs.chunks.values())
            with pytest.raises(UsageError, match="a class is a number"):
                client.hint(chain.chains, Said(256))
            with pytest.raises(UsageError, match="a hint says"):
                client.hint(chain.chains, Said())
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"class": 3}, Said(3)),
        ({"expect_s": 1.5, "class": 0}, Said(0, 1.5)),
        ({"closed": True}, CLOSED),
        ({"closed": False, "expect_s": 5}, Said(None, 5, False)),
    ],
)
def test_a_hint_of_a_request(value: object, said: Said) -> None:
    assert parse(value) == said


@pytest.mark.parametrize("value", [None, "closed", {"class": -1}, {"class": 1.0}, {"expect_s": 1e9}, {"x" * 1000: 1}])
def test_what_is_no_hint_is_told_in_one_sentence(value: object) -> None:
    with pytest.raises(UsageError, match=r"^[a-z].{10,150}$"):
        parse(value)


async def test_hints_outlive_a_change_of_policy(tmp_path: Path) -> None:
    """What is closed stays set aside; what is expected counts from then on."""
    async with open_table(tmp_path, MIB, ram=8 << 20, policy="lru") as (store, table):
        expected, other, over = (chain_of(MIB, 2, seed) for seed in range(3))
        for chain in (expected, other, over):
            await store_chain(store, table, chain)
        await store.hints.give(table, over.keys, CLOSED)
        await store.hints.give(table, expected.keys, Said(expect_s=600.0))
        order = store._residency.ram.policy
        assert [chunk.key for chunk in order.victims(lambda _: True)][:3] == [*over.keys[::-1], expected.keys[0]]
        await store.policy.change("learned")
        assert order.heeds == {"closed", "expect", "class"}
        found = [chunk.key for chunk in order.victims(lambda _: True)]
        assert found == [*over.keys[::-1], *other.keys[::-1], *expected.keys[::-1]]
