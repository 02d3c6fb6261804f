"""Several volumes: chunks are spread by their keys, each directory stands alone, and a device that fails fails alone."""

from __future__ import annotations

import errno
import shutil
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from kvfs.catalog import NOWHERE, ChunkTable
from kvfs.checking import check
from kvfs.client import Client
from kvfs.config import VolumeSetting
from kvfs.errors import UnavailableError, UsageError
from kvfs.index import FILE_NAME as INDEX
from kvfs.keys import KeyChain
from kvfs.messages import StoreStatus
from kvfs.opening import open_store
from kvfs.rebuilding import rebuild
from kvfs.store import Store
from kvfs.system import System
from kvfs.testing import (
    DEADLINE_S,
    FaultySystem,
    chain_of,
    eventually,
    load_right,
    new_chunks,
    open_table,
    payload_of,
    plain_mount,
    read_all,
    settings_in,
    sized_namespace,
    socket_path,
    store_chain,
    store_chunk,
    tiny_namespace,
)
from kvfs.testing.daemon import DaemonProcess
from kvfs.volume import Volume

from .volumes import Silent

NS = tiny_namespace()
MIB = sized_namespace(1 << 20)
FAILS = "writing to NVMe|could not be read"


def where(table: ChunkTable) -> dict[bytes, int]:
    return {chunk.key: chunk.volume for chunk in table.chunks.values() if chunk.nvme != NOWHERE}


async def drop_ram(store: Store, table: ChunkTable) -> None:
    """What is in RAM goes from there, so that it has to be read."""
    for chunk in table.chunks.values():
        store._residency.ram.drop(chunk)


async def assert_readable(store: Store, table: ChunkTable, chains: list[KeyChain]) -> None:
    """Every chunk of the chains is there, and each has the bytes that it must have, as `read_all` verifies."""
    for chain in chains:
        for key in chain.keys:
            assert len(await read_all(store, table.chunks[key])) == table.chunks[key].length
    assert store.counters.corrupt == 0


# striping


async def test_chunks_are_spread_and_stay_where_they_are(tmp_path: Path) -> None:
    chain = chain_of(NS, 200)
    async with open_table(tmp_path, NS, volumes=3) as (store, table):
        await store_chain(store, table, chain)
        await store.flush()
        before = where(table)
        shares = Counter(before.values())
        assert len(before) == 200
        assert set(shares) == {0, 1, 2}
        assert min(shares.values()) > 35, "binomial(200, 1/3) is below that once in 3 million"
        statistics = store.statistics()
        assert [each.num_chunks for each in statistics.volumes] == [shares[number] for number in range(3)]
        assert statistics.nvme is not None
        assert statistics.nvme.used_bytes == sum(each.used_bytes for each in statistics.volumes)
        assert store.capacity().total_bytes == statistics.nvme.capacity_bytes == 3 * ((32 << 20) - 4096)
    async with open_table(tmp_path, NS, volumes=3) as (store, table):
        assert where(table) == before
        await assert_readable(store, table, [chain])


async def test_the_order_and_the_paths_of_volumes_do_not_matter(tmp_path: Path) -> None:
    """A key belongs to a volume, not to its place in the settings."""
    chain = chain_of(NS, 60)
    async with open_table(tmp_path, NS, volumes=2) as (store, _):
        nvme = store._residency.nvme
        assert nvme is not None
        identities = [stripe.identity for stripe in nvme]
        chosen = [identities[nvme.choose(key)] for key in chain.keys]
    (tmp_path / "nvme").rename(tmp_path / "moved")
    turned = (VolumeSetting(str(tmp_path / "nvme2"), 32 << 20), VolumeSetting(str(tmp_path / "moved"), 32 << 20))
    async with open_store(replace(settings_in(tmp_path), nvme=turned)) as store:
        nvme = store._residency.nvme
        assert nvme is not None
        identities = [stripe.identity for stripe in nvme]
        assert [identities[nvme.choose(key)] for key in chain.keys] == chosen


