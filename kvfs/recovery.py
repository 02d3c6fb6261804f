"""Recovery: from the index to the catalog, at start. Runs in a thread, before anything else uses the tiers.

Rows are trusted as far as they fit their namespace and the volume. Where two rows claim the same bytes, which only a
damaged index can hold, the header on the volume says whose they are. Where the row of a namespace is damaged or gone,
its document beside the volume takes its place. Payloads are not read here: every read verifies.
"""

from __future__ import annotations

import gc
import heapq
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from kvfs import namespace as namespaces
from kvfs.catalog import Chunk, ChunkTable, last_needed
from kvfs.chunk import geometry, parse_header
from kvfs.documents import Documents, Found
from kvfs.errors import CorruptChunk, FormatError, UsageError
from kvfs.index import ChunkRow, Index, LimitRow, NamespaceRow, PinRow
from kvfs.keys import KEY_BYTES, Key
from kvfs.namespace import Namespace
from kvfs.pins import FOREVER
from kvfs.remembering import Learnt, recall, remembered
from kvfs.residency import Residency
from kvfs.stripes import Stripe, Stripes
from kvfs.tiers.nvme import NvmeTier, check_header
from kvfs.unclaimed import PatientAllocator
from kvfs.volume import SUPERBLOCK_BYTES, aligned_buffer

log = logging.getLogger(__name__)

MAX_POSITION = 1 << 32
_MAX_HEADERS = 16  # that are looked at to learn whose chunks a number names


@dataclass(frozen=True, slots=True)
class Contents:
    """What is in an index, and beside it."""

    namespaces: list[NamespaceRow]
    chunks: list[ChunkRow]
    pins: list[PinRow]
    limits: list[LimitRow]
    unclaimed: list[tuple[int, int]]
    learnt: Learnt
    documents: Found


def read(index: Index, documents: Documents) -> Contents:
    """All of an index, and the documents beside it. Raises OSError or sqlite3.Error."""
    return Contents(
        index.namespaces(),
        index.chunks(),
        index.pins(),
        index.limits(),
        index.unclaimed(),
        remembered(index),
        documents.read(),
    )


def recover(residency: Residency, contents: Sequence[Contents], now_ns: int) -> None:
    """Fill the catalog, and of each volume the allocator and the policy; `contents` has what is in the index of each.

    `now_ns` is the time since the epoch, by which chunks have an age.
    """
    assert residency.nvme is not None
    volumes = list(zip(residency.nvme, contents, strict=True))
    gc.disable()  # a million small objects are about to be made, none of them garbage
    try:
        all_tables = [_recover_tables(residency, stripe, found) for stripe, found in volumes]
        for (stripe, found), tables in zip(volumes, all_tables, strict=True):
            _find_lost_tables(residency, stripe, found, tables)
            _recover_limits(stripe, found.limits, tables)
        recall(residency, [found.learnt for found in contents])
        recovered = list(_recover_chunks(residency, volumes, all_tables))
        chunks: list[Chunk] = []
        for stripe, found in volumes:
            there = [chunk for chunk in recovered if chunk.volume == stripe.number] if len(volumes) > 1 else recovered
            there.sort(key=attrgetter("nvme"))
            there = _resolve_overlaps(residency, stripe.tier, there)
            stripe.tier.extents = PatientAllocator(
                stripe.tier.volume.capacity - SUPERBLOCK_BYTES,
                SUPERBLOCK_BYTES,
                ((chunk.nvme, chunk.length) for chunk in there),
                found.unclaimed,
            )
            chunks += there
        needed_ns = last_needed(chunks)
        chunks.sort(key=lambda chunk: (needed_ns.get(chunk, chunk.last_used_ns), -chunk.position))
        for (stripe, found), tables in zip(volumes, all_tables, strict=True):
            _recover_pins(residency, stripe, found.pins, tables)
        for chunk in chunks:
            age_s = (now_ns - needed_ns.get(chunk, chunk.last_used_ns)) / 1e9
            residency.nvme.of(chunk).tier.policy.recovered(chunk, age_s)
        _agree(residency, residency.nvme)
    finally:
        gc.enable()
    if chunks:
        log.info("found %d chunks in %d namespaces", len(chunks), len(residency.catalog.tables))
    if dropped := residency.counters.rows_dropped:
        log.warning("%d rows of the index cannot be true: their chunks are forgotten", dropped)
        residency.events.append("rows_dropped", chunks=dropped)


def _agree(residency: Residency, nvme: Stripes) -> None:
    """Let every index know every namespace, and what it may be: one that was added, or was missing, may not."""
    if len(nvme) == 1:
        return
    for table in residency.catalog.tables.values():
        for stripe in nvme:
            if stripe.number not in table.numbers:
                stripe.put_namespace(table)
            if table.quota_bytes is not None or table.max_age_ns is not None:
                stripe.limit(table)


