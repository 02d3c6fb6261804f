"""`kvfs record`: the requests of a live mount as a trace that `kvfs simulate` replays.

Each line bears its namespace, with the tokens of its chunks and the bytes of a token, so that namespaces of several models
can be replayed in one cache. Names and keys are replaced by hashes with a secret that is made for the recording and forgotten with it: what is equal stays equal,
and nothing leads back to keys, let alone to tokens. Engines never wait: the daemon keeps a little for whoever listens, and
counts what is lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
import typer

from kvfs import namespace as namespaces
from kvfs.chunk import geometry
from kvfs.config import format_size, parse_size
from kvfs.connection import Connection
from kvfs.durations import parse_duration
from kvfs.errors import KvfsError, UnavailableError, UsageError
from kvfs.keys import split
from kvfs.messages import Heard
from kvfs.mount.mountpoint import mount_at
from kvfs.tools import asking, listing, mounted
from kvfs.tools.trace_file import TraceFile
from kvfs.tools.words import format_count, format_duration, format_share, printable

EXAMPLES = """
kvfs record /mnt/kvfs week.jsonl.gz

Until Ctrl-C; then: kvfs simulate week.jsonl.gz --ram 64GiB --nvme 1TiB --policy lru,learned,opt

kvfs record /mnt/kvfs day.jsonl.gz --for 24h --max-size 2GiB --namespace Llama-3-8B

A day, of one model; it ends earlier if the file is that large.
"""

_ASK_EVERY_S = 0.2
_SHOW_EVERY_S = 1.0
_ID_BITS = 53  # a JSON number that every program reads exactly
_NS_A_MS = 1e6


class _Written(Protocol):
    """What a recording needs of a file."""

    def write(self, raw: bytes, /) -> object:
        """Append."""

    def flush(self) -> None:
        """Let it be in the file. Raises UnavailableError."""


class Recording:
    """What has been written so far, to an open file.

    Attributes: num_requests, num_asked, num_found (chunks), num_lost (requests), num_bytes (before they are compressed).

    `bytes_per_token` says what a token of a namespace takes, None if nobody knows any more.
    """

    def __init__(self, file: _Written, bytes_per_token: Callable[[str], int | None]) -> None:
        self._file = file
        self._bytes_per_token = bytes_per_token
        self._namespaces: dict[str, dict[str, object]] = {}
        self._whole = (0, 0, 0)
        self._secret = secrets.token_bytes(32)
        self._started_ns = 0
        self._num_flushed = 0
        self.num_requests = self.num_asked = self.num_found = self.num_lost = self.num_bytes = 0

    def add(self, heard: Heard) -> None:
        """Write one request."""
        if not heard.keys:
            return
        self._started_ns = self._started_ns or heard.time_ns
        ids = [self._id(heard.directory, key) for key in split(heard.keys)]
        line = {
            "timestamp": round(max(0, heard.time_ns - self._started_ns) / _NS_A_MS, 3),
            "input_length": len(ids) * heard.tokens_per_chunk,
            "output_length": 0,
            "hash_ids": ids,
            "block_size": heard.tokens_per_chunk,
            "found_blocks": heard.num_found,
            **self._namespace(heard.directory),
        }
        encoded = msgspec.json.encode(line) + b"\n"
        self._file.write(encoded)
        self.num_bytes += len(encoded)
        self.num_requests += 1
        self.num_asked += len(ids)
        self.num_found += heard.num_found

    def flush(self) -> None:
        """What was written so far is in the file, whatever becomes of this process.

        Raises UnavailableError if it cannot be written: the file, and what is counted, is as after the flush before.
        """
        if self.num_bytes != self._num_flushed:
            try:
                self._file.flush()
            except UnavailableError:
                self.num_requests, self.num_asked, self.num_found = self._whole
                raise
            self._num_flushed = self.num_bytes
            self._whole = (self.num_requests, self.num_asked, self.num_found)

    def _namespace(self, directory: str) -> dict[str, object]:
        """What a line says of a namespace."""
        known = self._namespaces.get(directory)
        if known is None:
            name = hashlib.blake2b(directory.encode(), key=self._secret, digest_size=8).hexdigest()
            size = self._bytes_per_token(directory)
            known = {"namespace": name, **({"bytes_per_token": size} if size is not None else {})}
            self._namespaces[directory] = known
        return known

    def _id(self, directory: str, key: bytes) -> int:
        digest = hashlib.blake2b(key + directory.encode(), key=self._secret, digest_size=8).digest()
        return int.from_bytes(digest, "little") >> (64 - _ID_BITS)


def record(
    mountpoint: Annotated[str, typer.Argument(help="Where the cache is mounted.", show_default=False)],
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="The trace to write, .gz to compress it; - for stdout.", show_default=False
        ),
    ],
    namespace: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only this namespace, or the one that begins so.", show_default=False),
    ] = None,
    for_time: Annotated[
        str | None,
        typer.Option("--for", metavar="TIME", help="End after so long: 90s, 24h, 7d.", show_default="Ctrl-C"),
    ] = None,
    max_size: Annotated[str, typer.Option(metavar="SIZE", help="End when the file is so large.")] = "1GiB",
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write down what engines ask for, for `kvfs simulate`: when, and which chunks, under names that lead back to nothing.

    A request is the prefix that an engine looks up, full chunks only; of tensor-parallel engines that of the first rank, with
    the bytes of all. There are no tokens in the file, no keys, and no names. Ctrl-C ends it, and the file is whole. Engines do not wait for it.
    """
    path = mounted.find(mountpoint)
    wait_s = parse_duration(for_time, "--for") if for_time is not None else None
    most = parse_size(max_size)
    if not most:
        raise UsageError("--max-size is above 0")
    wanted = None
    if namespace is not None:
        name = namespace
        wanted = mounted.ask(path, lambda beat: listing.find_namespace(path, name, beat))
    started_s = time.monotonic()
    with (
        asking.connected(path) as connection,
        _ends_with_a_signal() as has_ended,
        _opened(file, force) as (out, written),
    ):
        recording = Recording(out, partial(_bytes_per_token, path))
        shown_s = 0.0
        why, has_failed = "interrupted", False
        try:
            _take(connection, recording, wanted)
            typer.echo(f"kvfs: what engines ask for is written to {printable(file)}; Ctrl-C ends it", err=True)
            while True:
                is_last = has_ended() or (wait_s is not None and time.monotonic() - started_s >= wait_s)
                _take(connection, recording, wanted)
                if (written() if file != "-" else recording.num_bytes) >= most:
                    why = f"{format_size(most)} are written"
                    break
                if is_last:
                    break
                if time.monotonic() - shown_s >= _SHOW_EVERY_S and sys.stderr.isatty():
                    shown_s = time.monotonic()
                    sys.stderr.write(f"\r\x1b[K{_summary(recording, started_s)}")
                if not has_ended():
                    time.sleep(_ASK_EVERY_S)
        except UnavailableError as error:  # what was written so far is a trace as well
            why = str(error) if mount_at(path) is not None else f"{path} was unmounted"
            has_failed = isinstance(out, TraceFile) and out.has_failed
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    if not recording.num_requests and file != "-" and not force:
        Path(file).unlink(missing_ok=True)  # else it would be in the way of the next one
    if has_failed and not recording.num_requests:
        raise UnavailableError(why)
    _tell(recording, file, started_s, why)
    if has_failed:
        raise typer.Exit(1)


