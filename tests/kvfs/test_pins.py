"""Pins: what is pinned, and what it is built on, stays; durable, with an end, and never for more than there is room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from kvfs.catalog import Catalog, Chunk
from kvfs.errors import CapacityError
from kvfs.keys import Key
from kvfs.messages import StoreStatus
from kvfs.pins import FOREVER, Pins
from kvfs.policies import Holding, LeafFirstLRU
from kvfs.testing import (
    FaultySystem,
    chain_of,
    eventually,
    new_chunks,
    open_table,
    sized_namespace,
    store_chain,
    store_chunk,
    tiny_namespace,
)

STORED, REFUSED = StoreStatus.STORED, StoreStatus.REFUSED
MIB = sized_namespace(1 << 20)
HOUR = 3600 * 10**9


class Bench:
    """A catalog, its pins, and who is held according to the calls."""

    def __init__(self) -> None:
        self.catalog = Catalog()
        self.table = self.catalog.table(tiny_namespace(), 0)
        self.told: set[Chunk] = set()
        self.pins = Pins(self._tell)

    def _tell(self, chunk: Chunk, is_held: bool) -> None:
        assert (chunk in self.told) != is_held
        (self.told.add if is_held else self.told.remove)(chunk)

    def add(self, path: str, position: int | None = None) -> Chunk:
        at = len(path) - 1 if position is None else position
        chunk, _ = self.catalog.create(self.table, key(path), key(path[:-1]), at, 16, 0)
        self.pins.added(chunk)
        return chunk

    def remove(self, chunk: Chunk) -> bool:
        self.catalog.discard(chunk)
        return self.pins.removed(chunk)

    @property
    def held(self) -> set[str]:
        held = {path for path, chunk in self.by_path().items() if self.pins.is_held(chunk)}
        assert {self.table.chunks[key(path)] for path in held} == self.told
        assert self.pins.held_bytes == sum(chunk.length for chunk in self.told)
        return held

    def by_path(self) -> dict[str, Chunk]:
        return {chunk.key.rstrip(b"\0").decode(): chunk for chunk in self.table.chunks.values()}


def key(path: str) -> Key:
    return Key(path.encode().ljust(16, b"\0"))


def test_what_a_pinned_chunk_is_built_on_is_held() -> None:
    bench = Bench()
    chunks = {path: bench.add(path) for path in ("a", "ab", "abc", "abd", "x")}
    assert bench.pins.to_hold([chunks["abc"], chunks["abd"]]) == {chunks[path] for path in ("a", "ab", "abc", "abd")}
    bench.pins.pin(chunks["abc"], FOREVER)
    assert bench.held == {"a", "ab", "abc"}
    bench.pins.pin(chunks["abd"], FOREVER)
    bench.pins.pin(chunks["ab"], 7)
    assert bench.held == {"a", "ab", "abc", "abd"}
    assert bench.pins.to_hold(chunks.values()) == {chunks["x"]}
    assert bench.pins.unpin(chunks["abc"])
    assert not bench.pins.unpin(chunks["abc"])
    assert bench.held == {"a", "ab", "abd"}
    bench.pins.unpin(chunks["abd"])
    assert bench.held == {"a", "ab"}
    assert bench.pins.end(6) == []
    assert bench.pins.end(7) == [chunks["ab"]]
    assert bench.held == set()


def test_a_chunk_that_is_stored_again_is_held_again() -> None:
    """Removing one in the middle lets go of what lies before it, and of nothing behind."""
    bench = Bench()
    chunks = {path: bench.add(path) for path in ("a", "ab", "abc")}
    bench.pins.pin(chunks["abc"], FOREVER)
    assert bench.remove(chunks["ab"]) is False
    assert bench.held == {"abc"}
    again = bench.add("ab")
    assert bench.held == {"a", "ab", "abc"}
    bench.pins.pin(again, FOREVER)
    assert bench.remove(chunks["abc"]) is True
    assert bench.held == {"a", "ab"}
    assert bench.remove(again) is True
    assert bench.held == set()


def test_a_circle_of_parents_is_held_no_longer_than_its_pin() -> None:
    """A client may claim any parent for a chunk whose parent is not stored; positions must follow one another."""
    bench = Bench()
    one, _ = bench.catalog.create(bench.table, key("p"), key("q"), 5, 16, 0)
    two, _ = bench.catalog.create(bench.table, key("q"), key("p"), 6, 16, 0)
    for chunk in (one, two):
        bench.pins.added(chunk)
    bench.pins.pin(one, FOREVER)
    assert bench.held == {"p"}
    bench.pins.pin(two, FOREVER)
    bench.pins.unpin(one)
    assert bench.held == {"p", "q"}
    bench.pins.unpin(two)
    assert bench.held == set()


def test_a_pin_that_is_changed_ends_at_its_last_end() -> None:
    bench = Bench()
    chunk = bench.add("a")
    for until_ns in range(10, 5000):
        bench.pins.pin(chunk, until_ns)
    assert bench.pins.end(4998) == []
    assert bench.pins.end_of(chunk, 4998) == 4999
    assert bench.pins.end_of(chunk, 4999) is None
    bench.pins.pin(chunk, FOREVER)
    assert bench.pins.end(1 << 62) == []
    assert bench.pins.next_end_ns == FOREVER
    assert bench.held == {"a"}


PATHS = ["a", "ab", "abc", "abd", "abce", "ax", "axy"]


@given(st.lists(st.tuples(st.sampled_from(["pin", "unpin", "flip"]), st.sampled_from(PATHS)), max_size=40))
def test_held_is_what_a_pinned_chunk_needs(steps: list[tuple[str, str]]) -> None:
    """Whatever is stored, removed, pinned and unpinned in whatever order."""
    bench = Bench()
    pinned: set[str] = set()
    for what, path in steps:
        chunk = bench.by_path().get(path)
        if what == "flip":
            if chunk is None:
                bench.add(path)
            else:
                assert bench.remove(chunk) == (path in pinned)
                pinned.discard(path)
        elif chunk is not None and what == "pin":
            bench.pins.pin(chunk, FOREVER)
            pinned.add(path)
        elif chunk is not None:
            assert bench.pins.unpin(chunk) == (path in pinned)
            pinned.discard(path)
        stored = set(bench.by_path())
        expected = {
            path[:length]
            for path in pinned
            for length in range(1, len(path) + 1)
            if all(path[:between] in stored for between in range(length, len(path)))
        }
        assert bench.held == expected
    assert len(bench.pins) == len(pinned)


class Entry(int):
    """As much as the two policies look at."""

    hint = None


def test_what_is_held_is_not_among_the_victims() -> None:
    """It is in the tier all the same, and goes back into the order as just used."""
    held = {2}
    policy: Holding[Entry] = Holding(LeafFirstLRU(), held.__contains__)
    for entry in map(Entry, range(4)):
        policy.insert(entry)
    policy.hold(Entry(0))
    policy.hold(Entry(9))
    assert list(policy.victims(lambda _: True)) == [1, 3]
    assert len(policy) == 4
    policy.let_go(Entry(0))
    policy.let_go(Entry(9))
    assert list(policy.victims(lambda _: True)) == [1, 3, 0]
    for entry in map(Entry, (2, 1, 1)):
        policy.remove(entry)
    policy.let_go(Entry(2))
    assert list(policy.victims(lambda _: True)) == [3, 0]
    assert len(policy) == 2


# in a store


@pytest.mark.parametrize("nvme", [6 << 20, None])
async def test_what_is_pinned_is_not_evicted(tmp_path: Path, nvme: int | None) -> None:
    """Nor what it is built on; everything else goes, and when the pin has ended so does this."""
    chain, room = chain_of(MIB, 2), 5
    async with open_table(tmp_path, MIB, ram=5 << 20, nvme=nvme) as (store, table):
        await store_chain(store, table, chain)
        pinned = table.chunks[chain.keys[1]]
        assert await store.limits.pin([pinned], FOREVER) == 1
        for seed in range(1, 20):
            await store_chain(store, table, chain_of(MIB, 1, seed))
            assert await store.flush()
        assert set(chain.keys) <= set(table.chunks)
        assert 2 < len(table.chunks) <= room
        lowest = store.statistics().nvme or store.statistics().ram
        assert (lowest.num_chunks, store.statistics().num_pinned) == (len(table.chunks), 1)
        assert store.statistics().held_bytes == 2 * pinned.length
        assert await store.limits.unpin([pinned]) == 1
        for seed in range(21, 30):
            await store_chain(store, table, chain_of(MIB, 1, seed))
            assert await store.flush()
        assert not set(chain.keys) & set(table.chunks)


@pytest.mark.parametrize("nvme", [12 << 20, None])
async def test_a_chunk_that_fits_between_no_pins_costs_little(tmp_path: Path, nvme: int | None) -> None:
    """Pins that lie scattered leave no gap for a longer chunk: it is refused, or stays dirty, and the rest stays."""
    small, large = sized_namespace(64 << 10), sized_namespace(1 << 20)
    async with open_table(tmp_path, small, ram=(12 << 20) + 4096, nvme=nvme) as (store, table):
        other = store.attach(large)
        for seed in range(191):
            await store_chain(store, table, chain_of(small, 1, seed))
        assert await store.flush()
        chunks = [*table.chunks.values()]
        await store.limits.pin(chunks[3::8], FOREVER)
        status = await store_chunk(store, other, new_chunks(chain_of(large, 1))[0])
        assert status is (STORED if nvme else REFUSED)
        if nvme:
            assert not await store.flush(0.7)
            assert store.statistics().num_dirty == 1
        assert len(table.chunks) == 191
        await store.remove(chunks[3::8])
        await store.remove([*other.chunks.values()])


@pytest.mark.expect_log("a pin was refused")
async def test_pins_hold_three_quarters_at_most(tmp_path: Path) -> None:
    """All or nothing, said in one sentence; what is held already may be pinned for longer."""
    chain = chain_of(MIB, 5)
    async with open_table(tmp_path, MIB, ram=8 << 20, nvme=None) as (store, table):
        await store_chain(store, table, chain)
        other = chain_of(MIB, 2, seed=1)
        await store_chain(store, table, other)
        chunks = [table.chunks[key] for key in chain.keys]
        await store.limits.pin(chunks[4:], 2 * store.system.time_ns())
        with pytest.raises(
            CapacityError, match=r"pins may hold 6\.0 MiB, 3/4 of the tier: 5\.0 MiB are held, and 2\.0"
        ):
            await store.limits.pin([table.chunks[key] for key in other.keys], FOREVER)
        assert store.statistics().num_pinned == 1
        await store.limits.pin(chunks, FOREVER)
        assert store.statistics().num_pinned == 5
        assert b'"event":"pin_refused"' in store.events.read(0, 1 << 20)


async def test_a_removal_takes_what_is_pinned(tmp_path: Path) -> None:
    """A pin is against eviction; stored again the chunk is not pinned, now or after a restart."""
    chain = chain_of(MIB, 1)
    async with open_table(tmp_path, MIB) as (store, table):
        await store_chain(store, table, chain)
        await store.limits.pin([*table.chunks.values()], FOREVER)
        await store.remove([*table.chunks.values()])
        await store_chain(store, table, chain)
        assert store.statistics().num_pinned == 0
    async with open_table(tmp_path, MIB) as (store, table):
        assert len(table.chunks) == 1
        assert store.statistics().num_pinned == 0


async def test_a_restart_remembers_pins(tmp_path: Path) -> None:
    """With their ends; those that ended meanwhile are over."""
    chain = chain_of(MIB, 3)
    system = FaultySystem()
    system.now_ns = HOUR
    async with open_table(tmp_path, MIB, system) as (store, table):
        await store_chain(store, table, chain)
        one, two, three = (table.chunks[key] for key in chain.keys)
        await store.limits.pin([one], 3 * HOUR)
        await store.limits.pin([two], FOREVER)
        await store.limits.pin([three], 5 * HOUR)
        await store.limits.pin([three], 2 * HOUR)
    system.now_ns = 2 * HOUR
    async with open_table(tmp_path, MIB, system) as (store, table):
        ends = [store.limits.end_of_pin(table.chunks[key]) for key in chain.keys]
        assert ends == [3 * HOUR, FOREVER, None]
        assert store.statistics().held_bytes == 2 * table.chunks[chain.keys[0]].length


async def test_a_pin_ends_in_time(tmp_path: Path, mock_clock: trio.testing.MockClock) -> None:
    """To the moment, though a longer one was set before; and when the wall clock was set, within a minute."""
    system = FaultySystem()
    system.now_ns = HOUR
    async with open_table(tmp_path, MIB, system, nvme=None) as (store, table):
        await store_chain(store, table, chain_of(MIB, 2))
        head, tail = table.chunks.values()

        async def pinned_after(seconds: float) -> int:
            assert system.now_ns is not None
            system.now_ns += int(seconds * 10**9)
            mock_clock.jump(seconds)
            for _ in range(5):
                await trio.lowlevel.checkpoint()
            return store.statistics().num_pinned

        await store.limits.pin([head], 2 * HOUR)
        await store.limits.pin([tail], HOUR + 10 * 10**9)
        assert await pinned_after(9.9) == 2
        assert await pinned_after(0.2) == 1
        assert await pinned_after(3589) == 1
        assert await pinned_after(1) == 0
        await store.limits.pin([head], system.now_ns + 24 * HOUR)
        await trio.lowlevel.checkpoint()
        system.now_ns += 48 * HOUR
        assert store.limits.end_of_pin(head) is None
        assert await pinned_after(61) == 0
        assert store.events.read(0, 1 << 20).count(b'"event":"unpin"') == 3


@pytest.mark.expect_log("writing to NVMe")
async def test_a_failing_device_costs_no_pinned_chunk(tmp_path: Path) -> None:
    """A RAM tier that has to do without NVMe evicts what is dirty, but not what is pinned."""
    system = FaultySystem()
    chain = chain_of(MIB, 2)
    async with open_table(tmp_path, MIB, system, ram=4 << 20) as (store, table):
        system.write_error = 28
        await store_chain(store, table, chain)
        await store.limits.pin([table.chunks[chain.keys[1]]], FOREVER)
        await eventually(lambda: store.statistics().nvme and store.statistics().nvme.is_degraded)  # type: ignore[union-attr]
        for seed in range(1, 9):
            assert await store_chunk(store, table, new_chunks(chain_of(MIB, 1, seed))[0]) is STORED
        assert set(chain.keys) <= set(table.chunks)
        system.write_error = 0


async def test_many_chunks_are_pinned_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others get their turn in between; what is removed meanwhile is left out."""
    monkeypatch.setattr("kvfs.limits._AT_ONCE", 2)
    async with open_table(tmp_path, tiny_namespace()) as (store, table):
        await store_chain(store, table, chain_of(tiny_namespace(), 9))
        chunks = [*table.chunks.values()]
        counts: list[int] = []

        async def pin(how: Callable[[], int]) -> None:
            counts.append(await store.limits.pin(chunks, how()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pin, lambda: FOREVER)
            await trio.lowlevel.checkpoint()
            await store.remove(chunks[-1:])
        assert counts[0] in (8, 9)
        assert store.statistics().num_pinned == 8
        assert await store.limits.unpin(chunks) == 8
        assert store.statistics().held_bytes == 0
