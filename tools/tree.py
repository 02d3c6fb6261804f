"""`kvfs tree`: the prefixes of a mount drawn as a tree."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import typer

from kvfs.chunk import SUFFIX
from kvfs.tools import listing, ls, mounted, progress
from kvfs.tools.listing import Entry
from kvfs.tools.mounted import Beat

EXAMPLES = """
kvfs tree /mnt/kvfs

What continues what, in all namespaces. Each line counts what is in a directory and all below it, as rm -rf of it would.

kvfs tree /mnt/kvfs SmolLM2 --depth 2 --full

The prefixes of the namespace that begins with these letters and their branches, with whole keys.
"""

PINNED = "user.kvfs.pinned_until"


@dataclass
class Drawn:
    """A namespace and its prefixes, each before those below it; how many of their chunks are pinned, None if unknown."""

    name: str
    prefixes: list[Entry] = field(default_factory=list)
    num_pinned: list[int | None] = field(default_factory=list)


def tree(
    mountpoint: Annotated[str, typer.Argument(help="Where the cache is mounted.")],
    namespace: Annotated[str | None, typer.Argument(help="A namespace, or the beginning of its name.")] = None,
    depth: Annotated[int | None, typer.Option(metavar="N", min=1, help="Levels to show; all unless given.")] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="Most lines of a namespace to show.")] = 1000,
    full: Annotated[bool, typer.Option("--full", help="Whole keys.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Nested, in bytes and nanoseconds, for programs.")] = False,
) -> None:
    """Draw the prefixes as a tree, the last used first, with sizes, last use and pins."""
    path = mounted.find(mountpoint)
    drawn = progress.ask(path, lambda beat: _look(path, namespace, depth, limit, beat), "looking")
    if as_json:
        document = {each.name: _nested(each) for each, _ in drawn}
        typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2))
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for each, num_more in drawn:
        typer.echo(each.name)
        if each.prefixes:
            typer.echo("\n".join(_lines(each, full, width)))
        if num_more:
            typer.echo(f"kvfs: {num_more:,} more lines; --limit {num_more + limit} shows all", err=True)
    if not drawn:
        typer.echo("kvfs: nothing is stored here", err=True)


def _look(path: str, wanted: str | None, depth: int | None, limit: int, beat: Beat) -> list[tuple[Drawn, int]]:
    names = listing.namespace_names(path) if wanted is None else [listing.find_namespace(path, wanted, beat)]
    found = []
    for name in names:
        everything = listing.list_prefixes(path, name, beat)
        entries = [entry for entry in everything if depth is None or entry.depth < depth]
        shown = entries[:limit]
        pinned = _count_pinned(os.path.join(path, name, "prefixes"), everything, beat)
        found.append((Drawn(name, shown, [pinned.get(entry.path or "") for entry in shown]), len(entries) - len(shown)))
    return found


def _count_pinned(root: str, entries: list[Entry], beat: Beat) -> dict[str, int]:
    """Pinned chunks in each prefix directory and below it, by PATH; none where there are too many chunks to ask each."""
    count: dict[str, int] = {}
    if any(entry.tiers is None for entry in entries):
        return count
    for entry in entries:
        path = entry.path or ""
        count.setdefault(path, 0)
        try:
            names = [name for name in os.listdir(os.path.join(root, path)) if name.endswith(SUFFIX)]
        except FileNotFoundError:
            continue
        number = 0
        for name in names:
            beat()
            number += is_pinned(os.path.join(root, path, name))
        while number and path:
            count[path] = count.get(path, 0) + number
            path = os.path.dirname(path)
    return count


def is_pinned(path: str) -> bool:
    """Whether a chunk is pinned."""
    try:
        os.getxattr(path, PINNED, follow_symlinks=False)
    except OSError:
        return False
    return True


def _lines(drawn: Drawn, full: bool, width: int | None) -> Iterator[str]:
    entries = []
    for entry, branch in zip(drawn.prefixes, branches([entry.depth for entry in drawn.prefixes]), strict=True):
        path = (entry.path if full else entry.short_path) or entry.name
        entries.append(dataclasses.replace(entry, path=branch + path.rsplit("/", 1)[-1], short_path=None))
    pinned = [f"  {number:,} pinned" if number else "" for number in drawn.num_pinned]
    room = None if width is None else width - max(map(len, pinned))
    heading, *lines = ls.table("prefix", entries, time.time_ns(), width=room, full=True)
    yield typer.style(heading, dim=True)
    for line, note in zip(lines, pinned, strict=True):
        yield line + note


def branches(depths: list[int]) -> list[str]:
    """What is drawn before each line of a tree whose lines have these depths, parents first."""
    drawn = []
    goes_on: set[int] = set()  # depths at which a line follows below
    for depth in reversed(depths):
        goes_on = {other for other in goes_on if other <= depth}
        above = "".join("│   " if level in goes_on else "    " for level in range(depth))
        drawn.append(above + ("├── " if depth in goes_on else "└── "))
        goes_on.add(depth)
    return drawn[::-1]


def _nested(drawn: Drawn) -> list[dict[str, Any]]:
    top: list[dict[str, Any]] = []
    open_lists = [top]
    for entry, num_pinned in zip(drawn.prefixes, drawn.num_pinned, strict=True):
        below: list[dict[str, Any]] = []
        facts = ls.plain(entry) | {"num_pinned": num_pinned, "prefixes": below}
        del open_lists[entry.depth + 1 :]
        open_lists[entry.depth].append({name: value for name, value in facts.items() if name != "depth"})
        open_lists.append(below)
    return top
