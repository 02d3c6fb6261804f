"""Chunks that are stored and loaded whole: room asked for ahead, payloads without checksums, copies verified in place."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvfs.catalog import ChunkTable
from kvfs.chunk import geometry
from kvfs.client import Client, fill_all
from kvfs.copying import copy_layers
from kvfs.errors import CorruptChunk, UnavailableError, UsageError
from kvfs.keys import KeyChain
from kvfs.messages import StoreStatus, Tier
from kvfs.namespace import Namespace
from kvfs.store import Store
from kvfs.testing import (
    FaultySystem,
    chain_of,
    checksums_of,
    eventually,
    new_chunks,
    payload_of,
    sized_namespace,
    store_chain,
    tiny_namespace,
)

from .clients import client_of, in_thread, serving

TINY = tiny_namespace()
LONG = sized_namespace(3 << 20, num_layers=3)  # layers longer than what is copied at once
R = TypeVar("R")


@asynccontextmanager
async def running(
    directory: Path, namespace: Namespace, system: FaultySystem | None = None, **settings: Any
) -> AsyncIterator[tuple[Store, ChunkTable]]:
    options = {"ram": 64 << 20, "nvme": 96 << 20, "window_bytes": 32 << 20, **settings}
    async with serving(directory, namespace, system, **options) as (store, table, _):
        yield store, table


def store_whole(client: Client, chain: KeyChain) -> list[StoreStatus]:
    """Two chunks at a time; room for the next two is asked for before these are filled."""
    new = new_chunks(chain)
    groups = [new[i : i + 2] for i in range(0, len(new), 2)]
    statuses = []
    reserving = client.store_later(groups[0])
    for number in range(len(groups)):
        reservations = reserving.wait()
        assert reserving.wait() == reservations
        reserving = client.store_later(groups[number + 1] if number + 1 < len(groups) else [])
        for reservation in reservations:
            reservation.fill(memoryview(payload_of(reservation.chunk.chain, reservation.geometry)))  # type: ignore[arg-type]
        statuses += client.publish(reservations)
    return statuses


def load_whole(client: Client, chain: KeyChain, cuts: tuple[int, ...], *, stream: bool) -> list[Tier]:
    """Copy every chunk, layers up to each cut at a time, and compare."""
    load = client.load(chain.chains, stream=stream)
    assert load is not None
    with load:
        for index, value in enumerate(chain.chains):
            geo = load.geometry(index)
            target = memoryview(bytearray(geo.payload_bytes + 7))
            size = first = 0
            for stop in cuts:
                size += load.copy(index, target[size:], first, stop)
                first = stop
            assert size == geo.payload_bytes
            assert bytes(target[:size]) == payload_of(value, geo)
            assert bytes(target[size:]) == bytes(7)
        return load.sources


def load_parts(client: Client, chain: KeyChain) -> list[Tier]:
    """Copy what arrives as it arrives, and compare; every layer of every stored chunk arrives once."""
    load = client.load(chain.chains, stream=True)
    assert load is not None
    with load:
        found: dict[int, bytes] = {}
        for index, first, stop in load.parts():
            geo = load.geometry(index)
            target = memoryview(bytearray(geo.bounds[stop] - geo.bounds[first]))
            assert load.copy(index, target, first, stop) == len(target)
            found[index] = found.get(index, b"") + bytes(target)
        stored = [index for index, source in enumerate(load.sources) if source is not Tier.NONE]
        assert sorted(found) == stored
        assert all(found[index] == payload_of(chain.chains[index], load.geometry(index)) for index in stored)
        return load.sources


def load_all(client: Client, chain: KeyChain, num_helpers: int | None) -> tuple[list[Tier], dict[int, str]]:
    """Copy all at once, and compare what is said to be right; returns whence it came, and what failed."""
    load = client.load(chain.chains, stream=True)
    assert load is not None
    with load:
        geo = geometry(client.namespace, client.namespace.identity.tokens_per_chunk)
        target = memoryview(bytearray(load.num_chunks * geo.payload_bytes))

        def place(index: int, first: int, stop: int) -> memoryview:
            begin = index * geo.payload_bytes
            return target[begin + geo.bounds[first] : begin + geo.bounds[stop]]

        failed = load.copy_all(place, num_helpers=num_helpers)
        for index, source in enumerate(load.sources):
            if source is not Tier.NONE and index not in failed:
                begin = index * geo.payload_bytes
                assert bytes(target[begin : begin + geo.payload_bytes]) == payload_of(chain.chains[index], geo)
        return load.sources, {index: type(error).__name__ for index, error in failed.items()}


@pytest.mark.parametrize("access", ["isolated", "trusted"])
@pytest.mark.parametrize("namespace", [TINY, LONG], ids=["short layers", "long layers"])
async def test_store_and_load_whole(tmp_path: Path, namespace: Namespace, access: str) -> None:
    """What was stored whole, without checksums of its client's, comes back whole: from RAM, and later from NVMe."""
    chain = chain_of(namespace, 5)
    layers = namespace.num_layers
    async with running(tmp_path, namespace, access=access) as (store, _):
        with client_of(tmp_path, namespace) as client:
            assert await in_thread(store_whole, client, chain) == [StoreStatus.STORED] * 5
            assert await in_thread(lambda: load_whole(client, chain, (layers,), stream=False)) == [Tier.RAM] * 5
            assert client.statistics.failures == client.statistics.refused == 0
        assert await store.flush()
    async with running(tmp_path, namespace, access=access):
        with client_of(tmp_path, namespace) as client:
            cuts = (*range(1, layers), layers)
            assert await in_thread(lambda: load_whole(client, chain, cuts, stream=True)) == [Tier.NVME] * 5
            longer = chain_of(namespace, 7)
            assert await in_thread(load_parts, client, longer) == [Tier.RAM] * 5 + [Tier.NONE] * 2
    async with running(tmp_path, namespace, access=access):
        with client_of(tmp_path, namespace) as client:
            assert await in_thread(load_parts, client, longer) == [Tier.NVME] * 5 + [Tier.NONE] * 2


