"""Clients and sessions over a real socket: what works, who holds what, and what a hostile peer can do to the others."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import trio

from kvfs import messages as m
from kvfs import namespace as namespaces
from kvfs.catalog import ChunkTable
from kvfs.chunk import geometry
from kvfs.client import Client
from kvfs.errors import CorruptChunk, UnavailableError, UsageError
from kvfs.keys import KeyChain
from kvfs.messages import StoreStatus, Tier
from kvfs.mount.session import Sessions
from kvfs.namespace import Identity, LayerRun, Namespace, TensorSpec
from kvfs.store import Store
from kvfs.system import System
from kvfs.testing import (
    DEADLINE_S,
    FaultySystem,
    chain_of,
    checksums_of,
    eventually,
    layer_of,
    new_chunks,
    open_table,
    payload_of,
    sized_namespace,
    socket_path,
    store_chain,
    store_chunk,
    tiny_namespace,
)
from kvfs.testing.processes import num_descriptors

from .clients import client_of, in_thread, serving, store_prompt

NS = tiny_namespace()
MIB = sized_namespace(1 << 20)
R = TypeVar("R")


@dataclass
class Running:
    """A store with its session socket, in this process."""

    store: Store
    table: ChunkTable
    sessions: Sessions
    directory: Path

    def client(self, namespace: Namespace | None = None, **options: Any) -> Client:
        return client_of(self.directory, namespace or self.table.namespace, **options)


@asynccontextmanager
async def running(
    directory: Path, namespace: Namespace = NS, system: System | None = None, **settings: Any
) -> AsyncIterator[Running]:
    async with serving(directory, namespace, system, **settings) as (store, table, sessions):
        yield Running(store, table, sessions, directory)


def load_all(client: Client, chain: KeyChain, *, stream: bool = False) -> list[Tier]:
    """Load a chain and compare every layer with what its chain value calls for; returns where the chunks were."""
    load = client.load(chain.chains, stream=stream)
    if load is None:
        return [Tier.NONE] * len(chain.chains)
    with load:
        for layer in range(client.namespace.num_layers):
            for index, chain_value in enumerate(chain.chains):
                if load.sources[index] is not Tier.NONE:
                    assert bytes(load.layer(index, layer)) == layer_of(chain_value, load.geometry(index), layer)
        return load.sources


# what works


@pytest.mark.parametrize("stream", [False, True])
async def test_store_match_load(tmp_path: Path, stream: bool) -> None:
    """What one client stores another finds, from RAM, and after a restart from NVMe; everything is given back."""
    chain = chain_of(NS, 6)
    async with running(tmp_path) as daemon:
        with daemon.client() as one, daemon.client() as other:
            assert await in_thread(store_prompt, one, chain) == [StoreStatus.STORED] * 6
            assert await in_thread(store_prompt, one, chain) == [StoreStatus.EXISTS] * 6
            lease = await in_thread(other.match, chain.chains)
            assert lease.count == 6
            await in_thread(lease.release)
            assert await in_thread(lambda: load_all(other, chain, stream=stream)) == [Tier.RAM] * 6
        await eventually(lambda: daemon.sessions.num_open == 0)
    async with running(tmp_path) as daemon:
        with daemon.client() as client:
            assert await in_thread(lambda: load_all(client, chain, stream=stream)) == [Tier.NVME] * 6
            assert await in_thread(lambda: load_all(client, chain, stream=stream)) == [Tier.RAM] * 6
            assert client.statistics.failures == 0
            await eventually(lambda: daemon.store.statistics().num_leases == 0)
            await eventually(lambda: daemon.store.counters.loads_nvme == 6)


async def test_match_stops_at_the_first_missing_chunk(tmp_path: Path) -> None:
    """The longest stored prefix; what lies behind a hole does not count."""
    chain = chain_of(NS, 5)
    async with running(tmp_path) as daemon:
        await store_chain(daemon.store, daemon.table, chain)
        await daemon.store.remove([daemon.table.chunks[chain.keys[3]]])
        with daemon.client() as client:
            lease = await in_thread(client.match, chain.chains)
            assert lease.count == 3
            await in_thread(lease.release)
            load = await in_thread(client.load, chain.chains)
            assert load is not None
            assert [source is Tier.NONE for source in load.sources] == [False, False, False, True, False]
            with pytest.raises(UnavailableError, match="not stored"):
                load.layer(3, 0)
            await in_thread(load.close)


async def test_only_a_load_counts_as_a_hit(tmp_path: Path) -> None:
    """A match, and reads through the mount, teach the policy nothing."""
    chain = chain_of(NS, 1)
    async with running(tmp_path) as daemon:
        await store_chain(daemon.store, daemon.table, chain)
        chunk = daemon.table.chunks[chain.keys[0]]
        with daemon.client() as client:
            await in_thread(lambda: client.match(chain.chains).release())
            assert chunk.hits == 0
            await in_thread(load_all, client, chain)
            await eventually(lambda: chunk.hits == 1)


async def test_a_hole_in_the_window_is_used_again(tmp_path: Path) -> None:
    """Slots come back when chunks are published or aborted: a client stores far more than its window holds."""
    async with running(tmp_path, MIB, ram=16 << 20, nvme=64 << 20, window_bytes=2 << 20) as daemon:
        with daemon.client() as client:
            first = await in_thread(client.store, new_chunks(chain_of(MIB, 3)))
            assert [r.status for r in first] == [StoreStatus.STORED, StoreStatus.STORED, StoreStatus.REFUSED]
            await in_thread(client.abort, first)
            assert daemon.store.counters.stores_aborted >= 2
            for seed in range(1, 9):
                assert await in_thread(store_prompt, client, chain_of(MIB, 1, seed)) == [StoreStatus.STORED]
            assert daemon.store.statistics().ram.used_bytes <= 16 << 20


async def test_wrong_checksums_are_bad(tmp_path: Path) -> None:
    """A client whose bytes do not have its checksums learns it, and the slot is free again."""
    (new,) = new_chunks(chain_of(NS, 1))
    async with running(tmp_path) as daemon, daemon_peer(daemon) as peer:
        await peer.hello_and_window()
        for checksums in (bytes(8 * NS.num_layers), bytes(8), bytes(8 * NS.num_layers - 1), bytes(8000)):
            slots = await peer.ask(m.Store(3, (new,)))
            assert isinstance(slots, m.Slots)
            assert slots.slots[0].status is StoreStatus.STORED
            published = await peer.ask(m.Publish(4, (m.Finished(new.chain[:16], checksums),)))
            assert published == m.Published(4, (StoreStatus.BAD,))
        again = await peer.ask(m.Publish(5, (m.Finished(new.chain[:16], b""),)))
        assert again == m.Published(5, (StoreStatus.UNKNOWN,))
        assert daemon.store.statistics().ram.used_bytes == 0


async def test_two_clients_race_to_store_the_same_chunks(tmp_path: Path) -> None:
    """Both store the same prompt at once: each chunk is there once, both are told something true."""
    chain = chain_of(NS, 30)
    async with running(tmp_path) as daemon:
        results: list[list[StoreStatus]] = []
        with daemon.client() as one, daemon.client() as other:

            async def race(client: Client) -> None:
                results.append(await in_thread(store_prompt, client, chain))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(race, one)
                nursery.start_soon(race, other)
            for statuses in zip(*results, strict=True):
                assert sorted(statuses) in ([StoreStatus.STORED, StoreStatus.EXISTS],)
            assert await in_thread(load_all, one, chain) == [Tier.RAM] * 30
        assert len(daemon.table.chunks) == 30
        await daemon.store.flush()
        expected = sum(chunk.length for chunk in daemon.table.chunks.values())
        assert daemon.store.statistics().ram.used_bytes == expected


async def test_a_load_holds_its_bytes(tmp_path: Path) -> None:
    """While a load is open its bytes stay, through removal and under pressure; then they go."""
    chain = chain_of(MIB, 3)
    async with running(tmp_path, MIB) as daemon:
        await store_chain(daemon.store, daemon.table, chain)
        await daemon.store.flush()
        with daemon.client() as client:
            load = await in_thread(client.load, chain.chains)
            assert load is not None
            views = [load.layer(index, 0) for index in range(3)]
            await daemon.store.remove(list(daemon.table.chunks.values()))
            for seed in range(1, 8):
                await store_chain(daemon.store, daemon.table, chain_of(MIB, 2, seed))
                await daemon.store.flush()
            for index, view in enumerate(views):
                assert bytes(view) == layer_of(chain.chains[index], load.geometry(index), 0)
            before = daemon.store.statistics().num_leases
            await in_thread(load.close)
            await eventually(lambda: daemon.store.statistics().num_leases == before - 3)


async def test_ram_too_small_for_a_load(tmp_path: Path) -> None:
    """What finds no room in RAM is read from the volume by the client itself, verified all the same."""
    chain = chain_of(MIB, 12)
    async with running(tmp_path, MIB, ram=16 << 20) as daemon:
        await store_chain(daemon.store, daemon.table, chain)
    async with running(tmp_path, MIB, ram=4 << 20) as daemon:
        with daemon.client() as client:
            for stream in (False, True):
                sources = await in_thread(lambda s=stream: load_all(client, chain, stream=s))
                assert Tier.NONE not in sources
            assert daemon.store.counters.promotions_refused > 0
            assert client.statistics.failures == 0


@pytest.mark.expect_log("is corrupt and was dropped")
async def test_wrong_bytes_in_the_arena_are_not_given_out(tmp_path: Path) -> None:
    """A client verifies what it reads from RAM; what is wrong is reported, and the daemon drops it."""
    chain = chain_of(NS, 2)
    async with running(tmp_path) as daemon:
        await store_chain(daemon.store, daemon.table, chain)
        chunk = daemon.table.chunks[chain.keys[0]]
        geo = geometry(NS, 16)
        daemon.store.arena.view[chunk.ram + geo.layer_range(2)[0]] ^= 1
        with daemon.client() as client:
            load = await in_thread(client.load, chain.chains)
            assert load is not None
            assert bytes(await in_thread(load.layer, 0, 1)) == layer_of(chain.chains[0], geo, 1)
            with pytest.raises(CorruptChunk):
                await in_thread(load.layer, 0, 2)
            assert set(daemon.table.chunks) == {chain.keys[1]}
            assert daemon.store.counters.corrupt == 1
            await in_thread(load.close)


@pytest.mark.expect_log("could not be read")
@pytest.mark.parametrize("stream", [False, True])
async def test_an_unreadable_chunk_is_a_miss_for_its_index_only(tmp_path: Path, stream: bool) -> None:
    """EIO under one chunk of a load: that one is unavailable, the others are right; nothing waits or is deleted."""
    chain = chain_of(MIB, 4)
    async with running(tmp_path, MIB) as daemon:
        await store_chain(daemon.store, daemon.table, chain)
    system = FaultySystem()
    async with running(tmp_path, MIB, system) as daemon:
        chunk = daemon.table.chunks[chain.keys[1]]
        system.bad_reads = {chunk.nvme}

        def work(client: Client) -> None:
            load = client.load(chain.chains, stream=stream)
            assert load is not None
            with load:
                for index in (0, 2, 3):
                    for layer in range(4):
                        assert bytes(load.layer(index, layer)) == layer_of(
                            chain.chains[index], load.geometry(index), layer
                        )
                if load._placements[1].tier is not Tier.NVME:  # else the client reads the volume itself
                    with pytest.raises(UnavailableError):
                        load.layer(1, 0)

        with daemon.client() as client:
            await in_thread(work, client)
        assert len(daemon.table.chunks) == 4
        assert daemon.store.counters.corrupt == 0
        await eventually(lambda: daemon.store.statistics().num_leases == 0)


async def test_a_namespace_that_contradicts_what_is_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A client whose layout differs is refused with one sentence, and goes on without the cache."""
    other = msgspec.structs.replace(NS, layers=NS.layers[:1])
    async with running(tmp_path) as daemon:
        caplog.clear()
        client = daemon.client(other)
        with pytest.raises(Exception, match="another chunk layout"):
            await in_thread(client.attach)
        client.close()


