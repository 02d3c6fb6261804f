"""Clients that take too much: they are kept within bounds, and cost nobody else anything."""

from __future__ import annotations

import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
import trio

from kvfs import messages as m
from kvfs import namespace as namespaces
from kvfs.client import Client
from kvfs.errors import UsageError
from kvfs.mount import session
from kvfs.mount.session import serve_sessions
from kvfs.opening import open_store
from kvfs.store import Store
from kvfs.testing import (
    DEADLINE_S,
    chain_of,
    plain_mount,
    settings_in,
    socket_path,
    store_chain,
    tiny_namespace,
)
from kvfs.testing.daemon import DaemonProcess
from kvfs.testing.processes import num_descriptors

NS = tiny_namespace()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess.start(settings_in(tmp_path), socket_path(tmp_path)) as daemon:
        yield daemon


def connected(directory: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.settimeout(DEADLINE_S)
    client.connect(socket_path(directory))
    return client


def test_connections_beyond_the_descriptors_of_the_daemon_wait(tmp_path: Path, daemon: DaemonProcess) -> None:
    """A daemon that has no descriptor left for another client serves those that it has, and the next when some go."""
    in_use = num_descriptors(daemon.process.pid)
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (in_use + 20, in_use + 20))
    with closing(Client(plain_mount(tmp_path), NS, deadline_s=DEADLINE_S)) as client:
        client.attach()
        crowd = [connected(tmp_path) for _ in range(60)]
        assert client.match(chain_of(NS, 1).chains).count == 0
        assert client.statistics.failures == 0
        for other in crowd:
            other.close()
        with closing(Client(plain_mount(tmp_path), NS, deadline_s=DEADLINE_S)) as late:
            late.attach()


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[tuple[Store, trio.socket.SocketType]]:
    """A store in this process, and a client of it that has said hello."""
    async with open_store(settings_in(directory, nvme=None)) as store, trio.open_nursery() as nursery:
        await nursery.start(serve_sessions, store, socket_path(directory))
        client = trio.socket.from_stdlib_socket(connected(directory))
        await client.send(m.encode(m.Hello(1, m.VERSION, namespaces.encode(NS), "test")))
        assert isinstance(await reply(client), m.Welcome)
        yield store, client
        client.close()
        nursery.cancel_scope.cancel()


async def reply(client: trio.socket.SocketType) -> m.AnyReply:
    with trio.fail_after(DEADLINE_S):
        return m.decode_reply(await client.recv(m.MAX_MESSAGE_BYTES))


async def test_leases_of_a_session_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that never releases is told so, and holds no more than it was given; a release makes room."""
    monkeypatch.setattr(session, "_MAX_LEASES", 3)
    async with served(tmp_path) as (store, client):
        chain = chain_of(NS, 2)
        await store_chain(store, store.attach(NS), chain)
        lease = 0
        for number in range(3):
            await client.send(m.encode(m.Match(number, b"".join(chain.keys))))
            answer = await reply(client)
            assert isinstance(answer, m.Matched)
            lease = answer.lease
        for request in (m.Match(7, b"".join(chain.keys)), m.Load(7, b"".join(chain.keys), 0)):
            await client.send(m.encode(request))
            refused = await reply(client)
            assert isinstance(refused, m.Failure)
            assert "release some" in refused.message
        assert store.statistics().num_leases == 6
        await client.send(m.encode(m.Release(8, lease)))
        assert isinstance(await reply(client), m.Done)
        await client.send(m.encode(m.Match(9, b"".join(chain.keys))))
        assert isinstance(await reply(client), m.Matched)


async def test_namespaces_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A namespace stays when its last chunk goes, so there is an end to new ones; known ones are served on."""
    monkeypatch.setattr("kvfs.store._MAX_NAMESPACES", 2)
    async with open_store(settings_in(tmp_path, nvme=None)) as store:
        store.attach(tiny_namespace("tests/a"))
        store.attach(tiny_namespace("tests/b"))
        with pytest.raises(UsageError, match="2 namespaces already"):
            store.attach(tiny_namespace("tests/c"))
        store.attach(tiny_namespace("tests/a"))


async def window(client: trio.socket.SocketType, size_bytes: int) -> m.AnyReply:
    """Ask for a window; its descriptor, if there is one, is closed unread."""
    await client.send(m.encode(m.OpenWindow(5, size_bytes)))
    return await reply(client)


async def test_windows_of_all_sessions_are_bounded(tmp_path: Path) -> None:
    """They are memory beside the RAM tier: a session that finds none left is told so, until another ends."""
    async with served(tmp_path) as (store, client):
        largest = store.settings.window_bytes
        others = []
        for _ in range(16):
            others.append(trio.socket.from_stdlib_socket(connected(tmp_path)))
            await others[-1].send(m.encode(m.Hello(1, m.VERSION, namespaces.encode(NS), "test")))
            assert isinstance(await reply(others[-1]), m.Welcome)
            assert isinstance(await window(others[-1], largest), m.Window)
        refused = await window(client, 4096)
        assert isinstance(refused, m.Failure)
        assert "no memory for another window" in refused.message
        others.pop().close()
        with trio.fail_after(DEADLINE_S):
            while isinstance(await window(client, largest), m.Failure):
                await trio.lowlevel.checkpoint()
        for other in others:
            other.close()
