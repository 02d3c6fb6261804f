"""What tests of sessions share: a store with its socket, in this process or in one of its own, and what an engine does there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import trio

from kvfs.catalog import ChunkTable
from kvfs.client import Client
from kvfs.keys import ChainHash, KeyChain
from kvfs.messages import StoreStatus
from kvfs.mount.session import Sessions, serve_sessions
from kvfs.namespace import Namespace
from kvfs.store import Store
from kvfs.system import System
from kvfs.testing import (
    DEADLINE_S,
    FaultySystem,
    new_chunks,
    open_table,
    payload_of,
    plain_mount,
    settings_in,
    socket_path,
    tiny_namespace,
)
from kvfs.testing.daemon import DaemonProcess

R = TypeVar("R")


@asynccontextmanager
async def serving(
    directory: Path, namespace: Namespace, system: System | None = None, **settings: Any
) -> AsyncIterator[tuple[Store, ChunkTable, Sessions]]:
    """A store in the directory that serves sessions from this process."""
    async with open_table(directory, namespace, system, **settings) as (store, table), trio.open_nursery() as nursery:
        sessions = await nursery.start(serve_sessions, store, socket_path(directory))
        yield store, table, sessions
        if isinstance(system, FaultySystem):
            system.open_gates()
        nursery.cancel_scope.cancel()


def start(directory: Path, **settings: Any) -> DaemonProcess:
    """The same in a process of its own."""
    return DaemonProcess.start(settings_in(directory, **settings), socket_path(directory))


def client_of(directory: Path, namespace: Namespace | None = None, **options: Any) -> Client:
    """A client of either; it waits as long as a busy machine may need."""
    return Client(plain_mount(directory), namespace or tiny_namespace(), **{"deadline_s": DEADLINE_S, **options})


def store_prompt(client: Client, chain: KeyChain, *, at_once: int = 4, begin: int = 0) -> list[StoreStatus]:
    """Reserve, fill and publish the chunks of a prompt from `begin` on, a few at a time."""
    statuses: list[StoreStatus] = []
    new = new_chunks(chain, begin)
    for first in range(0, len(new), at_once):
        reservations = client.store(new[first : first + at_once])
        for reservation in reservations:
            if reservation.payload is not None:
                reservation.payload[:] = payload_of(ChainHash(reservation.chunk.chain), reservation.geometry)
        statuses += client.publish(reservations)
    return statuses


async def in_thread(work: Callable[..., R], *arguments: Any) -> R:
    """Call what waits for the daemon, which runs in this thread."""
    return await trio.to_thread.run_sync(work, *arguments)
