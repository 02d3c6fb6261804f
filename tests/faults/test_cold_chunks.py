"""Chunks on NVMe: promotions are single, in order and verified; whatever is wrong with the bytes is a counted miss."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from kvfs.catalog import Chunk
from kvfs.chunk import Geometry, geometry
from kvfs.errors import CorruptChunk, UnavailableError
from kvfs.keys import KeyChain
from kvfs.messages import StoreStatus, Tier
from kvfs.namespace import Namespace
from kvfs.promotion import Promotion
from kvfs.store import Store
from kvfs.testing import (
    FaultySystem,
    chain_of,
    eventually,
    new_chunks,
    open_table,
    payload_of,
    read_all,
    sized_namespace,
    store_chain,
    store_chunk,
    tiny_namespace,
)
from kvfs.tiers.nvme import slices
from kvfs.volume import FILE_NAME as VOLUME
from kvfs.volume import SUPERBLOCK_BYTES

NS = tiny_namespace()
MIB = sized_namespace(1 << 20)


async def stored_before(directory: Path, namespace: Namespace, count: int, **settings: int) -> KeyChain:
    """A chain that an earlier daemon stored."""
    chain = chain_of(namespace, count)
    async with open_table(directory, namespace, **settings) as (store, table):
        assert set(await store_chain(store, table, chain)) == {StoreStatus.STORED}
    return chain


def is_right(raw: bytes | memoryview, chain: KeyChain, position: int, namespace: Namespace) -> bool:
    geo = geometry(namespace, chain.tokens_per_chunk)
    return bytes(raw[geo.header_bytes :][: geo.payload_bytes]) == payload_of(chain.chains[position], geo)


async def promoted(store: Store, chunk: Chunk) -> Promotion | None:
    """Promote a chunk as a load does, until it is there or has failed."""
    store.lease(chunk)
    try:
        (promotion,) = store.promote([chunk])
        if promotion is not None:
            await promotion.wait_for_layers(chunk.table.namespace.num_layers)
            await eventually(lambda: promotion.num_left == 0)
        return promotion
    finally:
        store.release(chunk)


def overwrite(directory: Path, offset: int, raw: bytes) -> None:
    with open(directory / "nvme" / VOLUME, "r+b") as volume:
        volume.seek(offset)
        volume.write(raw)


def damage(directory: Path, offset: int, mask: int = 0x10) -> None:
    with open(directory / "nvme" / VOLUME, "r+b") as volume:
        volume.seek(offset)
        byte = volume.read(1)[0]
        volume.seek(offset)
        volume.write(bytes([byte ^ mask]))


# promotion


async def test_promotion_is_verified_and_counted(tmp_path: Path) -> None:
    chain = await stored_before(tmp_path, NS, 3)
    async with open_table(tmp_path) as (store, table):
        for key in chain.keys:
            promotion = await promoted(store, table.chunks[key])
            assert promotion is not None
            assert promotion.error is None
            assert table.chunks[key].tier is Tier.RAM
            assert not table.chunks[key].is_dirty
        assert store.counters.promotions == 3
        for position, key in enumerate(chain.keys):
            assert is_right(await read_all(store, table.chunks[key]), chain, position, NS)
        assert store.statistics().num_leases == 0


async def test_two_readers_of_one_cold_chunk_cause_one_read(tmp_path: Path) -> None:
    """Single flight: each piece is read once, however many ask."""
    chain = await stored_before(tmp_path, MIB, 2)
    system = FaultySystem()
    async with open_table(tmp_path, MIB, system) as (store, table):
        system.reads.clear()
        system.read_gate.clear()
        chunks = [table.chunks[key] for key in chain.keys]
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                for chunk in chunks:
                    nursery.start_soon(promoted, store, chunk)
            await eventually(lambda: store.statistics().num_leases >= 10)
            system.read_gate.set()
        num_pieces = len([*slices(geometry(MIB, 16))])
        assert len(system.reads) == len(set(system.reads)) == 2 * num_pieces
        assert store.counters.promotions == 2


async def test_two_readers_through_the_mount_cause_one_read(tmp_path: Path) -> None:
    """The same for reads that leave RAM alone."""
    chain = await stored_before(tmp_path, MIB, 1)
    system = FaultySystem()
    async with open_table(tmp_path, MIB, system) as (store, table):
        system.reads.clear()
        system.read_gate.clear()
        chunk = table.chunks[chain.keys[0]]
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(read_all, store, chunk)
            await eventually(lambda: chunk.leases == 4)
            system.read_gate.set()
        assert len(system.reads) == len(set(system.reads)) == len([*slices(geometry(MIB, 16))])
        assert chunk.tier is Tier.NVME
        assert store.statistics().ram.used_bytes == 0


async def test_first_layers_arrive_first(tmp_path: Path) -> None:
    """The first piece of every chunk is read before the second of any, so that an engine can begin early."""
    large = sized_namespace(2 << 20, num_layers=8)
    chain = await stored_before(tmp_path, large, 3)
    system = FaultySystem()
    async with open_table(tmp_path, large, system, io_threads=1) as (store, table):
        system.reads.clear()
        chunks = [table.chunks[key] for key in chain.keys]
        for chunk in chunks:
            store.lease(chunk)
        promotions = store.promote(chunks)
        seen: list[tuple[int, ...]] = []
        for promotion in promotions:
            assert promotion is not None
            await promotion.wait_for_layers(8)
            seen.append(tuple(other.layers for other in promotions if other))
        heads = {chunk.nvme for chunk in chunks}
        assert {offset for offset, _ in system.reads[:3]} == heads
        assert seen[-1] == (8, 8, 8)
        for chunk in chunks:
            store.release(chunk)


async def test_a_streamed_layer_is_right_when_it_is_announced(tmp_path: Path) -> None:
    """Whatever is below `layers` can be used at once, while the rest is still on its way."""
    large = sized_namespace(2 << 20, num_layers=8)
    chain = await stored_before(tmp_path, large, 1)
    async with open_table(tmp_path, large, io_threads=1) as (store, table):
        chunk = table.chunks[chain.keys[0]]
        geo = geometry(large, 16)
        right = payload_of(chain.chains[0], geo)
        store.lease(chunk)
        (promotion,) = store.promote([chunk])
        assert promotion is not None
        for layer in range(8):
            await promotion.wait_for_layers(layer + 1)
            begin, end = geo.layer_range(layer)
            assert bytes(promotion.buffer[begin:end]) == right[begin - geo.header_bytes : end - geo.header_bytes]
        store.release(chunk)


async def test_a_promotion_goes_on_without_its_reader(tmp_path: Path) -> None:
    """Whoever asked is gone; the bytes are as good for the next, and nothing stays leased."""
    chain = await stored_before(tmp_path, MIB, 1)
    system = FaultySystem()
    async with open_table(tmp_path, MIB, system) as (store, table):
        chunk = table.chunks[chain.keys[0]]
        system.read_gate.clear()
        with trio.move_on_after(0.05):
            await promoted(store, chunk)
        assert chunk.leases == 1
        system.read_gate.set()
        await eventually(lambda: chunk.tier is Tier.RAM and not chunk.leases)


async def test_a_chunk_removed_while_it_is_promoted(tmp_path: Path) -> None:
    """Its room in both tiers comes back when the promotion ends."""
    chain = await stored_before(tmp_path, MIB, 1)
    system = FaultySystem()
    async with open_table(tmp_path, MIB, system) as (store, table):
        chunk = table.chunks[chain.keys[0]]
        system.read_gate.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(promoted, store, chunk)
            await eventually(lambda: chunk.leases)
            await store.remove([chunk])
            assert store.statistics().nvme.used_bytes == chunk.length  # type: ignore[union-attr]
            system.read_gate.set()
        await store.flush()
        await eventually(lambda: store.statistics().nvme.used_bytes == 0)  # type: ignore[union-attr]
        assert store.statistics().ram.used_bytes == 0
        assert store.statistics().num_leases == 0


async def test_no_room_for_a_promotion(tmp_path: Path) -> None:
    """RAM full of leases: the promotion is refused at once and counted; the chunk stays readable from NVMe."""
    chain = await stored_before(tmp_path, MIB, 9, ram=16 << 20)
    async with open_table(tmp_path, MIB) as (store, table):
        for key in chain.keys[:8]:
            store.lease(table.chunks[key])
        assert None not in store.promote([table.chunks[key] for key in chain.keys[:8]])
        await eventually(lambda: store.counters.promotions == 8)
        assert await promoted(store, table.chunks[chain.keys[8]]) is None
        assert store.counters.promotions_refused == 1
        assert is_right(await read_all(store, table.chunks[chain.keys[8]]), chain, 8, MIB)
        for key in chain.keys[:8]:
            store.release(table.chunks[key])
        assert await promoted(store, table.chunks[chain.keys[8]]) is not None


# bytes that are wrong


def header_fields(geo: Geometry) -> dict[str, int]:
    """Name of each part of a chunk file → an offset within it."""
    places = {
        "length": 1,
        "json": 40,
        "metadata": 300,
        "checksums": 600,
        "tensors": 1100,
        "spaces": geo.header_bytes - 1,
    }
    for layer in range(len(geo.layers)):
        begin, end = geo.layer_range(layer)
        places[f"layer {layer} begin"], places[f"layer {layer} end"] = begin, end - 1
    places["pad begin"], places["pad end"] = geo.header_bytes + geo.payload_bytes, geo.file_bytes - 1
    return places


@pytest.mark.expect_log("is corrupt and was dropped")
@pytest.mark.parametrize("how", ["promote", "read", "facts", "examine"])
@pytest.mark.parametrize("part", header_fields(geometry(NS, 16)))
async def test_every_damaged_part_is_a_counted_miss(tmp_path: Path, part: str, how: str) -> None:
    """Bit rot in any field or layer: the chunk is dropped with an event, durably; its neighbours stay."""
    geo = geometry(NS, 16)
    chain = await stored_before(tmp_path, NS, 3)
    async with open_table(tmp_path) as (store, table):
        chunk = table.chunks[chain.keys[1]]
        damage(tmp_path, chunk.nvme + header_fields(geo)[part])
        if how == "facts" and header_fields(geo)[part] >= geo.header_bytes:
            how = "read"  # facts look at the header only
        if how == "promote":
            promotion = await promoted(store, chunk)
            assert promotion is not None
            assert isinstance(promotion.error, CorruptChunk)
        elif how == "examine":
            await store.examine(chunk)
        else:
            store.lease(chunk)
            with pytest.raises(CorruptChunk):
                await (store.facts(chunk) if how == "facts" else store.read(chunk, 0, 10))
            store.release(chunk)
        assert store.counters.corrupt == 1
        assert chain.keys[1] not in table.chunks
        (event,) = [e for e in map(json.loads, store.events.read(0, 1 << 20).splitlines()) if e["event"] == "corrupt"]
        assert event["key"] == chain.keys[1].hex()
        assert store.statistics().num_leases == 0
        await store.flush()
        assert store.statistics().ram.used_bytes == 0
        for position in (0, 2):
            assert is_right(await read_all(store, table.chunks[chain.keys[position]]), chain, position, NS)
    async with open_table(tmp_path) as (_, table):
        assert set(table.chunks) == {chain.keys[0], chain.keys[2]}


@pytest.mark.expect_log("is corrupt and was dropped")
async def test_a_whole_chunk_in_the_wrong_place(tmp_path: Path) -> None:
    """A sound chunk of the same namespace is not served under another's key."""
    chain = await stored_before(tmp_path, MIB, 2)
    async with open_table(tmp_path, MIB) as (store, table):
        one, other = (table.chunks[key] for key in chain.keys)
        overwrite(tmp_path, other.nvme, (tmp_path / "nvme" / VOLUME).read_bytes()[one.nvme :][: one.length])
        promotion = await promoted(store, other)
        assert promotion is not None
        assert isinstance(promotion.error, CorruptChunk)
        assert set(table.chunks) == {one.key}