async def test_capacities_weigh_and_a_new_volume_takes_only_its_share(tmp_path: Path) -> None:
    """3,000 keys on 8 and 24 MiB: a quarter and the rest; a third volume of 32 MiB takes a half, from both, and no key
    moves between the old ones.
    """
    keys = [key for seed in range(30) for key in chain_of(NS, 100, seed).keys]
    places = [VolumeSetting(str(tmp_path / name), size << 20) for name, size in (("a", 8), ("b", 24), ("c", 32))]

    def chosen(store: Store) -> list[int]:
        assert store._residency.nvme is not None
        return [store._residency.nvme.choose(key) for key in keys]

    async with open_store(replace(settings_in(tmp_path), nvme=tuple(places[:2]))) as store:
        before = chosen(store)
    async with open_store(replace(settings_in(tmp_path), nvme=tuple(places))) as store:
        after = chosen(store)
    assert 640 < before.count(0) < 860
    assert 1350 < after.count(2) < 1650
    assert all(new in (old, 2) for old, new in zip(before, after, strict=True))


async def test_evictions_make_room_on_the_volume_that_needs_it(tmp_path: Path) -> None:
    """Three times what fits: every volume is full, nothing waits, and what is there is right."""
    chains = [chain_of(MIB, 4, seed) for seed in range(24)]
    async with open_table(tmp_path, MIB, volumes=2, nvme=16 << 20, ram=16 << 20) as (store, table):
        for chain in chains:
            assert await store_chain(store, table, chain) == [StoreStatus.STORED] * 4
            with trio.fail_after(60):
                await store._writer.drain()  # type: ignore[union-attr]
        statistics = store.statistics()
        assert statistics.num_dirty == 0
        assert (
            statistics.num_chunks == statistics.nvme.num_chunks == sum(each.num_chunks for each in statistics.volumes)
        )  # type: ignore[union-attr]
        assert all(each.num_chunks >= 12 for each in statistics.volumes), "15 fit"
        await drop_ram(store, table)
        for chunk in [*table.chunks.values()]:
            await read_all(store, chunk)
        assert store.counters.corrupt == 0
        newest = chains[-1].keys
        assert all(key in table.chunks for key in newest)


# each directory stands alone


async def test_a_volume_that_is_added_keeps_what_was_there(tmp_path: Path) -> None:
    old, new = chain_of(NS, 40), chain_of(NS, 40, 1)
    async with open_table(tmp_path, NS) as (store, table):
        await store_chain(store, table, old)
        await store.limits.pin([table.chunks[old.keys[3]]], 1 << 62)
        await store.limits.set_quota(table, 20 << 20)
    async with open_table(tmp_path, NS, volumes=2) as (store, table):
        assert set(where(table).values()) == {0}
        await drop_ram(store, table)
        await assert_readable(store, table, [old])
        assert store.limits.end_of_pin(table.chunks[old.keys[3]])
        await store_chain(store, table, new)
        await store.flush()
        assert set(where(table).values()) == {0, 1}
        await store.remove([table.chunks[old.keys[39]]])
    async with open_table(tmp_path, NS, volumes=2) as (store, table):
        assert len(table.chunks) == 79
        assert table.quota_bytes == 20 << 20
        await assert_readable(store, table, [new])
    (tmp_path / "nvme").rename(tmp_path / "gone")
    (tmp_path / "nvme2").rename(tmp_path / "nvme")
    async with open_table(tmp_path, NS) as (store, table):
        assert table.quota_bytes == 20 << 20, "the one that was added knows it too"
        assert 0 < len(table.chunks) < 40


async def test_a_volume_that_is_taken_away_takes_only_its_own(tmp_path: Path) -> None:
    chain = chain_of(NS, 60)
    async with open_table(tmp_path, NS, volumes=2) as (store, table):
        await store_chain(store, table, chain)
        await store.flush()
        before = where(table)
    async with open_table(tmp_path, NS) as (store, table):
        assert where(table) == {key: 0 for key, volume in before.items() if volume == 0}
        await drop_ram(store, table)
        for chunk in [*table.chunks.values()]:
            await read_all(store, chunk)
        await store_chain(store, table, chain)  # computed anew
    async with open_table(tmp_path, NS, volumes=2) as (store, table):  # and some are on both now
        assert set(table.chunks) == set(chain.keys)
        assert where(table) == dict.fromkeys(chain.keys, 0)
        await assert_readable(store, table, [chain])
        assert store.counters.rows_dropped == 0
        assert store.statistics().volumes[1].used_bytes == 0


