"""`kvfs export`: chunks of a mount into a directory or a tar archive, parents first.

What comes out is what `cp -r` would make, without the prefix view: NAMESPACE/namespace.json and NAMESPACE/chunks/*. Any
tool can copy it back in, and `kvfs import` does.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated

import typer

from kvfs import namespace as namespaces
from kvfs.chunk import SUFFIX, parse_file_name
from kvfs.errors import CorruptChunk, FormatError, KvfsError, UsageError
from kvfs.namespace import Namespace
from kvfs.staging import MAX_FILE_BYTES, prove
from kvfs.tools import listing, mounted, progress
from kvfs.tools.copying import (
    STREAM,
    Copied,
    Pipe,
    StoppedError,
    is_tar,
    read_file,
    tell,
    tell_refused,
)
from kvfs.tools.mounted import Beat
from kvfs.tools.progress import Track
from kvfs.tools.selecting import checked_prefix, find_prefixes, is_prefix, unmatched_sentence

EXAMPLES = """
kvfs export /mnt/kvfs SmolLM2 /backup/kv

All chunks of a namespace, into /backup/kv/SmolLM2…/; what is there already is not read again.

kvfs export /mnt/kvfs SmolLM2 '0a1b2c3d*' warm.tar

A prefix by the PATH that `kvfs ls` prints, with what it is built on, as an archive.

kvfs export /mnt/kvfs SmolLM2 - | ssh other kvfs import /mnt/kvfs -

