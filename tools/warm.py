"""`kvfs warm`: bring chunks from NVMe into RAM before anybody asks for them.

It goes through a session of its own, batch by batch; a batch is over when each of its chunks is in RAM, or cannot be.
Nothing of it counts as use of a chunk.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvfs import messages as m
from kvfs import namespace as namespaces
from kvfs.chunk import SUFFIX
from kvfs.config import format_size
from kvfs.connection import Connection, find_socket
from kvfs.errors import UnavailableError, UsageError
from kvfs.messages import Warmth
from kvfs.tools import listing, mounted, progress
from kvfs.tools.mounted import Beat
from kvfs.tools.progress import STEP_DEADLINE_S, Track
from kvfs.tools.selecting import checked_prefix, find_prefixes, names_in, outermost, unmatched_sentence
from kvfs.tools.words import format_count

EXAMPLES = """
kvfs warm /mnt/kvfs SmolLM2 '0a1b2c3d*'

A prefix and all that is built on it, by the PATH that `kvfs ls` prints.

kvfs warm /mnt/kvfs SmolLM2

A whole namespace, what was used last first; say `kvfs warm /mnt/kvfs` for all of them.

kvfs warm /mnt/kvfs/NAMESPACE/prefixes/KEY /mnt/kvfs/NAMESPACE/chunks/KEY.safetensors

