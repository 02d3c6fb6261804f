"""Limits: what a person has said of chunks and namespaces, made durable and kept to. So far: pins.

Concurrency: belongs to the event loop's thread. Methods that are `async` return when what was asked for is durable; it
is in force before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import islice

import trio

from kvfs.catalog import Chunk
from kvfs.config import format_size
from kvfs.durations import NS
from kvfs.errors import CapacityError
from kvfs.pins import FOREVER
from kvfs.residency import Residency
from kvfs.system import System

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 60.0  # whatever happens: the wall clock may be set
_AT_ONCE = 2000
_PINNED_AT_MOST = (3, 4)


class Limits:
    """The limits of one store. `run` must be running for anything to end in time."""

    def __init__(self, residency: Residency, system: System) -> None:
        self._residency = residency
        self._system = system
        self._wake = trio.Event()

    # pins

    async def pin(self, chunks: Sequence[Chunk], until_ns: int) -> int:
        """Pin chunks until then, nanoseconds since the epoch or FOREVER; returns how many were there.

        Raises CapacityError if more than 3/4 of the lowest tier would have to stay, with nothing pinned;
        UnavailableError if it may not be durable.
        """
        residency, pins = self._residency, self._residency.pins
        part, whole = _PINNED_AT_MOST
        most = residency.lowest.extents.capacity * part // whole
        needed = pins.bytes_to_hold(chunk for chunk in chunks if not chunk.is_removed)
        if needed and pins.held_bytes + needed > most:
            reason = (
                f"pins may hold {format_size(most)}, {part}/{whole} of the tier: {format_size(pins.held_bytes)} are held, "
                f"and {format_size(needed)} more were to be"
            )
            log.warning("a pin was refused: %s", reason)
            residency.events.append("pin_refused", reason=reason)
            raise CapacityError(reason)
        count = 0
        remaining = iter(chunks)
        while some := list(islice(remaining, _AT_ONCE)):
            for chunk in some:
                if not chunk.is_removed:
                    pins.pin(chunk, until_ns)
                    self._keep(chunk, until_ns)
                    count += 1
            await trio.lowlevel.checkpoint()
        if count:
            until = "forever" if until_ns == FOREVER else until_ns
            residency.events.append("pin", namespace=chunks[0].table.directory, chunks=count, until_ns=until)
        self._wake.set()
        await residency.settle()
        return count

    async def unpin(self, chunks: Iterable[Chunk]) -> int:
        """End the pins of these chunks; returns how many had one. Raises UnavailableError if it may not be durable."""
        remaining = iter(chunks)
        count = 0
        while some := list(islice(remaining, _AT_ONCE)):
            count += self._ended([chunk for chunk in some if self._residency.pins.unpin(chunk)])
            await trio.lowlevel.checkpoint()
        await self._residency.settle()
        return count

    def end_of_pin(self, chunk: Chunk) -> int | None:
        """When a chunk's pin ends, nanoseconds since the epoch or FOREVER; None if it is not pinned."""
        return self._residency.pins.end_of(chunk, self._system.time_ns())

    def common_end(self, chunks: Iterable[Chunk]) -> int | None:
        """The first end among the pins of these chunks, None unless every one is pinned."""
        return self._residency.pins.common_end(chunks, self._system.time_ns()) if self._residency.pins else None

    def _keep(self, chunk: Chunk, until_ns: int | None) -> None:
        if self._residency.commits is not None:
            self._residency.commits.pin(chunk.table.number, chunk.key, until_ns)

    def _ended(self, chunks: list[Chunk]) -> int:
        by_namespace: dict[str, int] = {}
        for chunk in chunks:
            self._keep(chunk, None)
            by_namespace[chunk.table.directory] = by_namespace.get(chunk.table.directory, 0) + 1
        for directory, count in by_namespace.items():
            self._residency.events.append("unpin", namespace=directory, chunks=count)
        return len(chunks)

    # time

    def look(self) -> None:
        """Do what is due now."""
        self._ended(self._residency.pins.end(self._system.time_ns()))

    async def run(self) -> None:
        """Do what is due when it is, for ever."""
        while True:
            self.look()
            left_s = (self._residency.pins.next_end_ns - self._system.time_ns()) / NS
            with trio.move_on_after(max(0.0, min(left_s, _LOOK_EVERY_S))):
                await self._wake.wait()
            self._wake = trio.Event()
