"""`kvfs verify`: read every chunk through the mount and check all that it says of itself.

A chunk that only NVMe has is read from there, one that is in RAM from RAM. The daemon checks what it reads from NVMe
too, answers EIO for what is wrong, and drops it. Reading through the mount is no use of a chunk: it changes neither
hits nor the order of eviction.
"""

from __future__ import annotations

import errno
import functools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvfs import namespace as namespaces
from kvfs.chunk import MAX_CHUNK_BYTES, MAX_HEADER_BYTES, file_name, parse_header, verify_payload
from kvfs.config import format_size
from kvfs.errors import CorruptChunk, FormatError, KvfsError
from kvfs.namespace import Namespace
from kvfs.tools import listing, mounted, progress
from kvfs.tools.mounted import Beat
from kvfs.tools.progress import Track
from kvfs.tools.words import format_count, printable

EXAMPLES = """
kvfs verify /mnt/kvfs

Reads all chunks; the exit code is 0 if all are good, 1 if any was bad.

kvfs verify /mnt/kvfs SmolLM2 --json | jq -r '.bad[].path'

What is bad in the namespace that begins with these letters.
"""

_STEP_BYTES = 4 << 20
_MAX_FILE_BYTES = MAX_CHUNK_BYTES + MAX_HEADER_BYTES + 4096


@dataclass
class Bad:
    """A file that is not what it should be.

    Attributes:
        path: below the mount point.
        reason: the first thing that is wrong.
        dropped: whether the cache has it no longer.
    """

    path: str
    reason: str
    dropped: bool = False

    def __post_init__(self) -> None:
        self.path, self.reason = printable(self.path), printable(self.reason)


@dataclass
class Findings:
    """What was found. `--json` shows it.

    Attributes:
        chunks, bytes: how many were checked, bad ones included, and how large they are.
        gone: chunks that were removed or evicted before they were read.
        bad: what is not what it should be.
        interrupted: whether Ctrl-C ended it early.
    """

    chunks: int = 0
    bytes: int = 0
    gone: int = 0
    bad: list[Bad] = field(default_factory=list)
    interrupted: bool = False


def verify(
    mountpoint: Annotated[str, typer.Argument(help="Where the cache is mounted.")],
    namespace: Annotated[str | None, typer.Argument(help="A namespace, or the beginning of its name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="What was found, for programs.")] = False,
) -> None:
    """Read every chunk and check its name, header, checksums and padding.

    The daemon drops what it finds bad on NVMe itself.
    """
    path = mounted.find(mountpoint)
    chunks = progress.ask(path, lambda beat: _list(path, namespace, beat), "looking for chunks")
    found = Findings()
    try:
        work = functools.partial(_verify, path, chunks, found)
        total = sum(size for sizes in chunks.values() for size in sizes.values())
        found.interrupted = not progress.run(path, work, "verifying", total, is_bytes=True)
    except KvfsError:
        if found.chunks:
            typer.echo(f"kvfs: {_sentence(found)}, before this:", err=True)
        raise
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
    else:
        for bad in found.bad:
            typer.echo(f"{bad.path}  {bad.reason}{'; the daemon dropped it, see its log' if bad.dropped else ''}")
        begin = f"stopped at {sum(map(len, chunks.values())):,} chunks; " if found.interrupted else ""
        typer.echo(f"kvfs: {begin}{_sentence(found)}")
    if found.interrupted:
        raise KeyboardInterrupt
    if found.bad:
        raise typer.Exit(1)


def _sentence(found: Findings) -> str:
    gone = f"; {found.gone:,} went meanwhile" if found.gone else ""
    verdict = f"{len(found.bad):,} bad" if found.bad else "all good"
    return f"checked {format_count(found.chunks, 'chunk')}, {format_size(found.bytes)}: {verdict}{gone}"


def _list(path: str, namespace: str | None, beat: Beat) -> dict[str, dict[str, int]]:
    """For each namespace the sizes of its chunks' files, in bytes by name."""
    names = listing.namespace_names(path) if namespace is None else [listing.find_namespace(path, namespace, beat)]
    chunks: dict[str, dict[str, int]] = {}
    for name in names:
        sizes = chunks[name] = {}
        try:
            entries = os.scandir(os.path.join(path, name, "chunks"))
        except FileNotFoundError:  # the namespace is being removed
            continue
        with entries:
            for entry in entries:
                beat()
                try:
                    sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:
                    continue
    return chunks


def _verify(path: str, chunks: dict[str, dict[str, int]], found: Findings, track: Track) -> None:
    for name, sizes in chunks.items():
        json_path = os.path.join(name, "namespace.json")
        try:
            namespace = namespaces.decode(Path(path, json_path).read_bytes())
            if namespace.directory != name:
                raise FormatError(f"it is of the namespace {namespace.directory}")
        except FileNotFoundError:
            found.gone += len(sizes)
            continue
        except KvfsError as error:
            found.bad.append(Bad(json_path, str(error)))
            continue
        for file in sizes:
            if track.is_stopping:
                return
            _verify_chunk(path, os.path.join(name, "chunks", file), namespace, found, track)


def _verify_chunk(root: str, path: str, namespace: Namespace, found: Findings, track: Track) -> None:
    try:
        # Direct: what the cache has, and not the pages that the kernel has kept of it.
        descriptor = os.open(os.path.join(root, path), os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except FileNotFoundError:
        found.gone += 1
        return
    try:
        size = os.fstat(descriptor).st_size
        reason = None
        try:
            raw = _read(descriptor, min(size, _MAX_FILE_BYTES), track)
            if track.is_stopping:
                return  # it may not be whole
            _check(namespace, os.path.basename(path), raw)
        except CorruptChunk as error:
            reason = str(error)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.ETIMEDOUT):
                raise
            reason = f"it cannot be read: {error.strerror}"
        found.chunks += 1
        found.bytes += size
        if reason is not None:
            found.bad.append(Bad(path, reason, _is_removed(descriptor)))
    finally:
        os.close(descriptor)


def _read(descriptor: int, size: int, track: Track) -> memoryview:
    raw = memoryview(bytearray(size))
    offset = 0
    while offset < size and not track.is_stopping:
        num_bytes = os.preadv(descriptor, [raw[offset : offset + _STEP_BYTES]], offset)
        if not num_bytes:
            break
        offset += num_bytes
        track.advance(num_bytes)
    return raw[:offset]


def _check(namespace: Namespace, name: str, raw: memoryview) -> None:
    """Raise CorruptChunk for the first thing that is wrong with a whole file."""
    geo, facts = parse_header(namespace, raw)
    if name != file_name(facts.key):
        raise CorruptChunk(f"the header is that of the chunk {facts.key.hex()}")
    if len(raw) != geo.file_bytes:
        raise CorruptChunk(f"the file has {len(raw)} bytes instead of {geo.file_bytes}")
    verify_payload(geo, facts, raw)


def _is_removed(descriptor: int) -> bool:
    """Whether the cache has dropped an open chunk. The attributes are asked for: what `stat` says may be a second old."""
    try:
        os.getxattr(descriptor, "user.kvfs.dirty")
    except OSError as error:
        return error.errno in (errno.ENODATA, errno.ENOENT)
    return False