By paths in the mount: files, and directories with all that is below them.
"""
_BATCH_CHUNKS = 64
_BATCH_BYTES = 32 << 20  # so that the bar moves, and Ctrl-C is heard
_CHUNK = re.compile(rf"([0-9a-f]{{32}}){re.escape(SUFFIX)}")
EXIT_NOT_ALL = 1


@dataclass
class Warming:
    """What was done. `--json` shows it.

    Attributes:
        chunks, bytes: in RAM now, and how large they are; of these `brought` came from NVMe.
        over_share: chunks that did not fit: what is warm takes three quarters of RAM at most, until it is loaded.
        no_room: chunks that did not fit: the rest of RAM is in use, not written yet, or promised to others.
        unreadable: chunks that could not be read, or were damaged and dropped; gone: removed or evicted meanwhile.
        left_out_bytes: of all that are not in RAM.
        interrupted: whether Ctrl-C ended it early.
    """

    chunks: int = 0
    bytes: int = 0
    brought: int = 0
    over_share: int = 0
    no_room: int = 0
    unreadable: int = 0
    gone: int = 0
    left_out_bytes: int = 0
    interrupted: bool = False

    def add(self, warmth: Warmth, size: int) -> None:
        """Count what became of one chunk."""
        match warmth:
            case Warmth.THERE | Warmth.BROUGHT:
                self.chunks, self.bytes = self.chunks + 1, self.bytes + size
                self.brought += warmth is Warmth.BROUGHT
                return
            case Warmth.OVER_SHARE:
                self.over_share += 1
            case Warmth.NO_ROOM:
                self.no_room += 1
            case Warmth.UNREADABLE:
                self.unreadable += 1
            case Warmth.GONE:
                self.gone += 1
        self.left_out_bytes += size


@dataclass
class _Selection:
    """Of each namespace the chunks that are meant, the first of each chain first: (key, bytes)."""

    path: str
    namespaces: dict[str, dict[bytes, int]] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)


def warm(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="MOUNTPOINT [NAMESPACE [PREFIX]...] | FILE...",
            help="Where the cache is mounted, a namespace or the beginning of its name, and PATHs that `kvfs ls` "
            "prints, in quotes; or paths in the mount.",
            show_default=False,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="What was done, in bytes, for programs.")] = False,
) -> None:
    """Bring prefixes, chunks or whole namespaces from NVMe into RAM.

    It does not count as use. What engines have in use stays, and what is warm takes three quarters of RAM at most; what
    did not fit is said, and then the exit code is 1.
    """
    path, places = _understood(what)
    selection = progress.ask(path, functools.partial(_select, path, places), "looking for chunks")
    for text in selection.unmatched:
        typer.echo(f"kvfs: {unmatched_sentence([text])}", err=True)
    done = Warming()
    total = sum(sum(sizes.values()) for sizes in selection.namespaces.values())
    done.interrupted = not progress.run(
        path, functools.partial(_warm, selection, done), "warming", total, is_bytes=True
    )
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(done), indent=2))
    else:
        typer.echo(f"kvfs: {'stopped early; ' if done.interrupted else ''}{_sentence(done)}")
    if done.interrupted:
        raise KeyboardInterrupt
    if done.over_share or done.no_room or done.unreadable:
        raise typer.Exit(EXIT_NOT_ALL)


def _sentence(done: Warming) -> str:
    said = f"{format_count(done.chunks, 'chunk')}, {format_size(done.bytes)} in RAM, {done.brought:,} from NVMe"
    reasons = [
        (done.over_share, "did not fit: what is warm takes three quarters of RAM at most, until it is loaded"),
        (done.no_room, "did not fit: the rest of RAM is in use, not written yet, or promised to requests"),
        (done.unreadable, "could not be read: see the daemon's log"),
        (done.gone, "went meanwhile"),
    ]
    return "; ".join([said, *(f"{count:,} {why}" for count, why in reasons if count)])


def _understood(what: Sequence[str]) -> tuple[str, list[str] | tuple[str | None, list[str]]]:
    """The mount, and what of it: paths below it, or a namespace and PATHs of prefixes."""
    inside = mounted.inside(what[0])
    if inside is None:
        wanted = [checked_prefix(prefix) for prefix in what[2:]]
        return mounted.find(what[0]), (what[1] if len(what) > 1 else None, wanted)
    below: list[str] = []
    for text in what:
        place = mounted.inside(text)
        if place is None or place[0] != inside[0]:
            raise UsageError(f"{text} does not lie in the mount on {inside[0]}, as {what[0]} does")
        below.append(place[1])
    return inside[0], below


def _select(path: str, places: list[str] | tuple[str | None, list[str]], beat: Beat) -> _Selection:
    selection = _Selection(path)
    if isinstance(places, list):
        for below in places:
            name, *_ = below.split("/")
            place = os.path.join(path, below)
            if not namespaces.is_directory_name(name) or not os.path.exists(place):
                raise UsageError(f"{place} is neither a chunk nor a directory of a namespace")
            if os.path.isdir(place):
                top = os.path.join(place, "prefixes") if below == name else place
                _add(selection, name, _tree(top, beat))
            elif (found := _size(place)) is not None:
                _add(selection, name, [found])
            else:
                raise UsageError(f"{place} is no chunk")
        return selection
    wanted, prefixes = places
    names = listing.namespace_names(path) if wanted is None else [listing.find_namespace(path, wanted, beat)]
    for name in names:
        tops = [os.path.join(path, name, "prefixes")]
        if prefixes:
            found_by = {prefix: find_prefixes(path, name, prefix, beat) for prefix in prefixes}
            selection.unmatched = [prefix for prefix, found in found_by.items() if not found]
            tops = outermost(place for found in found_by.values() for place in found)
            if not tops:
                raise UsageError(unmatched_sentence(selection.unmatched, path, [name]))
        for top in tops:
            _add(selection, name, _tree(top, beat))
    return selection


_Found = tuple[bytes, int, int]  # key, bytes, last use


def _add(selection: _Selection, name: str, chunks: Sequence[_Found]) -> None:
    known = selection.namespaces.setdefault(name, {})
    known.update((key, size) for key, size, _ in chunks)


def _size(place: str) -> _Found | None:
    """A chunk's key, size and last use; None if it is none, or gone."""
    match = _CHUNK.fullmatch(os.path.basename(place))
    if match is None:
        return None
    try:
        stat = os.stat(place, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return bytes.fromhex(match[1]), stat.st_size, stat.st_atime_ns


def _tree(directory: str, beat: Beat) -> list[_Found]:
    """The chunks in a directory and below, each behind what it is built on; of branches the last used first."""
    run: list[_Found] = []
    branches: list[list[_Found]] = []
    for name in names_in(directory):
        beat()
        if name.endswith(SUFFIX):
            if (found := _size(os.path.join(directory, name))) is not None:
                run.append(found)
        else:
            branches.append(_tree(os.path.join(directory, name), beat))
    branches.sort(key=lambda branch: -max((used for *_, used in branch), default=0))
    return [*run, *(found for branch in branches for found in branch)]


def _batches(sizes: dict[bytes, int]) -> Iterator[list[tuple[bytes, int]]]:
    batch: list[tuple[bytes, int]] = []
    num_bytes = 0
    for key, size in sizes.items():
        if batch and (len(batch) == _BATCH_CHUNKS or num_bytes + size > _BATCH_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append((key, size))
        num_bytes += size
    if batch:
        yield batch


def _warm(selection: _Selection, done: Warming, track: Track) -> None:
    path = selection.path
    for name, sizes in selection.namespaces.items():
        if track.is_stopping or not sizes:
            continue
        try:
            namespace = namespaces.decode(Path(path, name, "namespace.json").read_bytes())
        except FileNotFoundError:
            done.gone += len(sizes)
            continue
        connection = Connection.open(
            find_socket(Path(path), mounted.DEADLINE_S), namespace, "kvfs warm", STEP_DEADLINE_S
        )
        try:
            _warm_namespace(connection, sizes, done, track)
        finally:
            connection.close()


def _warm_namespace(connection: Connection, sizes: dict[bytes, int], done: Warming, track: Track) -> None:
    for batch in _batches(sizes):
        if track.is_stopping:
            return
        request = m.Warm(connection.next_id(), b"".join([key for key, _ in batch]))
        found = connection.ask(request, m.Warmed, STEP_DEADLINE_S).found
        if len(found) != len(batch):
            raise UnavailableError("the daemon did not say what became of the chunks")
        for (_, size), warmth in zip(batch, found, strict=True):
            done.add(Warmth(warmth), size)
            track.advance(size)
