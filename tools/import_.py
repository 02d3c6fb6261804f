"""`kvfs import`: chunks from a directory or a tar archive into a mount, parents first as far as their order is ours.

It takes what `kvfs export`, `cp -r`, `rsync` and `tar` make of namespaces, with or without the prefix view. Nothing of
a name in an archive is used but a namespace's name and a chunk's: no path leads out of the mount.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from kvfs import namespace as namespaces
from kvfs.chunk import MAX_HEADER_BYTES, parse_file_name, parse_header
from kvfs.config import format_size, parse_size
from kvfs.errors import CorruptChunk, KvfsError, UnavailableError, UsageError
from kvfs.keys import Key
from kvfs.namespace import MAX_NAMESPACE_JSON_BYTES, Namespace
from kvfs.staging import MAX_FILE_BYTES, prove
from kvfs.tools import mounted, progress
from kvfs.tools.archive import Archive, ArchiveError, Member
from kvfs.tools.copying import (
    STREAM,
    Copied,
    Pipe,
    StoppedError,
    is_tar,
    open_file,
    read_file,
    tell,
    tell_refused,
    write_whole,
)
from kvfs.tools.mounted import Beat
from kvfs.tools.progress import Track
from kvfs.tools.selecting import names_in

EXAMPLES = """
kvfs import /mnt/kvfs /backup/kv

All namespaces in a directory, or the one that it is.

kvfs import /mnt/kvfs warm.tar

