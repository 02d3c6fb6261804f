"""What `kvfs export` and `kvfs import` have in common: the summary, and pipes that never make a mount look dead.

Concurrency: the work runs in the thread of `progress.run`, which takes silence for a daemon that does not answer. So
whoever waits for somebody else, at the other end of a pipe, says all the time that it is alive.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import NoReturn

import msgspec
import typer

from kvfs.config import format_size
from kvfs.errors import UsageError
from kvfs.tools.progress import Track
from kvfs.tools.words import format_count, printable

STREAM = "-"
MAX_NAMED = 1000
MAX_PATH = 4096
_POLL_S = 1.0
_PIPE_BYTES = 4096  # what select(2) promises room for, pipe(7)
_FILE_BYTES = 1 << 20


class StoppedError(Exception):
    """Ctrl-C was pressed while a pipe was waited for."""


@dataclass
class Refused:
    """A file that was not copied, and why; both are made fit for a terminal."""

    path: str
    reason: str

    def __post_init__(self) -> None:
        self.path, self.reason = printable(self.path), printable(self.reason)


@dataclass
class Copied:
    """What was done. `--json` shows it.

    Attributes:
        namespaces: whose chunks.
        chunks, bytes: how many were copied, and how large they are.
        there: chunks that were there already.
        gone: chunks that were removed or evicted before they were read.
        num_refused: what is no chunk of its namespace, or could not be read; refused: the first of them.
        evicted: how many of those that were copied in are not there any more; why: what they had no room in.
        interrupted: whether Ctrl-C ended it early.
    """

    namespaces: list[str] = field(default_factory=list)
    chunks: int = 0
    bytes: int = 0
    there: int = 0
    gone: int = 0
    num_refused: int = 0
    refused: list[Refused] = field(default_factory=list)
    evicted: int = 0
    why: str = ""
    interrupted: bool = False

    def refuse(self, path: str, reason: str) -> None:
        """Count a file that is not copied. Of an archive that has millions of them the first are named."""
        self.num_refused += 1
        if len(self.refused) < MAX_NAMED:
            self.refused.append(Refused(path[:MAX_PATH], reason))

    def sentence(self, verb: str) -> str:
        """One line for a person."""
        parts = [f"{verb} {format_count(self.chunks, 'chunk')}, {format_size(self.bytes)}"]
        parts += [f"{self.there:,} {_were(self.there)} there already"] if self.there else []
        parts += [f"{self.gone:,} went meanwhile"] if self.gone else []
        parts += [f"{self.num_refused:,} refused"] if self.num_refused else []
        parts += [f"{self.evicted:,} {_were(self.evicted)} evicted again meanwhile: {self.why}"] if self.evicted else []
        return ("stopped: " if self.interrupted else "") + "; ".join(parts)


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def tell(done: Copied, verb: str, *, as_json: bool, is_stdout_taken: bool = False) -> NoReturn:
    """Show the summary, and end with the exit code that says it: 0, 1 if anything was refused or evicted again, or that of Ctrl-C."""
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(done), indent=2), err=is_stdout_taken)
    else:
        tell_refused(done)
        typer.echo(f"kvfs: {done.sentence(verb)}", err=is_stdout_taken)
    if done.interrupted:
        raise KeyboardInterrupt
    raise typer.Exit(1 if done.num_refused or done.evicted else 0)


def tell_refused(done: Copied) -> None:
    """Name what was not copied, and why, a line each."""
    for refused in done.refused:
        typer.echo(f"{refused.path}  {refused.reason}", err=True)
    if done.num_refused > len(done.refused):
        typer.echo(f"and {done.num_refused - len(done.refused):,} more", err=True)


def is_tar(place: str) -> bool:
    """Whether a place is a tar archive, or a stream of one, and no directory."""
    return place == STREAM or (not os.path.isdir(place) and place.endswith(".tar"))


def write_whole(path: str, raw: bytes | memoryview, mode: int = 0o640) -> None:
    """Write a file. Raises OSError, also for what close says."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_TRUNC, mode)
    try:
        view = memoryview(raw)
        while view:
            view = view[os.write(descriptor, view) :]
    except BaseException:
        try:
            os.close(descriptor)
        except OSError:
            pass  # the first error counts
        raise
    os.close(descriptor)


class Pipe:
    """A descriptor as tarfile wants one, for reading or writing; says while it waits that it is alive."""

    def __init__(self, descriptor: int, track: Track) -> None:
        self._descriptor = descriptor
        self._track = track
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._step_bytes = _FILE_BYTES if is_file else _PIPE_BYTES

    def read(self, size: int) -> bytes:
        """Up to `size` bytes, fewer only at the end. Raises StoppedError."""
        pieces = []
        while size:
            self._wait([self._descriptor], [])
            piece = os.read(self._descriptor, size)
            if not piece:
                break
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def write(self, raw: bytes) -> int:
        """Write all of it. Raises StoppedError, and UsageError if nobody reads."""
        view = memoryview(raw)
        try:
            while view:
                self._wait([], [self._descriptor])
                view = view[os.write(self._descriptor, view[: self._step_bytes]) :]
        except BrokenPipeError as error:
            raise UsageError("whoever was to read the archive has gone") from error
        return len(raw)

    def _wait(self, reading: list[int], writing: list[int]) -> None:
        while not any(select.select(reading, writing, [], _POLL_S)):
            self._track.advance(0)
            if self._track.is_stopping:
                raise StoppedError


def open_file(path: str | Path) -> FileIO:
    """A regular file, for reading. Raises OSError, for what is no regular file too: a FIFO is not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    os.set_blocking(descriptor, True)
    return FileIO(descriptor)


def read_file(path: str | Path, limit_bytes: int, track: Track) -> memoryview:
    """The content of a file. Raises OSError, for what is larger than the limit or no regular file too."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit_bytes:
            raise OSError(errno.EFBIG, "it is too large", str(path))
        raw = memoryview(bytearray(size))
        done = 0
        while done < size:
            count = file.readinto(raw[done : done + (4 << 20)])
            if not count:
                break
            done += count
            track.advance(count)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # nobody asked for it to stay in the page cache
    return raw[:done]