async def test_two_caches_become_one(tmp_path: Path) -> None:
    """Each had numbered its namespaces for itself: the same number means two things."""
    other = tiny_namespace("tests/other")
    mine, yours = chain_of(NS, 10), chain_of(other, 10)
    async with open_table(tmp_path, NS) as (store, table):
        await store_chain(store, table, mine)
    (tmp_path / "nvme").rename(tmp_path / "nvme2")
    async with open_table(tmp_path, other) as (store, table):
        await store_chain(store, table, yours)
    for _ in range(2):
        async with open_table(tmp_path, NS, volumes=2) as (store, table):
            theirs = store.attach(other)
            assert (set(table.chunks), set(theirs.chunks)) >= (set(mine.keys), set(yours.keys))
            await assert_readable(store, table, [mine])
            await assert_readable(store, theirs, [yours])
            await store_chain(store, table, chain_of(NS, 10, 5))
            await store_chain(store, theirs, chain_of(other, 10, 5))
            await store.flush()
    async with open_table(tmp_path, NS, volumes=2) as (store, table):
        assert (len(table.chunks), len(store.attach(other).chunks)) == (20, 20)


@pytest.mark.expect_log("there is no index")
async def test_one_index_that_is_lost(tmp_path: Path) -> None:
    """The other volume's chunks are there; a rebuild of its directory alone brings back the rest."""
    chain = chain_of(NS, 40)
    async with open_table(tmp_path, NS, volumes=2) as (store, table):
        await store_chain(store, table, chain)
        await store.flush()
        before = where(table)
    for path in (tmp_path / "nvme2").glob(INDEX + "*"):
        path.unlink()
    async with open_table(tmp_path, NS, volumes=2) as (store, table):
        assert where(table) == {key: 0 for key, volume in before.items() if volume == 0}
    with closing(Volume.open_present(tmp_path / "nvme2", System())) as volume:
        rebuild(volume, Silent())
    for name in ("nvme", "nvme2"):
        with closing(Volume.open_present(tmp_path / name, System())) as volume:
            assert not check(volume, Silent(), read_payloads=True).num_findings
    async with open_table(tmp_path, NS, volumes=2) as (store, table):
        assert where(table) == before
        await assert_readable(store, table, [chain])


# devices that fail


@pytest.mark.expect_log(FAILS)
async def test_a_device_that_fails_at_writing_fails_alone(tmp_path: Path) -> None:
    """The other goes on; what belongs on the bad one stays in RAM, and is written when it works again."""
    system = FaultySystem()
    chain, later = chain_of(NS, 40), chain_of(NS, 40, 1)
    async with open_table(tmp_path, NS, system, volumes=2) as (store, table):
        system.bad_place, system.write_error = tmp_path / "nvme2", errno.EIO
        await store_chain(store, table, chain)
        await eventually(lambda: store.statistics().volumes[1].is_degraded)
        await store_chain(store, table, later)
        await eventually(lambda: all(chunk.volume for chunk in table.chunks.values() if chunk.is_dirty))
        good, bad = store.statistics().volumes
        assert (good.is_degraded, bad.is_degraded) == (False, True)
        assert (good.dirty_bytes, bad.num_chunks) == (0, 0)
        assert good.num_chunks > 20
        assert bad.dirty_bytes == sum(chunk.length for chunk in table.chunks.values() if chunk.is_dirty)
        assert store.counters.io_errors > 0
        await assert_readable(store, table, [chain, later])
        assert b'kvfs_volume_degraded{volume="%s"} 1.0' % bytes(tmp_path / "nvme2") in store.metrics_text()
        assert b'kvfs_volume_degraded{volume="%s"} 0.0' % bytes(tmp_path / "nvme") in store.metrics_text()
        on_good = [chunk for chunk in table.chunks.values() if not chunk.volume]
        with trio.fail_after(60):
            await store.remove(on_good[:3])  # nothing of this waits for the bad one
            await store.limits.pin(on_good[3:6], 1 << 62)
            await store.limits.set_quota(table, 1 << 30)
        system.write_error = 0
        assert await store.flush()
        assert not store.statistics().volumes[1].is_degraded
    async with open_table(tmp_path, NS, volumes=2) as (store, table):
        assert len(table.chunks) == 77
        assert set(where(table).values()) == {0, 1}


@pytest.mark.expect_log(FAILS)
async def test_a_small_ram_lets_go_of_what_the_bad_device_does_not_take(tmp_path: Path) -> None:
    """As a RAM cache would: stores go on, and what is on the good volume is not lost."""
    system = FaultySystem()
    async with open_table(tmp_path, MIB, system, volumes=2, ram=8 << 20, nvme=64 << 20) as (store, table):
        system.bad_place, system.write_error = tmp_path / "nvme2", errno.EIO
        stored: list[bytes] = []
        for seed in range(10):
            chain = chain_of(MIB, 4, seed)
            for new, key in zip(new_chunks(chain), chain.keys, strict=True):
                with trio.fail_after(60):
                    while await store_chunk(store, table, new) is StoreStatus.REFUSED:  # noqa: ASYNC110 - threads write
                        await trio.sleep(0.01)
                stored.append(key)
        nvme = store._residency.nvme
        assert nvme is not None
        await eventually(lambda: store.statistics().volumes[0].dirty_bytes == 0)
        await eventually(lambda: store.statistics().volumes[1].is_degraded)
        assert all(key in table.chunks for key in stored if nvme.choose(key) == 0)
        system.write_error = 0
        assert await store.flush()