An archive; ssh other kvfs export … - | kvfs import /mnt/kvfs - takes a stream.
"""

_JSON = "namespace.json"


def import_(
    mountpoint: Annotated[str, typer.Argument(help="Where the cache is mounted.")],
    source: Annotated[str, typer.Argument(help="A directory, a name that ends in .tar, or - for a stream.")],
    as_json: Annotated[bool, typer.Option("--json", help="The summary, for programs.")] = False,
) -> None:
    """Copy chunks in. Each has to prove itself; what does not is named with the reason, and the exit code is 1.

    So it is if chunks were evicted again meanwhile, because there is not so much room.
    Ctrl-C leaves whole chunks only.
    """
    path = mounted.find(mountpoint)
    done = Copied()
    put: set[str] = set()
    total = 0
    if is_tar(source):
        work = functools.partial(_from_tar, path, source, done, put)
        if source != STREAM:
            total = _file_bytes(source)
    else:
        tree = _find(source)
        total = sum(_size(file) for files in tree.values() for file in files.values())
        work = functools.partial(_from_directory, path, tree, done, put)
    try:
        done.interrupted = not progress.run(path, work, "importing", total, is_bytes=True)
        for name in done.namespaces:
            with contextlib.suppress(OSError):
                os.utime(os.path.join(path, name))  # nothing more comes: its files may show both their links
    except KvfsError:
        tell_refused(done)
        if done.chunks or done.num_refused:
            typer.echo(f"kvfs: {done.sentence('imported')}, before this:", err=True)
        raise
    mounted.ask(path, lambda beat: _look_after(path, put, done, beat))
    tell(done, "imported", as_json=as_json)


def _file_bytes(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def _size(file: str) -> int:
    try:
        return os.stat(file).st_size
    except OSError:
        return 0  # it is told of when it is read


def _find(source: str) -> dict[str, dict[Key, str]]:
    """The files of the chunks by key, for each directory of a namespace."""
    if not os.path.exists(source):
        raise UsageError(f"there is no {source}")
    if not os.path.isdir(source):
        raise UsageError(f"{source} is no directory, and its name does not end in .tar")
    here = [source] if os.path.exists(os.path.join(source, _JSON)) else []
    tops = here or sorted(str(place.parent) for place in Path(source).glob(f"*/{_JSON}"))
    if not tops:
        raise UsageError(f"there is no {_JSON} in {source}, nor one level below")
    found: dict[str, dict[Key, str]] = {}
    for top in tops:
        files = found[top] = {}
        for directory, _, names in os.walk(top):
            for name in names:
                key = parse_file_name(name)
                if key is not None:
                    files.setdefault(key, os.path.join(directory, name))
    return found


def _from_directory(path: str, tree: dict[str, dict[Key, str]], done: Copied, put: set[str], track: Track) -> None:
    for top, files in tree.items():
        try:
            raw = read_file(os.path.join(top, _JSON), MAX_NAMESPACE_JSON_BYTES, track)
            namespace = namespaces.decode(bytes(raw))
        except OSError as error:
            done.refuse(os.path.join(top, _JSON), error.strerror or str(error))
            continue
        except KvfsError as error:
            done.refuse(os.path.join(top, _JSON), str(error))
            continue
        _make(path, namespace, done)
        for key, file in sorted(files.items(), key=lambda item: _position(namespace, item[1], track)):
            if track.is_stopping:
                return
            target = _target(path, namespace.directory, key)
            if os.path.exists(target):
                done.there += 1
                track.advance(_size(file))
                continue
            try:
                content = read_file(file, MAX_FILE_BYTES, track)
            except OSError as error:
                done.refuse(file, error.strerror or str(error))
                continue
            _put(target, namespace, key, content, file, done, put)


def _from_tar(path: str, source: str, done: Copied, put: set[str], track: Track) -> None:
    known: dict[str, Namespace] = {}
    try:
        with contextlib.ExitStack() as stack:
            if source == STREAM:
                descriptor = sys.stdin.fileno()
            else:
                descriptor = stack.enter_context(open_file(source)).fileno()
            archive = Archive(Pipe(descriptor, track), track)
            for member, name, key in _members(archive):
                if track.is_stopping:
                    return
                limit = MAX_NAMESPACE_JSON_BYTES if key is None else MAX_FILE_BYTES
                if member.size > limit:
                    done.refuse(member.name, "it is too large")
                    continue
                if member.is_sparse:
                    done.refuse(member.name, "it has holes: make the archive without --sparse")
                    continue
                if key is None:
                    _take_identity(path, name, bytes(archive.read()), member.name, known, done)
                    continue
                if name not in known and not _learn(path, name, known):
                    done.refuse(member.name, f"no {_JSON} of {name} came before it")
                    continue
                target = _target(path, name, key)
                if os.path.exists(target):
                    done.there += 1
                else:
                    _put(target, known[name], key, archive.read(), member.name, done, put)
    except StoppedError:
        return
    except ArchiveError as error:
        raise UsageError(f"{source} is no archive, or not whole: {error}") from error
    except OSError as error:
        raise UsageError(f"cannot read {error.filename or source}: {error.strerror}") from error


def _members(archive: Archive) -> Iterator[tuple[Member, str, Key | None]]:
    """The files that matter, each with its namespace and, if it is a chunk, its key."""
    for member in archive:
        parts = member.name.split("/")
        key = parse_file_name(parts[-1])
        spaces = [part for part in parts[:-1] if namespaces.is_directory_name(part)]
        if member.is_file and spaces and (key is not None or parts[-1] == _JSON):
            yield member, spaces[-1], key


def _take_identity(path: str, name: str, raw: bytes, place: str, known: dict[str, Namespace], done: Copied) -> None:
    try:
        namespace = namespaces.decode(raw)
        if namespace.directory != name:
            raise UsageError(f"it is the {_JSON} of {namespace.directory}")
    except KvfsError as error:
        done.refuse(place, str(error))
        return
    _make(path, namespace, done)
    known[name] = namespace


def _learn(path: str, name: str, known: dict[str, Namespace]) -> bool:
    """Whether the mount knows a namespace already."""
    try:
        known[name] = namespaces.decode(Path(path, name, _JSON).read_bytes())
    except (OSError, KvfsError):
        return False
    return True


def _make(path: str, namespace: Namespace, done: Copied) -> None:
    """Let the mount have a namespace."""
    top = os.path.join(path, namespace.directory)
    if namespace.directory not in done.namespaces:
        done.namespaces.append(namespace.directory)
    try:
        if os.path.exists(os.path.join(top, _JSON)):
            if not os.path.exists(os.path.join(top, "chunks")):  # it was removed
                os.mkdir(os.path.join(top, "chunks"))
            return
        with contextlib.suppress(FileExistsError):
            os.mkdir(top)
        write_whole(os.path.join(top, _JSON), namespaces.encode(namespace))
        os.utime(top)  # nothing more is to be made by name: the mount may show all of it
    except OSError as error:
        raise _told(error, path, f"the namespace {namespace.directory} is refused") from error


def _put(target: str, namespace: Namespace, key: Key, raw: memoryview, place: str, done: Copied, put: set[str]) -> None:
    try:
        prove(namespace, key, raw)
        write_whole(target, raw)
    except CorruptChunk as error:
        done.refuse(place, str(error))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise _told(error, target, place, len(raw)) from error
        done.refuse(place, "it does not fit what is stored; the events of the mount say why")
    else:
        done.chunks += 1
        done.bytes += len(raw)
        put.add(target)


def _look_after(path: str, put: set[str], done: Copied, beat: Beat) -> None:
    """Count what was copied in and is not there any more, and say why."""
    left = set(put)
    for directory in {os.path.dirname(target) for target in put}:
        left.difference_update(os.path.join(directory, name) for name in names_in(directory))
        beat()
    done.evicted = len(left)
    reasons = {_quota_that_holds(os.path.dirname(os.path.dirname(target)), 0) for target in left}
    if reasons:
        room = os.statvfs(path)
        done.why = max(reasons) or f"the cache has room for {format_size(room.f_blocks * room.f_frsize)}"


def _quota_that_holds(directory: str, more_bytes: int) -> str:
    """Which quota keeps a namespace from having so much more, in words; "" if none does."""
    try:
        quota, stored = (os.getxattr(directory, f"user.kvfs.{name}").decode() for name in ("quota", "stored_bytes"))
    except OSError:
        return ""
    if quota == "none" or int(stored) + more_bytes <= parse_size(quota) * 7 // 8:  # what goes goes in batches
        return ""
    return f"the quota of {os.path.basename(directory)} is {quota}"


def _told(error: OSError, path: str, what: str, size_bytes: int = 0) -> KvfsError:
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return UsageError(f"you may not write to {path}: ask root, or whoever mounted it")
    if error.errno == errno.ENOSPC:
        quota = _quota_that_holds(os.path.dirname(os.path.dirname(path)), size_bytes)
        if quota:
            return UnavailableError(
                f"{quota}, and all that it has now is pinned, in use, not yet on NVMe, or came with this copy"
            )
        return UnavailableError(
            "the cache has no room now: all of it is in use, came with this copy, or cannot be written to NVMe"
        )
    return UnavailableError(f"{what}: {error.strerror}")


def _target(path: str, name: str, key: Key) -> str:
    return os.path.join(path, name, "chunks", f"{key.hex()}.safetensors")


def _position(namespace: Namespace, file: str, track: Track) -> int:
    """Where in its chain a chunk stands; 0 for what is none, which is told of when it is read whole."""
    track.advance(0)
    try:
        with open_file(file) as raw:
            length = int.from_bytes(raw.read(8), "little")
            header = os.pread(raw.fileno(), min(length + 8, MAX_HEADER_BYTES), 0)
            return parse_header(namespace, header)[1].position
    except (OSError, CorruptChunk):
        return 0
