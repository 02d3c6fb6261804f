"""What one client stores, message by message: room that it asks for, payloads that it hands over, and their end.

Concurrency: belongs to the event loop's thread. Publishes of one session wait for each other's end, not for their work.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable

import trio

from kvfs import messages as m
from kvfs.catalog import Chunk, ChunkTable
from kvfs.errors import KvfsError
from kvfs.intake import Handed
from kvfs.keys import Key
from kvfs.mount.handover import Handover
from kvfs.store import Store

_TURN_S = 0.0005  # after which others go on. While threads take checksums each turn given away costs up to 0.2 ms


class Stores:
    """The stores of one session."""

    def __init__(self, store: Store, handover: Handover) -> None:
        self._store = store
        self._handover = handover
        self._published = trio.Event()  # whether the latest publish, and so each before it, is visible
        self._published.set()
        self._arrived: list[Chunk] = []  # that the policy has not been told of as one chain

    async def reserve(self, table: ChunkTable, request: m.Store, send: Callable[[m.Reply], Awaitable[None]]) -> None:
        """Give room, or say why there is none. Raises UsageError for an impossible chunk; none has room then."""
        slots: list[m.Slot] = []
        turn_ends = trio.current_time() + _TURN_S
        try:
            for new in request.chunks:
                slots.append(self._handover.reserve(table, new))
                if trio.current_time() > turn_ends:  # a geometry that is new can take many milliseconds
                    await trio.lowlevel.checkpoint()
                    turn_ends = trio.current_time() + _TURN_S
        except KvfsError:
            for new, slot in zip(request.chunks, slots, strict=False):
                if slot.status is m.StoreStatus.STORED:
                    self._handover.abort(new.chain[:16])
            raise
        await send(m.Slots(request.id, tuple(slots)))

    async def publish(self, table: ChunkTable, request: m.Publish, send: Callable[[m.Reply], Awaitable[None]]) -> None:
        """Make visible what is handed over, after what was handed over before."""
        statuses = [m.StoreStatus.UNKNOWN] * len(request.chunks)
        num_bytes = 8 * table.namespace.num_layers
        handed: dict[int, Handed] = {}
        for index, finished in enumerate(request.chunks):
            if len(finished.checksums) not in (0, num_bytes):
                if self._handover.abort(finished.key):
                    statuses[index] = m.StoreStatus.BAD
                continue
            values = struct.unpack(f">{len(finished.checksums) // 8}Q", finished.checksums)
            taken = self._handover.take(finished.key, values)
            if taken is not None:
                handed[index] = taken
        # Payloads of several messages are received side by side. A later one may hold the children of this one's chunks.
        turn, self._published = self._published, trio.Event()
        is_visible = self._published
        try:
            published = await self._handover.publish(list(handed.values()), turn)
        finally:
            is_visible.set()
        for index, status in zip(handed, published, strict=True):
            statuses[index] = status
        await send(m.Published(request.id, tuple(statuses)))
        found = [table.chunks.get(Key(finished.key)) for finished in request.chunks]
        self._arrived += [chunk for chunk in found if chunk is not None]
        if is_visible is self._published:  # else once for all: each time the whole chain is gone through
            self.tell_arrived()

    def tell_arrived(self) -> None:
        """Have the policy hear of all that came since the last time, as one chain."""
        arrived, self._arrived = self._arrived, []
        self._store.stored(arrived)
