"""Sessions: the daemon's side of the protocol in `kvfs.messages`. One connection is one client.

The end of a connection, whatever its cause, gives back all that it held: leases, and what was handed over half.

Concurrency: one task reads a connection; requests that wait (`Load`, `Publish`, `Suspect`, `Warm`) go on in tasks of their
own, at most `_MAX_WAITING` a connection; more are refused. Packets are sent whole, one at a
time. A client that does not read its replies stops only itself.
"""

from __future__ import annotations

import array
import contextlib
import errno
import itertools
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence

import trio

from kvfs import messages as m
from kvfs import namespace as namespaces
from kvfs.catalog import NOWHERE, Chunk, ChunkTable
from kvfs.errors import CorruptChunk, KvfsError, ProtocolError, UnavailableError
from kvfs.hints import Said
from kvfs.keys import KEY_BYTES, split
from kvfs.mount.arrivals import tell_arrivals
from kvfs.mount.handover import Handover, InArena, ThroughWindow
from kvfs.mount.listening import Ear, Listeners
from kvfs.mount.stores import Stores
from kvfs.prefetch import Order
from kvfs.promotion import Promotion
from kvfs.read_ahead import Streams
from kvfs.store import Store

log = logging.getLogger(__name__)

_MAX_WAITING = 32
_MAX_SESSIONS = 512
_MAX_PREFETCHES = 256  # of one session that are not over
_MAX_AHEAD = 16  # orders of one session to read ahead
_MAX_PREFETCH_S = 3600.0
_MAX_LEASES = 16_384  # of one session: one for each request of an engine that is under way
_BACKLOG = 128
_MAX_FAILURE_CHARACTERS = 1000
_PEER = struct.Struct("3i")
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ECONNABORTED)  # accept(2): it may work later
_ACCEPT_AGAIN_S = 0.1
_leases = itertools.count(1)
_sessions = itertools.count(1)
_RAM, _NVME = int(m.Tier.RAM), int(m.Tier.NVME)


class Sessions:
    """All connections. Attributes: num_open."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.num_open = 0
        self._listeners = Listeners()

    async def serve(
        self, listener: socket.socket, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Accept connections on a listening SOCK_SEQPACKET socket, for ever."""
        accepting = trio.socket.from_stdlib_socket(listener)
        task_status.started()
        async with trio.open_nursery() as nursery:
            while True:
                connection = await self._accept(accepting)
                if self.num_open >= _MAX_SESSIONS:
                    log.warning("more than %d sessions: a client was turned away", _MAX_SESSIONS)
                    connection.close()
                    continue
                nursery.start_soon(self._serve_one, connection)

    async def _accept(self, accepting: trio.socket.SocketType) -> trio.socket.SocketType:
        """The next client. What keeps one out now, such as a process out of descriptors, must not end the others."""
        has_complained = False
        while True:
            try:
                connection, _ = await accepting.accept()
            except OSError as error:
                if error.errno not in _PASSING:
                    raise
                if not has_complained:
                    log.warning("clients have to wait: %s", error.strerror)
                has_complained = True
                await trio.sleep(_ACCEPT_AGAIN_S)
            else:
                return connection

    async def _serve_one(self, connection: trio.socket.SocketType) -> None:
        self.num_open += 1
        pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        is_trusted = self._store.settings.access == "trusted" and uid == os.geteuid()
        handover = InArena(self._store, pid) if is_trusted else ThroughWindow(self._store)
        session = Session(self._store, connection, handover, self._listeners)
        log.debug("session of process %d (uid %d) opened", pid, uid)
        try:
            await session.run()
        except* OSError as errors:  # the peer is gone
            log.debug("session of process %d broke: %s", pid, errors.exceptions)
        except* Exception:  # a defect that one client brought out must not end the sessions of all others
            self._store.counters.session_errors += 1
            log.exception("a defect ended the session of process %d", pid)
        finally:
            self.num_open -= 1
            session.close()
            connection.close()
            log.debug("session of process %d ended", pid)
            await handover.close()


