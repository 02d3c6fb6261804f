"""Handing chunks over: the client's side of storing.

`Reserving` asks for room; the engine fills earlier chunks meanwhile. A `Reservation` is filled at once, or layer by
layer. `seal` takes a layer's checksum, while its bytes are warm. In a window the daemon looks at the bytes again as it
copies them, and refuses those that are others by then; what a trusted client has sealed in place is not read again until
somebody loads it. Of a payload that was not sealed the daemon takes the checksums itself.
`Publishing` is a publish under way: the engine goes on filling the next chunks while the daemon checks these.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvfs import messages as m
from kvfs.chunk import Geometry, checksum
from kvfs.connection import Connection
from kvfs.copying import PIECE_BYTES, copy_layers
from kvfs.errors import KvfsError, UsageError
from kvfs.messages import NewChunk, StoreStatus

_MAX_CHUNKS_A_MESSAGE = 128
_DEADLINE_S = 30.0


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
    _checksums: dict[int, int] = field(default_factory=dict, repr=False)

    def fill(self, payload: memoryview) -> None:
        """Copy the whole payload from the engine's memory.

        What a trusted client writes needs its checksums from either side: this one takes them while it copies if the
        daemon still works on what was handed over before.
        """
        assert self.payload is not None
        size = self.geometry.payload_bytes
        if len(payload) != size:
            raise UsageError(f"the payload of this chunk has {size} bytes, not {len(payload)}")
        if self.connection is not None and self.connection.is_trusted and self.connection.is_behind():
            num_layers = len(self.geometry.layers)
            self._checksums = dict(enumerate(copy_layers(self.geometry, 0, num_layers, payload, self.payload)))
            return
        for begin in range(0, size, PIECE_BYTES):
            end = min(begin + PIECE_BYTES, size)
            self.payload[begin:end] = payload[begin:end]

    def seal(self, layer: int) -> None:
        """The layer is filled, and must not change any more. Its checksum costs a sixth of a copy; optional."""
        assert self.payload is not None
        places = self.geometry.layers[layer]
        self._checksums[layer] = checksum(self.payload[places[0].begin : places[-1].end])

    def finished(self) -> m.Finished:
        """What a publish says of this chunk. Once a layer was sealed, those that were not are sealed now."""
        if not self._checksums:
            return m.Finished(self.chunk.chain[:16], b"")
        num_layers = len(self.geometry.layers)
        for layer in range(num_layers):
            if layer not in self._checksums:
                self.seal(layer)
        values = map(self._checksums.__getitem__, range(num_layers))
        return m.Finished(self.chunk.chain[:16], struct.pack(f">{num_layers}Q", *values))


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
