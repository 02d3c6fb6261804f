"""Checking a volume that nobody uses: superblock, index, documents, and whether each row is true. Changes nothing.

What is found says how it ends: much of it the next mount mends by itself, by forgetting what is not true; the rest is
for `kvfs.rebuilding`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvfs.chunk import geometry, parse_header
from kvfs.config import format_size
from kvfs.documents import Documents, Found
from kvfs.errors import CorruptChunk, FormatError, UsageError
from kvfs.index import FILE_NAME, ChunkRow, Index
from kvfs.namespace import Namespace
from kvfs.recovery import namespace_in
from kvfs.rows import fits
from kvfs.scanning import Tally, Track, by_place, has_chunks, scan
from kvfs.volume import Volume, aligned_buffer

MAX_TOLD = 100
"""Findings of one kind that are told one by one; the others are counted."""
_THREADS = 4


@dataclass
class Finding:
    """Something that is not as it should be.

    Attributes:
        kind: "superblock", "length", "index", "document", "namespace", "row", "overlap", "chunk" or "unreadable".
        what: a sentence.
        remedy: "rebuild"; "mount" for what the next mount mends; "load" for a chunk that is dropped when it is loaded or
            verified, and by a rebuild; or "" if there is none.
    """

    kind: str
    what: str
    remedy: str = ""


@dataclass
class Report:
    """What was found.

    Attributes:
        directory, capacity_bytes: the volume.
        num_namespaces, num_chunks, chunk_bytes: what is in the index and true, as far as it was checked.
        read_payloads: whether every byte of the chunks was checked.
        findings: MAX_TOLD of each kind at most; num_findings: all, by kind.
        num_unclaimed: whole chunks on the volume that the index does not know, evicted ones; None if nobody looked.
        num_torn: headers of chunks that were written over since.
        unknown: headers of namespaces that nobody knows, by fingerprint and rank.
    """

    directory: str
    capacity_bytes: int
    num_namespaces: int = 0
    num_chunks: int = 0
    chunk_bytes: int = 0
    read_payloads: bool = False
    findings: list[Finding] = field(default_factory=list)
    num_findings: Counter[str] = field(default_factory=Counter)
    num_unclaimed: int | None = None
    num_torn: int = 0
    unknown: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, what: str, remedy: str = "") -> None:
        """Note a finding."""
        self.num_findings[kind] += 1
        if self.num_findings[kind] <= MAX_TOLD:
            self.findings.append(Finding(kind, what, remedy))


def check(volume: Volume, track: Track, *, read_payloads: bool) -> Report:
    """Check all of a volume that was opened with `Volume.open_present`.

    Raises UsageError for an index of another version, or one that the system does not let us open.
    """
    directory = volume.path.parent
    report = Report(str(directory), volume.capacity, read_payloads=read_payloads)
    if (length := os.fstat(volume.fd).st_size) < volume.capacity:
        report.add(
            "length",
            f"the volume was cut from {format_size(volume.capacity)} to {format_size(length)}; what lay behind is lost",
            "mount",
        )
    documents = Documents(directory).read()
    for name, reason in documents.bad.items():
        report.add("document", f"the document {name} is not readable: {reason}", "mount")
    try:
        index = Index.open_trusted(directory / FILE_NAME, volume.identity or None)
    except FormatError as error:
        rows, namespaces = [], {-1 - i: each.namespace for i, each in enumerate(documents.by_directory.values())}
        if has_chunks(volume):
            report.add("index", f"the index cannot be used: {error}; there are chunks on the volume", "rebuild")
        else:
            report.add("index", f"the index cannot be used: {error}; no chunk is on the volume", "mount")
    else:
        try:
            for line in index.damage():
                report.add("index", f"the index is damaged: {line}", "rebuild")
            rows, namespaces = index.chunks(), _namespaces(index, documents, report)
        finally:
            index.close()
        report.num_namespaces = len(namespaces)
    if volume.damage:
        is_ours = not volume.is_foreign or has_chunks(volume)
        what = f"the superblock of {volume.path} is damaged" if volume.is_foreign and is_ours else volume.damage
        report.add("superblock", what, "rebuild" if is_ours else "")
    rows = _without_overlaps(_possible(rows, namespaces, volume.capacity, report), report)
    if read_payloads:
        _check_payloads(volume, rows, namespaces, report, track)
    else:
        _check_headers(volume, rows, namespaces, report, track)
    return report


def _namespaces(index: Index, documents: Found, report: Report) -> dict[int, Namespace]:
    found: dict[int, Namespace] = {}
    for row in index.namespaces():
        kept = documents.by_directory.get(str(row.directory))
        try:
            namespace = namespace_in(row)
            if kept is not None and kept.is_covered and kept.namespace != namespace:
                raise FormatError("its document says otherwise")
        except (FormatError, UsageError) as error:
            remedy = "its document mends it" if kept is not None else "its chunks are lost"
            report.add("namespace", f"namespace {row.directory} in the index is damaged: {error}; {remedy}", "mount")
            if kept is None:
                continue
            namespace = kept.namespace
        else:
            if kept is None and f"{row.directory}.json" not in documents.bad:
                report.add("document", f"namespace {row.directory} has no document beside the volume", "mount")
        found[row.number] = namespace
    return found


def _possible(
    rows: Iterable[ChunkRow], namespaces: dict[int, Namespace], capacity: int, report: Report
) -> list[ChunkRow]:
    """The rows that can be true, by offset."""
    possible = []
    for row in rows:
        namespace = namespaces.get(row.namespace)
        if namespace is None:
            report.add("row", f"{_name(row)} is of a namespace that the index does not have", "mount")
        elif not fits(row, namespace, capacity):
            report.add("row", f"{_name(row)} has a row that cannot be true", "mount")
        else:
            possible.append(row)
    return sorted(possible, key=lambda row: row.offset)


def _without_overlaps(rows: list[ChunkRow], report: Report) -> list[ChunkRow]:
    end = 0
    before: ChunkRow | None = None
    for row in rows:
        if before is not None and row.offset < end:
            report.add("overlap", f"{_name(row)} and {_name(before)} claim the same bytes; one is lost", "mount")
        if row.offset + row.length > end:
            end, before = row.offset + row.length, row
    return rows


def _check_headers(
    volume: Volume, rows: list[ChunkRow], namespaces: dict[int, Namespace], report: Report, track: Track
) -> None:
    track.begin("reading headers", sum(row.length for row in rows))

    def look(row: ChunkRow) -> str | OSError:
        namespace = namespaces[row.namespace]
        header = aligned_buffer(geometry(namespace, row.num_tokens).header_bytes)
        try:
            volume.read(header, row.offset)
            facts = parse_header(namespace, header)[1]
        except OSError as error:
            return error
        except CorruptChunk as error:
            return str(error)
        told = (facts.key, facts.parent, facts.position, facts.num_tokens)
        return "" if told == (row.key, row.parent, row.position, row.num_tokens) else "there is another chunk"

    with ThreadPoolExecutor(_THREADS, "kvfs-fsck") as pool:
        try:
            for row, reason in zip(rows, pool.map(look, rows), strict=True):
                track.advance(row.length)
                if isinstance(reason, OSError):
                    report.add("unreadable", f"{_name(row)} could not be read: {reason.strerror}")
                    continue
                _count(report, row, reason)
        finally:
            pool.shutdown(cancel_futures=True)


def _check_payloads(
    volume: Volume, rows: list[ChunkRow], namespaces: dict[int, Namespace], report: Report, track: Track
) -> None:
    tally = Tally()
    keys = {}
    for found in scan(volume, by_place(namespaces.values()), tally, track):
        keys[found.offset] = (found.facts.key, found.namespace)
    for row in rows:
        if any(begin < row.offset + row.length and row.offset < begin + size for begin, size in tally.unreadable):
            report.add("unreadable", f"{_name(row)} could not be read whole")
            keys.pop(row.offset, None)
            continue
        is_there = keys.pop(row.offset, None) == (row.key, namespaces[row.namespace])
        _count(report, row, "" if is_there else "its bytes are not those of the chunk")
    report.num_unclaimed = len(keys)
    report.num_torn = tally.torn
    report.unknown = named(tally)


def named(tally: Tally) -> dict[str, int]:
    """How many headers there are of each namespace that nobody knows, in words."""
    return {f"{place[0]} rank {place[1]} of {place[2]}": number for place, number in tally.unknown.items()}


def _count(report: Report, row: ChunkRow, reason: str) -> None:
    if reason:
        report.add("chunk", f"{_name(row)} is bad: {reason}", "load")
        return
    report.num_chunks += 1
    report.chunk_bytes += row.length


def _name(row: ChunkRow) -> str:
    key: object = row.key
    return f"chunk {key.hex() if isinstance(key, bytes) else repr(key)} at {row.offset}"