@pytest.mark.expect_log("is corrupt and was dropped")
@pytest.mark.parametrize("fill", [0, 0xFF])
async def test_a_torn_write(tmp_path: Path, fill: int) -> None:
    """The second half of an extent was never written."""
    chain = await stored_before(tmp_path, MIB, 1)
    async with open_table(tmp_path, MIB) as (store, table):
        (chunk,) = table.chunks.values()
        overwrite(tmp_path, chunk.nvme + chunk.length // 2, bytes([fill]) * (chunk.length // 2))
        with pytest.raises(CorruptChunk):
            await read_all(store, chunk)
        assert chain.keys[0] not in table.chunks


@pytest.mark.expect_log("is corrupt and was dropped")
async def test_damage_in_ram(tmp_path: Path) -> None:
    """A client that saw wrong bytes in the arena is believed only after a look; then the chunk goes from all tiers."""
    chain = chain_of(NS, 2)
    async with open_table(tmp_path) as (store, table):
        await store_chain(store, table, chain)
        for key in chain.keys:
            await store.examine(table.chunks[key])
        assert len(table.chunks) == 2
        chunk = table.chunks[chain.keys[0]]
        store.arena.view[chunk.ram + chunk.length // 2] ^= 1
        await store.examine(chunk)
        assert set(table.chunks) == {chain.keys[1]}
        assert store.counters.corrupt == 1


# devices that fail


@pytest.mark.expect_log("could not be read")
@pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT, errno.EMFILE])
@pytest.mark.parametrize("how", ["promote", "read", "facts", "examine"])
async def test_an_unreadable_chunk_is_a_miss_and_stays(tmp_path: Path, how: str, number: int) -> None:
    """An error of the device proves nothing about the bytes: nothing is deleted, and the next read may succeed."""
    chain = await stored_before(tmp_path, NS, 2)
    system = FaultySystem()
    async with open_table(tmp_path, system=system) as (store, table):
        chunk = table.chunks[chain.keys[0]]
        system.read_error = number
        if how == "promote":
            promotion = await promoted(store, chunk)
            assert promotion is not None
            assert isinstance(promotion.error, UnavailableError)
        elif how == "examine":
            await store.examine(chunk)
        else:
            store.lease(chunk)
            with pytest.raises(UnavailableError):
                await (store.facts(chunk) if how == "facts" else store.read(chunk, 0, 10))
            store.release(chunk)
        assert store.counters.io_errors == 1
        assert store.counters.corrupt == 0
        assert set(table.chunks) == set(chain.keys)
        assert store.statistics().ram.used_bytes == 0
        system.read_error = 0
        assert is_right(await read_all(store, chunk), chain, 0, NS)
        promotion = await promoted(store, chunk)
        assert promotion is not None
        assert promotion.error is None


