"""`kvfs pin` and `kvfs unpin`: keep prefixes, or all that a namespace holds now, from being evicted.

A prefix is pinned with all that was built on it, in one request to the daemon; what is stored later is not pinned.
"""

from __future__ import annotations

import errno
import functools
import os
import time
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import typer

from kvfs.chunk import SUFFIX
from kvfs.config import format_size
from kvfs.durations import parse_duration, rfc3339
from kvfs.errors import CapacityError, KvfsError, UsageError
from kvfs.tools import listing, mounted, progress
from kvfs.tools.mounted import Beat
from kvfs.tools.progress import Track
from kvfs.tools.selecting import checked_prefix, find_prefixes, names_in, outermost, unmatched_sentence
from kvfs.tools.words import format_count

PIN_EXAMPLES = """
kvfs pin /mnt/kvfs SmolLM2 '0a1b2c3d*' --for 2h

A prefix and all that is built on it now, by the PATH that `kvfs ls` prints.

kvfs pin /mnt/kvfs SmolLM2 --for forever

All chunks that the namespace has now.

setfattr -n user.kvfs.pin -v 2h /mnt/kvfs/NAMESPACE/chunks/KEY.safetensors

One chunk, and what it is built on.
"""
UNPIN_EXAMPLES = """
kvfs unpin /mnt/kvfs SmolLM2 '0a1b2c3d*'

A prefix and all that is built on it.

kvfs unpin /mnt/kvfs SmolLM2

All chunks of a namespace.
"""
_PIN = "user.kvfs.pin"
FOREVER = "forever"


@dataclass
class Pinning:
    """What is to be pinned or unpinned, or was. `--json` shows it.

    Attributes:
        namespace: whose chunks; chunks, bytes: how many and how large; to be unpinned are those that are pinned.
        until: "forever", or when the pins end; None: they ended now.
        dry_run: whether nothing was done; interrupted: whether Ctrl-C ended it early.
    """

    namespace: str
    chunks: int = 0
    bytes: int = 0
    until: str | None = None
    dry_run: bool = False
    interrupted: bool = False


@dataclass
class _Selection:
    """The directories of a namespace that are meant, with chunks and bytes of each; PATHs that fit none."""

    namespace: str
    directories: dict[str, tuple[int, int]] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)

    @property
    def num_chunks(self) -> int:
        return sum(count for count, _ in self.directories.values())


_Mountpoint = Annotated[str, typer.Argument(help="Where the cache is mounted.")]
_Namespace = Annotated[str, typer.Argument(help="A namespace, or the beginning of its name.")]
_Prefixes = Annotated[
    list[str] | None, typer.Argument(metavar="PREFIX", help="PATHs that `kvfs ls` prints, in quotes.")
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what it would be, and leave it.")]
_Json = Annotated[bool, typer.Option("--json", help="The summary in bytes, for programs.")]


def pin(
    mountpoint: _Mountpoint,
    namespace: _Namespace,
    prefixes: _Prefixes = None,
    duration: Annotated[
        str | None, typer.Option("--for", metavar="DURATION|forever", help="How long: 90s, 15min, 2h, 3d, or forever.")
    ] = None,
    dry_run: _DryRun = False,
    as_json: _Json = False,
) -> None:
    """Keep prefixes, or all that a namespace holds now, from being evicted.

    Pins may hold three quarters of the lowest tier. `kvfs rm` takes what is pinned, too.
    """
    if duration is None:
        raise UsageError("say for how long: --for 2h, or --for forever")
    until = FOREVER if duration == FOREVER else _end(duration)
    _run(mountpoint, namespace, prefixes, duration.encode(), until, dry_run=dry_run, as_json=as_json)


def _end(duration: str) -> str:
    """When a pin of this duration ends."""
    if duration == "no" or not duration.strip("0"):
        raise UsageError(f"--for: {duration!r} is no time: say 2h, or forever; `kvfs unpin` ends pins")
    try:
        seconds = parse_duration(duration, "--for")
    except UsageError as error:
        raise UsageError(f"{error}, or forever") from error
    if not seconds:
        raise UsageError(f"--for: {duration!r} is no time: say 2h, or forever; `kvfs unpin` ends pins")
    return rfc3339(time.time_ns() + int(seconds * 1e9))


def unpin(
    mountpoint: _Mountpoint,
    namespace: _Namespace,
    prefixes: _Prefixes = None,
    dry_run: _DryRun = False,
    as_json: _Json = False,
) -> None:
    """End the pins of prefixes, or of all that a namespace holds."""
    _run(mountpoint, namespace, prefixes, b"no", None, dry_run=dry_run, as_json=as_json)


def _run(
    mountpoint: str, namespace: str, prefixes: list[str] | None, value: bytes, until: str | None, *,
    dry_run: bool, as_json: bool,
) -> None:  # fmt: skip
    wanted = [checked_prefix(prefix) for prefix in prefixes or ()]
    path = mounted.find(mountpoint)
    selection = progress.ask(
        path, lambda beat: _select(path, namespace, wanted, beat, only_pinned=until is None), "counting"
    )
    for prefix in selection.unmatched:
        typer.echo(f"kvfs: {unmatched_sentence([prefix])}", err=True)
    done = Pinning(selection.namespace, until=until, dry_run=dry_run)
    if dry_run:
        for count, size in selection.directories.values():
            done.chunks, done.bytes = done.chunks + count, done.bytes + size
    elif selection.directories:
        try:
            work = functools.partial(_set, path, selection, value, done)
            what = "unpinning" if until is None else "pinning"
            done.interrupted = not progress.run(path, work, what, selection.num_chunks)
        except KvfsError:
            if done.chunks:
                typer.echo(f"kvfs: {_sentence(done)}, before this:", err=True)
            raise
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(done), indent=2))
    else:
        begin = "stopped early; " if done.interrupted else ""
        typer.echo(f"kvfs: {begin}{_sentence(done)}")
    if done.interrupted:
        raise KeyboardInterrupt


