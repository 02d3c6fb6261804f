"""The place of an arena that outlives its daemon: an own tmpfs, which stays mounted, and what lies in it.

    <socket_directory>/<id>/arena/     tmpfs, huge pages for what is large, mode 0700; mounted by root
        bytes                          the arena itself, mode 0600
        table                          which extents of it hold a visible chunk; see below
        namespaces/<directory>.json    what its chunks are made of, see `documents`
        facts.json                     whose it is: written last, so that without it there is nothing
        keep                           there if the daemon is to leave all this behind when it ends in order

Who removes it: a daemon that ends in order, unless it is told to keep it (`kvfs umount --keep-ram`) or could not write
what is dirty; a daemon that starts and cannot take it over; `kvfs umount` where no daemon is alive any more; `kvfs
destroy` of the volume it belongs to; a reboot. A daemon that is killed leaves it, and that is the default: the memory
stays taken, but what is in it and nowhere else is there at the next mount. Whoever removes it holds the lock of the
directory above (`mount.sockets`), so that no living daemon loses it. Files are unlinked before the tmpfs is unmounted: a
container that was started meanwhile has a mount of it of its own.

It is bound to the boot, the mount point, the size and the volume. What differs means a clean start, and a sentence.

The table has one u64 for each 4 KiB of the arena, at the number of the 4 KiB at which an extent begins: its length in 4
KiB in the lower half; in the upper half 0 for a visible chunk, else the process of the trusted client that has reserved
the extent and may write to it as long as it lives. It is shared memory, so a kill tears nothing, and it is set when a
chunk becomes visible and cleared when it goes out of sight: what was removed cannot come back, whatever its extent still
holds. Of what the table says nothing is believed before the bytes were verified (`takeover`). A scan for headers instead
would find the removed ones too, and a zeroed header for each extent that is freed costs as much as an entry.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvfs.chunk import ALIGNMENT
from kvfs.config import exact_size, format_size
from kvfs.documents import DIRECTORY, Documents

log = logging.getLogger(__name__)

SOURCE = "kvfs-arena"
DIRECTORY_NAME = "arena"
FORMAT = "kvfs-arena/1"
BYTES, TABLE, FACTS, KEEP = "bytes", "table", "facts.json", "keep"
_ENTRY_BYTES = 8
_MAX_FACTS_BYTES = 64 << 10
_HUGE_PAGE = 2 << 20
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 2, 4, 8, 32
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_SPARE_BYTES = (
    128 << 20
)  # for documents, and for windows of engines that have not noticed yet that their daemon is gone
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ESCAPE = re.compile(r"\\([0-7]{3})")
_NOT_ZERO = re.compile(rb"[^\0]")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Whose an arena is.

    Attributes: boot_id: of the boot; mountpoint: of its daemon; size_bytes: of the arena; volume: the identity of the
    volumes in hex, "" for a RAM cache, None as long as it is not known; nvme_directories: where they lie.
    """

    format: str = FORMAT
    boot_id: str
    mountpoint: str
    size_bytes: int
    volume: str | None = None
    nvme_directories: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """How much stays, and for a mount with which settings, for people."""
        flags = " ".join(
            [f"--ram {exact_size(self.size_bytes)}", *(f"--nvme {each}" for each in self.nvme_directories)]
        )
        return f"{format_size(self.size_bytes)} of RAM stay for the next mount there with {flags}"


def facts_of(mountpoint: str, size_bytes: int, nvme_directories: tuple[str, ...]) -> Facts:
    """The facts of an arena that is made now."""
    return Facts(
        boot_id=_BOOT_ID.read_text().strip(), mountpoint=mountpoint, size_bytes=size_bytes,
        nvme_directories=nvme_directories,
    )  # fmt: skip


class Dropped(NamedTuple):
    """What was kept, and is not taken over. Attributes: what: it was, for people; reason: why, and how to keep it."""

    what: str
    reason: str

    def __str__(self) -> str:
        """The sentence for whoever mounts."""
        return f"{self.what} in RAM since the daemon before this one could not be taken over and went: {self.reason}"