@pytest.mark.expect_log("could not be read")
@pytest.mark.parametrize("piece", [0, 1, 2])
async def test_one_bad_piece_of_many(tmp_path: Path, piece: int) -> None:
    """Whichever piece cannot be read, the header's included, the chunk is kept, and the others of the load are there."""
    large = sized_namespace(2 << 20, num_layers=8)
    chain = await stored_before(tmp_path, large, 2)
    system = FaultySystem()
    async with open_table(tmp_path, large, system, io_threads=4) as (store, table):
        chunk, other = (table.chunks[key] for key in chain.keys)
        for _ in range(20):
            store.lease(chunk)
            (promotion,) = store.promote([chunk])
            store.release(chunk)
            assert promotion is not None
            system.bad_reads = {chunk.nvme + promotion.pieces[piece].begin}
            await eventually(lambda p=promotion: p.num_left == 0)
            assert store.counters.corrupt == 0
            if promotion.error is None:  # it was read before the fault came: once more
                store._residency.ram.drop(chunk)
                continue
            assert isinstance(promotion.error, UnavailableError)
        assert chain.keys[0] in table.chunks
        good = await promoted(store, other)
        assert good is not None
        assert good.error is None
        assert store.statistics().ram.used_bytes == other.length


@pytest.mark.expect_log("could not be read")
async def test_a_failed_chunk_can_be_asked_for_again_while_others_of_its_load_are_read(tmp_path: Path) -> None:
    """A second promotion may begin before the first load has ended; the daemon lives."""
    chain = await stored_before(tmp_path, MIB, 2)
    gated = GatedSystem()
    async with open_table(tmp_path, MIB, gated, io_threads=4) as (store, table):
        chunk, slow = (table.chunks[key] for key in chain.keys)
        gated.bad_reads = {chunk.nvme}
        gated.is_slow = lambda offset: slow.nvme <= offset < slow.nvme + slow.length
        gated.gate.clear()
        for each in (chunk, slow):
            store.lease(each)
        first, behind = store.promote([chunk, slow])
        assert first is not None
        assert behind is not None
        await eventually(lambda: first.num_left == 0)
        gated.is_slow = lambda offset: offset >= SUPERBLOCK_BYTES
        gated.bad_reads = set()
        (again,) = store.promote([chunk])
        assert again is not None
        assert again is not first
        gated.release_once(slow)
        await eventually(lambda: behind.num_left == 0)
        gated.gate.set()
        await again.wait_for_layers(4)
        assert again.error is None
        for each in (chunk, slow):
            store.release(each)


