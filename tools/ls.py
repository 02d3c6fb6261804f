"""`kvfs ls`: namespaces, prefixes or chunks of a mount, the last used first."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from kvfs.config import format_size
from kvfs.errors import UsageError
from kvfs.tools import listing, mounted
from kvfs.tools.listing import Entry
from kvfs.tools.words import format_duration

EXAMPLES = """
[bold]kvfs ls /mnt/kvfs[/bold]

The namespaces: one for each model, dtype, layout and rank.

[bold]kvfs ls /mnt/kvfs SmolLM2[/bold]

The prefixes of the namespace that begins with these letters. `rm -rf` of a prefix removes what its line counts.

[bold]kvfs ls /mnt/kvfs SmolLM2 --chunks --limit 10[/bold]

The ten chunks that were used last.
"""

UNKNOWN = "–"
PIPE_WIDTH = 240  # columns where there is no terminal: nothing is folded


def list_cache(
    mountpoint: Annotated[str, typer.Argument(help="Where the cache is mounted.")],
    namespace: Annotated[str | None, typer.Argument(help="A namespace, or the beginning of its name.")] = None,
    chunks: Annotated[bool, typer.Option("--chunks", help="Chunks in place of prefixes.")] = False,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="Most chunks to show.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Bytes and nanoseconds, for programs.")] = False,
) -> None:
    """List namespaces, prefixes or chunks, the last used first."""
    path = mounted.find(mountpoint)
    if namespace is None:
        if chunks:
            raise UsageError("say whose chunks: kvfs ls MOUNTPOINT NAMESPACE --chunks")
        kind, entries = "namespace", mounted.ask(path, lambda beat: listing.list_namespaces(path, beat))
    else:
        name = mounted.ask(path, lambda beat: listing.find_namespace(path, namespace, beat))
        if chunks:
            kind, entries = "chunk", mounted.ask(path, lambda beat: listing.list_chunks(path, name, limit, beat))
        else:
            kind, entries = "prefix", mounted.ask(path, lambda beat: listing.list_prefixes(path, name, beat))
    if as_json:
        rows = [{"kind": kind} | _plain(entry) for entry in entries]
        typer.echo(msgspec.json.format(msgspec.json.encode(rows), indent=2))
    elif entries:
        console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
        console.print(_table(kind, entries, time.time_ns()))
    else:
        typer.echo("kvfs: nothing is stored here yet", err=True)


def _plain(entry: Entry) -> dict[str, Any]:
    tiers = None if entry.tiers is None else sorted(entry.tiers)
    return {name: value for name, value in (asdict(entry) | {"tiers": tiers}).items() if value is not None}


def _table(kind: str, entries: list[Entry], now_ns: int) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(kind, overflow="fold")
    counts = {"namespace": ["chunks"], "prefix": ["chunks", "tokens"], "chunk": ["position", "tokens", "hits"]}[kind]
    for heading in (*counts, "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    if kind != "namespace":
        table.add_column("tier", no_wrap=True)
    if kind != "prefix":  # a key and its indentation leave little of 80 columns
        table.add_column("stored", justify="right", no_wrap=True)
    table.add_column("last used", justify="right", no_wrap=True)
    for entry in entries:
        numbers = {
            "chunks": entry.num_chunks, "tokens": entry.num_tokens, "position": entry.position, "hits": entry.hits,
        }  # fmt: skip
        row = ["  " * entry.depth + entry.name]
        row += [UNKNOWN if numbers[heading] is None else f"{numbers[heading]:,}" for heading in counts]
        row.append(format_size(entry.size_bytes))
        if kind != "namespace":
            row.append(UNKNOWN if entry.tiers is None else " ".join(sorted(entry.tiers, reverse=True)))
        if kind != "prefix":
            row.append(_ago(entry.published_ns, now_ns))
        table.add_row(*row, _ago(entry.last_used_ns, now_ns))
    return table


def _ago(then_ns: int, now_ns: int) -> str:
    return f"{format_duration((now_ns - then_ns) / 1e9)} ago" if then_ns else UNKNOWN
