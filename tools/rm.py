"""`kvfs rm`: remove prefixes, a namespace, what it holds, or what has not been used for long.

The prefix view is gone through twice, see `removing`: once to count, once to remove.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import typer

from kvfs.config import format_size
from kvfs.durations import parse_duration
from kvfs.errors import KvfsError, UsageError
from kvfs.tools import listing, mounted, progress, removing
from kvfs.tools.mounted import Beat
from kvfs.tools.progress import STEP_DEADLINE_S, Track
from kvfs.tools.removing import Victim, Walk
from kvfs.tools.selecting import checked_prefix, find_prefixes, is_prefix, outermost, unmatched_sentence
from kvfs.tools.words import format_count

EXAMPLES = """
kvfs rm /mnt/kvfs SmolLM2 '0a1b2c3d*/4e5f6a7b*'

A prefix and all that was built on it, by the PATH that `kvfs ls` prints.

kvfs rm /mnt/kvfs SmolLM2 --older-than 3d

What was not used for three days. Units are s, min (or m), h and d.

kvfs rm /mnt/kvfs --older-than 12h --dry-run

Says what that would remove of every namespace.

kvfs rm /mnt/kvfs SmolLM2 --all

All chunks of a namespace. Without --all it asks at a terminal, and refuses elsewhere.

kvfs rm /mnt/kvfs --namespace SmolLM2

The same, and the namespace itself if no engine uses it.

kvfs rm /mnt/kvfs '0a1b2c3d*/4e5f6a7b*'

A prefix, whichever namespace has it.
"""


@dataclass
class Removal:
    """What is to be removed, or was. `--json` shows it.

    Attributes:
        namespaces: whose chunks.
        chunks, bytes: how many and how large.
        gone: chunks that somebody else removed, or that were evicted, just before.
        removed_namespaces: those that are gone themselves.
        dry_run: whether nothing was removed.
        interrupted: whether Ctrl-C ended it early.
    """

    namespaces: list[str]
    chunks: int = 0
    bytes: int = 0
    gone: int = 0
    removed_namespaces: list[str] = field(default_factory=list)
    dry_run: bool = False
    interrupted: bool = False


@dataclass
class _Selection:
    """Where to look, and what for.

    Attributes:
        directories: for each namespace the prefixes that are removed; None: all.
        before_ns: only what was last used before this time; None: all.
        unmatched: PATHs that fit no prefix, while others did.
        goes_whole: whether the namespaces themselves go.
    """

    directories: dict[str, list[str] | None] = field(default_factory=dict)
    before_ns: int | None = None
    unmatched: list[str] = field(default_factory=list)
    goes_whole: bool = False


def remove(
    mountpoint: Annotated[str, typer.Argument(help="Where the cache is mounted.")],
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAMESPACE] [PREFIX]...",
            help="A namespace, or the beginning of its name, and PATHs that `kvfs ls` prints, in quotes.",
        ),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", metavar="NAMESPACE", help="All of it, and the namespace itself.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="Only what was last used so long ago: 90s, 3d.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All chunks of NAMESPACE, or of every namespace if none is named.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and leave it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The summary in bytes, for programs.")] = False,
) -> None:
    """Remove prefixes, a namespace or all its chunks, or what was not used for long.

    What is removed is gone for good when this returns. It asks only before it empties a namespace that was named
    without --all or --namespace.
    """
    named = [*([namespace] if namespace is not None else []), *(what or ())]
    if not named and not everything and older_than is None:
        raise UsageError(
            "say what to remove: a NAMESPACE, a PREFIX, or --all for everything, with --older-than AGE if only so old"
        )
    if everything and (namespace is not None or len(named) > 1):
        raise UsageError(f"say either {named[-1]!r} or --all, not both")
    if namespace is not None and older_than is not None:
        raise UsageError(
            f"--namespace takes all of it: for what is old say kvfs rm {mountpoint} NAMESPACE --older-than AGE"
        )
    age_s = None if older_than is None else parse_duration(older_than, "--older-than")
    for prefix in named[1:]:
        checked_prefix(prefix)
    path = mounted.find(mountpoint)
    selection = mounted.ask(
        path, lambda beat: _named(path, named, is_namespace=namespace is not None or everything, beat=beat)
    )
    selection.goes_whole = namespace is not None and len(named) == 1
    if age_s is not None:
        selection.before_ns = time.time_ns() - int(age_s * 1e9)
    for prefix in selection.unmatched:
        typer.echo(f"kvfs: {unmatched_sentence([prefix])}", err=True)

    found = progress.ask(path, lambda beat: _count(path, selection, beat), "counting")
    if named and not (everything or selection.goes_whole or dry_run) and age_s is None:
        _confirm_emptied(mountpoint, selection, found)
    done = Removal(list(selection.directories))
    if dry_run:
        done = found
    elif found.chunks:
        try:
            work = functools.partial(_remove, path, selection, done)
            done.interrupted = not progress.run(path, work, "removing", found.chunks)
        except KvfsError:
            if done.chunks:
                typer.echo(f"kvfs: {_sentence(done)}, before this:", err=True)
            raise
    if selection.goes_whole and not done.interrupted:
        done.removed_namespaces = [
            name for name in selection.directories if dry_run or mounted.ask(path, _Whole(path, name), STEP_DEADLINE_S)
        ]
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(done), indent=2))
    else:
        left = max(0, found.chunks - done.chunks - done.gone)
        end = f"; stopped early, {left:,} remain" if done.interrupted else ""
        typer.echo(f"kvfs: {_sentence(done)}{end}")
    if done.interrupted:
        raise KeyboardInterrupt
    if selection.goes_whole and len(done.removed_namespaces) < len(selection.directories):
        raise typer.Exit(1)  # the reason was told


def _confirm_emptied(mountpoint: str, selection: _Selection, found: Removal) -> None:
    """Go on only if nobody empties a namespace because a pattern of the shell's came to nothing."""
    whole = [name for name, directories in selection.directories.items() if directories is None]
    if not whole or not found.chunks:
        return
    if not sys.stdin.isatty():
        raise UsageError(
            f"this is all of {whole[0]}, {format_count(found.chunks, 'chunk')}: say kvfs rm {mountpoint} {whole[0]} --all"
        )
    if not typer.confirm(f"Remove all {format_count(found.chunks, 'chunk')} of {whole[0]}, for good?", err=True):
        typer.echo("kvfs: nothing was removed", err=True)
        raise typer.Exit(1)


