"""Recovery: from the index to the catalog, at start. Runs in a thread, before anything else uses the tiers.

Rows are trusted as far as they fit their namespace and the volume. Where two rows claim the same bytes, which only a
damaged index can hold, the header on the volume says whose they are. Payloads are not read here: every read verifies.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable
from operator import attrgetter

from kvfs import namespace as namespaces
from kvfs.catalog import Chunk, ChunkTable, last_needed
from kvfs.chunk import geometry
from kvfs.commits import Commits
from kvfs.errors import CorruptChunk, FormatError, UsageError
from kvfs.extents import ExtentAllocator
from kvfs.index import ChunkRow, Index, LimitRow, PinRow
from kvfs.keys import KEY_BYTES, Key
from kvfs.pins import FOREVER
from kvfs.residency import Residency
from kvfs.tiers.nvme import NvmeTier, check_header
from kvfs.volume import SUPERBLOCK_BYTES, aligned_buffer

log = logging.getLogger(__name__)

_MAX_POSITION = 1 << 32


def recover(residency: Residency, nvme: NvmeTier, commits: Commits, index: Index) -> ExtentAllocator:
    """Fill the catalog and the NVMe tier's policy; returns the allocator that knows the extents in use."""
    gc.disable()  # a million small objects are about to be made, none of them garbage
    try:
        tables = _recover_tables(residency, index)
        _recover_limits(commits, index.limits(), tables)
        chunks = list(_recover_chunks(residency, commits, index.chunks(), tables, nvme.volume.capacity))
        chunks.sort(key=attrgetter("nvme"))
        chunks = _resolve_overlaps(residency, nvme, chunks)
        allocator = ExtentAllocator(
            nvme.volume.capacity - SUPERBLOCK_BYTES, SUPERBLOCK_BYTES, ((chunk.nvme, chunk.length) for chunk in chunks)
        )
        needed_ns = last_needed(chunks)
        chunks.sort(key=lambda chunk: (needed_ns.get(chunk, chunk.last_used_ns), -chunk.position))
        _recover_pins(residency, commits, index.pins(), tables)
        for chunk in chunks:
            nvme.policy.insert(chunk)
    finally:
        gc.enable()
    gc.freeze()
    if chunks:
        log.info("found %d chunks in %d namespaces", len(chunks), len(tables))
    return allocator


def _recover_tables(residency: Residency, index: Index) -> dict[int, ChunkTable]:
    tables = {}
    for row in index.namespaces():
        try:
            if not isinstance(row.document, bytes):
                raise FormatError("it is not bytes")
            table = residency.catalog.table(namespaces.decode(row.document), row.created_ns)
        except (FormatError, UsageError) as error:
            log.error("namespace %s in the index is not readable, its chunks are dropped: %s", row.directory, error)
            continue
        table.number = row.number
        tables[row.number] = table
    return tables


def _recover_limits(commits: Commits, rows: Iterable[LimitRow], tables: dict[int, ChunkTable]) -> None:
    for row in rows:
        table = tables.get(row.namespace)
        if table is None:
            commits.remove_namespace(row.namespace)  # its number may be given to another one day
            continue
        table.quota_bytes = row.quota_bytes if _is_count(row.quota_bytes) else None
        table.max_age_ns = row.max_age_ns if _is_count(row.max_age_ns) else None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 0


def _recover_chunks(
    residency: Residency, commits: Commits, rows: Iterable[ChunkRow], tables: dict[int, ChunkTable], capacity: int
) -> Iterable[Chunk]:
    for row in rows:
        table = tables.get(row.namespace)
        if table is None or not _fits(row, table, capacity):
            commits.delete(row.namespace, row.key)
            continue
        chunk, _ = residency.catalog.create(
            table, Key(row.key), Key(row.parent), row.position, row.num_tokens, row.created_ns
        )
        chunk.last_used_ns = row.last_used_ns
        chunk.hits = row.hits
        chunk.nvme = row.offset
        yield chunk


def _recover_pins(
    residency: Residency, commits: Commits, rows: Iterable[PinRow], tables: dict[int, ChunkTable]
) -> None:
    """Pin what was pinned. A pin that ended meanwhile is ended like any other; one whose chunk was lost goes with it."""
    for row in rows:
        table = tables.get(row.namespace)
        chunk = table.chunks.get(Key(row.key)) if table is not None and _is_key(row.key) else None
        if chunk is not None and _is_end(row.until_ns):
            residency.pins.pin(chunk, row.until_ns)
        else:
            commits.pin(row.namespace, row.key, None)


def _fits(row: ChunkRow, table: ChunkTable, capacity: int) -> bool:
    if not (_is_key(row.key) and _is_key(row.parent) and all(isinstance(number, int) for number in row[3:])):
        return False
    try:
        length = geometry(table.namespace, row.num_tokens).file_bytes
    except UsageError:
        return False
    if not 0 <= row.position < _MAX_POSITION:
        return False
    return row.length == length and row.offset % 4096 == 0 and SUPERBLOCK_BYTES <= row.offset <= capacity - length


def _is_key(value: object) -> bool:
    """SQLite stores any type in any column."""
    return isinstance(value, bytes) and len(value) == KEY_BYTES


def _is_end(value: object) -> bool:
    return isinstance(value, int) and 0 < value <= FOREVER


def _resolve_overlaps(residency: Residency, nvme: NvmeTier, chunks: list[Chunk]) -> list[Chunk]:
    """Of chunks that overlap keep those whose header is really there."""
    kept: list[Chunk] = []
    for chunk in chunks:
        while kept and kept[-1].nvme + kept[-1].length > chunk.nvme:
            loser = kept[-1] if _is_there(nvme, chunk) else chunk
            log.error("two chunks claim the same extent; %s is dropped", loser.key.hex())
            residency.discard_recovered(loser)
            if loser is chunk:
                break
            kept.pop()
        else:
            kept.append(chunk)
    return kept


def _is_there(nvme: NvmeTier, chunk: Chunk) -> bool:
    header = aligned_buffer(geometry(chunk.table.namespace, chunk.num_tokens).header_bytes)
    try:
        nvme.volume.read(header, chunk.nvme)
        check_header(chunk, header)
    except (CorruptChunk, OSError):
        return False
    return True
