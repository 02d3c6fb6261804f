"""The volume: one preallocated file on NVMe, read and written past the page cache, 4 KiB aligned.

    offset   bytes   content of the superblock
    0        8       magic "KVFSVOL\\0"
    8        4       format version, u32 little-endian
    12       4       zero
    16       16      identity of the volume, random
    32       8       capacity in bytes, superblock included, u64
    40       8       created, nanoseconds since the epoch, u64
    48       8       xxh3_64 of the 48 bytes before, u64
    56       4040    zeros

Chunks lie behind it in extents of 4 KiB multiples, each a whole chunk file. Never change these values without a new
version. A lock on the directory keeps a second daemon away; it ends with the process.

Everything here blocks and is called in threads; nothing here knows what a chunk is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import struct
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from kvfs.chunk import ALIGNMENT
from kvfs.config import exact_size, format_size
from kvfs.errors import FormatError, UsageError
from kvfs.index import FILE_NAME as INDEX
from kvfs.kernel_reads import KernelReads
from kvfs.system import System

log = logging.getLogger(__name__)

VERSION = 1
MAGIC = b"KVFSVOL\0"
FILE_NAME = "volume"
SUPERBLOCK_BYTES = ALIGNMENT
_HEAD = struct.Struct("<8sI4x16sQQ")
_SUM = struct.Struct("<Q")
_MAX_TRANSFER = 64 << 20


class ForeignVolume(UsageError, FormatError):
    """A file in the place of the volume that does not begin like one."""


class Volume:
    """An open volume.

    Attributes:
        path: of the file; identity: the random 16 bytes in its superblock; capacity: its size in bytes.
        is_direct: whether the file system takes O_DIRECT (else reads and writes are buffered).
        fd: the daemon's descriptor; client_fd: a read-only one to hand out.
        is_new: whether it was made just now.
        damage: what is wrong with its superblock, "" if nothing; else `identity` is empty.
        is_foreign: whether the file does not even begin like a volume.
    """

    def __init__(
        self,
        path: Path,
        fds: tuple[int, int, int],
        identity: bytes,
        capacity: int,
        is_direct: bool,
        system: System,
        *,
        is_new: bool = False,
        damage: str = "",
        is_foreign: bool = False,
    ):
        self.path = path
        self.fd, self.client_fd, self._lock_fd = fds
        self.identity = identity
        self.capacity = capacity
        self.is_direct = is_direct
        self.is_new = is_new
        self.damage = damage
        self.is_foreign = is_foreign
        self._system = system
        self._queues: list[KernelReads[Any]] = []

    @classmethod
    def open(cls, directory: Path, capacity: int, system: System) -> Volume:
        """Open the volume in `directory`, or make it.

        Its parent has to exist: a typo, or a disk that is not mounted, must not fill another disk. An existing volume
        keeps its content; a larger `capacity` extends it. Raises UsageError for what an operator
        has to mend (locked, no room, another format, smaller than before), OSError for the rest.
        """
        _make_directory(directory, system)
        capacity = align_down(capacity)
        path = directory / FILE_NAME
        with contextlib.ExitStack() as undo:
            lock_fd = lock_directory(directory)
            undo.callback(os.close, lock_fd)
            if is_new := not path.exists():
                _create(path, capacity, system)
            fd, is_direct = _open(path, os.O_RDWR)
            undo.callback(os.close, fd)
            identity, capacity = _grow(fd, path, capacity, system)
            client_fd, _ = _open(path, os.O_RDONLY)
            undo.pop_all()
        if not is_direct:
            log.warning("the file system of %s takes no O_DIRECT: reads and writes go through the page cache", path)
        return cls(path, (fd, client_fd, lock_fd), identity, capacity, is_direct, system, is_new=is_new)

    @classmethod
    def open_present(cls, directory: Path, system: System) -> Volume:
        """Open the volume that is there, as it is: nothing is made, extended or mended. For fsck.

        One whose superblock is damaged is opened too, see `damage`; its capacity is then that of the file. Raises
        UsageError for what is locked, missing, or of another version.
        """
        path = directory / FILE_NAME
        with contextlib.ExitStack() as undo:
            try:
                lock_fd = lock_directory(directory)
                undo.callback(os.close, lock_fd)
                fd, is_direct = _open(path, os.O_RDWR)
                undo.callback(os.close, fd)
                client_fd, _ = _open(path, os.O_RDONLY)
                undo.callback(os.close, client_fd)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise UsageError(f"there is no kvfs volume in {directory}") from error
            damage, is_foreign = "", False
            try:
                identity, capacity = _read_superblock(fd, path, system)
            except FormatError as error:
                damage, is_foreign = str(error), isinstance(error, ForeignVolume)
                identity, capacity = b"", align_down(os.fstat(fd).st_size)
            undo.pop_all()
        fds = (fd, client_fd, lock_fd)
        return cls(path, fds, identity, capacity, is_direct, system, damage=damage, is_foreign=is_foreign)

    def mend(self, identity: bytes) -> None:
        """Write the superblock anew; the capacity is that of the file. Durable when it returns. Raises OSError."""
        _write_superblock(self.fd, identity, self.capacity, self._system)
        self.identity, self.damage = identity, ""

    def written(self) -> list[tuple[int, int]]:
        """(begin, end) of what was ever written behind the superblock, as far as the file system tells it apart."""
        found = []
        end = SUPERBLOCK_BYTES
        length = align_down(os.fstat(self.fd).st_size)
        while end < length:
            try:
                begin = os.lseek(self.client_fd, end, os.SEEK_DATA)
                end = os.lseek(self.client_fd, begin, os.SEEK_HOLE)
            except OSError as error:
                if error.errno != errno.ENXIO:  # that is: no data behind this
                    return [(SUPERBLOCK_BYTES, length)] if length > SUPERBLOCK_BYTES else []
                break
            begin, end = align_down(begin), min(-(-end // ALIGNMENT) * ALIGNMENT, length)
            if end > begin:
                found.append((begin, end))
        return found

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`; both, and the buffer's address, are multiples of 4096. Raises OSError.

        What lies behind the end of a truncated file reads as zeros: those bytes are gone, and no checksum fits them.
        """
        done = 0
        while done < len(buffer):
            count = self._system.preadv(self.fd, [buffer[done : done + _MAX_TRANSFER]], offset + done)
            done += count
            if count <= 0 or done % ALIGNMENT:
                if offset + done < os.fstat(self.fd).st_size:
                    raise OSError(errno.EIO, f"short read at {offset + done}", str(self.path))
                buffer[done:] = bytes(len(buffer) - done)
                return

    def kernel_reads(self, max_under_way: int) -> KernelReads[Any] | None:
        """A queue for so many reads at once, which ends with the volume; None where there is none."""
        queue = self._system.kernel_reads(self.fd, max_under_way) if self.is_direct else None
        if queue is not None:
            self._queues.append(queue)
        return queue

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Write `buffers` one after the other from `offset`; aligned as in `read`. Not durable before `sync`.

        At most 1,024 buffers (IOV_MAX). Raises OSError.
        """
        left = list(buffers)
        while left:
            part = left if len(left) > 1 else [left[0][:_MAX_TRANSFER]]
            count = self._system.pwritev(self.fd, part, offset)
            if count <= 0:
                raise OSError(errno.EIO, f"short write at {offset}", str(self.path))
            offset += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if left:
                left[0] = left[0][count:]

    def is_in_place(self) -> bool:
        """Whether volume and index lie where they were opened: nobody removed them, or unmounted their disk.

        What the device does not tell is no proof that they are gone.
        """
        try:
            found = os.stat(self.path)
            os.stat(self.path.with_name(INDEX))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        return os.path.samestat(found, os.fstat(self.fd))

    def sync(self) -> None:
        """Make every write that has returned durable. Raises OSError."""
        self._system.fdatasync(self.fd)

    def close(self) -> None:
        """Close it; the lock goes with the descriptor."""
        for queue in self._queues:
            queue.close()
        for fd in (self.client_fd, self.fd, self._lock_fd):
            os.close(fd)


def aligned_buffer(size_bytes: int) -> memoryview:
    """Zeroed anonymous memory that starts on an os_page, as direct I/O wants it."""
    return memoryview(mmap.mmap(-1, size_bytes))


def _open(path: Path, flags: int) -> tuple[int, bool]:
    """Open with O_DIRECT where the file system takes it."""
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags | os.O_CLOEXEC, 0o600), False


def align_down(size: int) -> int:
    """`size` without what lies behind its last multiple of 4096."""
    return size - size % ALIGNMENT


def lock_directory(directory: Path) -> int:
    """A descriptor that keeps every other kvfs away from what is in the directory, until it is closed.

    Raises UsageError if another has it, OSError if the directory cannot be opened.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise UsageError(f"{directory} is in use by another kvfs daemon") from error
    return fd


