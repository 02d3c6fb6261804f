"""The arena: the memory of the RAM tier, mapped read-only by every client, and the windows that clients write to.

Only the daemon writes the arena. It is prefaulted, in huge pages where the system allows, since a first touch costs a
client more than half of its speed and direct reads into 4 KiB shared pages run at half the speed. Three forms, the
best that works is taken:

* ``tmpfs-huge``: a file of an own tmpfs in huge pages (root). With a place for it (`kept`) the tmpfs stays mounted there,
  and the next daemon takes it over; without one it is unmounted lazily as soon as it is open, so that nothing is left over
  however the daemon ends.
* ``memfd-huge``: a sealed memfd with MADV_HUGEPAGE, where ``shmem_enabled`` is ``advise`` or ``always``.
* ``memfd``: a sealed memfd in 4 KiB pages.

A memfd has no name, so that it ends with its daemon and the last client that maps it: it cannot be taken over. (A file in
/dev/shm could be, but not be sealed, would have small pages, and stay behind a daemon that was killed for good.)

A window is handed out writable. The daemon never maps one but reads it by descriptor: a client that truncates its
window gets a short read, not a SIGBUS in the daemon.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import tempfile
import threading
from pathlib import Path

from kvfs import kept as kept_places
from kvfs.chunk import align
from kvfs.kept import Dropped, Facts, Kept

log = logging.getLogger(__name__)

MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
_F_ADD_SEALS = 1033
_SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 0x2, 0x4, 0x10
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MNT_DETACH = 2
_HUGE_PAGE = 2 << 20
_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


class Arena:
    """One flat piece of shared memory.

    Attributes:
        size_bytes: of the arena; kind: which of the three forms it has.
        fd: read-write descriptor, the daemon's own; client_fd: read-only, to be handed out.
        view: the whole arena, writable.
        kept: its place, if it has one that outlives the daemon; is_to_stay: it will be left there.
        dropped: what the daemon before us had kept and could not be taken over.
    """

    def __init__(
        self,
        size_bytes: int,
        kind: str,
        fd: int,
        client_fd: int,
        directory_fd: int | None,
        window_budget_bytes: int,
        kept: Kept | None = None,
    ) -> None:
        self.kept = kept
        self.dropped: Dropped | None = None
        self.is_to_stay = kept is not None and kept.is_taken_over
        self.size_bytes = size_bytes
        self.kind = kind
        self.fd = fd
        self.client_fd = client_fd
        self._directory_fd = directory_fd
        self._windows_left_bytes = window_budget_bytes
        self._windows_lock = threading.Lock()
        self._map = mmap.mmap(fd, size_bytes)
        self.view = memoryview(self._map)

    @classmethod
    def create(
        cls,
        size_bytes: int,
        *,
        huge_pages: bool = True,
        window_budget_bytes: int = 0,
        is_shared: bool = False,
        place: Path | None = None,
        facts: Facts | None = None,
        dropped: Dropped | None = None,
    ) -> Arena:
        """Make and prefault an arena. Raises OSError (ENOMEM) if the memory is not there.

        `window_budget_bytes` bounds what all windows together may take. With `is_shared`, whoever is handed `fd` may
        write to it. In `place` it may outlive us, if it can; `facts` say whose it is then. `dropped` is remembered.
        """
        size_bytes = align(size_bytes)
        arena = None
        if huge_pages and os.geteuid() == 0:
            try:
                if place is not None and facts is not None:
                    arena = cls.of(kept_places.make(place, facts, window_budget_bytes), window_budget_bytes)
                else:
                    arena = cls._on_tmpfs(size_bytes, window_budget_bytes)
            except OSError as error:
                log.warning("no tmpfs with huge pages for the arena (%s); taking a memfd", error)
        arena = arena or cls._on_memfd(size_bytes, huge_pages, window_budget_bytes)
        arena.dropped = dropped
        try:
            arena._map.madvise(MADV_POPULATE_WRITE)
            arena._seal(0 if is_shared else _SEAL_FUTURE_WRITE)
        except OSError:
            arena.close()
            raise
        return arena

    @classmethod
    def of(cls, kept: Kept, window_budget_bytes: int) -> Arena:
        """The arena in a place of its own, that of an earlier daemon or a new one, which is not prefaulted yet."""
        return cls(
            kept.facts.size_bytes, "tmpfs-huge", kept.fd, kept.client_fd, kept.directory_fd, window_budget_bytes, kept
        )

    @classmethod
    def _on_tmpfs(cls, size_bytes: int, window_budget_bytes: int) -> Arena:
        limit = -(-(size_bytes + window_budget_bytes) // _HUGE_PAGE) * _HUGE_PAGE + _HUGE_PAGE
        directory = tempfile.mkdtemp(prefix="kvfs-arena-")
        try:
            directory_fd = _open_detached_tmpfs(directory, f"huge=always,size={limit},mode=0700")
        finally:
            os.rmdir(directory)
        try:
            fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=directory_fd)
            os.ftruncate(fd, size_bytes)
            client_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            os.close(directory_fd)
            raise
        return cls(size_bytes, "tmpfs-huge", fd, client_fd, directory_fd, window_budget_bytes)

    @classmethod
    def _on_memfd(cls, size_bytes: int, huge_pages: bool, window_budget_bytes: int) -> Arena:
        fd = _memfd("kvfs-arena", size_bytes)
        client_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        huge = huge_pages and _shmem_takes_advice()
        arena = cls(size_bytes, "memfd-huge" if huge else "memfd", fd, client_fd, None, window_budget_bytes)
        if huge:
            arena._map.madvise(mmap.MADV_HUGEPAGE)
        return arena

    def _seal(self, future_write: int) -> None:
        """A memfd can be sealed, so that not even the same user can truncate it, or write to it, any more."""
        if self._directory_fd is None:
            with contextlib.suppress(PermissionError):  # kernels before 5.1 lack FUTURE_WRITE
                fcntl.fcntl(self.fd, _F_ADD_SEALS, future_write | _SEAL_SHRINK | _SEAL_GROW)

    def create_window(self, size_bytes: int) -> int:
        """A descriptor of new shared memory that a client may write, for `close_window`. Raises OSError."""
        with self._windows_lock:
            if size_bytes > self._windows_left_bytes:
                raise OSError(errno.ENOSPC, "other sessions have it all")
            self._windows_left_bytes -= size_bytes
        try:
            return self._new_window(size_bytes)
        except OSError:
            self._give_back(size_bytes)
            raise

    def close_window(self, fd: int, size_bytes: int) -> None:
        """Give a window back; its client may keep it mapped, but can do no more with it."""
        os.close(fd)
        self._give_back(size_bytes)

    def _give_back(self, size_bytes: int) -> None:
        with self._windows_lock:
            self._windows_left_bytes += size_bytes

    def _new_window(self, size_bytes: int) -> int:
        if self._directory_fd is None:
            fd = _memfd("kvfs-window", size_bytes)
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW)
            return fd
        fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=self._directory_fd)
        try:
            os.ftruncate(fd, size_bytes)
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError:
            os.close(fd)
            raise
        return fd

    def close(self) -> None:
        """Give the memory back, or leave it in its place; views of it must be gone."""
        self.view.release()
        with contextlib.suppress(BufferError):  # a reader's view is still alive: the map goes with it
            self._map.close()
        for fd in (self.fd, self.client_fd, self._directory_fd if self.kept is None else None):
            if fd is not None:
                os.close(fd)
        if self.kept is not None:
            self.kept.close()
            if self.is_to_stay:
                self.kept.stays()
            else:
                kept_places.remove(self.kept.path)


def _memfd(name: str, size_bytes: int) -> int:
    """A memfd that only our user can open anew: they are made with mode 0777, and /proc/PID/fd leads to them."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, size_bytes)
    return fd


def _shmem_takes_advice() -> bool:
    try:
        return "[never]" not in (text := _SHMEM_ENABLED.read_text()) and "[deny]" not in text
    except OSError:
        return False


def _open_detached_tmpfs(directory: str, options: str) -> int:
    """A directory descriptor of a tmpfs that is mounted nowhere."""
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    if libc.mount(b"kvfs-arena", directory.encode(), b"tmpfs", ctypes.c_ulong(flags), options.encode()):
        raise _last_error(directory)
    try:
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        if libc.umount2(directory.encode(), _MNT_DETACH):
            raise _last_error(directory)


def _last_error(path: str) -> OSError:
    number = ctypes.get_errno() or errno.EIO
    return OSError(number, os.strerror(number), path)
