"""Reading ahead by chain: only where a session loads a chain piece by piece, and only what was loaded after it before."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvfs.catalog import Chunk, ChunkTable
from kvfs.keys import KeyChain, root
from kvfs.messages import Tier
from kvfs.read_ahead import Streams, known_to_continue
from kvfs.store import Store
from kvfs.testing import chain_of, eventually, open_table, sized_namespace, store_chain

MIB = sized_namespace(1 << 20)


@asynccontextmanager
async def cold(
    directory: Path, *chains: KeyChain, ram: int = 16 << 20
) -> AsyncIterator[tuple[Store, ChunkTable, list[list[Chunk]]]]:
    """A store with these chains of chunks of 1 MiB, all on NVMe only."""
    async with open_table(directory, MIB, nvme=64 << 20, ram=32 << 20) as (store, table):
        for chain in chains:
            await store_chain(store, table, chain)
    async with open_table(directory, MIB, nvme=64 << 20, ram=ram) as (store, table):
        yield store, table, [[table.chunks[key] for key in chain.keys] for chain in chains]


def branches(common: int, *own: int) -> list[KeyChain]:
    """Chains whose first chunks are the same."""
    size = MIB.identity.tokens_per_chunk
    start = root(MIB.identity.fingerprint())
    head = list(range(common * size))
    return [
        KeyChain(start, size, [*head, *range(10_000 * number, 10_000 * number + count * size)])
        for number, count in enumerate(own, 1)
    ]


def use(store: Store, chunks: list[Chunk]) -> None:
    store.touch(chunks, [Tier.NVME] * len(chunks))


async def test_a_chain_that_is_loaded_piece_by_piece_goes_on(tmp_path: Path) -> None:
    """The second piece shows it; each time twice as much is read ahead as before."""
    async with cold(tmp_path, chain_of(MIB, 12)) as (store, _, (chunks,)):
        use(store, chunks)
        streams = Streams()
        assert streams.next(chunks[:1]) == []
        assert streams.next(chunks[1:2]) == chunks[2:3]
        assert streams.next(chunks[2:3]) == chunks[3:5]
        assert streams.next(chunks[3:4]) == chunks[4:8]
        assert streams.next(chunks[4:12]) == []


async def test_what_nobody_loaded_before_is_not_read_ahead(tmp_path: Path) -> None:
    async with cold(tmp_path, chain_of(MIB, 6)) as (store, _, (chunks,)):
        use(store, chunks[:4])
        streams = Streams()
        streams.next(chunks[:2])
        assert streams.next(chunks[2:3]) == chunks[3:4]
        assert Streams().next([]) == []


async def test_other_loads_do_not_make_a_chain(tmp_path: Path) -> None:
    """Loads that begin at the head, behind a hole, or of another session."""
    async with cold(tmp_path, chain_of(MIB, 6)) as (store, _, (chunks,)):
        use(store, chunks)
        streams = Streams()
        assert streams.next(chunks[:2]) == []
        assert streams.next(chunks[:2]) == []
        assert streams.next(chunks[3:4]) == []
        assert Streams().next(chunks[2:3]) == []


async def test_where_several_were_loaded_nobody_knows(tmp_path: Path) -> None:
    """Of branches the one that was loaded is taken, unless another was too."""
    async with cold(tmp_path, *branches(2, 2, 2)) as (store, _, (one, other)):
        assert one[1] is other[1]
        assert known_to_continue(one[1], 8 << 20) == []
        use(store, one)
        assert known_to_continue(one[0], 8 << 20) == one[1:]
        use(store, other)
        assert known_to_continue(one[0], 8 << 20) == one[1:2]


async def test_it_is_counted_apart_and_bounded(tmp_path: Path) -> None:
    """An eighth of RAM at most, until it is loaded."""
    async with cold(tmp_path, chain_of(MIB, 12)) as (store, _, (chunks,)):
        fits = (16 << 20) // 8 // chunks[0].length
        order = store.read_ahead(chunks)
        assert order is not None
        await eventually(lambda: sum(chunk.tier is Tier.RAM for chunk in chunks) == fits)
        assert (store.counters.read_aheads_begun, store.counters.prefetches_begun) == (fits, 0)
        order.cancel()
        assert store.counters.read_aheads_dropped == 12 - fits
        use(store, chunks)
        assert (store.counters.read_aheads_useful, store.counters.prefetches_useful) == (fits, 0)
        assert store.statistics().num_leases == 0
        assert store.read_ahead(chunks[:fits]) is None
