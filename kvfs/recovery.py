"""Recovery: from the index to the catalog, at start. Runs in a thread, before anything else uses the tiers.

Rows are trusted as far as they fit their namespace and the volume. Where two rows claim the same bytes, which only a
damaged index can hold, the header on the volume says whose they are. Where the row of a namespace is damaged or gone,
its document beside the volume takes its place. Payloads are not read here: every read verifies.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

from kvfs import namespace as namespaces
from kvfs.catalog import Chunk, ChunkTable, last_needed
from kvfs.chunk import geometry, parse_header
from kvfs.commits import Commits
from kvfs.documents import Documents, Found
from kvfs.errors import CorruptChunk, FormatError, UsageError
from kvfs.extents import ExtentAllocator
from kvfs.index import ChunkRow, Index, LimitRow, NamespaceRow, PinRow
from kvfs.keys import KEY_BYTES, Key
from kvfs.namespace import Namespace
from kvfs.pins import FOREVER
from kvfs.remembering import recall
from kvfs.residency import Residency
from kvfs.tiers.nvme import NvmeTier, check_header
from kvfs.unclaimed import PatientAllocator
from kvfs.volume import SUPERBLOCK_BYTES, aligned_buffer

log = logging.getLogger(__name__)

MAX_POSITION = 1 << 32
_MAX_HEADERS = 16  # that are looked at to learn whose chunks a number names


def recover(
    residency: Residency, nvme: NvmeTier, commits: Commits, index: Index, documents: Documents, now_ns: int
) -> ExtentAllocator:
    """Fill the catalog and the NVMe tier's policy; returns the allocator that knows the extents in use.

    `now_ns` is the time since the epoch, by which chunks have an age.

    Raises OSError if the documents cannot be read.
    """
    gc.disable()  # a million small objects are about to be made, none of them garbage
    try:
        rows = index.chunks()
        found = documents.read()
        tables = _recover_tables(residency, commits, index.namespaces(), found)
        _find_lost_tables(residency, nvme, commits, rows, tables, found)
        _recover_limits(commits, index.limits(), tables)
        recall(residency, index)
        chunks = list(_recover_chunks(residency, commits, rows, tables, nvme.volume.capacity))
        chunks.sort(key=attrgetter("nvme"))
        chunks = _resolve_overlaps(residency, nvme, chunks)
        allocator = PatientAllocator(
            nvme.volume.capacity - SUPERBLOCK_BYTES,
            SUPERBLOCK_BYTES,
            ((chunk.nvme, chunk.length) for chunk in chunks),
            index.unclaimed(),
        )
        needed_ns = last_needed(chunks)
        chunks.sort(key=lambda chunk: (needed_ns.get(chunk, chunk.last_used_ns), -chunk.position))
        _recover_pins(residency, commits, index.pins(), tables)
        for chunk in chunks:
            nvme.policy.recovered(chunk, (now_ns - needed_ns.get(chunk, chunk.last_used_ns)) / 1e9)
    finally:
        gc.enable()
    if chunks:
        log.info("found %d chunks in %d namespaces", len(chunks), len(tables))
    if dropped := residency.counters.rows_dropped:
        log.warning("%d rows of the index cannot be true: their chunks are forgotten", dropped)
        residency.events.append("rows_dropped", chunks=dropped)
    return allocator


def _recover_tables(
    residency: Residency, commits: Commits, rows: Iterable[NamespaceRow], found: Found
) -> dict[int, ChunkTable]:
    """The tables by the number that rows of chunks name. What is damaged in a row, its document mends."""
    for name, reason in found.bad.items():
        log.warning("the document %s of a namespace is not readable: %s", name, reason)
    tables: dict[int, ChunkTable] = {}
    for row in rows:
        kept = found.by_directory.get(str(row.directory))
        try:
            namespace = namespace_in(row)
            if kept is not None and kept.is_covered and kept.namespace != namespace:
                raise FormatError(f"it is not that of {kept.namespace.directory}")
        except (FormatError, UsageError) as error:
            if kept is None:
                log.error("namespace %s in the index is not readable: %s", row.directory, error)
                continue
            namespace = kept.namespace
            log.warning("namespace %s in the index is mended with its document: %s", row.directory, error)
            residency.events.append("namespace_mended", namespace=namespace.directory)
        created_ns = kept.created_ns if kept is not None and kept.is_covered else _time(row.created_ns)
        is_whole = (row.document, row.created_ns) == (namespaces.encode(namespace), created_ns)
        if namespace.directory in residency.catalog.tables:
            continue  # two rows claim to be it
        table = tables[row.number] = _table(residency, namespace, created_ns, row.number)
        if not is_whole or kept is None or not kept.is_covered or row.directory != namespace.directory:
            commits.add_namespace(_row_of(table))
    return tables


def _recover_limits(commits: Commits, rows: Iterable[LimitRow], tables: dict[int, ChunkTable]) -> None:
    for row in rows:
        table = tables.get(row.namespace)
        if table is None:
            commits.remove_namespace(row.namespace, "")  # its number may be given to another one day
            continue
        table.quota_bytes = row.quota_bytes if _is_count(row.quota_bytes) else None
        table.max_age_ns = row.max_age_ns if _is_count(row.max_age_ns) else None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 0


def _find_lost_tables(
    residency: Residency,
    nvme: NvmeTier,
    commits: Commits,
    rows: list[ChunkRow],
    tables: dict[int, ChunkTable],
    found: Found,
) -> None:
    """Give the chunks of a namespace whose row is lost their table: their headers say whose document is theirs."""
    numbers = {row.namespace for row in rows}
    looked_at: Counter[int] = Counter()
    for row in rows:
        if row.namespace in tables or looked_at[row.namespace] >= _MAX_HEADERS:
            continue
        looked_at[row.namespace] += 1
        for document in found.by_directory.values():
            namespace = document.namespace
            known = residency.catalog.tables.get(namespace.directory)
            if known is not None and known.number in numbers:
                continue  # these are the chunks of another
            if fits(row, namespace, nvme.volume.capacity) and _key_at(nvme, namespace, row) == row.key:
                table = tables[row.namespace] = _table(residency, namespace, document.created_ns, row.namespace)
                commits.add_namespace(_row_of(table))
                log.warning(
                    "namespace %s in the index is mended with its document: its number was lost", table.directory
                )
                residency.events.append("namespace_mended", namespace=table.directory)
                break


def _time(value: object) -> int:
    return value if isinstance(value, int) else 0


def namespace_in(row: NamespaceRow) -> Namespace:
    """The namespace in a row. Raises FormatError or UsageError for one that cannot be read."""
    if not isinstance(row.document, bytes):
        raise FormatError("it is not bytes")
    return namespaces.decode(row.document)


def _table(residency: Residency, namespace: Namespace, created_ns: int, number: int) -> ChunkTable:
    table = residency.catalog.table(namespace, created_ns)
    table.number = number
    return table


def _row_of(table: ChunkTable) -> NamespaceRow:
    return NamespaceRow(table.number, table.directory, namespaces.encode(table.namespace), table.created_ns)


def _key_at(nvme: NvmeTier, namespace: Namespace, row: ChunkRow) -> Key | None:
    """The key in the header where the row says that its chunk is; None if there is none of this namespace."""
    header = aligned_buffer(geometry(namespace, row.num_tokens).header_bytes)
    try:
        nvme.volume.read(header, row.offset)
        return parse_header(namespace, header)[1].key
    except (CorruptChunk, OSError):
        return None


def _recover_chunks(
    residency: Residency, commits: Commits, rows: Iterable[ChunkRow], tables: dict[int, ChunkTable], capacity: int
) -> Iterable[Chunk]:
    for row in rows:
        table = tables.get(row.namespace)
        if table is None or not fits(row, table.namespace, capacity):
            residency.counters.rows_dropped += 1
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


def fits(row: ChunkRow, namespace: Namespace, capacity: int) -> bool:
    """Whether a row can be true of a chunk of this namespace, on a volume of so many bytes."""
    numbers = (row.namespace, *row[3:])
    if not (_is_key(row.key) and _is_key(row.parent) and all(isinstance(number, int) for number in numbers)):
        return False
    try:
        length = geometry(namespace, row.num_tokens).file_bytes
    except UsageError:
        return False
    if not 0 <= row.position < MAX_POSITION:
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
