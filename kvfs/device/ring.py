"""Reading into GPU memory through a ring of pinned buffers: while one is copied to the device, the next are filled.

What is used where kvikio is missing, and for bytes that are in host memory already.

Concurrency: any number of threads may carry at the same time; a buffer belongs to one piece until its copy is recorded,
and is filled again when that event has come about.
"""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvfs.addresses import address_of
from kvfs.device.destination import Destination
from kvfs.device.driver import Driver
from kvfs.device.host import read_fully
from kvfs.system import System

BUFFER_BYTES = 4 << 20
NUM_THREADS = 4
NUM_BUFFERS = 2 * NUM_THREADS

Fill = Callable[[memoryview], None]


@dataclass(frozen=True)
class _Buffer:
    """Pinned memory, and the event that says when its last copy is over."""

    address: int
    view: memoryview
    event: int


class PinnedRing:
    """Pinned buffers and a stream of one device; close it when nobody carries any more."""

    def __init__(self, driver: Driver, device: int, system: System) -> None:
        self._driver = driver
        self._device = device
        self._system = system
        self._stream = driver.create_stream(device)
        self._all: list[_Buffer] = []
        self._free: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "kvfs-ring")

    @classmethod
    def open(cls, driver: Driver, device: int, system: System) -> PinnedRing:
        """Pin the buffers. Raises UnavailableError."""
        ring = cls(driver, device, system)
        try:
            for _ in range(NUM_BUFFERS):
                ring._add_buffer()
        except BaseException:
            ring.close()
            raise
        return ring

    def _add_buffer(self) -> None:
        address = self._driver.allocate_host(BUFFER_BYTES, self._device)
        view = memoryview((ctypes.c_char * BUFFER_BYTES).from_address(address)).cast("B")
        buffer = _Buffer(address, view, self._driver.create_event(self._device))
        self._all.append(buffer)
        self._free.put(buffer)

    def read(self, fd: int, parts: Sequence[tuple[int, Destination]]) -> None:
        """Fill the destinations, each from its offset of a file; they are full when this returns.

        Raises OSError, EOFError or UnavailableError, when nothing is under way any more.
        """

        def filler(offset: int) -> Fill:
            return lambda view: read_fully(fd, offset, view, self._system)

        pieces = []
        for offset, target in parts:
            for begin, piece in _cut(target):
                pieces.append((piece, filler(offset + begin)))
        self._carry(pieces)

    def copy(self, source: memoryview, target: Destination) -> None:
        """Fill a destination from host memory; it is full when this returns."""

        def filler(part: memoryview) -> Fill:
            def fill(view: memoryview) -> None:
                view[:] = part

            return fill

        self._carry([(piece, filler(source[begin : begin + piece.size_bytes])) for begin, piece in _cut(target)])

    def copy_pinned(self, source: memoryview, target: Destination) -> None:
        """The same from memory that is registered with CUDA: one copy, without the buffers."""
        size, address = target.size_bytes, address_of(source)
        self._driver.copy_to_device(target.address, address, size, self._stream, self._device)
        self._driver.wait_for_stream(self._stream, self._device)

    def _carry(self, pieces: Sequence[tuple[Destination, Fill]]) -> None:
        futures = [self._threads.submit(self._carry_piece, target, fill) for target, fill in pieces[1:]]
        try:
            for target, fill in pieces[:1]:  # this thread would only wait
                self._carry_piece(target, fill)
        finally:
            failures = [error for error in (future.exception() for future in futures) if error is not None]
            self._driver.wait_for_stream(self._stream, self._device)
        if failures:
            raise failures[0]

    def _carry_piece(self, target: Destination, fill: Fill) -> None:
        buffer = self._free.get()
        try:
            self._driver.wait_for_event(buffer.event, self._device)
            fill(buffer.view[: target.size_bytes])
            self._driver.copy_to_device(target.address, buffer.address, target.size_bytes, self._stream, self._device)
            self._driver.record(buffer.event, self._stream, self._device)
        finally:
            self._free.put(buffer)

    def close(self) -> None:
        """Give the buffers back."""
        self._threads.shutdown()
        self._driver.wait_for_stream(self._stream, self._device)
        for buffer in self._all:
            buffer.view.release()
            self._driver.free_host(buffer.address, self._device)
        self._driver.destroy(self._device, [self._stream], [buffer.event for buffer in self._all])
        self._all.clear()


def _cut(target: Destination) -> list[tuple[int, Destination]]:
    """A destination in pieces of a buffer's size, each with where it begins."""
    starts = range(0, target.size_bytes, BUFFER_BYTES)
    return [(begin, target.part(begin, min(begin + BUFFER_BYTES, target.size_bytes))) for begin in starts]