async def serve_sessions(
    store: Store, socket_path: str, task_status: trio.TaskStatus[Sessions] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve clients at a socket path that does not exist yet, for ever; the path is removed at the end."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        listener.bind(socket_path)
        os.chmod(socket_path, 0o666 if store.settings.allow_other else 0o600)
        listener.listen(_BACKLOG)
        sessions = Sessions(store)
        task_status.started(sessions)
        await sessions.serve(listener)
    finally:
        listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(socket_path)


class Session:
    """One client: what it holds, and the answers to its requests."""

    def __init__(
        self, store: Store, connection: trio.socket.SocketType, handover: Handover, listeners: Listeners
    ) -> None:
        self._store = store
        self._connection = connection
        self._table: ChunkTable | None = None
        self._leases: dict[int, list[Chunk]] = {}
        self._prefetches: dict[int, Order] = {}
        self._streams = Streams()
        self._ahead: deque[Order] = deque()
        self._handover = handover
        self._listeners = listeners
        self._ear: Ear | None = None
        self._number = next(_sessions)
        self._sending = trio.Lock()
        self._waiting = trio.Semaphore(_MAX_WAITING)
        self._stores = Stores(store, handover)

    async def run(self) -> None:
        """Answer requests until the client closes the connection."""
        async with trio.open_nursery() as nursery:
            while packet := await self._connection.recv(m.MAX_MESSAGE_BYTES + 1):
                try:
                    request = m.decode_request(packet)
                except ProtocolError as error:
                    self._store.counters.protocol_errors += 1
                    await self._refuse(0, error)
                    continue
                await self._dispatch(request, nursery)
            nursery.cancel_scope.cancel()

    def close(self) -> None:
        """End all leases, and the use of the namespace. What was reserved is the handover's."""
        self._stores.tell_arrived()
        if self._ear is not None:
            self._listeners.remove(self._ear)
        if self._table is not None:
            self._table.num_sessions -= 1
        for chunks in self._leases.values():
            self._release(chunks)
        self._leases.clear()
        for order in self._prefetches.values():
            order.cancel()
        self._prefetches.clear()
        for order in self._ahead:
            order.cancel()
        self._ahead.clear()

    async def _dispatch(self, request: m.AnyRequest, nursery: trio.Nursery) -> None:
        if isinstance(request, m.Load | m.Publish | m.Suspect | m.Warm) and not self._is_at_hand(request):
            try:
                self._waiting.acquire_nowait()
            except trio.WouldBlock:  # waiting here would hide the end of the session, and with it leases
                await self._refuse(request.id, UnavailableError(f"{_MAX_WAITING} requests of this session are waiting"))
                return
            nursery.start_soon(self._answer_later, request)
        else:
            await self._answer(request)

    def _is_at_hand(self, request: m.AnyRequest) -> bool:
        """Whether it is a load with nothing to wait for: to begin a task for it takes 0.1 ms."""
        if not isinstance(request, m.Load) or self._table is None or len(request.keys) % KEY_BYTES:
            return False
        found = map(self._table.chunks.get, split(request.keys))
        return all(chunk is None or chunk.ram != NOWHERE for chunk in found)

    async def _answer_later(self, request: m.AnyRequest) -> None:
        try:
            await self._answer(request)
        except OSError as error:  # the peer is gone; the reading task sees it too
            log.debug("a reply could not be sent: %s", error)
        finally:
            self._waiting.release()

    async def _answer(self, request: m.AnyRequest) -> None:
        try:
            await self._handle(request)
        except KvfsError as error:
            if isinstance(error, ProtocolError):
                self._store.counters.protocol_errors += 1
            await self._refuse(request.id, error)

    async def _refuse(self, id_: int, error: KvfsError) -> None:
        await self._send(m.Failure(id_, str(error)[:_MAX_FAILURE_CHARACTERS]))  # it may quote what the client sent

    async def _handle(self, request: m.AnyRequest) -> None:
        match request:
            case m.Hello():
                await self._hello(request)
            case m.Match():
                await self._match(request)
            case m.Load():
                await self._load(request)
            case m.Prefetch():
                self._prefetch(request)
                await self._send(m.Done(request.id))
            case m.Cancel():
                if (order := self._prefetches.pop(request.prefetch, None)) is not None:
                    order.cancel()
                await self._send(m.Done(request.id))
            case m.Warm():
                await self._warm(request)
            case m.Release():
                self._release(self._leases.pop(request.lease, []))
                await self._send(m.Done(request.id))
            case m.OpenWindow():
                await self._open_window(request)
            case m.Store():
                await self._stores.reserve(self._attached, request, self._send)
            case m.Publish():
                await self._stores.publish(self._attached, request, self._send)
            case m.Declined():
                self._store.declined(self._attached, split(request.keys))
                await self._send(m.Done(request.id))
            case m.Hint():
                await self._hint(request)
            case m.Why():
                _check_version(request.version)
                await self._send(self._store.why(request.id, request.directory, split(request.keys)))
            case m.Listen():
                await self._listen(request)
            case m.Abort():
                for key in split(request.keys):
                    self._handover.abort(key)
                await self._send(m.Done(request.id))
            case m.Suspect():
                for key in split(request.keys):
                    chunk = self._attached.chunks.get(key)
                    if chunk is not None:
                        await self._store.examine(chunk)
                await self._send(m.Done(request.id))

    async def _send(self, reply: m.Reply, fds: Sequence[int] = ()) -> None:
        packet = m.encode(reply)
        if not fds and not self._sending.locked():
            with contextlib.suppress(BlockingIOError):
                # trio's way gives two turns of the loop away: 0.1 ms that the next request waits.
                os.write(self._connection.fileno(), packet)
                return
        async with self._sending:
            if fds:
                passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                await self._connection.sendmsg([packet], passed)
            else:
                await self._connection.send(packet)

    @property
    def _attached(self) -> ChunkTable:
        if self._table is None:
            raise ProtocolError("the first message of a session is hello")
        return self._table

    # requests

    async def _hello(self, request: m.Hello) -> None:
        _check_version(request.version)
        if self._table is not None:
            raise ProtocolError("hello was said already")
        self._table = self._store.attach(namespaces.decode(request.namespace))
        self._table.num_sessions += 1
        arena, volumes = self._store.arena, self._store.volumes
        is_trusted = isinstance(self._handover, InArena)
        fds = [arena.fd if is_trusted else arena.client_fd, *(volume.client_fd for volume in volumes)]
        welcome = m.Welcome(
            request.id, m.VERSION, self._table.directory, arena.size_bytes, self._store.settings.window_bytes,
            len(volumes), is_trusted,
        )  # fmt: skip
        await self._send(welcome, fds)

    async def _match(self, request: m.Match) -> None:
        chunks = self._store.match(self._attached, split(request.keys))
        tiers = bytes([_RAM if chunk.ram != NOWHERE else _NVME for chunk in chunks])  # each is in one of them
        await self._send(m.Matched(request.id, len(chunks), self._hold(chunks), tiers))
        if self._listeners and not request.is_again:
            now_ns = self._store.system.time_ns()
            self._listeners.heard(now_ns, self._number, self._attached, request.keys, len(chunks))

    async def _listen(self, request: m.Listen) -> None:
        _check_version(request.version)
        if self._ear is None:
            self._ear = self._listeners.add()
            if self._ear is None:
                raise UnavailableError("others are listening already, as many as may")
        await self._send(m.Overheard(request.id, *self._ear.take()))

    def _prefetch(self, request: m.Prefetch) -> None:
        found = map(self._attached.chunks.get, split(request.keys))
        if not self._store.has_nvme:
            return
        if len(self._prefetches) >= _MAX_PREFETCHES:
            self._prefetches = {id_: order for id_, order in self._prefetches.items() if not order.is_over}
            if len(self._prefetches) >= _MAX_PREFETCHES:
                raise ProtocolError(f"a session has at most {_MAX_PREFETCHES} prefetches under way: cancel some")
        if request.id in self._prefetches:
            self._prefetches[request.id].cancel()
        deadline_s = min(request.deadline_ms / 1000, _MAX_PREFETCH_S)
        chunks = [chunk for chunk in found if chunk is not None]
        self._prefetches[request.id] = self._store.prefetch(chunks, request.priority, deadline_s)

    async def _hint(self, request: m.Hint) -> None:
        said = Said(
            request.class_, None if request.expect_ms is None else request.expect_ms / 1000, request.closed
        )  # fmt: skip
        await self._store.hints.give(self._attached, split(request.keys), said)
        await self._send(m.Done(request.id))

    def _read_ahead(self, loaded: list[Chunk]) -> None:
        """What was loaded may go on; see `kvfs.read_ahead`. The newest of these orders count."""
        order = self._store.read_ahead(self._streams.next(loaded))
        if order is None:
            return
        if len(self._ahead) >= _MAX_AHEAD:
            self._ahead.popleft().cancel()
        self._ahead.append(order)

    async def _warm(self, request: m.Warm) -> None:
        found = [self._attached.chunks.get(key) for key in split(request.keys)]
        chunks = [chunk for chunk in found if chunk is not None]
        self._store.lease_all(chunks)
        try:
            warmths = iter(await self._store.warm(chunks))
        finally:
            self._store.release_all(chunks)
        await self._send(m.Warmed(request.id, bytes([m.Warmth.GONE if c is None else next(warmths) for c in found])))

    def _hold(self, chunks: list[Chunk]) -> int:
        """Remember leases that were taken; returns their number, 0 for none."""
        if not chunks:
            return 0
        if len(self._leases) >= _MAX_LEASES:
            self._release(chunks)
            raise ProtocolError(f"a session holds at most {_MAX_LEASES} leases: release some")
        lease = next(_leases)
        self._leases[lease] = chunks
        return lease

    def _release(self, chunks: list[Chunk]) -> None:
        self._store.release_all(chunks)

    async def _load(self, request: m.Load) -> None:
        table = self._attached
        found = [table.chunks.get(key) for key in split(request.keys)]
        chunks = [chunk for chunk in found if chunk is not None]
        self._store.lease_all(chunks)
        lease = self._hold(chunks)
        sources = {chunk: chunk.tier for chunk in chunks}
        self._store.counters.missed_chunks += len(found) - len(chunks)
        cold = [chunk for chunk in chunks if sources[chunk] is not m.Tier.RAM]
        promotions: dict[Chunk, Promotion | None] = {}
        if request.stay_on_volume:
            there = len(cold)
            cold = [chunk for chunk in cold if self._store.is_under_way(chunk)]
            self._store.counters.loads_on_volume += there - len(cold)
        if cold and self._store.has_nvme:
            promotions = dict(zip(cold, self._store.promote(cold), strict=True))
        num_layers = table.namespace.num_layers
        under_way = [promotion for promotion in promotions.values() if promotion is not None]
        if under_way and not request.stream:
            with trio.move_on_after(request.deadline_ms / 1000):
                for promotion in under_way:
                    await promotion.wait_for_layers(num_layers)
        placements = tuple(_placement(chunk, sources, promotions, request.stream, num_layers) for chunk in found)
        ready = min((promotion.layers for promotion in under_way), default=num_layers) if request.stream else num_layers
        await self._send(m.Loaded(request.id, placements, lease, ready))
        loaded = [chunk for chunk, place in zip(found, placements, strict=True) if chunk and place.tier]
        self._store.counters.loads_unavailable += len(chunks) - len(loaded)
        self._store.touch(loaded, [sources[chunk] for chunk in loaded])
        self._read_ahead(loaded)
        if ready < num_layers:
            awaited = [
                (i, promotions[chunk]) for i, chunk in enumerate(found) if chunk is not None and chunk in promotions
            ]
            under_way_by_index = [(index, promotion) for index, promotion in awaited if promotion is not None]
            await tell_arrivals(request, under_way_by_index, ready, num_layers, self._send)

    async def _open_window(self, request: m.OpenWindow) -> None:
        _ = self._attached
        if not isinstance(self._handover, ThroughWindow):
            raise ProtocolError("a trusted session stores into the arena itself")
        fd, size = await self._handover.open(request.size_bytes)
        await self._send(m.Window(request.id, size), [fd])


def _check_version(version: int) -> None:
    if version != m.VERSION:
        raise ProtocolError(f"this daemon speaks session protocol {m.VERSION}, the client {version}")


def _placement(
    chunk: Chunk | None,
    sources: dict[Chunk, m.Tier],
    promotions: dict[Chunk, Promotion | None],
    stream: bool,
    num_layers: int,
) -> m.Placement:
    """Where a leased chunk is readable: in the arena if it is or will be there, else on the volume."""
    if chunk is None:
        return m.Placement(m.Tier.NONE, m.Tier.NONE, 0, 0)
    source = sources[chunk]
    if chunk.ram != NOWHERE:
        return m.Placement(m.Tier.RAM, source, chunk.ram, chunk.length)
    promotion = promotions.get(chunk)
    if promotion is not None:
        is_usable = promotion.error is None and (stream or promotion.layers >= num_layers)
        if is_usable:
            return m.Placement(m.Tier.RAM, source, promotion.offset, chunk.length)
        if isinstance(promotion.error, CorruptChunk):
            return m.Placement(m.Tier.NONE, m.Tier.NONE, 0, 0)
    if chunk.nvme != NOWHERE and not chunk.is_removed:
        return m.Placement(m.Tier.NVME, source, chunk.nvme, chunk.length, chunk.volume, chunk.is_proven)
    return m.Placement(m.Tier.NONE, m.Tier.NONE, 0, 0)