@pytest.mark.parametrize("num_helpers", [None, 0, 1, 3])
async def test_copy_all_at_once(tmp_path: Path, num_helpers: int | None) -> None:
    """Whoever helps, all that is stored is copied to its place: from NVMe, and from RAM."""
    chain, longer = chain_of(LONG, 6), chain_of(LONG, 8)
    async with running(tmp_path, LONG) as (store, table):
        await store_chain(store, table, chain)
        assert await store.flush()
    async with running(tmp_path, LONG):
        with client_of(tmp_path, LONG) as client:
            for tier in (Tier.NVME, Tier.RAM):
                found = await in_thread(load_all, client, longer, num_helpers)
                assert found == ([tier] * 6 + [Tier.NONE] * 2, {})


@pytest.mark.parametrize("access", ["isolated", "trusted"])
@pytest.mark.parametrize("num_helpers", [None, 0, 1, 3])
async def test_fill_all_at_once(tmp_path: Path, num_helpers: int | None, access: str) -> None:
    """Whoever helps, each payload is in its place, with its checksums; one of another length is refused, and none moves."""
    namespace = sized_namespace(9 << 20, num_layers=3)  # a helper may take each layer
    chain = chain_of(namespace, 3)
    async with running(tmp_path, namespace, access=access):
        with client_of(tmp_path, namespace) as client:
            reservations = await in_thread(client.store, new_chunks(chain))
            payloads = [memoryview(payload_of(one.chunk.chain, one.geometry)) for one in reservations]
            with pytest.raises(UsageError, match="payload"):
                fill_all(reservations, [*payloads[:2], payloads[2][1:]], num_helpers=num_helpers)
            first = reservations[0].payload
            assert first is not None
            assert not any(first[:4096])
            await in_thread(lambda: fill_all(reservations, payloads, num_helpers=num_helpers))
            assert await in_thread(client.publish, reservations) == [StoreStatus.STORED] * 3
            assert await in_thread(load_all, client, chain, num_helpers) == ([Tier.RAM] * 3, {})


@pytest.mark.parametrize("num_helpers", [0, 1])
@pytest.mark.expect_log("is corrupt and was dropped")
async def test_wrong_bytes_are_found_while_all_are_copied(tmp_path: Path, num_helpers: int) -> None:
    """They fail their chunk alone; a place that is too short is the caller's mistake, and ends it."""
    chain = chain_of(LONG, 4)
    async with running(tmp_path, LONG) as (store, table):
        await store_chain(store, table, chain)
        store.arena.view[table.chunks[chain.keys[2]].ram + geometry(LONG, 16).layer_range(1)[0]] ^= 1
        with client_of(tmp_path, LONG) as client:
            load = await in_thread(client.load, chain.chains)
            assert load is not None
            with pytest.raises(UsageError, match="do not fit"):
                await in_thread(lambda: load.copy_all(lambda *_: memoryview(bytearray(9)), num_helpers=num_helpers))
            await in_thread(load.close)
            assert await in_thread(load_all, client, chain, num_helpers) == ([Tier.RAM] * 4, {2: "CorruptChunk"})
        assert set(table.chunks) == {chain.keys[i] for i in (0, 1, 3)}