From node to node.
"""

_COMPRESSED = re.compile(r"\.(tar\.\w+|tgz|tbz2?|txz|tzst)$")
_DIRECTORY_MODE, _FILE_MODE = 0o700, 0o600  # what users asked can be computed from it


def export(
    mountpoint: Annotated[str, typer.Argument(help="Where the cache is mounted.")],
    namespace: Annotated[str, typer.Argument(help="A namespace, or the beginning of its name.")],
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[PREFIX]... DESTINATION",
            help="PATHs that `kvfs ls` prints, in quotes; and a directory, a name that ends in .tar, or - for a stream.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="The summary, for programs.")] = False,
) -> None:
    """Copy chunks out, whole and checked, parents first. Ctrl-C leaves whole chunks only.

    Reading counts as no use of them.
    """
    *prefixes, destination = words
    path = mounted.find(mountpoint)
    if destination == STREAM and sys.stdout.isatty():
        raise UsageError("an archive is nothing for a terminal: send it to a file or a program")
    name = mounted.ask(path, lambda beat: listing.find_namespace(path, namespace, beat))
    prefixes = [checked_prefix(prefix) for prefix in prefixes]
    mounted.ask(path, lambda beat: _check_destination(path, name, destination, beat))
    chunks = progress.ask(path, lambda beat: _select(path, name, prefixes, beat), "looking for chunks")
    done = Copied([name])
    write = functools.partial(_to_tar if is_tar(destination) else _to_directory, path, name, chunks, destination, done)
    total = sum(size for _, size in chunks)
    try:
        done.interrupted = not progress.run(path, write, "exporting", total, is_bytes=True)
    except KvfsError:
        tell_refused(done)
        if done.chunks or done.num_refused:
            typer.echo(f"kvfs: {done.sentence('exported')}, before this:", err=True)
        raise
    tell(done, "exported", as_json=as_json, is_stdout_taken=destination == STREAM)


def _check_destination(path: str, name: str, destination: str, beat: Beat) -> None:
    """Raise UsageError for what is no place to write to: nothing is made by mistake."""
    if destination == STREAM or os.path.isdir(destination):
        return
    if is_prefix(destination) and (set(destination) & set("*?[") or find_prefixes(path, name, destination, beat)):
        raise UsageError(f"{destination!r} is the PATH of a prefix: say where to, too; ./{destination} is a directory")
    if _COMPRESSED.search(destination):
        raise UsageError(
            f"archives are not compressed here: write to a name that ends in .tar, or - | gzip > {destination}"
        )
    parent = os.path.dirname(os.path.abspath(destination))
    if not os.path.isdir(parent):
        raise UsageError(f"cannot write to {destination}: there is no directory {parent}")


def _select(path: str, name: str, prefixes: list[str], beat: Beat) -> list[tuple[str, int]]:
    """The names and sizes of the chunks to copy, parents first: all, or those of prefixes and what these stand on."""
    root = os.path.join(path, name)
    names: set[str] = set()
    if not prefixes:
        names.update(os.listdir(os.path.join(root, "chunks")))
    for prefix in prefixes:
        fitting = find_prefixes(path, name, prefix, beat)
        if not fitting:
            raise UsageError(unmatched_sentence([prefix], path, [name]))
        for found in fitting:
            for _, _, files in os.walk(found):
                names.update(file for file in files if file.endswith(SUFFIX))
                beat()
    positions: dict[str, int] = {}
    sizes: dict[str, int] = {}
    waiting = list(names)
    while waiting:
        file = waiting.pop()
        beat()
        place = os.path.join(root, "chunks", file)
        try:
            sizes[file] = os.stat(place).st_size
            positions[file] = int(os.getxattr(place, "user.kvfs.position"))
            above = os.getxattr(place, "user.kvfs.parent").decode() + SUFFIX
        except OSError:
            sizes.pop(file, None)  # it went
            continue
        if prefixes and above not in names:
            names.add(above)
            waiting.append(above)
    return sorted(sizes.items(), key=lambda item: (positions[item[0]], item[0]))


def _identity(path: str, name: str) -> tuple[Namespace, bytes]:
    raw = Path(path, name, "namespace.json").read_bytes()
    namespace = namespaces.decode(raw)
    if namespace.directory != name:
        raise FormatError(f"the namespace.json in {name} is that of {namespace.directory}")
    return namespace, raw


def _read(path: str, name: str, namespace: Namespace, file: str, done: Copied, track: Track) -> memoryview | None:
    """A whole chunk that is good, or None for one that is counted as gone or refused."""
    source = os.path.join(path, name, "chunks", file)
    try:
        raw = read_file(source, MAX_FILE_BYTES, track)
        key = parse_file_name(file)
        assert key is not None
        prove(namespace, key, raw)
    except FileNotFoundError:
        done.gone += 1
    except (OSError, CorruptChunk) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        done.refuse(os.path.join(name, "chunks", file), f"{reason}")
    else:
        return raw
    return None


def _to_directory(
    path: str, name: str, chunks: list[tuple[str, int]], destination: str, done: Copied, track: Track
) -> None:
    namespace, identity = _identity(path, name)
    top = os.path.join(destination, name)
    try:
        for directory in (destination, top):
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory, _DIRECTORY_MODE)
        if not os.path.exists(os.path.join(top, "namespace.json")):
            with _replaced(os.path.join(top, "namespace.json")) as out:
                out.write(identity)
        with contextlib.suppress(FileExistsError):
            os.mkdir(os.path.join(top, "chunks"), _DIRECTORY_MODE)
        for file, size in chunks:
            if track.is_stopping:
                return
            target = os.path.join(top, "chunks", file)
            if _size(target) == size:
                done.there += 1
                track.advance(size)
                continue
            raw = _read(path, name, namespace, file, done, track)
            if raw is None:
                continue
            with _replaced(target) as out:
                out.write(raw)
                out.flush()
                with contextlib.suppress(FileNotFoundError):
                    modified_ns = os.stat(os.path.join(path, name, "chunks", file)).st_mtime_ns
                    os.utime(out.fileno(), ns=(modified_ns, modified_ns))
            done.chunks += 1
            done.bytes += len(raw)
        os.utime(top)
    except OSError as error:
        raise UsageError(f"cannot write to {error.filename or destination}: {error.strerror}") from error


def _to_tar(path: str, name: str, chunks: list[tuple[str, int]], destination: str, done: Copied, track: Track) -> None:
    namespace, identity = _identity(path, name)
    try:
        with contextlib.ExitStack() as stack:
            if destination == STREAM:
                pipe = Pipe(sys.stdout.fileno(), track)
                archive = stack.enter_context(tarfile.open(fileobj=pipe, mode="w|"))  # type: ignore[call-overload]
            else:
                file = stack.enter_context(_replaced(destination))
                archive = stack.enter_context(tarfile.open(fileobj=file, mode="w"))
            _add(archive, f"{name}/namespace.json", identity, os.stat(os.path.join(path, name)).st_mtime)
            for leaf, _ in chunks:
                if track.is_stopping:
                    return
                raw = _read(path, name, namespace, leaf, done, track)
                if raw is None:
                    continue
                modified_s = 0.0
                with contextlib.suppress(FileNotFoundError):
                    modified_s = os.stat(os.path.join(path, name, "chunks", leaf)).st_mtime
                _add(archive, f"{name}/chunks/{leaf}", raw, modified_s)
                done.chunks += 1
                done.bytes += len(raw)
    except StoppedError:
        return
    except OSError as error:
        raise UsageError(f"cannot write to {error.filename or destination}: {error.strerror}") from error


@contextlib.contextmanager
def _replaced(path: str) -> Iterator[IO[bytes]]:
    """A file that has its name once it is whole; one that could not be written leaves what was there before.

    What is no plain file, such as a tape, is written as it is.
    """
    is_plain = not os.path.exists(path) or os.path.isfile(path)
    target = os.path.realpath(path)
    place = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.part") if is_plain else path
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _FILE_MODE)
    try:
        with open(descriptor, "wb") as file:
            yield file
        if is_plain:
            os.rename(place, target)
    except BaseException:
        if is_plain:
            with contextlib.suppress(OSError):
                os.unlink(place)
        raise


def _add(archive: tarfile.TarFile, name: str, raw: bytes | memoryview, modified_s: float) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(raw)
    member.mtime = int(modified_s)
    member.mode = _FILE_MODE
    archive.addfile(member, io.BytesIO(raw))


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None
