"""Crash points: a record of what a store did to its disk, and every disk that a machine could find after a power loss.

A `RecordingSystem` notes, in one order, each write to the volume, each sync, each growth, each change of a name, and
each commit of the index, as it begins and as it returns. `points` cuts the record behind every entry; `Point.images`
makes the disks that are possible there. What was synced is there. Of what was not, each write may be there, missing,
or there in part: torn at a page or a sector, or with any of its sectors.

The index does its own writes, through SQLite. Its commits are durable when they return (WAL, synchronous = FULL; a
test holds it to that), so between the begin and the return of one the index may be as it was before or after.

Nothing here is used by kvfs itself.

Concurrency: entries come from any thread, under one lock. `observe` is called with it held, and so must not wait.
"""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvfs.index import FILE_NAME as INDEX
from kvfs.index import Index
from kvfs.testing import FaultySystem
from kvfs.volume import FILE_NAME as VOLUME

PAGE_BYTES = 4096
SECTOR_BYTES = 512

Files = dict[str, bytes]
"""Everything in the directory but the volume, by path: the index above all."""
Kind = Literal["write", "written", "grow", "grown", "sync", "synced", "rename", "named", "commit", "committed", "end"]


class Entry(NamedTuple):
    """One moment of a record.

    Attributes:
        kind: what happened: for most calls one word for the begin and one for the return. "rename" is the volume getting
            its name, "named" the sync of the directory.
        number: which call this is, the same at its begin and its return.
        offset, data: of a write; of a growth `offset` is the new size of the file.
        files: the files beside the volume, for commits.
        observed: what `observe` said.
    """

    kind: Kind
    number: int
    offset: int
    data: bytes
    files: Files
    observed: Any


class RecordingSystem(FaultySystem):
    """Notes everything that changes the disk, from `recording` on.

    Attributes: directory: of the volume; entries; observe: called at each entry, its answer is kept there.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.entries: list[Entry] = []
        self.observe: Callable[[], Any] = lambda: None
        self._note_lock = threading.Lock()
        self._num_calls = 0

    @contextmanager
    def recording(self) -> Iterator[Recorded]:
        """Commits of any index of this process are noted meanwhile. The record is whole when the context is left."""
        before = disk_in(self.directory)
        recorded = Recorded(before, self.entries)
        commit = Index.commit

        def noted(index: Index, *arguments: Any, **named: Any) -> None:
            number = self._note("commit", files=files_in(self.directory))
            commit(index, *arguments, **named)
            self._note("committed", number, files=files_in(self.directory))

        Index.commit = noted  # type: ignore[method-assign, assignment]
        try:
            yield recorded
        finally:
            Index.commit = commit  # type: ignore[method-assign]
            self._note("end")

    def _note(
        self, kind: Kind, number: int = 0, *, offset: int = 0, data: bytes = b"", files: Files | None = None
    ) -> int:
        with self._note_lock:
            self._num_calls += not number
            number = number or self._num_calls
            self.entries.append(Entry(kind, number, offset, data, files or {}, self.observe()))
        return number

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        """See `System`. A write that fails may have written all the same."""
        data = b"".join(bytes(buffer) for buffer in buffers)[: self.max_transfer]
        number = self._note("write", offset=offset, data=data)
        count = super().pwritev(fd, buffers, offset)
        self._note("written", number)
        return count

    def fdatasync(self, fd: int) -> None:
        """See `System`. One that fails has made nothing durable for sure."""
        number = self._note("sync")
        super().fdatasync(fd)
        self._note("synced", number)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        """See `System`."""
        number = self._note("grow", offset=offset + length)
        super().fallocate(fd, offset, length)
        self._note("grown", number)

    def rename(self, old: Path, new: Path) -> None:
        """See `System`. Only files that were synced are renamed."""
        self._note("rename")
        super().rename(old, new)

    def sync_directory(self, path: Path) -> None:
        """See `System`."""
        super().sync_directory(path)
        if path == self.directory:
            self._note("named")


class Disk(NamedTuple):
    """What lies in a volume's directory: the volume's bytes (None: there is none), and the other files."""

    volume: bytes | None
    files: Files

    def put(self, directory: Path) -> None:
        """Make the directory hold this and nothing else."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for name, content in self.files.items():
            directory.joinpath(name).parent.mkdir(exist_ok=True)
            directory.joinpath(name).write_bytes(content)
        if self.volume is not None:
            directory.joinpath(VOLUME).write_bytes(self.volume)


def files_in(directory: Path) -> Files:
    """The files beside the volume; without the shared memory of the index, which does not outlive the machine."""
    left_out = (VOLUME, VOLUME + ".unfinished", INDEX + "-shm")
    paths = (path for path in directory.rglob("*") if path.is_file() and path.name not in left_out)
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def disk_in(directory: Path) -> Disk:
    """What a directory holds now."""
    volume = directory / VOLUME
    return Disk(volume.read_bytes() if volume.exists() else None, files_in(directory))


