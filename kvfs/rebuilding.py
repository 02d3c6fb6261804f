"""Rebuilding an index from what is on the volume, for `kvfs fsck --rebuild`.

Every whole chunk that a scan finds gets a row; of two with one key the newer. Nothing else is believed, but what an
index that can be trusted says beside that: hits, last use, the numbers of namespaces, other tables of it; and rows of
which the device did not give the bytes, for that proves nothing. The new index is made under another name and takes its
place in one step, the old one is set aside: until then an interrupt leaves everything as it was.

A chunk that was removed or evicted is not found: its first block was erased. An older copy of it may be there still, written
when the power went before its commit, or evicted by a kvfs that did not erase; so what an index that can be trusted has let
go stays away. What is unclaimed (see `kvfs.unclaimed`) was never let go.
"""

from __future__ import annotations

import os
import sqlite3
import time
import uuid
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvfs import namespace as namespaces
from kvfs.checking import named
from kvfs.documents import Document, Documents
from kvfs.errors import FormatError, UsageError
from kvfs.index import FILE_NAME, SET_ASIDE, ChunkRow, Index, NamespaceRow, remove_logs
from kvfs.keys import Key
from kvfs.namespace import Namespace
from kvfs.recovery import namespace_in
from kvfs.rows import MAX_POSITION, fits
from kvfs.scanning import Found, Tally, Track, by_place, scan
from kvfs.volume import Volume

UNFINISHED = FILE_NAME + ".rebuilding"
_MAX_NS = (1 << 63) - 1  # what SQLite holds
_IDENTITY_BYTES = 16
_Place = tuple[str, bytes]
"""A namespace's directory and a key."""


@dataclass
class Rebuilt:
    """What a rebuilt index holds, and what is not in it.

    Attributes:
        directory: of the volume.
        num_namespaces, num_chunks, chunk_bytes: in the new index.
        num_returned: of these the index before did not know.
        num_let_go: whole chunks that an index which can be trusted does not know: evicted, and left so.
        num_lost: chunks of an index that could be trusted which are not whole on the volume.
        num_unread: chunks kept though the device did not give their bytes.
        num_doubled: older copies of a chunk.
        num_torn: headers of chunks that were written over since.
        unknown: headers of namespaces that nobody knows, by fingerprint and rank.
        unreadable_bytes: what the device did not give.
        mended_superblock: whether the superblock was written anew.
        set_aside: where the index before is, "" if there was none.
        read_bytes, seconds: of the scan.
    """

    directory: str
    num_namespaces: int = 0
    num_chunks: int = 0
    chunk_bytes: int = 0
    num_returned: int = 0
    num_let_go: int = 0
    num_lost: int = 0
    num_unread: int = 0
    num_doubled: int = 0
    num_torn: int = 0
    unknown: dict[str, int] = field(default_factory=dict)
    unreadable_bytes: int = 0
    mended_superblock: bool = False
    set_aside: str = ""
    read_bytes: int = 0
    seconds: float = 0.0


@dataclass
class _Before:
    """What there was.

    Attributes:
        index: if it can be trusted, else None; rows: of it, those that can be true; keys: in all its rows, true or not.
        unclaimed: (begin, end) of what it does not speak of, by offset.
        numbers: of its namespaces; documents, spare: every namespace that anything names.
    """

    index: Index | None
    rows: dict[_Place, ChunkRow]
    numbers: dict[str, int]
    documents: dict[str, Document]
    spare: list[Namespace] = field(default_factory=list)
    keys: set[bytes] = field(default_factory=set)
    unclaimed: list[tuple[int, int]] = field(default_factory=list)

    def has_let_go(self, found: Found) -> bool:
        """Whether the index can be trusted and knows nothing of this chunk."""
        if self.index is None or found.facts.key in self.keys:
            return False
        at = bisect_right(self.unclaimed, (found.offset, _MAX_NS)) - 1
        return at < 0 or found.offset >= self.unclaimed[at][1]

    def know(self, namespace: Namespace, created_ns: object) -> None:
        """Take in a namespace that an index names; if its document says otherwise, both are tried."""
        first_ns = created_ns if isinstance(created_ns, int) else 0
        self.documents.setdefault(namespace.directory, Document(namespace, first_ns))
        self.spare.append(namespace)


class _Kept(NamedTuple):
    """What is remembered of a chunk that was found: a million may be."""

    offset: int
    length: int
    parent: Key
    position: int
    num_tokens: int
    created_ns: int


