"""A volume for the tests of fsck."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfs.keys import KeyChain
from kvfs.testing import (
    chain_of,
    open_table,
    store_chain,
)

from .volumes import MIB, NS


@pytest.fixture
async def chains(tmp_path: Path) -> list[KeyChain]:
    """Two prompts of four chunks that share two, with uses, and one of another namespace; the store has ended."""
    first = chain_of(MIB, 4)
    second = KeyChain(first.root, 16, [*range(32), *range(1000, 1032)])
    other = chain_of(NS, 3)
    async with open_table(tmp_path, MIB) as (store, table):
        await store_chain(store, table, first)
        await store_chain(store, table, second)
        store.touch([table.chunks[first.keys[0]]], [table.chunks[first.keys[0]].tier])
        await store_chain(store, store.attach(NS), other)
    return [first, second, other]
