"""The client: what an engine adapter uses to find, load and store chunks. Synchronous, and safe to share by threads.

A failing cache is a miss: `match`, `load`, `store` and `publish` never raise for a daemon that is gone, stopped or
confused, they return empty-handed within their deadline; the failure is counted and logged once until it heals. After
a failure nothing is asked for `RETRY_S`, so that a stopped daemon does not cost a deadline a request.

Attach reads one link through the mount, in a thread that may be left behind: a stopped daemon cannot hold it. Nothing
else touches the mount. What the link said is remembered whatever happens, since a mount may be stale for ever where
its socket is not: in a container a new daemon's mount is not seen, its socket is. The connection is closed, and the arena
unmapped, in a forked child.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from types import TracebackType
from typing import Self

from kvfs import messages as m
from kvfs.chunk import geometry
from kvfs.connection import Connection, find_socket
from kvfs.errors import KvfsError, UnavailableError, UsageError
from kvfs.handing_over import Publishing, Reservation, Reserving, fill_all
from kvfs.hints import Said
from kvfs.keys import ChainHash, key_of
from kvfs.loading import Load
from kvfs.messages import NewChunk, StoreStatus, Tier
from kvfs.namespace import Namespace

log = logging.getLogger(__name__)

RETRY_S = 1.0
MAX_PREFETCH_DEADLINE_S = 86_400.0


@dataclass(slots=True)
class ClientStatistics:
    """Totals of one client: chunks, except `failures`, which are requests that the cache did not answer."""

    matched: int = 0
    loaded_ram: int = 0
    loaded_nvme: int = 0
    missed: int = 0
    refused: int = 0
    failures: int = 0


@dataclass(eq=False)
class Lease:
    """`count` chunks from the first on are stored, and stay until this is released (or used as a context).

    `tiers` has a byte for each, the `Tier` it was in when they were matched.
    """

    count: int
    tiers: bytes = b""
    _number: int = 0
    _connection: Connection | None = None

    def release(self) -> None:
        """End the lease, without waiting for the daemon; more than once is harmless."""
        connection, self._connection = self._connection, None
        if connection is not None and self._number:
            connection.tell(m.Release(connection.next_id(), self._number))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass(eq=False)
class Prefetching:
    """What `Client.prefetch` began."""

    _number: int = 0
    _connection: Connection | None = None

    def cancel(self) -> None:
        """Give up what was not begun yet, without waiting for the daemon; more than once is harmless."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.tell(m.Cancel(connection.next_id(), self._number))