@dataclass
class Recorded:
    """A disk, and what was done to it."""

    before: Disk
    entries: list[Entry]


@dataclass
class Point:
    """A moment at which the power may go.

    Attributes:
        number: of the last entry before it; step: what that was.
        durable: the bytes of the volume that are synced; size: of the file.
        pending: what is not: writes (offset, bytes), growths (new size, no bytes), in order.
        has_volume: whether the volume bears its name for sure, for sure not, or (None) perhaps.
        files: what the files beside the volume may be: one or two states.
        observed: what was observed at the last entry before and at the first behind. Nothing on the disk happened
            between the two, so each of them was true of this disk.
    """

    number: int
    step: Kind
    durable: bytes
    pending: list[tuple[int, bytes]]
    has_volume: bool | None
    files: list[Files]
    observed: tuple[Any, Any]

    def images(self, rng: random.Random, num_torn: int = 1, num_random: int = 1) -> Iterator[tuple[str, Disk]]:
        """Disks that can be found at this point, each with a word that says how it came to be.

        All of what is pending, none of it, and: `num_torn` times each write torn at a page and at a sector, its
        begin kept or its end, among whole or missing others; `num_random` times any sectors of any writes.
        """
        for volume, how in self._volumes(rng, num_torn, num_random):
            for index, files in enumerate(self.files):
                which = ("", ", before the commit", ", after the commit")[index + 1 if len(self.files) > 1 else 0]
                if self.has_volume is not False:
                    yield f"{how}{which}", Disk(volume, files)
                if not self.has_volume:
                    yield f"{how}{which}, no name", Disk(None, files)

    def _volumes(self, rng: random.Random, num_torn: int, num_random: int) -> Iterator[tuple[bytes, str]]:
        yield self._apply(self.pending), "all of it"
        if not self.pending:
            return
        yield self.durable, "nothing unsynced"
        for _ in range(num_torn):
            for which, (offset, data) in enumerate(self.pending):
                for unit, word in ((PAGE_BYTES, "page"), (SECTOR_BYTES, "sector")):
                    if len(data) <= unit:
                        continue
                    cut = unit * rng.randrange(1, -(-len(data) // unit))
                    is_begin = rng.random() < 0.5
                    piece = (offset, data[:cut]) if is_begin else (offset + cut, data[cut:])
                    others = self.pending[:which] if rng.random() < 0.5 else []
                    behind = self.pending[which + 1 :] if rng.random() < 0.5 else []
                    yield (
                        self._apply([*others, piece, *behind]),
                        f"write {which} torn at {word} {cut // unit}, {'begin' if is_begin else 'end'} kept",
                    )
        for number in range(num_random):
            share = rng.random()
            pieces = [piece for write in self.pending for piece in _sectors(*write) if rng.random() < share]
            yield self._apply(pieces), f"random sectors, {number}"

    def _apply(self, writes: Sequence[tuple[int, bytes]]) -> bytes:
        volume = bytearray(self.durable)
        for write in writes:
            _apply(volume, *write)
        return bytes(volume)


def _sectors(offset: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    if not data:
        yield offset, data
    for begin in range(0, len(data), SECTOR_BYTES):
        yield offset + begin, data[begin : begin + SECTOR_BYTES]


def _apply(volume: bytearray, offset: int, data: bytes) -> None:
    """A write, or a growth to `offset` bytes."""
    end = offset + len(data)
    if end > len(volume):
        volume.extend(bytes(end - len(volume)))
    if data:
        volume[offset:end] = data


def points(recorded: Recorded) -> Iterator[Point]:
    """Every moment between two entries of a record."""
    durable = bytearray(recorded.before.volume or b"")
    has_volume: bool | None = recorded.before.volume is not None
    pending: dict[int, tuple[int, bytes]] = {}  # by the number of the call, in order
    returned: set[int] = set()
    covered: dict[int, list[int]] = {}  # by a sync that has begun: what it will make durable
    files = [recorded.before.files]
    for position, entry in enumerate(recorded.entries[:-1]):
        match entry.kind:
            case "write" | "grow":
                pending[entry.number] = (entry.offset, entry.data)
            case "written" | "grown":
                returned.add(entry.number)
            case "sync":
                covered[entry.number] = [number for number in pending if number in returned]
            case "synced":
                for number in covered.pop(entry.number):
                    if number in pending:
                        _apply(durable, *pending.pop(number))
            case "rename":
                has_volume = None
            case "named":
                has_volume = True
            case "commit":
                files = [entry.files, _committed(recorded.entries, entry)]
            case "committed":
                files = [entry.files]
        yield Point(
            position, entry.kind, bytes(durable), list(pending.values()), has_volume, files,
            (entry.observed, recorded.entries[position + 1].observed),
        )  # fmt: skip


def _committed(entries: Sequence[Entry], begin: Entry) -> Files:
    """What the files were when a commit returned; what they had been if it never did."""
    for entry in entries:
        if entry.kind == "committed" and entry.number == begin.number:
            return entry.files
    return begin.files