# who holds what


async def test_a_closed_session_gives_everything_back(tmp_path: Path) -> None:
    """Leases, reservations and the window go with the connection, without a word from the client."""
    chain = chain_of(NS, 4)
    async with running(tmp_path) as daemon:
        await store_chain(daemon.store, daemon.table, chain)
        await daemon.store.flush()
        used = daemon.store.statistics().ram.used_bytes
        descriptors = num_descriptors(os.getpid())
        client = daemon.client()
        await in_thread(client.match, chain.chains)
        await in_thread(client.load, chain.chains)
        await in_thread(client.store, new_chunks(chain_of(NS, 5, 1)))
        assert daemon.store.statistics().num_leases == 8
        assert daemon.store.statistics().ram.used_bytes > used
        client.close()
        await eventually(lambda: daemon.store.statistics().num_leases == 0)
        await eventually(lambda: daemon.store.statistics().ram.used_bytes == used)
        await eventually(lambda: num_descriptors(os.getpid()) <= descriptors)


@pytest.mark.expect_log("does not answer, going on without it")
async def test_a_connection_that_broke_leaks_nothing(tmp_path: Path) -> None:
    """Descriptors of sessions that timed out are closed in the client, again and again."""
    system = FaultySystem()
    async with running(tmp_path, MIB, system) as daemon:
        chain = chain_of(MIB, 1)
        await store_chain(daemon.store, daemon.table, chain)
        with daemon.client() as client:
            await in_thread(client.attach)
            before = num_descriptors(os.getpid())
            for _ in range(4):
                connection = client._connection
                assert connection is not None
                connection._socket.shutdown(socket.SHUT_RDWR)
                client._retry_at = 0.0
                assert (await in_thread(client.match, chain.chains)).count in (0, 1)
                client._retry_at = 0.0
                assert (await in_thread(client.match, chain.chains)).count == 1
            await eventually(lambda: daemon.sessions.num_open == 1)
            await eventually(lambda: num_descriptors(os.getpid()) <= before)


