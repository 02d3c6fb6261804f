"""`kvfs status`: what a mount holds and does, from its status.json."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Annotated, Any, NamedTuple, Self

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvfs import kept
from kvfs.config import format_size
from kvfs.errors import UnavailableError, UsageError
from kvfs.metrics import Counters
from kvfs.mount import mountpoint as mountpoints
from kvfs.tools import daemons, faults, mounted
from kvfs.tools.words import format_count, format_duration, format_share, printable

EXAMPLES = """
kvfs status

The one cache that is mounted; of several a line each.

kvfs status /mnt/kvfs

kvfs status /mnt/kvfs --json | jq .counters

while kvfs status /mnt/kvfs; [ $? = 3 ]; do sleep 1; done

Wait until a daemon that was unmounted has written everything: its exit code is 3 until then.
"""

EXIT_DOES_NOT_ANSWER = 1
EXIT_NOT_MOUNTED_NOW = 3


def status(
    mountpoint: Annotated[
        str | None, typer.Argument(help="Where the cache is mounted; not needed where there is one only.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The status as it is, for programs.")] = False,
) -> None:
    """Show what a cache holds and does.

    Exit code 0: it is mounted and answers (without MOUNTPOINT: all that are mounted do); 1: a daemon is gone, or does not
    answer; 2: nothing is mounted there, or anywhere; 3: the same, and its daemon is ending and still writes, or has not mounted
    yet.
    """
    if mountpoint is None:
        paths = mounted.all_paths()
        if len(paths) != 1:
            _show_all(paths, as_json=as_json)
            return
        [mountpoint] = paths
        others = Unmounted.look(paths)
    else:
        others = Unmounted((), ())
    try:
        path = mounted.find(mountpoint)
        document = mounted.read_status(path)
    except mounted.NotMountedError as error:
        _show_unmounted(mountpoint, error, as_json=as_json)
        return
    except mounted.GoneError as error:
        raise mounted.GoneError(f"{error}{_kept_hint(mountpoint)}") from error
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2))
    else:
        Console().print(panel(path, document), *others.lines())


def _show_unmounted(mountpoint: str, error: UsageError, *, as_json: bool) -> None:
    """Of a place where nothing is mounted: its daemon that ends, or begins; else what is kept in RAM is in the error."""
    path = mountpoints.resolve(mountpoint)
    daemon = daemons.of_mountpoint(path)
    if daemon is None:
        raise UsageError(f"{error}{_kept_hint(mountpoint)}") from error
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(_document(path, daemon)), indent=2))
    else:
        typer.echo(f"kvfs: {printable(daemon.sentence(path))}")
    raise typer.Exit(EXIT_NOT_MOUNTED_NOW)


def _document(path: str, daemon: daemons.Unmounted) -> dict[str, Any]:
    left = daemon.left
    return {
        "mountpoint": path, "state": "alive" if left is None else "ending", "pid": daemon.pid,
        "num_dirty": left.num_dirty if left else 0, "dirty_bytes": left.dirty_bytes if left else 0,
    }  # fmt: skip


def _kept_hint(mountpoint: str) -> str:
    path = mountpoints.resolve(mountpoint)
    hints = [f"{facts.sentence}; `kvfs umount {mountpoint}` gives them back" for _, facts in kept.kept_for(path)]
    return f". {hints[0]}" if hints else ""


class Unmounted(NamedTuple):
    """What there is beside mounts. Attributes: ending: daemons, with their mount points; left: RAM that was kept."""

    ending: Sequence[tuple[str, daemons.Unmounted]]
    left: Sequence[kept.Facts]

    @classmethod
    def look(cls, paths: Sequence[str]) -> Self:
        """All there is now; `paths` are mounted."""
        ending = [(path, daemon) for path, daemon in daemons.ending_now() if path not in paths]
        known = {*paths, *(path for path, _ in ending)}
        return cls(ending, [facts for _, facts in kept.all_kept() if facts.mountpoint not in known])

    def rows(self) -> Iterator[tuple[str, str]]:
        """Where, and what, for people."""
        for path, daemon in self.ending:
            yield path, daemon.sentence(path)
        for facts in self.left:
            yield facts.mountpoint, f"not mounted; {facts.sentence}"

    def lines(self) -> list[Text]:
        """The same, a line each."""
        return [Text(f"{path}: {what}") for path, what in self.rows()]

    def documents(self) -> list[dict[str, Any]]:
        """The same for programs."""
        found = [_document(path, daemon) for path, daemon in self.ending]
        return [*found, *({"state": "kept", **msgspec.to_builtins(facts)} for facts in self.left)]


def _show_all(paths: Sequence[str], *, as_json: bool) -> None:
    """A line for each mount, of which there is none or several, each daemon that ends, and RAM that was kept."""
    if as_json and paths:
        raise UsageError(f"kvfs is mounted on {', '.join(paths)}: say which")
    others = Unmounted.look(paths)
    table, all_answer = overview(paths)
    for path, what in others.rows():
        table.add_row(Text(path), "-", "-", "-", Text(what))
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(others.documents()), indent=2))
    elif table.row_count:
        Console().print(table)
    if not all_answer:
        raise typer.Exit(EXIT_DOES_NOT_ANSWER)
    if others.ending and not paths:
        raise typer.Exit(EXIT_NOT_MOUNTED_NOW)
    if not paths:
        raise UsageError("kvfs is mounted nowhere: `kvfs mount` does it")


def overview(paths: Sequence[str]) -> tuple[Table, bool]:
    """A line for each of several mounts, and whether all answer; one that does not says so in its line."""
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("mounted on", overflow="fold")
    for heading in ("chunks", "ram", "nvme"):
        table.add_column(heading, justify="right")
    table.add_column("")
    all_answer = True
    for path in paths:
        try:
            document = mounted.read_status(path)
        except (UsageError, UnavailableError) as error:
            all_answer = False
            table.add_row(Text(path), "-", "-", "-", Text(f"{error}{_kept_hint(path)}"))
            continue
        tiers = [document.get(name) for name in ("ram", "nvme")]
        full = [format_size(tier.get("used_bytes", 0)) if isinstance(tier, dict) else "-" for tier in tiers]
        words = ", ".join(f"{found.directory}: {found.word}" for found in faults.troubles(document))
        table.add_row(Text(path), f"{document.get('num_chunks', 0):,}", *full, Text(words, style="bold red"))
    return table, all_answer


def panel(path: str, document: dict[str, Any]) -> RenderableType:
    """The status for people. A part that this version does not know is left out."""
    parts: list[RenderableType] = [Text(_headline(document)), _tiers(document)]
    parts += [
        Text(f"the volume in {found.directory}: {found.what}. {found.advice}", style="bold red")
        for found in faults.troubles(document)
    ]
    counters = document.get("counters")
    if isinstance(counters, dict) and any(counters.values()):
        parts += [Text(), _counters(counters)]
    title = Text(f"kvfs {document.get('version', '?')} on {path}")
    return Panel(Group(*parts), title=title, title_align="left", expand=False)


def _headline(document: dict[str, Any]) -> str:
    parts = [
        format_count(document.get("num_chunks", 0), "chunk"),
        "in " + format_count(document.get("num_namespaces", 0), "namespace"),
        f"· process {document.get('pid', '?')}, up {format_duration(document.get('uptime_s', 0))}",
    ]
    if policy := document.get("policy"):
        coming = document.get("next_policy")
        parts.append(f"· policy {policy}" + (f", soon {coming}" if coming else ""))
    dirty, leased = document.get("num_dirty", 0), document.get("num_leases", 0)
    if leased:
        parts.append(f"· {leased:,} in use")
    pinned = document.get("num_pinned", 0)
    if pinned:
        parts.append(f"· {pinned:,} pinned, which hold {format_size(document.get('held_bytes', 0))}")
    if document.get("num_staging"):
        size = format_size(document.get("staging_bytes", 0))
        parts.append(f"· {format_count(document['num_staging'], 'file')}, {size}, being copied in")
    if document.get("num_kept_back"):
        parts.append(f"· {format_size(document.get('kept_back_bytes', 0))} in RAM only, not admitted to NVMe")
    if dirty:
        parts.append(f"· {format_size(document.get('dirty_bytes', 0))} not yet on NVMe")
    return " ".join(parts)


def _tiers(document: dict[str, Any]) -> Table:
    table = Table("tier", box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("chunks", "used", "of", "full"):
        table.add_column(heading, justify="right")
    table.add_column("kind")
    for name in ("ram", "nvme"):
        tier = document.get(name)
        if not isinstance(tier, dict):
            continue
        used, size = tier.get("used_bytes", 0), tier.get("capacity_bytes", 0)
        kind = Text(str(tier.get("kind", "")))
        if tier.get("is_degraded"):
            words = {found.word: None for found in faults.troubles(document)} or {"device fails": None}
            kind.append(f" degraded: {', '.join(words)}", style="bold red")
        table.add_row(
            name, f"{tier.get('num_chunks', 0):,}", format_size(used), format_size(size), format_share(used, size), kind
        )
    volumes = document.get("volumes")
    if isinstance(volumes, list) and len(volumes) > 1:
        for volume in volumes:
            _add_volume(table, volume)
    return table


def _add_volume(table: Table, volume: dict[str, Any]) -> None:
    used, size = volume.get("used_bytes", 0), volume.get("capacity_bytes", 0)
    name, kind = Text(f"  {volume.get('directory', '?')}"), Text(str(volume.get("kind", "")))
    found = faults.trouble(volume)
    if volume.get("kind") == "missing":
        table.add_row(name, "-", "-", "-", "-", Text("missing", style="bold red"))
        return
    if found is not None:
        kind.append(f" degraded: {found.word}", style="bold red")
    chunks = f"{volume.get('num_chunks', 0):,}"
    table.add_row(name, chunks, format_size(used), format_size(size), format_share(used, size), kind)


def _counters(counters: dict[str, Any]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim", no_wrap=True, overflow="ellipsis")
    for row in _shown(counters):
        table.add_row(*row)
    return table


def _shown(counters: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Counters that are not zero, since the daemon started, and what each of them counts: most of them chunks."""
    meaning = {item.name: str(item.metadata["help"]) for item in fields(Counters)}
    for name, value in counters.items():
        if isinstance(value, int) and value:
            words = name.removesuffix("_bytes").replace("_", " ")
            yield words, format_size(value) if name.endswith("_bytes") else f"{value:,}", meaning.get(name, "")