@pytest.mark.expect_log(FAILS)
async def test_what_waits_for_a_good_volume_is_not_let_go_for_a_bad_one(tmp_path: Path) -> None:
    """While nothing is clean yet: only what the bad volume does not take may leave RAM before it is written."""
    system = FaultySystem()
    async with open_table(tmp_path, MIB, system, volumes=2, ram=8 << 20, nvme=64 << 20) as (store, table):
        nvme = store._residency.nvme
        assert nvme is not None
        _, bad = nvme
        system.write_gate.clear()
        bad.tier.is_degraded = True  # as after a write that failed
        good: list[bytes] = []
        for seed in range(40):
            (key,) = chain_of(MIB, 1, seed).keys
            (new,) = new_chunks(chain_of(MIB, 1, seed))
            if await store_chunk(store, table, new) is StoreStatus.STORED and nvme.choose(key) == 0:
                good.append(key)
        assert len(good) >= 3
        assert store.counters.evictions_ram > 0
        assert all(key in table.chunks for key in good)
        system.write_gate.set()
        assert await store.flush()
        assert all(table.chunks[key].nvme != NOWHERE for key in good)


@pytest.mark.expect_log(FAILS)
async def test_a_device_that_cannot_be_read_costs_only_its_own(tmp_path: Path) -> None:
    system = FaultySystem()
    chain = chain_of(NS, 30)
    async with open_table(tmp_path, NS, system, volumes=2) as (store, table):
        await store_chain(store, table, chain)
        await store.flush()
        await drop_ram(store, table)
        system.bad_place, system.read_error = tmp_path / "nvme2", errno.EIO
        failed: set[bytes] = set()
        for chunk in [*table.chunks.values()]:
            try:
                await read_all(store, chunk)
            except UnavailableError:
                failed.add(chunk.key)
        assert failed == {key for key, volume in where(table).items() if volume == 1}
        promotions = store.promote(found := store.match(table, chain.keys))
        for promotion in promotions:
            assert promotion is not None
            await promotion.wait_for_layers(NS.num_layers)
            assert (promotion.error is not None) == (promotion.chunk.key in failed)
        store.release_all(found)
        assert len(table.chunks) == 30, "an error of the device proves nothing"


@pytest.mark.expect_log("the cache goes on without it")
@pytest.mark.parametrize("is_empty", [False, True])
async def test_a_disk_that_is_not_mounted_does_not_keep_the_cache_down(tmp_path: Path, is_empty: bool) -> None:
    """What was on it is missed, everything goes to the other, and all is there when it comes back."""
    disk = tmp_path / "disk"
    disk.mkdir()
    volumes = (VolumeSetting(str(tmp_path / "nvme"), 32 << 20), VolumeSetting(str(disk / "kvfs"), 32 << 20))
    chain, later = chain_of(NS, 40), chain_of(NS, 20, 1)
    settings = replace(settings_in(tmp_path), nvme=volumes)
    async with open_store(settings) as store:
        table = store.attach(NS)
        await store_chain(store, table, chain)
        await store.flush()
        before = where(table)
    disk.rename(tmp_path / "away")
    if is_empty:
        disk.mkdir()  # of the file system below: nothing may be made there
    async with open_store(settings) as store:
        table = store.attach(NS)
        assert set(table.chunks) == {key for key, volume in before.items() if volume == 0}
        there, missing = store.statistics().volumes
        assert (there.kind == "missing", missing.kind, missing.is_degraded) == (False, "missing", True)
        await store_chain(store, table, later)
        await store.flush()
        assert len(where(table)) == len(table.chunks)
    if is_empty:
        disk.rmdir()
    (tmp_path / "away").rename(disk)
    async with open_store(settings) as store:
        table = store.attach(NS)
        assert set(table.chunks) == {*chain.keys, *later.keys}
        await assert_readable(store, table, [chain, later])


