"""Admission: what is written to NVMe, what stays in RAM only, and what brings it there after all."""

from __future__ import annotations

from pathlib import Path

from kvfs.admission import Admission, Spent, Verdict
from kvfs.catalog import Chunk, ChunkTable
from kvfs.chunk import geometry
from kvfs.messages import StoreStatus, Tier
from kvfs.pins import FOREVER
from kvfs.store import Store
from kvfs.testing import FaultySystem, chain_of, open_table, sized_namespace, store_chain

NS = sized_namespace(1 << 20)
CHUNK_BYTES = geometry(NS, NS.identity.tokens_per_chunk).file_bytes
DAY_NS = 86_400 * 10**9
STORED = StoreStatus.STORED


def judge(
    admission: Admission, num_bytes: int, day: int = 9, *, is_used: bool = True, is_asked: bool = False
) -> Verdict:
    return admission.admit(num_bytes, day * DAY_NS + 5, is_used=is_used, is_asked_for=is_asked)


# the rule and the budget


def test_second_use() -> None:
    always, second = Admission(), Admission("second-use")
    assert judge(always, 1, is_used=False) is Verdict.ADMITTED
    assert judge(second, 1, is_used=False) is Verdict.UNUSED
    assert judge(second, 1, is_used=True) is Verdict.ADMITTED
    assert judge(second, 1, is_used=False, is_asked=True) is Verdict.ADMITTED


def test_a_budget_of_a_day() -> None:
    """It is filled anew with the day; what is asked for goes beyond it, and counts; so does what was spent before."""
    admission = Admission("always", 100, Spent(9, 30))
    assert judge(admission, 70) is Verdict.ADMITTED
    assert judge(admission, 1) is Verdict.OVER_BUDGET
    assert judge(admission, 50, is_asked=True) is Verdict.ADMITTED
    assert admission.spent_on(9 * DAY_NS) == Spent(9, 150)
    assert judge(admission, 100, day=10) is Verdict.ADMITTED
    assert judge(admission, 1, day=10) is Verdict.OVER_BUDGET
    assert judge(admission, 1, day=9) is Verdict.OVER_BUDGET  # the clock was set back
    assert admission.spent_on(11 * DAY_NS) == Spent(11, 0)


# in a store


def chunks_of(table: ChunkTable, seed: int, num_chunks: int) -> list[Chunk]:
    return [table.chunks[key] for key in chain_of(NS, num_chunks, seed).keys]


def use(store: Store, chunks: list[Chunk]) -> None:
    store.touch(chunks, [Tier.RAM] * len(chunks))


def is_clean(chunk: Chunk) -> bool:
    return chunk.nvme >= 0


async def test_what_is_used_again_is_written(tmp_path: Path) -> None:
    """The rest stays in RAM, does not count as dirty, and is gone with the daemon."""
    async with open_table(tmp_path, NS, None, admission="second-use") as (store, table):
        await store_chain(store, table, chain_of(NS, 3, 1))
        assert await store.flush()
        statistics = store.statistics()
        assert (statistics.num_dirty, statistics.num_kept_back) == (0, 3)
        assert statistics.kept_back_bytes == 3 * CHUNK_BYTES
        assert statistics.counters["not_admitted_unused"] == 3
        use(store, chunks_of(table, 1, 2))
        assert store.statistics().num_dirty == 2
        assert await store.flush()
        assert [is_clean(chunk) for chunk in chunks_of(table, 1, 3)] == [True, True, False]
        assert store.statistics().kept_back_bytes == CHUNK_BYTES
    async with open_table(tmp_path, NS, None, admission="second-use") as (store, table):
        assert set(table.chunks) == set(chain_of(NS, 2, 1).keys)