async def test_layer_by_layer(tmp_path: Path) -> None:
    """What is said to be there of all chunks is there, and right: cold, in steps; warm, at once; of what is not stored nothing."""
    namespace = sized_namespace(2 << 20, num_layers=8)
    chain, longer = chain_of(namespace, 5), chain_of(namespace, 6)
    async with running(tmp_path, namespace) as (store, table):
        await store_chain(store, table, chain)
        assert await store.flush()
    geo = geometry(namespace, 16)

    def load(client: Client, wanted: KeyChain) -> tuple[set[Tier], list[int]]:
        target = memoryview(bytearray(len(wanted.chains) * geo.payload_bytes))
        loading = client.load(wanted.chains, stream=True)
        assert loading is not None
        steps = []
        with loading:

            def place(index: int, first: int, stop: int) -> memoryview:
                begin = index * geo.payload_bytes
                return target[begin + geo.bounds[first] : begin + geo.bounds[stop]]

            for num_layers in loading.layers(place):
                steps.append(num_layers)
                for index in range(5):
                    begin, size = index * geo.payload_bytes, geo.bounds[num_layers]
                    assert target[begin : begin + size] == payload_of(chain.chains[index], geo)[:size]
            return set(loading.sources[:5]), steps

    async with running(tmp_path, namespace):
        with client_of(tmp_path, namespace) as client:
            tiers, steps = await in_thread(load, client, longer)
            assert (tiers, steps[-1]) == ({Tier.NVME}, 8)
            assert steps == sorted(set(steps))
            assert await in_thread(load, client, longer) == ({Tier.RAM}, [8])


@pytest.mark.expect_log("is corrupt and was dropped")
async def test_layer_by_layer_up_to_wrong_bytes(tmp_path: Path) -> None:
    """A chunk that is wrong ends it: nothing is said of a layer that one chunk lacks."""
    chain = chain_of(LONG, 4)
    async with running(tmp_path, LONG) as (store, table):
        await store_chain(store, table, chain)
        store.arena.view[table.chunks[chain.keys[2]].ram + geometry(LONG, 16).layer_range(1)[0]] ^= 1
        target = memoryview(bytearray(geometry(LONG, 16).payload_bytes))

        def load(client: Client) -> list[int]:
            with client.load(chain.chains) as loading:  # type: ignore[union-attr]
                return list(loading.layers(lambda *_: target))

        with client_of(tmp_path, LONG) as client:
            with pytest.raises(CorruptChunk):
                await in_thread(load, client)
            await eventually(lambda: chain.keys[2] not in table.chunks)


@pytest.mark.expect_log("could not be read")
async def test_parts_of_a_chunk_that_cannot_be_read(tmp_path: Path) -> None:
    """EIO under one chunk: its part comes too, and its copy raises; the parts of the others are right."""
    chain = chain_of(LONG, 4)
    async with running(tmp_path, LONG) as (store, table):
        await store_chain(store, table, chain)
        assert await store.flush()
    system = FaultySystem()
    async with running(tmp_path, LONG, system) as (_, table):
        system.bad_reads = {table.chunks[chain.keys[1]].nvme}

        def load() -> dict[int, bool]:
            is_right: dict[int, bool] = {}
            with client_of(tmp_path, LONG) as client:
                loading = client.load(chain.chains, stream=True)
                assert loading is not None
                with loading:
                    for index, first, stop in loading.parts():
                        target = memoryview(bytearray(geometry(LONG, 16).payload_bytes))
                        try:
                            size = loading.copy(index, target, first, stop)
                        except UnavailableError:
                            is_right[index] = False
                            continue
                        begin = loading.geometry(index).bounds[first]
                        expected = payload_of(chain.chains[index], loading.geometry(index))[begin : begin + size]
                        is_right[index] = is_right.get(index, True) and bytes(target[:size]) == expected
            return is_right

        assert await in_thread(load) == {0: True, 1: False, 2: True, 3: True}