async def test_a_broken_session_keeps_the_leases_of_open_loads(tmp_path: Path) -> None:
    """Another thread's time-out must not let the daemon overwrite what this thread is copying."""
    chain = chain_of(MIB, 2)
    async with running(tmp_path, MIB) as daemon:
        await store_chain(daemon.store, daemon.table, chain)
        await daemon.store.flush()
        client = daemon.client()
        load = await in_thread(client.load, chain.chains)
        assert load is not None
        view = load.layer(0, 0)
        connection = client._connection
        assert connection is not None
        connection._broke(TimeoutError())
        assert (await in_thread(client.match, chain.chains)).count == 2  # attached anew
        for seed in range(1, 8):
            await store_chain(daemon.store, daemon.table, chain_of(MIB, 2, seed))
            await daemon.store.flush()
        assert bytes(view) == layer_of(chain.chains[0], geometry(MIB, 16), 0)
        assert bytes(load.layer(1, 3)) == layer_of(chain.chains[1], geometry(MIB, 16), 3)
        await in_thread(load.close)
        await eventually(lambda: daemon.sessions.num_open == 1)
        client.close()


async def test_a_load_of_a_closed_client_is_unavailable(tmp_path: Path) -> None:
    """Not corrupt: nothing was proven."""
    chain = chain_of(NS, 2)
    async with running(tmp_path) as daemon:
        await store_chain(daemon.store, daemon.table, chain)
        client = daemon.client()
        load = await in_thread(client.load, chain.chains)
        assert load is not None
        client.close()
        with pytest.raises(UnavailableError):
            load.layer(1, 0)
        load.close()
        load.close()
        assert len(daemon.table.chunks) == 2