def _make_directory(directory: Path, system: System) -> None:
    try:
        directory.mkdir(mode=0o700)
        system.sync_directory(directory.parent)
    except FileExistsError:
        if not directory.is_dir():
            raise UsageError(f"cannot open the volume in {directory}: it is not a directory") from None
    except FileNotFoundError as error:
        if directory.parent.is_dir():  # as in /proc
            raise UsageError(f"cannot open the volume in {directory}: no directory can be made there") from error
        raise UsageError(
            f"cannot open the volume in {directory}: {directory.parent} does not exist, and kvfs makes the last "
            "directory only; is the disk mounted?"
        ) from error


def _create(path: Path, capacity: int, system: System) -> None:
    """Make a volume under another name first, so that one without its superblock is never seen."""
    unfinished = path.with_suffix(".unfinished")
    try:
        fd, _ = _open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    except FileNotFoundError as error:  # as in /proc
        raise UsageError(f"cannot open the volume in {path.parent}: no file can be made there") from error
    try:
        _allocate(fd, unfinished, 0, capacity, system)
        _write_superblock(fd, uuid.uuid4().bytes, capacity, system)
        os.fsync(fd)
        system.rename(unfinished, path)
        system.sync_directory(path.parent)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _grow(fd: int, path: Path, capacity: int, system: System) -> tuple[bytes, int]:
    """Check the superblock and extend the volume to `capacity`; returns identity and capacity."""
    identity, present = _read_superblock(fd, path, system)
    if capacity < present:
        raise UsageError(
            f"the volume in {path.parent} has {format_size(present)} and cannot shrink to {format_size(capacity)}: "
            f"give {exact_size(present)} or more, or start anew: kvfs destroy {path.parent}"
        )
    length = os.fstat(fd).st_size
    if length < present:
        log.error("%s was cut from %d to %d bytes; chunks that lay behind are lost", path, present, length)
        length -= length % ALIGNMENT
        _allocate(fd, path, length, present - length, system)
    if capacity > present:
        _allocate(fd, path, present, capacity - present, system)
        _write_superblock(fd, identity, capacity, system)
    return identity, capacity