async def test_what_comes_back_was_used_before(tmp_path: Path) -> None:
    """A chunk that nobody loaded is evicted from RAM when room is needed; stored once more, it is written."""
    async with open_table(tmp_path, NS, None, ram=3 * CHUNK_BYTES, admission="second-use") as (store, table):
        await store_chain(store, table, chain_of(NS, 1, 1))
        for seed in (2, 3, 4):
            assert await store_chain(store, table, chain_of(NS, 1, seed)) == [STORED]
        assert chain_of(NS, 1, 1).keys[0] not in table.chunks
        assert store.counters.evictions_ram == 1
        assert await store_chain(store, table, chain_of(NS, 1, 1)) == [STORED]
        assert await store.flush()
        assert is_clean(chunks_of(table, 1, 1)[0])
        assert store.statistics().num_kept_back == 2


async def test_what_is_pinned_is_written(tmp_path: Path) -> None:
    """And what it is built on."""
    async with open_table(tmp_path, NS, None, admission="second-use") as (store, table):
        await store_chain(store, table, chain_of(NS, 3, 1))
        chunks = chunks_of(table, 1, 3)
        await store.limits.pin([chunks[1]], FOREVER)
        assert await store.flush()
        assert [is_clean(chunk) for chunk in chunks] == [True, True, False]


async def test_what_is_removed_is_not_kept_back(tmp_path: Path) -> None:
    async with open_table(tmp_path, NS, None, admission="second-use") as (store, table):
        await store_chain(store, table, chain_of(NS, 2, 1))
        await store.remove(list(table.chunks.values()))
        assert (store.statistics().num_kept_back, store.statistics().kept_back_bytes) == (0, 0)
        assert store.statistics().ram.used_bytes == 0


async def test_the_next_day_has_a_budget_of_its_own(tmp_path: Path) -> None:
    """What is over the budget of a day is served from RAM; later its next use brings it to NVMe."""
    system = FaultySystem()
    system.now_ns = 20_000 * DAY_NS
    async with open_table(tmp_path, NS, system, write_budget_bytes=2 * CHUNK_BYTES) as (store, table):
        await store_chain(store, table, chain_of(NS, 3, 1))
        assert await store.flush()
        assert store.statistics().counters["not_admitted_budget"] == 1
        assert store.statistics().admitted_today_bytes == 2 * CHUNK_BYTES
        chunks = chunks_of(table, 1, 3)
        use(store, chunks)
        assert not is_clean(chunks[2])
        system.now_ns += DAY_NS
        use(store, chunks)
        assert await store.flush()
        assert is_clean(chunks[2])
        assert store.statistics().admitted_today_bytes == CHUNK_BYTES


async def test_a_restart_refills_no_budget(tmp_path: Path) -> None:
    system = FaultySystem()
    system.now_ns = 20_000 * DAY_NS
    for seed, admitted in ((1, 1), (2, 1), (3, 0)):
        async with open_table(tmp_path, NS, system, write_budget_bytes=2 * CHUNK_BYTES) as (store, table):
            await store_chain(store, table, chain_of(NS, 1, seed))
            assert await store.flush()
            assert [is_clean(chunk) for chunk in chunks_of(table, seed, 1)] == [bool(admitted)]
            assert store.statistics().num_kept_back == 1 - admitted


async def test_what_is_kept_back_makes_way_for_a_quota(tmp_path: Path) -> None:
    """Before what is on NVMe: else a namespace full of what was used once would take nothing more."""
    async with open_table(tmp_path, NS, None, ram=8 * CHUNK_BYTES, admission="second-use") as (store, table):
        await store.limits.set_quota(table, 4 * CHUNK_BYTES)
        await store_chain(store, table, chain_of(NS, 1, 1))
        use(store, chunks_of(table, 1, 1))
        assert await store.flush()
        for seed in range(2, 8):
            assert await store_chain(store, table, chain_of(NS, 1, seed)) == [STORED]
        there = [seed for seed in range(1, 8) if chain_of(NS, 1, seed).keys[0] in table.chunks]
        assert there == [1, 5, 6, 7]
        await store.limits.set_quota(table, 2 * CHUNK_BYTES)
        assert [seed for seed in there if chain_of(NS, 1, seed).keys[0] in table.chunks] == [1, 7]