class Record:
    """The table, see the module. Belongs to the event loop's thread; offsets and lengths are multiples of 4096."""

    def __init__(self, fd: int, arena_bytes: int) -> None:
        self._num_granules = arena_bytes // ALIGNMENT
        self._map = mmap.mmap(fd, self._num_granules * _ENTRY_BYTES)
        self._entries = memoryview(self._map).cast("Q")

    def put(self, offset: int, length: int) -> None:
        """The extent holds a chunk that is visible now."""
        self._entries[offset // ALIGNMENT] = length // ALIGNMENT

    def reserve(self, offset: int, length: int, pid: int) -> None:
        """A process may write to the extent."""
        self._entries[offset // ALIGNMENT] = pid << 32 | length // ALIGNMENT

    def clear(self, offset: int) -> None:
        """Whatever the extent holds is not to be seen again."""
        self._entries[offset // ALIGNMENT] = 0

    def release(self, offset: int, pid: int) -> None:
        """This process is done with the extent; what is a chunk by now stays one."""
        if self._entries[offset // ALIGNMENT] >> 32 == pid:
            self._entries[offset // ALIGNMENT] = 0

    def entries(self) -> list[tuple[int, int, int]]:
        """Offset, length and process (0: a chunk) of all extents, in order; what contradicts an earlier one is cleared."""
        raw = bytes(self._map)  # to be searched at the speed of C; 2 MiB for each GiB of the arena
        found = []
        end = 0
        place = 0
        while (match := _NOT_ZERO.search(raw, place)) is not None:
            granule = match.start() // _ENTRY_BYTES
            place = (granule + 1) * _ENTRY_BYTES
            pid, length = divmod(self._entries[granule], 1 << 32)
            if granule < end or not 0 < length <= self._num_granules - granule:
                self._entries[granule] = 0
                continue
            end = granule + length
            found.append((granule * ALIGNMENT, length * ALIGNMENT, pid))
        return found

    def close(self) -> None:
        """Unmap it; what it says stays."""
        self._entries.release()
        self._map.close()


class Kept:
    """A place that is mounted, and ours alone.

    Attributes: path; facts; fd: of the arena, client_fd: the same read-only, directory_fd: of the tmpfs; record;
    documents: the namespaces of its chunks; is_taken_over: a daemon before us has made it.
    """

    def __init__(self, path: Path, facts: Facts, *, is_taken_over: bool) -> None:
        self.path = path
        self.facts = facts
        self.is_taken_over = is_taken_over
        self.documents = Documents(path)
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.ExitStack() as undo:
            self.directory_fd = os.open(path, flags | os.O_RDONLY | os.O_DIRECTORY)
            undo.callback(os.close, self.directory_fd)
            self.fd = self._open(BYTES, flags, facts.size_bytes, undo)
            self.client_fd = os.open(path / BYTES, flags | os.O_RDONLY)
            undo.callback(os.close, self.client_fd)
            table_fd = self._open(TABLE, flags, facts.size_bytes // ALIGNMENT * _ENTRY_BYTES, undo)
            self.record = Record(table_fd, facts.size_bytes)
            os.close(table_fd)
            undo.pop_all()

    def _open(self, name: str, flags: int, size_bytes: int, undo: contextlib.ExitStack) -> int:
        if not self.is_taken_over:
            flags |= os.O_CREAT | os.O_EXCL
        fd = os.open(self.path / name, flags | os.O_RDWR, 0o600)
        if name == BYTES:
            undo.callback(os.close, fd)
        if not self.is_taken_over:
            os.ftruncate(fd, size_bytes)
        elif os.fstat(fd).st_size != size_bytes:
            raise OSError(errno.EINVAL, f"{name} does not have its size")
        return fd

    def write_facts(self, facts: Facts) -> None:
        """Say whose it is; from then on it can be taken over. Raises OSError."""
        unfinished = self.path / (FACTS + ".unfinished")
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(facts))
        unfinished.rename(self.path / FACTS)
        self.facts = facts

    def forget_chunks(self, found: Facts) -> Dropped:
        """What it holds belongs elsewhere: nothing of it is to be seen again; returns what it was. Raises OSError."""
        before = " and ".join(found.nvme_directories) or "no volume: it was a RAM cache"
        reason = f"it belongs to {before}, and only a mount with the volumes of before takes it over"
        dropped = Dropped(_content(self.path, found), reason)
        for offset, _, pid in self.record.entries():
            if not pid:
                self.record.clear(offset)
        self.documents.destroy()
        return dropped

    def is_to_stay(self) -> bool:
        """Whether somebody asked for it to be left behind."""
        return (self.path / KEEP).exists()

    def stays(self) -> None:
        """We end, and leave it."""
        (self.path / KEEP).unlink(missing_ok=True)

    def close(self) -> None:
        """Close what is open here, but `fd` and `client_fd`, which the arena closes."""
        self.record.close()
        os.close(self.directory_fd)


def make(path: Path, facts: Facts, window_budget_bytes: int) -> Kept:
    """A new place. Raises OSError; nothing is left then."""
    path.mkdir(mode=0o700, exist_ok=True)
    try:
        _mount(path, facts.size_bytes, window_budget_bytes)
        try:
            return Kept(path, facts, is_taken_over=False)
        except OSError:
            remove(path)
            raise
    except OSError:
        with contextlib.suppress(OSError):
            path.rmdir()
        raise


def find(path: Path, wanted: Facts, window_budget_bytes: int) -> Kept | Dropped | None:
    """What a daemon before us left in this place, if it is what we want; else it is removed, and that is said.

    To be called by whoever holds the lock of the directory above. Raises OSError for what cannot be removed.
    """
    if not is_mounted(path):
        return None
    reason, kept = _contradiction(path, wanted), None
    found = read_facts(path)
    if not reason:
        try:
            kept = Kept(path, wanted, is_taken_over=True)
            _mount(path, wanted.size_bytes, window_budget_bytes, _MS_REMOUNT)
        except (OSError, ValueError) as error:
            reason = str(error)
    if kept is not None and not reason:
        kept.stays()
        return kept
    dropped = Dropped(_content(path, found), reason)
    log.warning("%s", dropped)
    remove(path)
    return dropped


def _content(path: Path, facts: Facts | None) -> str:
    """How many chunks a place has, for people, as far as it can be told."""
    if facts is None:
        return "what was"
    try:
        with open(path / TABLE, "r+b") as table:
            record = Record(table.fileno(), facts.size_bytes)
    except (OSError, ValueError):
        return "what was"
    lengths = [length for _, length, pid in record.entries() if not pid]
    record.close()
    return f"{len(lengths):,} chunk{'' if len(lengths) == 1 else 's'}, {format_size(sum(lengths))}, that were"


def _contradiction(path: Path, wanted: Facts) -> str:
    found = read_facts(path)
    if found is None:
        return "it was never finished, or is of another version"
    if found.boot_id != wanted.boot_id:
        return "it is of another boot"
    if found.mountpoint != wanted.mountpoint:
        return f"it belongs to {found.mountpoint}"
    if found.size_bytes != wanted.size_bytes:
        left = (
            "; what NVMe has is there"
            if found.nvme_directories and found.nvme_directories == wanted.nvme_directories
            else ""
        )
        return (
            f"ram was {exact_size(found.size_bytes)} then and is {exact_size(wanted.size_bytes)} now, and only a mount with the "
            f"ram of before takes it over{left}"
        )
    return ""


def read_facts(path: Path) -> Facts | None:
    """Whose the arena in this place is; None for what is none of ours, or not finished, or of another version."""
    try:
        with open(path / FACTS, "rb") as file:
            facts = msgspec.json.decode(file.read(_MAX_FACTS_BYTES), type=Facts)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return facts if facts.format == FORMAT else None


def places() -> list[Path]:
    """Every place that is mounted, as this process sees it; the mountinfo of the kernel says which."""
    found = []
    for line in Path("/proc/self/mountinfo").read_bytes().decode("utf-8", "surrogateescape").split("\n"):
        fields, _, tail = line.partition(" - ")
        words = fields.split(" ")
        if tail.startswith(f"tmpfs {SOURCE} ") and len(words) >= 6:
            found.append(Path(_ESCAPE.sub(lambda match: chr(int(match[1], 8)), words[4])))
    return found


def is_mounted(path: Path) -> bool:
    """Whether an arena is mounted here."""
    return path in places()


def all_kept() -> Iterator[tuple[Path, Facts]]:
    """The places of all daemons, alive or not."""
    for path in places():
        facts = read_facts(path)
        if facts is not None:
            yield path, facts


def kept_for(mountpoint: str) -> Iterator[tuple[Path, Facts]]:
    """Those of one mount point."""
    return (each for each in all_kept() if each[1].mountpoint == mountpoint)


def remove_if_left(path: Path) -> bool:
    """Give the memory in this place back, unless a daemon that is alive has it; returns whether it did. Raises OSError."""
    parent_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(parent_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove(path)
        with contextlib.suppress(OSError):
            path.parent.rmdir()
    except BlockingIOError:
        return False
    finally:
        os.close(parent_fd)
    return True


def remove(path: Path) -> None:
    """Unlink what lies here, unmount it and remove the directory; whoever has it mapped keeps it. Raises OSError."""
    for name in (FACTS, FACTS + ".unfinished", BYTES, TABLE, KEEP):
        with contextlib.suppress(OSError):
            (path / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        if (path / DIRECTORY).is_dir():
            Documents(path).destroy()
    while is_mounted(path):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.umount2(os.fsencode(path), _MNT_DETACH | _UMOUNT_NOFOLLOW):
            raise _last_error(path)
    with contextlib.suppress(OSError):
        path.rmdir()


def _mount(path: Path, size_bytes: int, window_budget_bytes: int, flags: int = 0) -> None:
    table_bytes = size_bytes // ALIGNMENT * _ENTRY_BYTES
    limit = size_bytes + 2 * window_budget_bytes + table_bytes + _SPARE_BYTES
    limit = -(-limit // _HUGE_PAGE) * _HUGE_PAGE
    # Not "always": each document of a namespace would take 2 MiB.
    options = f"huge=within_size,size={limit},mode=0700"
    libc = ctypes.CDLL(None, use_errno=True)
    flags |= _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    if libc.mount(SOURCE.encode(), os.fsencode(path), b"tmpfs", ctypes.c_ulong(flags), options.encode()):
        raise _last_error(path)


def _last_error(path: Path) -> OSError:
    number = ctypes.get_errno() or errno.EIO
    return OSError(number, os.strerror(number), str(path))