def _allocate(fd: int, path: Path, offset: int, length: int, system: System) -> None:
    """Extend the file from `offset` by `length`. What cannot fit is refused before it fills the disk for a moment."""
    free = system.free_bytes(fd)
    if free is not None and length > free:
        raise _no_room(path, offset + length, free)
    try:
        system.fallocate(fd, offset, length)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, offset)
        if error.errno != errno.ENOSPC:
            raise
        raise _no_room(path, offset + length, system.free_bytes(fd)) from error


def _no_room(path: Path, size: int, free: int | None) -> UsageError:
    left = "" if free is None else f": {format_size(free)} are free"
    return UsageError(f"there is no room for a volume of {format_size(size)} in {path.parent}{left}")


def _write_superblock(fd: int, identity: bytes, capacity: int, system: System) -> None:
    block = aligned_buffer(SUPERBLOCK_BYTES)
    head = _HEAD.pack(MAGIC, VERSION, identity, capacity, system.time_ns())
    block[: _HEAD.size] = head
    _SUM.pack_into(block, _HEAD.size, xxhash.xxh3_64_intdigest(head))
    system.pwritev(fd, [block], 0)
    system.fdatasync(fd)


def _read_superblock(fd: int, path: Path, system: System) -> tuple[bytes, int]:
    """Identity and capacity. Raises UsageError for another version, FormatError for what is no superblock of any."""
    block = aligned_buffer(SUPERBLOCK_BYTES)
    system.preadv(fd, [block], 0)
    magic, version, identity, capacity, _ = _HEAD.unpack_from(block)
    if magic != MAGIC:
        if path.with_name(INDEX).exists():
            raise ForeignVolume(
                f"the superblock of {path} is damaged, for an index is beside it: kvfs fsck {path.parent} --rebuild mends it if chunks are on it"
            )
        raise ForeignVolume(
            f"{path} is not a kvfs volume (if it was one before: kvfs fsck {path.parent} --rebuild); name another "
            "directory, or remove the file if it is yours"
        )
    is_whole = _SUM.unpack_from(block, _HEAD.size)[0] == xxhash.xxh3_64_intdigest(block[: _HEAD.size])
    if version != VERSION and (version > VERSION or is_whole):
        does = "use the kvfs that made it" if version > VERSION else f"start anew with kvfs destroy {path.parent}"
        raise UsageError(f"{path} has volume format {version}, this kvfs reads {VERSION}; {does}")
    if not is_whole:
        raise FormatError(
            f"the superblock of {path} does not have its checksum; kvfs fsck {path.parent} --rebuild mends it, or "
            f"kvfs destroy {path.parent} to start anew"
        )
    return identity, capacity
