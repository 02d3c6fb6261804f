"""Clients that store in place (`access = "trusted"`), and publishes that nobody waits for yet."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvfs import namespace as namespaces
from kvfs.catalog import ChunkTable
from kvfs.client import Client, Publishing
from kvfs.errors import CorruptChunk, UnavailableError
from kvfs.messages import StoreStatus, Tier
from kvfs.store import Store
from kvfs.testing import (
    DEADLINE_S,
    chain_of,
    eventually,
    layer_of,
    new_chunks,
    payload_of,
    plain_mount,
    sized_namespace,
)

from .clients import client_of, in_thread, serving

MIB = sized_namespace(1 << 20)

_DIES_WITH_A_SLOT = """
import sys, time
from kvfs import namespace
from kvfs.client import Client
from kvfs.testing import chain_of, new_chunks
space = namespace.decode(sys.stdin.buffer.read())
client = Client(sys.argv[1], space, deadline_s=60.0)
(reservation,) = client.store(new_chunks(chain_of(space, 1)))
reservation.payload[:4] = b"half"
connection = reservation.connection
connection._socket.close()  # the session ends, the process and its mapping do not
print("reserved", flush=True)
time.sleep(60)
"""


@asynccontextmanager
async def trusted(directory: Path, **settings: Any) -> AsyncIterator[tuple[Store, ChunkTable]]:
    async with serving(directory, MIB, access="trusted", **settings) as (store, table, _):
        yield store, table


def fill(client: Client, seed: int, num_chunks: int = 1) -> Publishing:
    """Reserve, write, seal, hand over."""
    reservations = client.store(new_chunks(chain_of(MIB, num_chunks, seed)))
    for reservation in reservations:
        assert reservation.payload is not None
        reservation.payload[:] = payload_of(reservation.chunk.chain, reservation.geometry)  # type: ignore[arg-type]
        for layer in range(len(reservation.geometry.layers)):
            reservation.seal(layer)
    return client.publish_later(reservations)


def assert_right(client: Client, seed: int, num_chunks: int, source: Tier) -> None:
    chain = chain_of(MIB, num_chunks, seed)
    load = client.load(chain.chains)
    assert load is not None
    with load:
        assert load.sources == [source] * num_chunks
        for index, value in enumerate(chain.chains):
            for layer in range(MIB.num_layers):
                assert bytes(load.layer(index, layer)) == layer_of(value, load.geometry(index), layer)


@pytest.mark.parametrize("huge_pages", ["auto", "never"])
async def test_what_was_stored_in_place_is_there_after_a_restart(tmp_path: Path, huge_pages: str) -> None:
    """A trusted client writes where the chunk stays; others find it, and the volume has it."""
    async with trusted(tmp_path, huge_pages=huge_pages) as (store, _):
        with client_of(tmp_path, MIB) as one, client_of(tmp_path, MIB) as other:
            publishing = await in_thread(fill, one, 1, 3)
            assert await in_thread(publishing.wait) == [StoreStatus.STORED] * 3
            await in_thread(assert_right, other, 1, 3, Tier.RAM)
        assert await store.flush()
    async with trusted(tmp_path) as (store, _):
        with client_of(tmp_path, MIB) as client:
            await in_thread(assert_right, client, 1, 3, Tier.NVME)


@pytest.mark.expect_log("is corrupt and was dropped")
@pytest.mark.parametrize("tier", [Tier.RAM, Tier.NVME])
async def test_wrong_bytes_in_place_are_a_miss(tmp_path: Path, tier: Tier) -> None:
    """Whoever seals a layer and writes on is trusted; who loads the chunk looks, from whichever tier, and it is gone."""

    def spoil() -> list[StoreStatus]:
        with client_of(tmp_path, MIB) as client:
            (reservation,) = client.store(new_chunks(chain_of(MIB, 1)))
            assert reservation.payload is not None
            reservation.payload[:] = bytes(len(reservation.payload))
            for layer in range(MIB.num_layers):
                reservation.seal(layer)
            reservation.payload[100] = 1
            return client.publish([reservation])

    def load() -> None:
        with client_of(tmp_path, MIB) as client:
            load = client.load(chain_of(MIB, 1).chains)
            assert load is not None
            with load, pytest.raises((CorruptChunk, UnavailableError)):
                load.layer(0, 0)

    async with trusted(tmp_path) as (store, table):
        assert await in_thread(spoil) == [StoreStatus.STORED]
        assert await store.flush()
        if tier is Tier.RAM:
            await in_thread(load)
            await eventually(lambda: not table.chunks)
    if tier is Tier.NVME:
        async with trusted(tmp_path) as (store, table):
            await in_thread(load)
            assert not next(iter(store.catalog.tables.values())).chunks


async def test_whoever_has_time_takes_the_checksums(tmp_path: Path) -> None:
    """A whole payload is sealed as it is copied if the daemon is busy with earlier ones; either way it is right."""
    large = sized_namespace(3 << 20)
    chain = chain_of(large, 2)

    def check(client: Client) -> None:
        load = client.load(chain.chains)
        assert load is not None
        with load:
            for index, value in enumerate(chain.chains):
                for layer in range(large.num_layers):
                    assert bytes(load.layer(index, layer)) == layer_of(value, load.geometry(index), layer)

    async with trusted(tmp_path, ram=32 << 20, nvme=32 << 20, window_bytes=16 << 20) as (store, _):
        with client_of(tmp_path, large) as client:
            first, second = await in_thread(client.store, new_chunks(chain))
            first.fill(memoryview(payload_of(chain.chains[0], first.geometry)))
            assert first.finished().checksums == b""
            publishing = client.publish_later([first])  # which the daemon cannot answer: this is its thread
            second.fill(memoryview(payload_of(chain.chains[1], second.geometry)))
            assert len(second.finished().checksums) == 8 * large.num_layers
            assert await in_thread(client.publish, [second]) == [StoreStatus.STORED]
            assert await in_thread(publishing.wait) == [StoreStatus.STORED]
            await in_thread(check, client)
            assert not client.statistics.failures
        assert store.counters.stores_bad == 0


async def test_a_trusted_client_has_a_budget(tmp_path: Path) -> None:
    """What is reserved at once is bounded by the window setting, also without a window."""
    async with trusted(tmp_path, window_bytes=2 << 20) as (store, _):

        def reserve() -> list[StoreStatus]:
            with client_of(tmp_path, MIB) as client:
                assert client.window_bytes() == 2 << 20
                reservations = client.store(new_chunks(chain_of(MIB, 3)))
                statuses = [reservation.status for reservation in reservations]
                client.abort(reservations)
                return statuses

        expected = [StoreStatus.STORED, StoreStatus.STORED, StoreStatus.REFUSED]
        assert await in_thread(reserve) == expected
        assert await in_thread(reserve) == expected
        assert store.statistics().ram.used_bytes == 0


async def test_reserved_memory_waits_for_the_end_of_its_client(tmp_path: Path) -> None:
    """A session that ends with chunks half written: nobody else gets that memory while the process may still write."""
    async with trusted(tmp_path) as (store, _):
        with subprocess.Popen(  # noqa: ASYNC220 - waited for in threads
            [sys.executable, "-c", _DIES_WITH_A_SLOT, str(plain_mount(tmp_path))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(namespaces.encode(MIB))
                process.stdin.close()
                assert await in_thread(process.stdout.readline) == b"reserved\n"
                with client_of(
                    tmp_path, MIB
                ) as client:  # a session that came and went: the other's end was seen before
                    publishing = await in_thread(fill, client, 9)
                    await in_thread(publishing.wait)
                assert store.statistics().ram.used_bytes == 2 * next(iter(store.catalog.chunks())).length
            finally:
                process.kill()
            await in_thread(process.wait)
        await eventually(lambda: store.statistics().ram.used_bytes == next(iter(store.catalog.chunks())).length)
        assert store.counters.stores_aborted == 1


async def test_publishes_that_overlap(tmp_path: Path) -> None:
    """Several publishes are under way, other requests go on meanwhile, each wait gets its own answer."""
    async with trusted(tmp_path, ram=32 << 20, window_bytes=16 << 20) as (store, table):

        def overlap() -> None:
            with client_of(tmp_path, MIB) as client:
                under_way = [fill(client, seed, 2) for seed in range(6)]
                assert client.match(chain_of(MIB, 2, 99).chains).count == 0
                for publishing in reversed(under_way):
                    assert publishing.wait() == [StoreStatus.STORED] * 2
                    assert publishing.wait() == [StoreStatus.STORED] * 2
                for seed in range(6):
                    assert_right(client, seed, 2, Tier.RAM)
                assert client.statistics.failures == 0

        await in_thread(overlap)
        assert len(table.chunks) == 12
        assert store.counters.session_errors == 0


async def test_publishes_become_visible_in_order(tmp_path: Path) -> None:
    """A long chain handed over in many messages at once is one prefix: no part is visible before what it is built on."""
    small = sized_namespace(64 << 10)
    room = {"ram": 96 << 20, "nvme": 96 << 20, "window_bytes": 64 << 20}  # for all of it: nothing is evicted
    async with trusted(tmp_path, **room) as (store, _):

        def hand_over() -> None:
            with Client(plain_mount(tmp_path), small, deadline_s=DEADLINE_S) as client:
                reservations = client.store(new_chunks(chain_of(small, 900)))
                for reservation in reservations:
                    assert reservation.payload is not None
                    reservation.payload[:] = payload_of(reservation.chunk.chain, reservation.geometry)  # type: ignore[arg-type]
                assert set(client.publish(reservations)) == {StoreStatus.STORED}

        await in_thread(hand_over)
        (directory,) = store.catalog.tables[small.directory].prefixes.directories.values()
        assert directory.num_chunks == 900
        assert not directory.subdirectories


async def test_an_isolated_client_of_a_trusting_daemon(tmp_path: Path) -> None:
    """Trust goes by user: whoever is not the daemon's user gets a read-only arena and a window."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    async with trusted(tmp_path, allow_other=True) as (_, table):
        for path in (tmp_path, *tmp_path.parents):
            if path.stat().st_uid == 0 and path.stat().st_mode & 0o005 != 0o005:
                path.chmod(0o755)
        plain_mount(tmp_path)
        pid = os.fork()
        if pid == 0:  # in a child without trio's help: become nobody, store, say how it went by the exit code
            code = 9
            try:
                os.setgid(65534)
                os.setuid(65534)
                with client_of(tmp_path, MIB) as client:
                    publishing = fill(client, 5)
                    connection = publishing._parts[0][0]
                    is_trusted = connection.welcome is not None and connection.welcome.is_trusted
                    code = 0 if publishing.wait() == [StoreStatus.STORED] and not is_trusted else 1
            finally:
                os._exit(code)
        _, status = await in_thread(os.waitpid, pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert len(table.chunks) == 1
