"""Recovery: from the index to the catalog, at start. Runs in a thread, before anything else uses the tiers.

Rows are trusted as far as they fit their namespace and the volume. Where two rows claim the same bytes, which only a
damaged index can hold, the header on the volume says whose they are. Where the row of a namespace is damaged or gone,
its document beside the volume takes its place. Payloads are not read here: every read verifies.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress, repeat
from operator import attrgetter, is_not, not_
from typing import Any

from kvfs import namespace as namespaces
from kvfs.catalog import NOWHERE, Catalog, Chunk, ChunkTable
from kvfs.chunk import geometry, parse_header
from kvfs.documents import Documents, Found
from kvfs.durations import NS
from kvfs.errors import CorruptChunk, FormatError, UsageError
from kvfs.index import ChunkRow, Index, LimitRow, NamespaceRow, PinRow
from kvfs.keys import Key
from kvfs.namespace import Namespace
from kvfs.pins import FOREVER
from kvfs.planting import by_need, plant, runs
from kvfs.remembering import Learnt, recall, remembered
from kvfs.residency import Residency
from kvfs.rows import ChunkColumns, fits, is_key, read_rows, split_true
from kvfs.stripes import Stripe, Stripes
from kvfs.tiers.nvme import NvmeTier, check_header
from kvfs.unclaimed import PatientAllocator
from kvfs.volume import SUPERBLOCK_BYTES, aligned_buffer

log = logging.getLogger(__name__)

_NVME, _LENGTH = attrgetter("nvme"), attrgetter("length")
_AT_ONCE = 8192  # chunks of a volume that its policy is told of before the start is over; of more, after it
_MAX_HEADERS = 16  # that are looked at to learn whose chunks a number names


@dataclass(frozen=True, slots=True)
class Contents:
    """What is in an index, and beside it."""

    namespaces: list[NamespaceRow]
    chunks: list[ChunkColumns]
    misnumbered: list[ChunkRow]
    pins: list[PinRow]
    limits: list[LimitRow]
    unclaimed: list[tuple[int, int]]
    learnt: Learnt
    documents: Found


def read(index: Index, documents: Documents) -> Contents:
    """All of an index, and the documents beside it. Raises OSError or sqlite3.Error."""
    return Contents(
        index.namespaces(),
        list(read_rows(index)),
        index.misnumbered(),
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
    all_tables = [_recover_tables(residency, stripe, found) for stripe, found in volumes]
    for (stripe, found), tables in zip(volumes, all_tables, strict=True):
        _find_lost_tables(residency, stripe, found, tables)
        _recover_limits(stripe, found.limits, tables)
    recall(residency, [found.learnt for found in contents])
    _recover_chunks(residency, volumes, all_tables)
    for stripe, found in volumes:
        _claim_extents(residency, stripe, found.unclaimed)
    planted = []
    for table in residency.catalog.tables.values():
        planted.append(runs(table))
        plant(table, planted[-1])
    for (stripe, found), tables in zip(volumes, all_tables, strict=True):
        _recover_pins(residency, stripe, found.pins, tables)
    _recover_order(residency, residency.nvme, *by_need(planted), now_ns)
    _agree(residency, residency.nvme)
    if num_chunks := residency.catalog.num_chunks:
        log.info("found %d chunks in %d namespaces", num_chunks, len(residency.catalog.tables))
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
    nvme, found = stripe.tier, contents.documents
    numbers = {rows.number for rows in contents.chunks}
    for row in _some_of_unknown(contents.chunks, tables):
        if row.namespace in tables:
            continue
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


def _some_of_unknown(chunks: Iterable[ChunkColumns], tables: dict[int, ChunkTable]) -> Iterator[ChunkRow]:
    """Rows of the namespaces that have no table, a few of each."""
    for rows in chunks:
        if rows.number not in tables:
            yield from (rows.row(place) for place in range(min(_MAX_HEADERS, len(rows))))


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
) -> None:
    """Make the chunks of all volumes. Of one that is on two of them the first is kept."""
    found: dict[ChunkTable, list[tuple[Stripe, ChunkColumns]]] = {}
    for (stripe, contents), tables in zip(volumes, all_tables, strict=True):
        untrue = contents.misnumbered
        for rows in contents.chunks:
            table = tables.get(rows.number)
            if table is None:
                untrue += [rows.row(place) for place in range(len(rows))]
            else:
                good, bad = split_true(rows, table.namespace, stripe.tier.volume.capacity)
                found.setdefault(table, []).append((stripe, good))
                untrue += bad
        residency.counters.rows_dropped += len(untrue)
        for row in untrue:
            stripe.commits.delete(row.namespace, row.key)
    for table, parts in found.items():
        _make(residency.catalog, table, *_of_all_volumes(parts))


def _of_all_volumes(parts: Sequence[tuple[Stripe, ChunkColumns]]) -> tuple[ChunkColumns, list[int]]:
    """The rows of a namespace on all volumes, as they were stored, and of each the number of its volume."""
    if len(parts) == 1:
        stripe, rows = parts[0]
        return rows, [stripe.number] * len(rows)
    known: set[Key] = set()
    all_columns: list[list[Any]] = [[] for _ in parts[0][1].columns]
    volumes: list[int] = []
    for stripe, rows in parts:
        again = [place for place, key in enumerate(rows.keys) if key in known]  # stored while the volume was missing
        for place in again:
            stripe.commits.delete(rows.number, rows.keys[place])
        there = rows.without(again) if again else rows
        known.update(there.keys)
        volumes += [stripe.number] * len(there)
        for column, more in zip(all_columns, there.columns, strict=True):
            column += more
    together = ChunkColumns(0, all_columns)
    order = sorted(range(len(together)), key=together.created_ns.__getitem__)
    return together.map(lambda column: map(column.__getitem__, order)), [volumes[place] for place in order]


def _make(catalog: Catalog, table: ChunkTable, rows: ChunkColumns, volumes: list[int]) -> None:
    """Make chunks of the rows of a namespace."""
    lengths = {num_tokens: table.file_bytes(num_tokens) for num_tokens in {*rows.nums_tokens}}
    nothing = repeat(None)
    chunks = [*map(
        Chunk, rows.keys, rows.parents, rows.positions, catalog.inodes, nothing, nothing, nothing, repeat(table),
        rows.nums_tokens, map(lengths.__getitem__, rows.nums_tokens), rows.created_ns, rows.last_used_ns, rows.hits,
        repeat(0), repeat(NOWHERE), rows.offsets, volumes,
    )]  # fmt: skip
    catalog.take(table, chunks)
    for chunk in compress(chunks, map(is_not, rows.parents, chain([None], rows.keys))):
        above = table.chunks.get(chunk.parent)
        if above is not None:
            chunk.parent = above.key


def _claim_extents(residency: Residency, stripe: Stripe, unclaimed: Iterable[tuple[int, int]]) -> None:
    """Let nothing be allocated where a chunk of this volume is. Of two that overlap one is forgotten."""
    chunks = [*residency.catalog.chunks()]
    if residency.nvme is not None and len(residency.nvme) > 1:
        chunks = [chunk for chunk in chunks if chunk.volume == stripe.number]
    used = sorted(zip(map(_NVME, chunks), map(_LENGTH, chunks), strict=True))
    room = (stripe.tier.volume.capacity - SUPERBLOCK_BYTES, SUPERBLOCK_BYTES)
    try:
        stripe.tier.extents = PatientAllocator(*room, used, unclaimed)
    except ValueError:
        chunks.sort(key=_NVME)
        used = [(chunk.nvme, chunk.length) for chunk in _resolve_overlaps(residency, stripe.tier, chunks)]
        stripe.tier.extents = PatientAllocator(*room, used, unclaimed)


def _recover_order(residency: Residency, nvme: Stripes, chunks: list[Chunk], needed_ns: list[int], now_ns: int) -> None:
    """Give the policy of each volume its chunks, those first that were needed longest ago; if they are many, later."""
    pins = residency.pins
    for stripe in nvme:
        there, then_ns = chunks, needed_ns
        if len(nvme) > 1:
            is_there = [chunk.volume == stripe.number for chunk in chunks]
            there, then_ns = [*compress(chunks, is_there)], [*compress(needed_ns, is_there)]
        policy = stripe.tier.policy
        if len(there) <= _AT_ONCE:
            policy.recovered_all(there, ((now_ns - each_ns) / NS for each_ns in then_ns))
            continue
        if pins.held_bytes:
            is_free = [not pins.is_held(chunk) for chunk in there]
            for chunk in compress(there, map(not_, is_free)):
                policy.insert(chunk)
            there, then_ns = [*compress(there, is_free)], [*compress(then_ns, is_free)]
        policy.recover_later(there, then_ns)


def _recover_pins(residency: Residency, stripe: Stripe, rows: Iterable[PinRow], tables: dict[int, ChunkTable]) -> None:
    """Pin what was pinned. A pin that ended meanwhile is ended like any other; one whose chunk was lost goes with it."""
    for row in rows:
        table = tables.get(row.namespace)
        chunk = table.chunks.get(Key(row.key)) if table is not None and is_key(row.key) else None
        if chunk is not None and chunk.volume == stripe.number and _is_end(row.until_ns):
            residency.pins.pin(chunk, row.until_ns)
        else:
            stripe.commits.pin(row.namespace, row.key, None)


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
            residency.counters.rows_dropped += 1
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
