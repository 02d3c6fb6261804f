"""`kvfs ls`: namespaces, prefixes or chunks of a mount, the last used first.

Names are there to be copied: they are never folded or cut. Where a terminal is too narrow, the columns that matter least
are left out; where even that is not enough, the terminal breaks the line itself.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import msgspec
import typer

from kvfs.config import format_size
from kvfs.errors import UsageError
from kvfs.tools import listing, mounted, progress
from kvfs.tools.listing import Entry
from kvfs.tools.words import format_count, format_duration, printable

EXAMPLES = """
kvfs ls /mnt/kvfs

The namespaces: one for each model, dtype, layout and rank.

kvfs ls /mnt/kvfs SmolLM2

The prefixes of the namespace that begins with these letters.

rm -rf /mnt/kvfs/NAMESPACE/prefixes/PATH

Removes what a line of them counts; PATH is what the line begins with, copied as it is.

kvfs ls /mnt/kvfs SmolLM2 --chunks --limit 10

The ten chunks that were used last.
"""

UNKNOWN = "–"


def list_cache(
    mountpoint: Annotated[str, typer.Argument(help="Where the cache is mounted.")],
    namespace: Annotated[str | None, typer.Argument(help="A namespace, or the beginning of its name.")] = None,
    chunks: Annotated[bool, typer.Option("--chunks", help="Chunks in place of prefixes.")] = False,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="Most lines to show.")] = 50,
    full: Annotated[bool, typer.Option("--full", help="Whole keys in the paths of prefixes, no patterns.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Bytes and nanoseconds, for programs.")] = False,
) -> None:
    """List namespaces, prefixes or chunks, the last used first."""
    path = _mount(mountpoint)
    if namespace is None:
        if chunks:
            raise UsageError("say whose chunks: kvfs ls MOUNTPOINT NAMESPACE --chunks")
        kind, entries = "namespace", progress.ask(path, lambda beat: listing.list_namespaces(path, beat), "looking")
        total = len(entries)
    else:
        name = mounted.ask(path, lambda beat: listing.find_namespace(path, namespace, beat))
        if chunks:
            kind = "chunk"
            entries, total = progress.ask(path, lambda beat: listing.list_chunks(path, name, limit, beat), "looking")
        else:
            kind, entries = (
                "prefix",
                progress.ask(path, lambda beat: listing.list_prefixes(path, name, beat), "looking"),
            )
            total = len(entries)
    entries = entries[:limit]
    if as_json:
        rows = [{"kind": kind} | plain(entry) for entry in entries]
        typer.echo(msgspec.json.format(msgspec.json.encode(rows), indent=2))
    elif entries:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        heading, *lines = table(kind, entries, time.time_ns(), width=width, full=full)
        typer.echo(typer.style(heading, dim=True))
        typer.echo("\n".join(lines))
    else:
        typer.echo("kvfs: nothing is stored here", err=True)
    if total > limit:
        typer.echo(f"kvfs: {total - limit:,} more; --limit {total} shows all", err=True)


def _mount(path: str) -> str:
    inside = mounted.inside(path)
    if inside is not None:
        mount, rest = inside
        namespace = rest.split("/")[0]
        raise UsageError(f"{path} lies inside the mount: say `kvfs ls {mount} {namespace}`")
    return mounted.find(path)


def plain(entry: Entry) -> dict[str, Any]:
    """What is known of an entry, for programs."""
    facts = asdict(entry) | {
        "tiers": None if entry.tiers is None else sorted(entry.tiers, reverse=True),
        "short_path": None,
    }
    return {name: value for name, value in facts.items() if value is not None}


@dataclass(frozen=True)
class _Column:
    """A column right of the names; where there is no room, the highest `spare` goes first."""

    heading: str
    spare: int
    cell: Callable[[Entry, int], str]
    is_text: bool = False


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def _ago(then_ns: int, now_ns: int) -> str:
    return f"{format_duration((now_ns - then_ns) / 1e9)} ago" if then_ns else UNKNOWN


def _tier(entry: Entry, _: int) -> str:
    return UNKNOWN if entry.tiers is None else "+".join(sorted(entry.tiers, reverse=True)) or UNKNOWN


def _staging(entry: Entry, _: int) -> str:
    if not entry.staging_files:
        return UNKNOWN
    return f"{format_count(entry.staging_files, 'file')}, {format_size(entry.staging_bytes or 0)}"


def _pin(entry: Entry, now_ns: int) -> str:
    until = entry.pinned_until
    if until is None:
        return UNKNOWN
    return until if isinstance(until, str) else f"{format_duration((until - now_ns) / 1e9)} more"


_CHUNKS = _Column("chunks", 2, lambda entry, _: _number(entry.num_chunks))
_TOKENS = _Column("tokens", 4, lambda entry, _: _number(entry.num_tokens))
_POSITION = _Column("position", 6, lambda entry, _: _number(entry.position))
_HITS = _Column("hits", 5, lambda entry, _: _number(entry.hits))
_SIZE = _Column("size", 1, lambda entry, _: format_size(entry.size_bytes))
_TIER = _Column("tier", 7, _tier, is_text=True)
_STORED = _Column("stored", 8, lambda entry, now_ns: _ago(entry.published_ns, now_ns))
_USED = _Column("last used", 3, lambda entry, now_ns: _ago(entry.last_used_ns, now_ns))
_COPIED_IN = _Column("copied in", 9, _staging)
_PINNED = _Column("pinned", 2, _pin)
_RARE = frozenset({_COPIED_IN, _PINNED})  # left out where no line has anything there
_COLUMNS = {
    "namespace": (_CHUNKS, _SIZE, _STORED, _USED, _COPIED_IN),
    "prefix": (_CHUNKS, _TOKENS, _SIZE, _TIER, _USED),
    "chunk": (_POSITION, _TOKENS, _HITS, _SIZE, _TIER, _STORED, _USED, _PINNED),
}
_GAP = "  "


def table(kind: str, entries: list[Entry], now_ns: int, *, width: int | None, full: bool = False) -> list[str]:
    """The lines of a table, its heading first, with as many columns as `width` has room for; None: with all."""
    names = [_name(entry, full) for entry in entries]
    columns = list(_COLUMNS[kind])
    cells = {column: [column.heading, *(column.cell(entry, now_ns) for entry in entries)] for column in columns}
    columns = [column for column in columns if column not in _RARE or {*cells[column][1:]} - {UNKNOWN}]
    widths = {column: max(map(len, texts)) for column, texts in cells.items()}
    first = max(map(len, (kind, *names)))
    while width is not None and columns and first + sum(len(_GAP) + widths[column] for column in columns) > width:
        columns.remove(max(columns, key=lambda column: column.spare))
    lines = []
    for row, name in enumerate([kind, *names]):
        parts = [name.ljust(first)]
        for column in columns:
            text, size = cells[column][row], widths[column]
            parts.append(text.ljust(size) if column.is_text else text.rjust(size))
        lines.append(_GAP.join(parts).rstrip())
    return lines


def _name(entry: Entry, full: bool) -> str:
    return printable((entry.path if full else entry.short_path) or entry.name)