class GatedSystem(FaultySystem):
    """Reads for which `is_slow` holds wait for the gate, or for their range to be released."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        super().__init__()
        self.is_slow: Callable[[int], bool] = lambda offset: False
        self._released: range = range(0)

    def open_gates(self) -> None:
        super().open_gates()
        self.gate.set()

    def release_once(self, chunk: Chunk) -> None:
        self._released = range(chunk.nvme, chunk.nvme + chunk.length)

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:  # type: ignore[override]
        while self.is_slow(offset) and not self.gate.wait(0.005):
            if offset in self._released:
                break
        return super().preadv(fd, buffers, offset)


@pytest.mark.expect_log("could not be read")
async def test_layers_that_were_announced_stay_while_they_are_held(tmp_path: Path) -> None:
    """A load whose later layers fail keeps the bytes of its earlier ones until it is released: somebody copies them."""
    large = sized_namespace(2 << 20, num_layers=8)
    chain = await stored_before(tmp_path, large, 1)
    system = FaultySystem()
    async with open_table(tmp_path, large, system, io_threads=1) as (store, table):
        chunk = table.chunks[chain.keys[0]]
        store.lease(chunk)
        (promotion,) = store.promote([chunk])
        assert promotion is not None
        system.bad_reads = {chunk.nvme + promotion.pieces[-1].begin}
        await eventually(lambda: promotion.num_left == 0)
        assert isinstance(promotion.error, UnavailableError)
        assert 0 < promotion.layers < 8
        geo = geometry(large, 16)
        begin, end = geo.layer_range(0)
        before = bytes(promotion.buffer[begin:end])
        for seed in range(1, 6):
            await store_chunk(store, table, new_chunks(chain_of(large, 1, seed))[0])
            await store.flush()
        assert bytes(promotion.buffer[begin:end]) == before == payload_of(chain.chains[0], geo)[: end - begin]
        used = store.statistics().ram.used_bytes
        store.release(chunk)
        assert store.statistics().ram.used_bytes == used - chunk.length


@pytest.mark.expect_log("is corrupt and was dropped")
async def test_a_truncated_volume(tmp_path: Path) -> None:
    """A volume that lost its end: what was there is proven bad and dropped, everything else goes on."""
    chain = await stored_before(tmp_path, MIB, 3)
    async with open_table(tmp_path, MIB) as (store, table):
        last = max(table.chunks.values(), key=lambda chunk: chunk.nvme)
        os.truncate(tmp_path / "nvme" / VOLUME, last.nvme + 8192)
        promotion = await promoted(store, last)
        assert promotion is not None
        assert isinstance(promotion.error, CorruptChunk)
        assert last.is_removed
        assert len(table.chunks) == 2
        for chunk in table.chunks.values():
            assert is_right(await read_all(store, chunk), chain, chunk.position, MIB)