class Client:
    """One namespace of one mount, attached when it is first needed and again after a failure.

    Attributes: mount, namespace, deadline_s: how long a request may take; statistics.
    """

    def __init__(
        self,
        mount: str | Path,
        namespace: Namespace,
        *,
        deadline_s: float = 1.0,
        window_bytes: int = 64 << 20,
        name: str = "kvfs",
    ) -> None:
        self.mount = Path(mount)
        self.namespace = namespace
        self.deadline_s = deadline_s
        self.statistics = ClientStatistics()
        self._window_bytes = window_bytes
        self._name = name
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._socket_path: str | None = None  # the last that the mount named
        self._asks_mount_first = False
        self._retry_at = 0.0
        self._has_complained = False
        _clients.add(self)

    # connection

    def attach(self) -> None:
        """Connect now. Raises UnavailableError, or UsageError if the daemon refuses this client for good.

        What it raises is not logged again when the client goes on without the cache.
        """
        with self._lock:
            if self._connection is None or self._connection.has_ended():
                self._connection = None
                try:
                    self._connection = self._connect()
                except UnavailableError:
                    self._has_complained = True
                    raise
                self._has_complained = False

    @property
    def arena(self) -> memoryview:
        """A view of the mapped arena, which keeps it mapped; empty without a session."""
        connection = self._connection
        try:
            return memoryview(connection.arena if connection is not None else b"")
        except ValueError:  # it is being unmapped at this moment
            return memoryview(b"")

    def is_attached(self) -> bool:
        """Whether there is a session, as far as is known without asking: a stopped daemon still has its own."""
        connection = self._connection
        return connection is not None and not connection.has_ended()

    def _connect(self) -> Connection:
        """A new connection: to the socket that is known, or, if nobody answers there, to the one that the mount names."""
        deadline = time.monotonic() + self.deadline_s
        known, asks_mount = self._socket_path, self._asks_mount_first
        self._asks_mount_first = False
        refusal: UnavailableError | None = None
        if known is not None and not asks_mount and os.path.exists(known):
            try:
                return Connection.open(known, self.namespace, self._name, self.deadline_s)
            except UnavailableError as error:
                if time.monotonic() >= deadline:
                    self._asks_mount_first = True  # the next time: another daemon may have taken its place
                    raise
                refusal = error
        self._socket_path = find_socket(self.mount, max(0.001, deadline - time.monotonic()))
        if refusal is not None and self._socket_path == known:
            raise refusal
        left_s = max(0.001, deadline - time.monotonic())
        return Connection.open(self._socket_path, self.namespace, self._name, left_s)

    def _attached(self) -> Connection | None:
        """The connection, or None while the cache is failing, or while another thread does not get to connect."""
        if not self._lock.acquire(timeout=self.deadline_s):
            return None
        try:
            connection = self._connection
            if connection is not None and not connection.has_ended():
                return connection
            self._connection = None
            if time.monotonic() < self._retry_at:
                return None
            try:
                self._connection = self._connect()
            except (UnavailableError, UsageError) as error:
                self._failed(error)
                return None
            self._has_complained = False
            return self._connection
        finally:
            self._lock.release()

    def _failed(self, error: KvfsError) -> None:
        self.statistics.failures += 1
        self._retry_at = time.monotonic() + RETRY_S  # heeded only once the connection is broken
        if not self._has_complained:
            log.warning("the cache at %s does not answer, going on without it: %s", self.mount, error)
            self._has_complained = True

    def close(self) -> None:
        """End the session: all leases and slots go back. The client attaches again if it is used again."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # finding and loading

    def match(self, chains: Sequence[ChainHash], *, is_again: bool = False) -> Lease:
        """How long a prefix of `chains` is stored? What is found is leased. A failing cache has nothing.

        `is_again` says that it was asked for the same request of the engine before.
        """
        connection = self._attached()
        if connection is None or not chains:
            return Lease(0)
        keys = b"".join([chain[:16] for chain in chains[: m.MAX_BATCH]])
        try:
            reply = connection.ask(m.Match(connection.next_id(), keys, is_again), m.Matched, self.deadline_s)
        except KvfsError as error:
            self._failed(error)
            return Lease(0)
        self.statistics.matched += reply.count
        return Lease(reply.count, reply.tiers, reply.lease, connection)

    def load(
        self,
        chains: Sequence[ChainHash],
        *,
        deadline_s: float | None = None,
        stream: bool = False,
        stay_on_volume: bool = False,
    ) -> Load | None:
        """The bytes of chunks, leased until the load is closed; None from a failing cache.

        Chunks that are not stored have the source NONE. With `stream` it returns before cold chunks have arrived;
        `Load.layer` then waits. With `stay_on_volume` chunks that are on NVMe only are not brought into RAM: see
        `Load.extent`. At most 4,096 chunks.
        """
        connection = self._attached()
        if connection is None:
            return None
        if len(chains) > m.MAX_BATCH:
            raise UsageError(f"a load takes at most {m.MAX_BATCH} chunks, not {len(chains)}")
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        keys = b"".join([chain[:16] for chain in chains])
        request = m.Load(connection.next_id(), keys, int(deadline_s * 1000), stream, stay_on_volume)
        try:
            load = Load.begin(connection, self.namespace, chains, request, deadline_s)
        except KvfsError as error:
            self._failed(error)
            return None
        for source in load.sources:
            if source is Tier.RAM:
                self.statistics.loaded_ram += 1
            elif source is Tier.NVME:
                self.statistics.loaded_nvme += 1
            else:
                self.statistics.missed += 1
        return load

    def prefetch(self, chains: Sequence[ChainHash], *, priority: int = 0, deadline_s: float = 60.0) -> Prefetching:
        """Have chunks that are on NVMe brought into RAM, the first first, without waiting; a failing cache does not.

        A load of them is likely: what none comes for is counted as wasted. Higher priorities go first. Raises UsageError
        for a priority that is not one of 0 to 100, or a deadline that is none.
        """
        if not 0 <= priority <= 100 or not 0 <= deadline_s <= MAX_PREFETCH_DEADLINE_S:
            raise UsageError(
                f"a prefetch has a priority of 0 to 100 and a deadline of at most {MAX_PREFETCH_DEADLINE_S:g} s, "
                f"not {priority} and {deadline_s}"
            )
        connection = self._attached()
        if connection is None or not chains:
            return Prefetching()
        number = connection.next_id()
        keys = b"".join([chain[:16] for chain in chains[: m.MAX_BATCH]])
        connection.tell(m.Prefetch(number, keys, priority, int(deadline_s * 1000)))
        return Prefetching(number, connection)

    def declined(self, chains: Sequence[ChainHash]) -> None:
        """What could be loaded of these is computed, since that is cheaper; without waiting. `kvfs why` then says so."""
        connection = self._connection
        if connection is not None and chains and not connection.has_ended():
            keys = b"".join([chain[:16] for chain in chains[: m.MAX_BATCH]])
            connection.tell(m.Declined(connection.next_id(), keys))

    def hint(self, chains: Sequence[ChainHash], said: Said) -> None:
        """Say what is known of a chain, without waiting; see `kvfs.hints` for what there is to say, and what it changes.

        `chains` are those of the whole chain, head first, or of its end, if what stands before is another's affair; of
        more than 4,096 the first. It counts for the longest prefix of them that is stored by then: give it after the
        publish. A failing cache hears nothing. Raises UsageError for a hint that is none.
        """
        said.check()
        connection = self._attached()
        if connection is None or not chains:
            return
        keys = b"".join([chain[:16] for chain in chains[: m.MAX_BATCH]])
        expect_ms = None if said.expect_s is None else ceil(said.expect_s * 1000)
        connection.tell(m.Hint(connection.next_id(), keys, said.class_, expect_ms, said.is_closed))

    # storing

    def window_bytes(self) -> int:
        """How many bytes of payload can be in flight at once; 0 while the cache is failing."""
        connection = self._attached()
        if connection is None:
            return 0
        try:
            window = connection.window(self._window_bytes, self.deadline_s)
            return min(len(window), connection.max_in_flight_bytes)
        except KvfsError as error:
            self._failed(error)
            return 0

    def store(self, chunks: Sequence[NewChunk]) -> list[Reservation]:
        """Reserve room for chunks; see `Reservation`. A failing cache, or a full window, refuses."""
        return self.store_later(chunks).wait()

    def store_later(self, chunks: Sequence[NewChunk]) -> Reserving:
        """The same, without waiting: fill what was reserved before, then `Reserving.wait`."""
        reservations = [Reservation(chunk, geometry(self.namespace, chunk.num_tokens)) for chunk in chunks]
        reserving = Reserving(reservations, self._failed, self._were_refused)
        connection = self._attached()
        if connection is not None:
            reserving.begin(connection, self._window_bytes, self.deadline_s)
        return reserving

    def _were_refused(self, num_chunks: int) -> None:
        self.statistics.refused += num_chunks

    def publish(self, reservations: Sequence[Reservation]) -> list[StoreStatus]:
        """Make filled reservations visible; the status of each is updated and returned. A failing cache refuses.

        Reservations without a slot are passed over.
        """
        return self.publish_later(reservations).wait()

    def publish_later(self, reservations: Sequence[Reservation]) -> Publishing:
        """The same, without waiting: fill the next chunks meanwhile, then `Publishing.wait`."""
        publishing = Publishing(reservations, self._failed)
        publishing.begin()
        return publishing

    def abort(self, reservations: Sequence[Reservation]) -> None:
        """Give reserved slots back."""
        by_connection: dict[Connection, list[bytes]] = {}
        for reservation in reservations:
            if reservation.payload is not None and reservation.connection is not None:
                by_connection.setdefault(reservation.connection, []).append(reservation.chunk.chain[:16])
                reservation.payload = None
                reservation.status = StoreStatus.REFUSED
        for connection, keys in by_connection.items():
            connection.post(m.Abort(connection.next_id(), b"".join(keys)))


def new_chunk(chain: ChainHash, parent: ChainHash, position: int, num_tokens: int) -> NewChunk:
    """The description of a chunk to be stored; `parent` is the chain value before it."""
    return NewChunk(chain, key_of(parent), position, num_tokens)


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _forget_after_fork() -> None:
    """A child must not speak on its parent's connection: it closes its copies and attaches for itself if it wants."""
    for client in list(_clients):
        client._lock = threading.Lock()
        connection, client._connection = client._connection, None
        if connection is not None:
            connection.abandon()


os.register_at_fork(after_in_child=_forget_after_fork)
__all__ = [
    "Client",
    "ClientStatistics",
    "Lease",
    "Load",
    "NewChunk",
    "Prefetching",
    "Publishing",
    "Reservation",
    "Reserving",
    "StoreStatus",
    "Tier",
    "fill_all",
    "new_chunk",
]
