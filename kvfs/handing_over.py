"""Handing chunks over: the client's side of storing.

`Reserving` asks for room; the engine fills earlier chunks meanwhile. A `Reservation` is filled at once, or layer by
layer. `seal` takes a layer's checksum, while its bytes are warm. In a window the daemon looks at the bytes again as it
copies them, and refuses those that are others by then; what a trusted client has sealed in place is not read again until
somebody loads it. Of a payload that was not sealed the daemon takes the checksums itself.
`Publishing` is a publish under way: the engine goes on filling the next chunks while the daemon checks these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import xxhash

from kvfs import messages as m
from kvfs.chunk import Geometry
from kvfs.connection import Connection
from kvfs.copying import copy_bytes, copy_layers, runs
from kvfs.errors import KvfsError, UsageError
from kvfs.helping import for_each, helpers_for
from kvfs.messages import NewChunk, StoreStatus

_MAX_CHUNKS_A_MESSAGE = 128
_DEADLINE_S = 30.0
_PART_BYTES = 4 << 20  # of a payload that a helper takes at once


@dataclass(eq=False)
class Reservation:
    """One chunk to be stored. If `status` is STORED, `fill` it, or write `payload`, and hand this to
    `Client.publish`.

    Attributes:
        payload: `geometry.payload_bytes` of shared memory, writable; None unless there is a slot.
    """

    chunk: NewChunk
    geometry: Geometry
    status: StoreStatus = StoreStatus.REFUSED
    payload: memoryview | None = field(default=None, repr=False)
    connection: Connection | None = field(default=None, repr=False)
    _filled: dict[int, bytes] = field(default_factory=dict, repr=False)  # checksums taken meanwhile, by first layer
    _sealed: dict[int, bytes] = field(default_factory=dict, repr=False)

    def fill(self, payload: memoryview) -> None:
        """Copy the whole payload from the engine's memory.

        What a trusted client writes needs its checksums from either side: this one takes them while it copies if the
        daemon still works on what was handed over before. Raises UsageError for a payload of another size.
        """
        fill_all([self], [payload], num_helpers=0)

    def seal(self, layer: int) -> None:
        """The layer is filled, and must not change any more. Its checksum costs a sixth of a copy; optional."""
        assert self.payload is not None
        places = self.geometry.layers[layer]
        self._sealed[layer] = xxhash.xxh3_64_digest(self.payload[places[0].begin : places[-1].end])

    def finished(self) -> m.Finished:
        """What a publish says of this chunk. Once a layer was sealed, those that were not are sealed now."""
        if not self._sealed:
            return m.Finished(self.chunk.chain[:16], b"".join([self._filled[first] for first in sorted(self._filled)]))
        num_layers = len(self.geometry.layers)
        for layer in range(num_layers):
            if layer not in self._sealed:
                self.seal(layer)
        return m.Finished(self.chunk.chain[:16], b"".join(map(self._sealed.__getitem__, range(num_layers))))


def fill_all(
    reservations: Sequence[Reservation], payloads: Sequence[memoryview], *, num_helpers: int | None = None
) -> None:
    """Copy the payload of each from the engine's memory; all have a slot.

    Threads help, as many as `num_helpers` says: one, unless told otherwise, where this process has a second core and it is
    worth it. The checksums of what trusted clients write are taken here then: a helper is done with them sooner than the
    daemon, which has what was handed over before to write. Raises UsageError for a payload of another size.
    """
    for reservation, payload in zip(reservations, payloads, strict=True):
        if len(payload) != reservation.geometry.payload_bytes:
            size = reservation.geometry.payload_bytes
            raise UsageError(f"the payload of this chunk has {size} bytes, not {len(payload)}")
        reservation._filled, reservation._sealed = {}, {}
    if num_helpers is None:
        num_helpers = helpers_for(sum(map(len, payloads)))
    for_each(_parts(reservations, payloads, is_helped=num_helpers > 0), _fill_part, num_helpers)


@dataclass(frozen=True, slots=True)
class _Part:
    """Layers `first` to before `stop` of a payload, to be copied, and with their checksums if they are `sealed` meanwhile."""

    reservation: Reservation
    payload: memoryview
    first: int
    stop: int
    sealed: bool


def _parts(reservations: Sequence[Reservation], payloads: Sequence[memoryview], *, is_helped: bool) -> Iterator[_Part]:
    for reservation, payload in zip(reservations, payloads, strict=True):
        connection = reservation.connection
        sealed = connection is not None and connection.is_trusted and (is_helped or connection.is_behind())
        for first, stop in runs(reservation.geometry, 0, len(reservation.geometry.layers), _PART_BYTES):
            yield _Part(reservation, payload, first, stop, sealed)


def _fill_part(part: _Part) -> None:
    target, geo = part.reservation.payload, part.reservation.geometry
    assert target is not None
    begin, end = geo.bounds[part.first], geo.bounds[part.stop]
    if part.sealed:
        found = copy_layers(geo, part.first, part.stop, part.payload[begin:end], target[begin:end])
        part.reservation._filled[part.first] = found
    else:
        copy_bytes(part.payload[begin:end], target[begin:end])


class Reserving:
    """Room that was asked for. Everyone is waited for, or its connection closed: what it gets is held until then."""

    def __init__(
        self, reservations: list[Reservation], failed: Callable[[KvfsError], None], refused: Callable[[int], None]
    ) -> None:
        """`refused` is told how many chunks a cache that was asked did not want."""
        self._reservations = reservations
        self._failed = failed
        self._refused = refused
        self._parts: list[tuple[Connection, int, Sequence[Reservation]]] = []
        self._is_asked = False
        self._window = memoryview(b"")
        self._deadline_s = 0.0

    def begin(self, connection: Connection, window_bytes: int, deadline_s: float) -> None:
        """Ask; what cannot be asked for is refused."""
        self._is_asked = True
        self._deadline_s = deadline_s
        try:
            self._window = connection.window(window_bytes, deadline_s)
            for start in range(0, len(self._reservations), _MAX_CHUNKS_A_MESSAGE):
                part = self._reservations[start : start + _MAX_CHUNKS_A_MESSAGE]
                request = m.Store(connection.next_id(), tuple([reservation.chunk for reservation in part]))
                connection.begin(request, deadline_s)
                self._parts.append((connection, request.id, part))
        except KvfsError as error:
            self._failed(error)

    def wait(self) -> list[Reservation]:
        """The reservations, each with a slot or the reason why it has none; more than once is harmless."""
        parts, self._parts = self._parts, []
        for connection, id_, part in parts:
            try:
                slots = connection.finish(id_, m.Slots, self._deadline_s).slots
            except KvfsError as error:
                self._failed(error)
                continue
            for reservation, slot in zip(part, slots, strict=True):
                reservation.status = slot.status
                if slot.status is StoreStatus.STORED:
                    end = slot.offset + reservation.geometry.payload_bytes
                    reservation.payload = self._window[slot.offset : end]
                    reservation.connection = connection
        if self._is_asked:
            self._is_asked = False
            self._refused(sum(one.status is StoreStatus.REFUSED for one in self._reservations))
        return self._reservations


class Publishing:
    """Chunks that were handed over and are not visible yet. Every publish is waited for, or its connection closed."""

    def __init__(self, reservations: Sequence[Reservation], failed: Callable[[KvfsError], None]) -> None:
        self._reservations = reservations
        self._failed = failed
        self._parts: list[tuple[Connection, int, Sequence[Reservation]]] = []

    def begin(self) -> None:
        """Send what is filled; reservations without a slot are passed over. What cannot be sent is refused."""
        filled = [reservation for reservation in self._reservations if reservation.payload is not None]
        if not filled:
            return
        size = max(1, min(_MAX_CHUNKS_A_MESSAGE, m.MAX_MESSAGE_BYTES // (64 + 8 * len(filled[0].geometry.layers))))
        for start in range(0, len(filled), size):
            self._send(filled[start : start + size])

    def _send(self, part: Sequence[Reservation]) -> None:
        connection = part[0].connection
        finished = tuple(reservation.finished() for reservation in part)
        for reservation in part:
            reservation.payload = None
            reservation.status = StoreStatus.REFUSED
        if connection is None or connection.is_broken:
            return
        request = m.Publish(connection.next_id(), finished)
        try:
            connection.begin(request, _DEADLINE_S)
        except KvfsError as error:
            self._failed(error)
        else:
            self._parts.append((connection, request.id, part))

    def wait(self) -> list[StoreStatus]:
        """The status of every reservation, once all are visible or turned away; more than once is harmless."""
        parts, self._parts = self._parts, []
        for connection, id_, part in parts:
            try:
                statuses = connection.finish(id_, m.Published, _DEADLINE_S).statuses
            except KvfsError as error:
                self._failed(error)
                continue
            for reservation, status in zip(part, statuses, strict=True):
                reservation.status = status
        return [reservation.status for reservation in self._reservations]