class _Counting:
    """A `Track` that counts what it hands on."""

    def __init__(self, track: Track) -> None:
        self.num_bytes = 0
        self.begin = track.begin
        self._advance = track.advance

    def advance(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._advance(num_bytes)


def rebuild(volume: Volume, track: Track) -> Rebuilt:
    """Make a new index for a volume that was opened with `Volume.open_present`, and mend its superblock if need be.

    Raises UsageError where nothing shows that it is a volume of kvfs, or for an index of a newer version, and OSError
    and sqlite3.Error from writing; then everything is as it was.
    """
    directory = volume.path.parent
    result = Rebuilt(str(directory))
    _remove_unfinished(directory)
    before = _read(directory, volume)
    try:
        try:
            chunks = _scan(volume, before, result, track)
            if volume.is_foreign and not chunks:
                raise UsageError(f"nothing on {volume.path} shows that it is a kvfs volume; it is left as it is")
            _write(volume, before, chunks, result)
        finally:
            if before.index is not None:
                before.index.close()  # what it has not written yet goes into its file
        _put_in_place(directory, result)
    except BaseException:
        _remove_unfinished(directory)
        raise
    return result


def _read(directory: Path, volume: Volume) -> _Before:
    found = Documents(directory).read()
    before = _Before(None, {}, {}, dict(found.by_directory))
    for name in (FILE_NAME, SET_ASIDE):
        for namespace, created_ns in _salvage(directory / name):
            before.know(namespace, created_ns)
    with suppress(FormatError):
        before.index = Index.open_trusted(directory / FILE_NAME, volume.identity or None)
    if before.index is None:
        return before
    if len(before.index.volume_identity()) != _IDENTITY_BYTES:
        before.index.close()
        before.index = None
        return before
    names = {}
    for row in before.index.namespaces():
        with suppress(FormatError, UsageError):
            namespace = namespace_in(row)
            before.know(namespace, row.created_ns)
            names[row.number] = namespace.directory
    before.numbers = {name: number for number, name in names.items()}
    before.unclaimed = sorted((offset, offset + length) for offset, length in before.index.unclaimed())
    for chunk in before.index.chunks():
        before.keys.add(chunk.key)
        name = names.get(chunk.namespace, "")
        if name and fits(chunk, before.documents[name].namespace, volume.capacity):
            before.rows[name, chunk.key] = chunk
    return before


def _salvage(path: Path) -> Iterator[tuple[Namespace, object]]:
    """The namespaces that an index still names, however damaged it is: a header is believed for itself alone."""
    if not path.exists():
        return
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)) as connection,
    ):
        rows = connection.execute("SELECT number, directory, document, created_ns FROM namespaces")
        while True:
            try:
                row = next(rows, None)
                if row is None:
                    return
                yield namespace_in(NamespaceRow(*row)), row[3]
            except (FormatError, UsageError, UnicodeDecodeError):
                continue


def _scan(volume: Volume, before: _Before, result: Rebuilt, track: Track) -> dict[_Place, _Kept]:
    tally, counting = Tally(), _Counting(track)
    known = by_place([*(document.namespace for document in before.documents.values()), *before.spare])
    chunks: dict[_Place, _Kept] = {}
    layouts: dict[str, Namespace] = {}
    started = time.monotonic()
    for found in scan(volume, known, tally, counting):
        name = found.namespace.directory
        is_odd = found.facts.position >= MAX_POSITION or found.offset + found.length > volume.capacity
        if is_odd or layouts.setdefault(name, found.namespace) != found.namespace:
            continue
        if before.has_let_go(found):
            result.num_let_go += 1
            continue
        other = chunks.get((name, found.facts.key))
        if other is not None:
            result.num_doubled += 1
            if other.created_ns > found.facts.created_ns:
                continue
        facts = found.facts
        chunks[name, facts.key] = _Kept(
            found.offset, found.length, facts.parent, facts.position, facts.num_tokens, min(facts.created_ns, _MAX_NS)
        )
    result.seconds, result.read_bytes = time.monotonic() - started, counting.num_bytes
    for name, namespace in layouts.items():
        before.documents[name] = Document(namespace, before.documents[name].created_ns)
    result.num_torn, result.unknown = tally.torn, named(tally)
    result.unreadable_bytes = sum(size for _, size in tally.unreadable)
    result.num_returned = sum(1 for place in chunks if place not in before.rows)
    missing = [place for place in before.rows if place not in chunks]
    kept = _unread([before.rows[place] for place in missing], tally.unreadable, chunks.values())
    result.num_unread = len(kept)
    result.num_lost = len(missing) - len(kept)
    before.rows = {place: row for place, row in before.rows.items() if place in chunks or row in kept}
    return chunks