@pytest.mark.expect_log("is corrupt and was dropped")
async def test_wrong_bytes_are_found_in_the_copy(tmp_path: Path) -> None:
    """A layer that is wrong in RAM fails the copy that holds it, and no other; the daemon hears of it and drops it."""
    chain = chain_of(TINY, 2)
    async with running(tmp_path, TINY) as (store, table):
        await store_chain(store, table, chain)
        geo = geometry(TINY, 16)
        store.arena.view[table.chunks[chain.keys[0]].ram + geo.layer_range(2)[1] - 1] ^= 1
        target = memoryview(bytearray(geo.payload_bytes))
        with client_of(tmp_path, TINY) as client:
            load = await in_thread(client.load, chain.chains)
            assert load is not None
            assert await in_thread(load.copy, 0, target, 0, 2) == geo.bounds[2]
            with pytest.raises(CorruptChunk):
                await in_thread(load.copy, 0, target)
            assert await in_thread(load.copy, 1, target) == geo.payload_bytes
            assert set(table.chunks) == {chain.keys[1]}
            await in_thread(load.close)


async def test_what_cannot_be_copied(tmp_path: Path) -> None:
    """A target that is too short, a payload of another length, a chunk that is not there: an error each, no byte moves."""
    chain = chain_of(TINY, 2)
    async with running(tmp_path, TINY) as (store, table):
        await store_chain(store, table, chain_of(TINY, 1))
        with client_of(tmp_path, TINY) as client:
            load = await in_thread(client.load, chain.chains)
            assert load is not None
            target = memoryview(bytearray(geometry(TINY, 16).payload_bytes - 1))
            with pytest.raises(UsageError, match="do not fit"):
                await in_thread(load.copy, 0, target)
            with pytest.raises(UnavailableError, match="not stored"):
                await in_thread(load.copy, 1, target)
            assert not any(target)
            await in_thread(load.close)
            (reservation,) = await in_thread(client.store, new_chunks(chain, 1))
            with pytest.raises(UsageError, match="payload"):
                reservation.fill(target)
            client.abort([reservation])


async def test_room_that_nobody_waited_for_goes_with_the_session(tmp_path: Path) -> None:
    """A client that asks for room and leaves holds nothing afterwards."""
    async with running(tmp_path, LONG) as (store, _):

        def ask_and_leave() -> None:
            with client_of(tmp_path, LONG) as client:
                client.store_later(new_chunks(chain_of(LONG, 3)))
                assert client.match(chain_of(LONG, 1).chains).count == 0  # the daemon has seen the request before this

        await in_thread(ask_and_leave)
        await eventually(lambda: not store.statistics().ram.used_bytes)


@pytest.mark.expect_log("does not answer, going on without it")
async def test_asking_for_room_without_a_cache(tmp_path: Path) -> None:
    """No daemon: everything is refused, nothing raises."""
    with client_of(tmp_path, TINY) as client:
        client.deadline_s = 0.2
        (reservation,) = await in_thread(lambda: client.store_later(new_chunks(chain_of(TINY, 1))).wait())
        assert reservation.status is StoreStatus.REFUSED
        assert client.publish([reservation]) == [StoreStatus.REFUSED]


@pytest.mark.parametrize("namespace", [TINY, LONG, sized_namespace(1 << 20, num_layers=7)], ids=["a", "b", "c"])
def test_copy_layers(namespace: Namespace) -> None:
    """Whatever part is copied, its bytes and checksums are those of the layers, and nothing else is written."""
    geo = geometry(namespace, 16)
    payload = payload_of(chain_of(namespace, 1).chains[0], geo)
    expected = checksums_of(payload, geo)
    for first in range(namespace.num_layers):
        for stop in range(first, namespace.num_layers + 1):
            begin, end = geo.bounds[first], geo.bounds[stop]
            target = bytearray(end - begin + 3)
            assert copy_layers(geo, first, stop, memoryview(payload)[begin:], memoryview(target)) == struct.pack(
                f">{stop - first}Q", *expected[first:stop]
            )
            assert target == payload[begin:end] + bytes(3)


def test_layers_are_not_copied_past_the_end() -> None:
    """Of memory that is too short, or that must not be written, nothing is."""
    geo = geometry(TINY, 16)
    payload = memoryview(payload_of(chain_of(TINY, 1).chains[0], geo))
    short, target = bytearray(geo.payload_bytes - 1), bytearray(geo.payload_bytes)
    for source, to in (
        (payload, memoryview(short)),
        (payload[1:], memoryview(target)),
        (payload, memoryview(target).toreadonly()),
    ):
        with pytest.raises(ValueError, match="cannot be copied"):
            copy_layers(geo, 0, TINY.num_layers, source, to)
    assert not any(short)
    assert not any(target)
