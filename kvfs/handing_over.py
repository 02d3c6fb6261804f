"""Handing chunks over: the client's side of storing.

A `Reservation` is filled layer by layer; `seal` takes a layer's checksum while its bytes are warm. `Publishing` is a
publish under way: the engine goes on filling the next chunks while the daemon checks these.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvfs import messages as m
from kvfs.chunk import Geometry, checksum
from kvfs.connection import Connection
from kvfs.errors import KvfsError
from kvfs.messages import NewChunk, StoreStatus

_MAX_CHUNKS_A_MESSAGE = 128
_DEADLINE_S = 30.0


@dataclass(eq=False)
class Reservation:
    """One chunk to be stored. If `status` is STORED, fill `payload` and hand this to `Client.publish`.

    Attributes:
        payload: `geometry.payload_bytes` of shared memory, writable; None unless there is a slot.
    """

    chunk: NewChunk
    geometry: Geometry
    status: StoreStatus = StoreStatus.REFUSED
    payload: memoryview | None = field(default=None, repr=False)
    connection: Connection | None = field(default=None, repr=False)
    _checksums: dict[int, int] = field(default_factory=dict, repr=False)

    def seal(self, layer: int) -> None:
        """The layer is filled. Taking its checksum now, while it is in the core's cache, is nearly free; optional."""
        assert self.payload is not None
        places = self.geometry.layers[layer]
        self._checksums[layer] = checksum(self.payload[places[0].begin : places[-1].end])

    def finished(self) -> m.Finished:
        """What a publish says of this chunk; seals what is not sealed yet."""
        for layer in range(len(self.geometry.layers)):
            if layer not in self._checksums:
                self.seal(layer)
        values = [self._checksums[layer] for layer in range(len(self.geometry.layers))]
        return m.Finished(self.chunk.chain[:16], struct.pack(f">{len(values)}Q", *values))


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
