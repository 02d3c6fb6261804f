"""Which extents of a volume are proven: what this daemon wrote, and of what an earlier one left, what was verified since."""

from __future__ import annotations

from pathlib import Path

from kvfs.messages import Tier
from kvfs.testing import chain_of, open_table, read_all, store_chain, tiny_namespace

NS = tiny_namespace()


async def test_what_is_written_is_proven_once_it_is_durable(tmp_path: Path) -> None:
    async with open_table(tmp_path, NS) as (store, table):
        (key,) = chain_of(NS, 1).keys
        await store_chain(store, table, chain_of(NS, 1))
        chunk = table.chunks[key]
        assert chunk.is_proven == (not chunk.is_dirty)
        assert await store.flush()
        assert chunk.is_proven


async def test_what_an_earlier_daemon_left_is_proven_by_who_verifies_it(tmp_path: Path) -> None:
    """By the read of a file, as `kvfs verify` and `cp` do it, and by a promotion; not by being there."""
    chain = chain_of(NS, 3)
    async with open_table(tmp_path, NS) as (store, table):
        await store_chain(store, table, chain)
    async with open_table(tmp_path, NS) as (store, table):
        read, promoted, left = (table.chunks[key] for key in chain.keys)
        assert {chunk.tier for chunk in (read, promoted, left)} == {Tier.NVME}
        assert not any(chunk.is_proven for chunk in (read, promoted, left))
        await read_all(store, read)
        store.lease_all([promoted])
        (promotion,) = store.promote([promoted])
        assert promotion is not None
        assert store.is_under_way(promoted)
        await promotion.wait_for_layers(NS.num_layers)
        store.release_all([promoted])
        assert [chunk.is_proven for chunk in (read, promoted, left)] == [True, True, False]
        assert not store.is_under_way(promoted)