async def test_a_fork_does_not_speak_for_its_parent(tmp_path: Path) -> None:
    """A forked child closes its copies; parent and daemon go on, and the child can attach for itself."""
    chain = chain_of(NS, 2)

    def fork(client: Client) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                is_detached = client._connection is None
                os._exit(0 if is_detached and client.match(chain.chains).count == 2 else 1)
            finally:
                os._exit(2)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    async with running(tmp_path) as daemon:
        await store_chain(daemon.store, daemon.table, chain)
        with daemon.client() as client:
            load = await in_thread(client.load, chain.chains)
            assert load is not None
            assert await in_thread(fork, client) == 0
            assert bytes(load.layer(1, 0)) == layer_of(chain.chains[1], load.geometry(1), 0)
            await in_thread(load.close)
            await eventually(lambda: daemon.store.statistics().num_leases == 0)
            assert (await in_thread(client.match, chain.chains)).count == 2
            assert client.statistics.failures == 0


# hostile peers


class Peer:
    """A raw connection that can send anything."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self.socket = sock
        self.fds: list[int] = []

    async def send(self, packet: bytes) -> None:
        await self.socket.send(packet)

    async def receive(self) -> m.AnyReply | None:
        """The next reply, None at the end of the session."""
        with trio.fail_after(DEADLINE_S):
            packet, ancillary, _, _ = await self.socket.recvmsg(m.MAX_MESSAGE_BYTES + 1, 1024)
        for _, _, raw in ancillary:
            self.fds += struct.unpack(f"{len(raw) // 4}i", raw)
        return m.decode_reply(packet) if packet else None

    async def ask(self, request: m.Request) -> m.AnyReply | None:
        await self.send(m.encode(request))
        return await self.receive()

    async def hello(self, namespace: Namespace = NS) -> m.AnyReply | None:
        return await self.ask(m.Hello(1, m.VERSION, namespaces.encode(namespace), "peer"))

    async def hello_and_window(self) -> int:
        assert isinstance(await self.hello(), m.Welcome)
        assert isinstance(await self.ask(m.OpenWindow(2, 1 << 20)), m.Window)
        return self.fds[-1]

    def close(self) -> None:
        self.socket.close()
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()


@asynccontextmanager
async def daemon_peer(daemon: Running) -> AsyncIterator[Peer]:
    sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    await sock.connect(socket_path(daemon.directory))
    peer = Peer(sock)
    try:
        yield peer
    finally:
        peer.close()


async def assert_unharmed(daemon: Running, chain: KeyChain) -> None:
    """Somebody else stores and loads as if nothing had been."""
    with daemon.client() as client:
        await in_thread(store_prompt, client, chain)
        assert Tier.NONE not in await in_thread(load_all, client, chain)
        assert client.statistics.failures == 0
    assert daemon.store.counters.session_errors == 0


def hostile_namespace(**changes: Any) -> bytes:
    document = msgspec.json.decode(namespaces.encode(NS))
    document.update(changes)
    return msgspec.json.encode(document)


HOSTILE = {
    "garbage": os.urandom(100),
    "one byte": b"\0",
    "oversized": b"\x93" + bytes(m.MAX_MESSAGE_BYTES),
    "nested": b"\x91" * 5000,
    "huge array": b"\xdd\xff\xff\xff\xff",
    "unknown verb": msgspec.msgpack.encode(["drop", 1]),
    "a verb of 159 KiB": msgspec.msgpack.encode(["x" * (159 << 10), 1]),
    "a reply": m.encode(m.Done(1)),
    "another version": m.encode(m.Hello(1, 99, namespaces.encode(NS), "x")),
    "no namespace": m.encode(m.Hello(1, m.VERSION, b"", "x")),
    "namespace of garbage": m.encode(m.Hello(1, m.VERSION, b"{" * 100_000, "x")),
    "unprintable dtype": m.encode(
        m.Hello(1, m.VERSION, hostile_namespace(fingerprint=None, layers=[{"count": 1, "tensors": [
            {"name": "k", "dtype": "\x01" * 15_000, "shape": [16], "token_axis": 0}]}]), "x")
    ),
    "unprintable format": m.encode(
        m.Hello(1, m.VERSION, hostile_namespace(
            identity={**msgspec.to_builtins(NS.identity), "format": "\U000e0001" * 20_000}, fingerprint=None), "x")
    ),
    "match before hello": m.encode(m.Match(1, bytes(16))),
    "load before hello": m.encode(m.Load(1, bytes(16), 0)),
    "store before hello": m.encode(m.Store(1, ())),
    "window before hello": m.encode(m.OpenWindow(1, 4096)),
    "publish before hello": m.encode(m.Publish(1, (m.Finished(bytes(16), b""),))),
    "suspect before hello": m.encode(m.Suspect(1, bytes(16))),
    "prefetch before hello": m.encode(m.Prefetch(1, bytes(16), 0, 1000)),
    "prefetch of no priority": m.encode(m.Prefetch(1, bytes(16), 101, 1000)),
    "part of a key": m.encode(m.Match(1, bytes(15))),
    "warm before hello": m.encode(m.Warm(1, bytes(16))),
    "declined before hello": m.encode(m.Declined(1, bytes(16))),
    "why of another version": m.encode(m.Why(1, 99, NS.directory, bytes(16))),
    "why of part of a key": m.encode(m.Why(1, m.VERSION, NS.directory, bytes(15))),
    "why of a long name": m.encode(m.Why(1, m.VERSION, "x" * 256, bytes(16))),
    "why of too many keys": m.encode(m.Why(1, m.VERSION, NS.directory, bytes(16 * (m.MAX_QUESTIONS + 1)))),
    "listen of another version": m.encode(m.Listen(1, 99)),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_packets_get_an_error(tmp_path: Path, name: str) -> None:
    """An error reply of bounded size, or the end of that session; everybody else is unharmed."""
    async with running(tmp_path) as daemon, daemon_peer(daemon) as peer:
        await peer.send(HOSTILE[name])
        reply = await peer.receive()
        assert isinstance(reply, m.Failure), reply
        assert len(reply.message) < 2000
        assert isinstance(await peer.hello(), m.Welcome)
        await assert_unharmed(daemon, chain_of(NS, 2))


AFTER_HELLO: dict[str, m.Request] = {
    "a second hello": m.Hello(9, m.VERSION, namespaces.encode(NS), "x"),
    "window of nothing": m.OpenWindow(9, 0),
    "window of everything": m.OpenWindow(9, 1 << 61),
    "part of a key in match": m.Match(9, bytes(17)),
    "part of a key in load": m.Load(9, bytes(15), 0),
    "part of a key in abort": m.Abort(9, bytes(1)),
    "part of a key in suspect": m.Suspect(9, bytes(1)),
    "part of a key in prefetch": m.Prefetch(9, bytes(1), 0, 1000),
    "part of a key in warm": m.Warm(9, bytes(17)),
    "part of a key in declined": m.Declined(9, bytes(17)),
    "part of a key in why": m.Why(9, m.VERSION, NS.directory, bytes(17)),
    "part of a key in hint": m.Hint(9, bytes(1), 3),
    "a hint of nothing": m.Hint(9, bytes(16)),
    "a hint of a class that there is not": m.Hint(9, bytes(16), 256),
    "a hint that expects a use in a month": m.Hint(9, bytes(16), None, 30 * 86_400_000),
    "a hint that expects what is closed": m.Hint(9, bytes(16), None, 1000, True),
    "store without a window": m.Store(9, tuple(new_chunks(chain_of(NS, 1)))),
}


@pytest.mark.parametrize("name", AFTER_HELLO)
async def test_impossible_requests_get_an_error(tmp_path: Path, name: str) -> None:
    """The session goes on behind it."""
    async with running(tmp_path) as daemon, daemon_peer(daemon) as peer:
        await peer.hello()
        assert isinstance(await peer.ask(AFTER_HELLO[name]), m.Failure)
        assert await peer.ask(m.Match(10, bytes(16))) == m.Matched(10, 0, 0, b"")
        await assert_unharmed(daemon, chain_of(NS, 2))


async def test_harmless_nonsense(tmp_path: Path) -> None:
    """Leases, slots and keys that do not exist; deadlines of aeons; empty batches; repeated keys."""
    chain = chain_of(NS, 1)
    async with running(tmp_path) as daemon, daemon_peer(daemon) as peer:
        await store_chain(daemon.store, daemon.table, chain)
        await peer.hello_and_window()
        assert await peer.ask(m.Release(3, 12345)) == m.Done(3)
        assert await peer.ask(m.Abort(4, bytes(32))) == m.Done(4)
        assert await peer.ask(m.Suspect(5, bytes(32))) == m.Done(5)
        assert await peer.ask(m.Prefetch(6, bytes(32), 100, 1 << 60)) == m.Done(6)
        assert await peer.ask(m.Cancel(7, 12345)) == m.Done(7)
        assert await peer.ask(m.Warm(8, bytes(32) + chain.keys[0] * 2)) == m.Warmed(8, bytes([0, 0, 1, 1]))
        assert await peer.ask(m.Warm(9, b"")) == m.Warmed(9, b"")
        assert await peer.ask(m.Store(6, ())) == m.Slots(6, ())
        assert await peer.ask(m.Publish(7, ())) == m.Published(7, ())
        loaded = await peer.ask(m.Load(8, chain.keys[0] * 100, (1 << 62) - 1, True))
        assert isinstance(loaded, m.Loaded)
        assert {place.tier for place in loaded.placements} == {Tier.RAM}
        assert await peer.ask(m.Release(9, loaded.lease)) == m.Done(9)
        await daemon.store.flush()
        assert daemon.store.statistics().num_leases == 0
        twice = new_chunks(chain_of(NS, 1, 1)) * 2
        slots = await peer.ask(m.Store(10, tuple(twice)))
        assert isinstance(slots, m.Slots)
        assert [slot.status for slot in slots.slots] == [StoreStatus.STORED, StoreStatus.EXISTS]


async def test_a_chain_loaded_piece_by_piece_is_read_ahead(tmp_path: Path) -> None:
    """From the second piece on, as far as it was loaded before; what was begun ends with the session, its leases too."""
    chain = chain_of(MIB, 8)
    async with open_table(tmp_path, MIB, nvme=64 << 20, ram=32 << 20) as (store, table):
        await store_chain(store, table, chain)
    async with running(tmp_path, MIB, nvme=64 << 20, ram=32 << 20) as daemon, daemon_peer(daemon) as peer:
        await peer.hello(MIB)
        for key in chain.keys:
            daemon.table.chunks[key].hits = 1
        counters = daemon.store.counters
        for number, key in enumerate(chain.keys[:3]):
            loaded = await peer.ask(m.Load(10 + number, key, 60_000))
            assert isinstance(loaded, m.Loaded)
            if number == 1:
                await eventually(lambda: daemon.table.chunks[chain.keys[2]].tier is Tier.RAM)
        assert [place.source for place in loaded.placements] == [Tier.RAM]
        await eventually(lambda: (counters.read_aheads_useful, counters.read_aheads_begun) == (1, 3))
        assert counters.prefetches_begun == 0
        peer.close()
        await eventually(lambda: daemon.store.statistics().num_leases == 0)


async def test_a_batch_with_an_impossible_chunk_reserves_nothing(tmp_path: Path) -> None:
    """An error in the middle of a batch gives back what its beginning had taken."""
    good, _ = new_chunks(chain_of(NS, 2))
    bad = m.NewChunk(bytes(32), bytes(16), 0, 17)
    async with running(tmp_path) as daemon, daemon_peer(daemon) as peer:
        await peer.hello_and_window()
        for number in range(50):
            assert isinstance(await peer.ask(m.Store(number, (good, bad))), m.Failure)
        assert daemon.store.statistics().ram.used_bytes == 0
        slots = await peer.ask(m.Store(99, (good,)))
        assert isinstance(slots, m.Slots)
        assert slots.slots[0].status is StoreStatus.STORED


async def test_another_sessions_lease_cannot_be_released(tmp_path: Path) -> None:
    chain = chain_of(NS, 1)
    async with running(tmp_path) as daemon, daemon_peer(daemon) as peer, daemon_peer(daemon) as thief:
        await store_chain(daemon.store, daemon.table, chain)
        await daemon.store.flush()
        await peer.hello()
        await thief.hello()
        matched = await peer.ask(m.Match(2, chain.keys[0]))
        assert isinstance(matched, m.Matched)
        await thief.ask(m.Release(3, matched.lease))
        assert daemon.table.chunks[chain.keys[0]].leases == 1


async def test_a_slanderer_cannot_delete(tmp_path: Path) -> None:
    """A client that suspects everything costs reads, not chunks."""
    chain = chain_of(NS, 3)
    async with running(tmp_path) as daemon, daemon_peer(daemon) as peer:
        await store_chain(daemon.store, daemon.table, chain)
        await peer.hello()
        await peer.ask(m.Suspect(2, b"".join(chain.keys)))
        assert len(daemon.table.chunks) == 3


async def test_a_client_that_reads_no_replies_stops_only_itself(tmp_path: Path) -> None:
    """Thousands of requests without reading an answer: the daemon stops listening to that client, not to others."""
    chain = chain_of(NS, 3)
    packet = m.encode(m.Match(1, b"".join(chain.keys)))
    async with running(tmp_path) as daemon, daemon_peer(daemon) as peer:
        await store_chain(daemon.store, daemon.table, chain)
        await peer.hello()
        num_sent = 0
        while num_sent < 100_000:
            with trio.move_on_after(0.2) as patience:
                await peer.send(packet)
            if patience.cancelled_caught:
                break
            num_sent += 1
        assert num_sent < 100_000
        await assert_unharmed(daemon, chain_of(NS, 2, 1))
        peer.close()
        await eventually(lambda: daemon.store.statistics().num_leases == 0)
        await eventually(lambda: daemon.sessions.num_open == 0)


async def test_many_loads_that_wait_do_not_hide_a_death(tmp_path: Path) -> None:
    """A client with more waiting loads than the daemon takes at once is reaped all the same when it dies."""
    chain = chain_of(MIB, 1)
    async with running(tmp_path, MIB) as daemon:
        await store_chain(daemon.store, daemon.table, chain)
    system = FaultySystem()
    async with running(tmp_path, MIB, system) as daemon:
        async with daemon_peer(daemon) as peer:
            await peer.hello(MIB)
            system.read_gate.clear()
            for number in range(100):
                await peer.send(m.encode(m.Load(number, chain.keys[0], 1 << 40)))
            await eventually(lambda: daemon.table.chunks[chain.keys[0]].leases > 20)
        await eventually(lambda: daemon.sessions.num_open == 0)
        await eventually(lambda: daemon.table.chunks[chain.keys[0]].leases <= 1)  # the promotion itself
        system.read_gate.set()


@pytest.mark.expect_log("a payload could not be received")
@pytest.mark.parametrize("how", ["truncate", "punch", "overwrite"])
async def test_a_clumsy_client_spoils_only_its_own_window(tmp_path: Path, how: str) -> None:
    """A window that shrinks or changes while the daemon copies is BAD or right, never wrong and never a signal."""
    chain = chain_of(MIB, 1)
    geo = geometry(MIB, 16)
    right = payload_of(chain.chains[0], geo)
    checksums = b"".join(value.to_bytes(8, "big") for value in checksums_of(right, geo))
    settings = {"huge_pages": "auto"} if how == "truncate" else {}  # memory in a tmpfs cannot be sealed
    async with running(tmp_path, MIB, **settings) as daemon, daemon_peer(daemon) as peer:
        await peer.hello(MIB)
        await peer.ask(m.OpenWindow(2, 2 << 20))
        window = peer.fds[-1]
        slots = await peer.ask(m.Store(3, tuple(new_chunks(chain))))
        assert isinstance(slots, m.Slots)
        os.pwrite(window, right, slots.slots[0].offset)
        try:
            if how == "truncate":
                os.ftruncate(window, 4096)
            elif how == "punch":
                os.pwrite(window, bytes(4096), slots.slots[0].offset + 300_000)
            else:
                os.pwrite(window, b"x", slots.slots[0].offset + geo.payload_bytes - 1)
        except PermissionError:
            pytest.skip("this window is sealed: it cannot be truncated")
        assert await peer.ask(m.Publish(4, (m.Finished(chain.keys[0], checksums),))) == m.Published(
            4, (StoreStatus.BAD,)
        )
        await assert_unharmed(daemon, chain_of(MIB, 1, 1))


async def test_windows_cannot_be_shrunk(tmp_path: Path) -> None:
    """Where memory can be sealed, the window is."""
    async with running(tmp_path) as daemon, daemon_peer(daemon) as peer:
        window = await peer.hello_and_window()
        with pytest.raises(PermissionError):
            os.ftruncate(window, 0)


async def test_clients_cannot_write_what_others_read(tmp_path: Path) -> None:
    """Arena and volume are handed out read-only."""
    async with running(tmp_path) as daemon, daemon_peer(daemon) as peer:
        await peer.hello()
        arena, volume = peer.fds
        for fd in (arena, volume):
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.pwrite(fd, bytes(4096), 4096)
            with pytest.raises(OSError, match=r"Invalid argument|Operation not permitted|Bad file descriptor"):
                os.ftruncate(fd, 0)


@pytest.mark.expect_log("such chunks are refused")
async def test_a_large_namespace_does_not_stop_the_daemon(tmp_path: Path) -> None:
    """The largest namespace that fits a message, attached and stored to: others are answered meanwhile and after."""
    tensors = tuple(TensorSpec(f"t{i}", "U8", (1 << 16,), 0) for i in range(8))
    identity = Identity("big", "1", "U8", "t", 1024, 1, 1, tokens_per_chunk=1 << 16)
    big = Namespace(identity, (LayerRun(1024, tensors),))
    async with running(tmp_path) as daemon:
        async with daemon_peer(daemon) as peer:
            await peer.hello(big)
            await peer.ask(m.OpenWindow(2, 1 << 20))
            await peer.send(
                m.encode(m.Store(3, tuple(m.NewChunk(os.urandom(32), bytes(16), 0, 1 + n) for n in range(200))))
            )
            await assert_unharmed(daemon, chain_of(NS, 2))
        table = daemon.store.catalog.tables[big.directory]
        assert sum(geo.header_bytes for geo in table.namespace.derived.values()) < 128 << 20


async def test_lying_positions_and_parents(tmp_path: Path) -> None:
    """A place that contradicts a stored parent is refused; any other claim harms neither prefix view nor removal."""
    async with running(tmp_path) as daemon:
        chain = chain_of(NS, 4)
        await store_chain(daemon.store, daemon.table, chain)
        for parent, position in ((chain.keys[3], 0), (chain.keys[0], 4_000_000_000)):
            with pytest.raises(UsageError, match="cannot follow"):
                await store_chunk(daemon.store, daemon.table, m.NewChunk(bytes(32), parent, position, 16))
        for number, (parent, position) in enumerate([(bytes(16), 7), (b"\1" * 16, 0)]):
            new = m.NewChunk(bytes([number]) * 32, parent, position, 16)
            assert await store_chunk(daemon.store, daemon.table, new) is StoreStatus.STORED
        listed = [c for d in daemon.table.prefixes.directories.values() for c in d.subtree()]
        assert set(listed) == set(daemon.table.chunks.values())
        await daemon.store.flush()
        await daemon.store.remove(listed)
        assert not daemon.table.chunks
        assert not daemon.table.prefixes.directories