def _unread(rows: list[ChunkRow], unreadable: list[tuple[int, int]], chunks: Iterable[_Kept]) -> set[ChunkRow]:
    """The rows whose bytes the device did not give, where no chunk was found."""
    suspects = [row for row in rows if any(_overlap(row.offset, row.length, *hole) for hole in unreadable)]
    if suspects:
        found = list(chunks)
        suspects = [
            row for row in suspects if not any(_overlap(row.offset, row.length, c.offset, c.length) for c in found)
        ]
    return set(suspects)


def _overlap(offset: int, length: int, other_offset: int, other_length: int) -> bool:
    return offset < other_offset + other_length and other_offset < offset + length


def _write(volume: Volume, before: _Before, chunks: dict[_Place, _Kept], result: Rebuilt) -> None:
    """The new index under its other name, the documents, and the superblock if it is damaged: each whole in itself."""
    directory = volume.path.parent
    path = directory / UNFINISHED
    identity = volume.identity or (before.index.volume_identity() if before.index else uuid.uuid4().bytes)
    if before.index is not None:
        before.index.copy(path)
    index = Index.open(path, identity)
    documents = Documents(directory)
    try:
        numbers = dict(before.numbers)
        for name in sorted({name for name, _ in chunks}, key=lambda name: (before.documents[name].created_ns, name)):
            numbers.setdefault(name, 1 + max(numbers.values(), default=0))
        rows = [_row(numbers[place[0]], place[1], kept, before.rows.get(place)) for place, kept in chunks.items()]
        rows += [row for place, row in before.rows.items() if place not in chunks]
        # Of what is unknown today a namespace.json may tell tomorrow.
        unclaimed = [(begin, end - begin) for begin, end in volume.written()] if result.unknown else []
        added = [_namespace_row(number, before.documents[name]) for name, number in numbers.items()]
        index.replace_chunks(rows, added, unclaimed)
        result.num_namespaces, result.num_chunks = len(numbers), len(rows)
        result.chunk_bytes = sum(row.length for row in rows)
    finally:
        index.close()
    for name in numbers:
        documents.write(before.documents[name])
    _give_to_owner(volume, [path, documents.path, *documents.path.glob("*.json")])
    if volume.damage:
        volume.mend(identity)
        result.mended_superblock = True


def _put_in_place(directory: Path, result: Rebuilt) -> None:
    """Let the new index be the index. Whenever this ends, there is one, and never with the log of another."""
    path, aside, unfinished = (directory / name for name in (FILE_NAME, SET_ASIDE, UNFINISHED))
    if path.exists():
        link = aside.with_name(SET_ASIDE + ".unfinished")
        link.unlink(missing_ok=True)
        os.link(path, link)
        link.replace(aside)
        result.set_aside = str(aside)
    remove_logs(path)
    unfinished.replace(path)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_unfinished(directory: Path) -> None:
    """Remove what an interrupted rebuild left."""
    path = directory / UNFINISHED
    remove_logs(path)
    for each in (path, path.with_name(UNFINISHED + "-journal")):
        each.unlink(missing_ok=True)


def _give_to_owner(volume: Volume, paths: list[Path]) -> None:
    """Root may have to mend what belongs to the daemon's user, who has to be able to open it afterwards."""
    owner = os.fstat(volume.fd)
    if os.geteuid() == 0 and owner.st_uid != 0:
        for path in paths:
            if path.exists():
                os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def _namespace_row(number: int, document: Document) -> NamespaceRow:
    namespace = document.namespace
    created_ns = min(document.created_ns, _MAX_NS)
    return NamespaceRow(number, namespace.directory, namespaces.encode(namespace), created_ns)


def _row(number: int, key: bytes, kept: _Kept, before: ChunkRow | None) -> ChunkRow:
    used_ns, hits = (before.last_used_ns, before.hits) if before is not None else (kept.created_ns, 0)
    return ChunkRow(
        number, key, kept.parent, kept.position, kept.num_tokens, kept.offset, kept.length, kept.created_ns, used_ns, hits
    )  # fmt: skip