@pytest.mark.expect_log("the cache goes on without it")
async def test_a_device_that_gives_errors_at_the_start(tmp_path: Path) -> None:
    system = FaultySystem()
    chain = chain_of(NS, 40)
    async with open_table(tmp_path, NS, volumes=2) as (store, table):
        await store_chain(store, table, chain)
        await store.flush()
        before = where(table)
    system.bad_place, system.read_error = tmp_path / "nvme", errno.EIO
    async with open_table(tmp_path, NS, system, volumes=2) as (store, table):
        assert set(table.chunks) == {key for key, volume in before.items() if volume == 1}
        assert [each.kind == "missing" for each in store.statistics().volumes] == [True, False]
        await assert_readable(store, table, [])
        for chunk in [*table.chunks.values()]:
            await read_all(store, chunk)


@pytest.mark.expect_log("the cache goes on without it")
async def test_a_drive_that_was_replaced(tmp_path: Path) -> None:
    """What is in its place is not taken for it; a volume that is made there on purpose is."""
    chain = chain_of(NS, 40)
    async with open_table(tmp_path, NS, volumes=2) as (store, table):
        await store_chain(store, table, chain)
    shutil.rmtree(tmp_path / "nvme2")
    (tmp_path / "nvme2").mkdir()
    async with open_table(tmp_path, NS, volumes=2) as (store, _):
        assert store.statistics().volumes[1].kind == "missing"
        assert not [*(tmp_path / "nvme2").iterdir()]
    Volume.open(tmp_path / "nvme2", 32 << 20, System()).close()  # as kvfs format does
    async with open_table(tmp_path, NS, volumes=2) as (store, table):
        await store_chain(store, table, chain)
        await store.flush()
        assert set(where(table).values()) == {0, 1}


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_typing_error_is_refused(tmp_path: Path, is_first: bool) -> None:
    """Also in a volume that is added: the others do not know it."""
    if not is_first:
        async with open_table(tmp_path, NS):
            pass
    volumes = (
        VolumeSetting(str(tmp_path / "nvme"), 32 << 20),
        VolumeSetting(str(tmp_path / "dsik" / "kvfs"), 32 << 20),
    )
    with pytest.raises(UsageError, match=r"dsik does not exist, and kvfs makes the last directory only"):
        async with open_store(replace(settings_in(tmp_path), nvme=volumes)):
            pass


async def test_what_an_operator_did_wrong_is_refused_however_many_there_are(tmp_path: Path) -> None:
    async with open_table(tmp_path, NS, volumes=2):
        with pytest.raises(UsageError, match="nvme is in use by another kvfs daemon"):
            async with open_store(settings_in(tmp_path, volumes=2)):
                pass
    (tmp_path / "nvme2" / "volume").write_bytes(b"somebody's file" * 1000)
    with pytest.raises(UsageError, match="nvme2"):
        async with open_store(settings_in(tmp_path, volumes=2)):
            pass


# the whole daemon


def test_killed_with_two_volumes_and_loaded_by_a_client(tmp_path: Path) -> None:
    """What was clean is there after kill -9. RAM has no room for all of it: clients read both volumes themselves."""
    settings = settings_in(tmp_path, volumes=2, ram=4 << 20, nvme=32 << 20)
    chain = chain_of(MIB, 24)
    with DaemonProcess.start(settings, socket_path(tmp_path)) as daemon:
        daemon.attach(MIB)
        with Client(plain_mount(tmp_path), MIB, deadline_s=DEADLINE_S) as client:
            _store_all(client, chain)
            assert daemon.flush()
            clean = daemon.clean_keys()
            daemon.kill()
    assert len(clean) == 24
    with DaemonProcess.start(settings, socket_path(tmp_path)) as daemon:
        with Client(plain_mount(tmp_path), MIB, deadline_s=DEADLINE_S) as client:
            assert load_right(client, chain) == set(chain.keys)
            assert daemon.statistics()["counters"]["promotions_refused"] > 8
        assert [each["num_chunks"] > 4 for each in daemon.statistics()["volumes"]] == [True, True]


def _store_all(client: Client, chain: KeyChain) -> None:
    for index, new in enumerate(new_chunks(chain)):
        end = time.monotonic() + DEADLINE_S
        while (reservation := client.store([new])[0]).payload is None:
            assert time.monotonic() < end
            time.sleep(0.005)  # RAM is full of what is being written
        reservation.fill(memoryview(payload_of(chain.chains[index], reservation.geometry)))
        assert client.publish([reservation]) == [StoreStatus.STORED]