def _sentence(done: Removal) -> str:
    verb = "would remove" if done.dry_run else "removed"
    gone = f"; {done.gone:,} more went meanwhile" if done.gone else ""
    whole = "".join(f", and the namespace {name}" for name in done.removed_namespaces)
    return f"{verb} {format_count(done.chunks, 'chunk')}, {format_size(done.bytes)}{gone}{whole}"


def _named(path: str, named: list[str], *, is_namespace: bool, beat: Beat) -> _Selection:
    """What is meant by a namespace and prefixes of it, or by prefixes of whichever namespace has them."""
    if not named:
        return _select(path, None, [], beat)
    first = named[0]
    if not is_namespace and is_prefix(first):
        names = listing.namespace_names(path)
        if not any(name.startswith(first) for name in names):
            return _select(path, names, [checked_prefix(prefix) for prefix in named], beat)
    return _select(path, [listing.find_namespace(path, first, beat)], [checked_prefix(p) for p in named[1:]], beat)


@dataclass(frozen=True)
class _Whole:
    """Removes a namespace that was emptied; says why if it stays."""

    path: str
    name: str

    def __call__(self, beat: Beat) -> bool:
        beat()
        try:
            with mounted.changing(self.path):
                os.rmdir(os.path.join(self.path, self.name))
        except FileNotFoundError:
            return True
        except OSError as error:
            why = {
                errno.EBUSY: "an engine uses it",
                errno.ENOTEMPTY: "chunks were stored in it meanwhile",
            }.get(error.errno or 0)
            if why is None:
                raise
            typer.echo(f"kvfs: the namespace {self.name} was emptied and stays: {why}", err=True)
            return False
        return True


def _select(path: str, names: list[str] | None, prefixes: list[str], beat: Beat) -> _Selection:
    """The prefixes of these namespaces, or all of them; None: of every namespace."""
    names = listing.namespace_names(path) if names is None else names
    if not prefixes:
        return _Selection(dict.fromkeys(names))
    found: dict[str, list[str] | None] = {}
    unmatched: list[str] = []
    for prefix in prefixes:
        places = {name: find_prefixes(path, name, prefix, beat) for name in names}
        if not any(places.values()):
            unmatched.append(prefix)
        for name, of_this in places.items():
            if of_this:
                found[name] = outermost([*(found.get(name) or ()), *of_this])
    if not found:
        raise UsageError(unmatched_sentence(unmatched, path, names))
    return _Selection(found, unmatched=unmatched)


def _count(path: str, selection: _Selection, beat: Beat) -> Removal:
    found = Removal(list(selection.directories), dry_run=True)
    for victim in _victims(path, selection, beat):
        found.chunks += 1
        found.bytes += victim.size_bytes
    return found


def _remove(path: str, selection: _Selection, done: Removal, track: Track) -> None:
    lock = threading.Lock()

    def took(victim: Victim, was_there: bool) -> None:
        with lock:
            if was_there:
                done.chunks += 1
                done.bytes += victim.size_bytes
            else:
                done.gone += 1
            track.advance(1)

    for walk, groups in _walks(path, selection, lambda: track.advance(0)):
        for directories in groups:
            removing.Forest(path, walk, directories, took, lambda: track.is_stopping).remove()


def _victims(path: str, selection: _Selection, beat: Beat) -> Iterator[Victim]:
    for walk, groups in _walks(path, selection, beat):
        for directories in groups:
            for directory in directories:
                yield from walk.victims(directory)


def _walks(path: str, selection: _Selection, beat: Beat) -> Iterator[tuple[Walk, list[list[str]]]]:
    """For each namespace how it is gone through, and its directories that are gone through group after group."""
    for name, directories in selection.directories.items():
        root = os.path.join(path, name)
        walk = Walk(os.path.join(root, "chunks"), selection.before_ns, beat)
        yield walk, [directories] if directories is not None else walk.groups(os.path.join(root, "prefixes"))