def _take(connection: Connection, recording: Recording, wanted: str | None) -> None:
    is_more = True
    while is_more:
        heard = asking.listen(connection)
        recording.num_lost += heard.num_lost
        for request in heard.requests:
            if wanted in (None, request.directory) and (wanted is not None or _is_first_rank(request.directory)):
                recording.add(request)
        is_more = heard.is_more
    recording.flush()


def _bytes_per_token(path: str, directory: str) -> int | None:
    """What a token takes in all ranks of a namespace together, by its namespace.json; None if that is gone."""
    file = Path(path, directory, "namespace.json")
    try:
        namespace = namespaces.decode(mounted.ask(path, lambda _: file.read_bytes()))
        tokens = namespace.identity.tokens_per_chunk
        return -(-geometry(namespace, tokens).payload_bytes * namespace.num_ranks // tokens)
    except (KvfsError, OSError):
        return None


def _is_first_rank(directory: str) -> bool:
    return "-r0of" in directory


def _summary(recording: Recording, started_s: float) -> str:
    return (
        f"{format_count(recording.num_requests, 'request')} in {format_duration(time.monotonic() - started_s)}, "
        f"{format_count(recording.num_asked, 'chunk')} asked for, {format_share(recording.num_found, recording.num_asked)} found"
    )


def _tell(recording: Recording, file: str, started_s: float, why: str) -> None:
    lines = [f"{file}: {_summary(recording, started_s)}"]
    if why != "interrupted":
        lines.append(f"kvfs: it ended because {why}")
    if recording.num_lost:
        lines.append(f"kvfs: {format_count(recording.num_lost, 'request')} came too fast and are not in it")
    for line in lines:
        typer.echo(printable(line), err=True)
    if not recording.num_requests:
        raise UnavailableError("no engine asked for anything: the trace is empty")


@contextlib.contextmanager
def _ends_with_a_signal() -> Iterator[Callable[[], bool]]:
    """SIGINT and SIGTERM are remembered, not raised: a file that is being written is completed."""
    received: list[int] = []
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda got, _: received.append(got)) for number in numbers}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _opened(file: str, force: bool) -> Iterator[tuple[_Written, Callable[[], int]]]:
    """The file to write, readable by its owner only, and what tells how many bytes it has."""
    if file == "-":
        try:
            yield sys.stdout.buffer, lambda: 0
            sys.stdout.buffer.flush()
        except BrokenPipeError as error:
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
            )  # else the interpreter would complain at its end
            raise UnavailableError("whoever read the trace is gone") from error
        return
    with TraceFile(file, may_replace=force) as opened:
        yield opened, lambda: opened.num_bytes
