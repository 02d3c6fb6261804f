"""Handover: how the chunks that one client stores come into the arena.

`isolated` clients write into a window, memory of their own session, from which the daemon copies: whatever a client
does, it cannot alter what others read. `trusted` ones, of the daemon's own user, get the arena writable and write each
chunk where it will stay; that saves a copy, and only their good behaviour protects what is stored. Both have a budget of
bytes in flight, and either way nothing is visible before its checksums were verified, or taken, here.

Concurrency: belongs to the event loop's thread; copies and checks run in threads of the store.
"""

from __future__ import annotations

import logging
import os
import select
from abc import ABC, abstractmethod

import trio

from kvfs.catalog import ChunkTable
from kvfs.chunk import align
from kvfs.errors import ProtocolError, UsageError
from kvfs.extents import ExtentAllocator
from kvfs.intake import Handed, InPlace, Reservation, Source, WindowSlot
from kvfs.messages import NewChunk, Slot, StoreStatus
from kvfs.store import Store

log = logging.getLogger(__name__)


class Handover(ABC):
    """The reserved chunks of one client, by key."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reserved: dict[bytes, tuple[Reservation, Source]] = {}

    @abstractmethod
    def _place(self, reservation: Reservation) -> tuple[Source, int] | None:
        """Where the client puts the payload, and the offset it is told; None if its budget is used up."""

    @abstractmethod
    def _free(self, reservation: Reservation, source: Source) -> None:
        """The place may be used again."""

    @abstractmethod
    async def close(self) -> None:
        """The connection ended: give everything back as soon as the client cannot write to it any more."""

    def reserve(self, table: ChunkTable, new: NewChunk) -> Slot:
        """A slot for a chunk to come. Raises UsageError for an impossible chunk."""
        if new.chain[:16] in self._reserved:
            return Slot(StoreStatus.EXISTS, 0)
        reservation = self._store.reserve(table, new)
        if not isinstance(reservation, Reservation):
            return Slot(reservation, 0)
        placed = self._place(reservation)
        if placed is None:
            self._store.abort(reservation)
            return Slot(StoreStatus.REFUSED, 0)
        source, offset = placed
        self._reserved[reservation.key] = (reservation, source)
        return Slot(StoreStatus.STORED, offset)

    def take(self, key: bytes, checksums: tuple[int, ...]) -> Handed | None:
        """A reserved chunk that its client has finished; `publish` must follow. None for what was never reserved."""
        reserved = self._reserved.pop(key, None)
        return None if reserved is None else Handed(*reserved, checksums)

    async def publish(self, chunks: list[Handed], turn: trio.Event) -> list[StoreStatus]:
        """Publish what was taken, visibly after `turn`; the slots are free afterwards, whatever happens."""
        try:
            return await self._store.publish(chunks, turn)
        finally:
            for handed in chunks:
                self._free(handed.reservation, handed.source)

    def abort(self, key: bytes) -> bool:
        """The client gives a slot back; returns whether it had one."""
        reserved = self._reserved.pop(key, None)
        if reserved is None:
            return False
        self._store.abort(reserved[0])
        self._free(*reserved)
        return True

    def _abort_all(self) -> None:
        for key in list(self._reserved):
            self.abort(key)


class ThroughWindow(Handover):
    """Chunks of an isolated client. Attributes: fd: of the window, None before it is opened."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.fd: int | None = None
        self._slots: ExtentAllocator | None = None

    async def open(self, size_bytes: int) -> tuple[int, int]:
        """Make the window; returns its descriptor and size. Raises ProtocolError, or UsageError if memory is short."""
        limit = self._store.settings.window_bytes
        size = align(size_bytes)
        if self.fd is not None:
            raise ProtocolError("the session has a window already")
        if not 0 < size <= limit:
            raise ProtocolError(f"a window has 1 to {limit} bytes, not {size_bytes}")
        try:
            self.fd = await trio.to_thread.run_sync(self._store.arena.create_window, size)
        except OSError as error:
            raise UsageError(f"there is no memory for another window: {error.strerror}") from error
        self._slots = ExtentAllocator(size)
        return self.fd, size

    def reserve(self, table: ChunkTable, new: NewChunk) -> Slot:
        """See `Handover`."""
        if self._slots is None:
            raise ProtocolError("open a window before storing")
        return super().reserve(table, new)

    def _place(self, reservation: Reservation) -> tuple[Source, int] | None:
        assert self._slots is not None
        assert self.fd is not None
        offset = self._slots.allocate(align(reservation.geometry.payload_bytes))
        return None if offset is None else (WindowSlot(self.fd, offset), offset)

    def _free(self, reservation: Reservation, source: Source) -> None:
        if self._slots is not None and isinstance(source, WindowSlot):
            self._slots.free(source.offset, align(reservation.geometry.payload_bytes))

    async def close(self) -> None:
        """See `Handover`. The client may go on writing to its window: nobody else ever uses that memory."""
        self._abort_all()
        if self.fd is not None and self._slots is not None:
            self._store.arena.close_window(self.fd, self._slots.capacity)
            self.fd = None


class InArena(Handover):
    """Chunks of a trusted client: it writes where they will stay."""

    def __init__(self, store: Store, pid: int) -> None:
        super().__init__(store)
        self._left_bytes = store.settings.window_bytes
        self._record = store.arena.kept.record if store.arena.kept is not None else None
        self._pid = pid
        self._may_write_on = False
        try:
            self._pidfd: int | None = os.pidfd_open(pid)
        except OSError:  # it is gone already
            self._pidfd = None

    def _place(self, reservation: Reservation) -> tuple[Source, int] | None:
        size = align(reservation.geometry.payload_bytes)
        if size > self._left_bytes:
            return None
        self._left_bytes -= size
        if self._record is not None:  # whoever takes the arena over must not reuse it while this client lives
            self._record.reserve(reservation.offset, reservation.geometry.file_bytes, self._pid)
        return InPlace(), reservation.offset + reservation.geometry.header_bytes

    def _free(self, reservation: Reservation, source: Source) -> None:
        self._left_bytes += align(reservation.geometry.payload_bytes)
        if self._record is not None and not self._may_write_on:
            self._record.release(reservation.offset, self._pid)

    async def close(self) -> None:
        """See `Handover`. What was reserved is kept from others until the process is gone: it may still be writing."""
        try:
            if self._reserved and self._pidfd is not None and not _has_ended(self._pidfd):
                log.info("%d reserved chunks wait for the end of their client", len(self._reserved))
                self._may_write_on = True
                await trio.lowlevel.wait_readable(self._pidfd)
                self._may_write_on = False
        finally:
            self._abort_all()
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