def _recover_tables(residency: Residency, stripe: Stripe, contents: Contents) -> dict[int, ChunkTable]:
    """The tables by the number that rows of chunks name. What is damaged in a row, its document mends."""
    found = contents.documents
    for name, reason in found.bad.items():
        log.warning("the document %s of a namespace is not readable: %s", name, reason)
    tables: dict[int, ChunkTable] = {}
    for row in contents.namespaces:
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
        known = residency.catalog.tables.get(namespace.directory)
        if known is not None and (stripe.number in known.numbers or known.namespace != namespace):
            continue  # two rows claim to be it
        table = tables[row.number] = _table(residency, stripe, namespace, created_ns, row.number)
        if not is_whole or kept is None or not kept.is_covered or row.directory != namespace.directory:
            stripe.put_namespace(table)
    return tables


def _recover_limits(stripe: Stripe, rows: Iterable[LimitRow], tables: dict[int, ChunkTable]) -> None:
    for row in rows:
        table = tables.get(row.namespace)
        if table is None:
            stripe.commits.remove_namespace(row.namespace, "")  # its number may be given to another one day
            continue
        table.quota_bytes = _smaller(table.quota_bytes, row.quota_bytes)
        table.max_age_ns = _smaller(table.max_age_ns, row.max_age_ns)


def _smaller(known: int | None, value: object) -> int | None:
    """The smaller limit: a volume that was missing for a while may know another than the rest."""
    if not isinstance(value, int) or value < 0:
        return known
    return value if known is None else min(known, value)


def _find_lost_tables(residency: Residency, stripe: Stripe, contents: Contents, tables: dict[int, ChunkTable]) -> None:
    """Give the chunks of a namespace whose row is lost their table: their headers say whose document is theirs."""
    nvme, rows, found = stripe.tier, contents.chunks, contents.documents
    numbers = {row.namespace for row in rows}
    looked_at: Counter[int] = Counter()
    for row in rows:
        if row.namespace in tables or looked_at[row.namespace] >= _MAX_HEADERS:
            continue
        looked_at[row.namespace] += 1
        for document in found.by_directory.values():
            namespace = document.namespace
            known = residency.catalog.tables.get(namespace.directory)
            if known is not None and known.numbers.get(stripe.number) in numbers:
                continue  # these are the chunks of another
            if fits(row, namespace, nvme.volume.capacity) and _key_at(nvme, namespace, row) == row.key:
                table = _table(residency, stripe, namespace, document.created_ns, row.namespace)
                tables[row.namespace] = table
                stripe.put_namespace(table)
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


def _table(residency: Residency, stripe: Stripe, namespace: Namespace, created_ns: int, number: int) -> ChunkTable:
    table = residency.catalog.table(namespace, created_ns)
    stripe.recovered(table, number)
    return table


def _key_at(nvme: NvmeTier, namespace: Namespace, row: ChunkRow) -> Key | None:
    """The key in the header where the row says that its chunk is; None if there is none of this namespace."""
    header = aligned_buffer(geometry(namespace, row.num_tokens).header_bytes)
    try:
        nvme.volume.read(header, row.offset)
        return parse_header(namespace, header)[1].key
    except (CorruptChunk, OSError):
        return None


def _recover_chunks(
    residency: Residency, volumes: Sequence[tuple[Stripe, Contents]], all_tables: Sequence[dict[int, ChunkTable]]
) -> Iterator[Chunk]:
    """The chunks of all volumes, parents before children. Of one that is on two of them the first is kept."""
    found = [
        _true_rows(residency, stripe, contents.chunks, tables)
        for (stripe, contents), tables in zip(volumes, all_tables, strict=True)
    ]
    for stripe, table, row in found[0] if len(found) == 1 else heapq.merge(*found, key=lambda each: each[2].position):
        if row.key in table.chunks:  # written anew while the volume was missing
            stripe.commits.delete(row.namespace, row.key)
            continue
        chunk, _ = residency.catalog.create(
            table, Key(row.key), Key(row.parent), row.position, row.num_tokens, row.created_ns
        )
        chunk.last_used_ns = row.last_used_ns
        chunk.hits = row.hits
        chunk.volume = stripe.number
        chunk.nvme = row.offset
        yield chunk


def _true_rows(
    residency: Residency, stripe: Stripe, rows: Iterable[ChunkRow], tables: dict[int, ChunkTable]
) -> Iterator[tuple[Stripe, ChunkTable, ChunkRow]]:
    capacity = stripe.tier.volume.capacity
    for row in rows:
        table = tables.get(row.namespace)
        if table is None or not fits(row, table.namespace, capacity):
            residency.counters.rows_dropped += 1
            stripe.commits.delete(row.namespace, row.key)
        else:
            yield stripe, table, row


def _recover_pins(residency: Residency, stripe: Stripe, rows: Iterable[PinRow], tables: dict[int, ChunkTable]) -> None:
    """Pin what was pinned. A pin that ended meanwhile is ended like any other; one whose chunk was lost goes with it."""
    for row in rows:
        table = tables.get(row.namespace)
        chunk = table.chunks.get(Key(row.key)) if table is not None and _is_key(row.key) else None
        if chunk is not None and chunk.volume == stripe.number and _is_end(row.until_ns):
            residency.pins.pin(chunk, row.until_ns)
        else:
            stripe.commits.pin(row.namespace, row.key, None)


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