def _sentence(done: Pinning) -> str:
    verb = "unpin" if done.until is None else "pin"
    verb = f"would {verb}" if done.dry_run else f"{verb}ned"
    end = {None: "", FOREVER: ", forever"}.get(done.until, f", until {done.until}")
    return f"{verb} {format_count(done.chunks, 'chunk')}, {format_size(done.bytes)}{end}"


def _select(path: str, namespace: str, prefixes: list[str], beat: Beat, *, only_pinned: bool) -> _Selection:
    name = listing.find_namespace(path, namespace, beat)
    selection = _Selection(name)
    if prefixes:
        places = {prefix: find_prefixes(path, name, prefix, beat) for prefix in prefixes}
        selection.unmatched = [prefix for prefix, found in places.items() if not found]
        directories = outermost(place for found in places.values() for place in found)
        if not directories:
            raise UsageError(unmatched_sentence(selection.unmatched, path, [name]))
    else:
        top = os.path.join(path, name, "prefixes")
        directories = [os.path.join(top, below) for below in names_in(top)]
    for directory in directories:
        selection.directories[directory] = _count(directory, beat, only_pinned=only_pinned)
    return selection


def _count(directory: str, beat: Beat, *, only_pinned: bool) -> tuple[int, int]:
    """Number and bytes of the chunks in a prefix and below; with `only_pinned`, of those."""
    num_chunks = size = 0
    waiting = [directory]
    while waiting:
        current = waiting.pop()
        for name in names_in(current):
            beat()
            place = os.path.join(current, name)
            if not name.endswith(SUFFIX):
                waiting.append(place)
                continue
            try:
                if only_pinned:
                    os.getxattr(place, _PIN)
                length = os.stat(place, follow_symlinks=False).st_size
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENODATA):
                    raise
                continue
            num_chunks, size = num_chunks + 1, size + length
    return num_chunks, size


def _set(path: str, selection: _Selection, value: bytes, done: Pinning, track: Track) -> None:
    for directory, (count, size) in selection.directories.items():
        if track.is_stopping:
            return
        try:
            with mounted.changing(path):
                os.setxattr(directory, _PIN, value)
        except FileNotFoundError:
            continue
        except PermissionError as error:
            raise UsageError(f"you may not pin in {path}: ask root, or whoever mounted it") from error
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise CapacityError(
                f"there is no room for more pins: they may hold three quarters of the lowest tier, and {directory} has "
                f"{format_size(size)}; `kvfs status {path}` shows what they hold"
            ) from error
        done.chunks, done.bytes = done.chunks + count, done.bytes + size
        track.advance(count)
