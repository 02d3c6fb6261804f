"""The command: runs the rows, shows a table or JSON, leaves nothing behind."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import typer
from rich.console import Console
from rich.table import Table

import kvfs
from kvfs.config import Access
from kvfs.errors import UsageError
from kvfs.tools.bench import rig, rows
from kvfs.tools.bench.crowd import crowd
from kvfs.tools.bench.movement import hits_under_writes, movement
from kvfs.tools.bench.results import Row
from kvfs.tools.bench.scratch import scratch_below

EXAMPLES = """
kvfs bench

Everything, some minutes: 15 GiB of disk below the current directory and 7 GiB of memory for a while.

kvfs bench --dir /data --quick --json

On the device of /data, fewer rounds, for scripts.

chrt -r 1 kvfs bench

On a machine that does other work at the same time: figures of an idle one (nice does not help between sessions).
"""

_NEEDED_BYTES = 16 << 30
_SHAPES = ((rig.Shape(32 << 20, 32), 1), (rig.Shape(1 << 20, 16), 8))


def bench(
    context: typer.Context,
    directory: Annotated[
        Path, typer.Option("--dir", help="Directory on the device to measure; emptied of our files afterwards.")
    ] = Path(),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the median counts.")] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="Three rounds, no fresh volumes.")] = False,
    access: Annotated[
        str, typer.Option(metavar="trusted|isolated", help="How chunks are stored: in place, or through a window.")
    ] = "trusted",
    as_json: Annotated[bool, typer.Option("--json", help="Rows as JSON on stdout.")] = False,
) -> None:
    """Measure what each path reaches, beside the limit of the hardware, in one run and in turns.

    ratio is speed ÷ limit for GB/s (1 is the most there can be) and time ÷ limit for ms (1 is the least). A bar is no
    limit of the hardware but what we ask of ourselves.
    """
    if context.invoked_subcommand is not None:
        sources = [context.get_parameter_source(name) for name in context.params]
        if any(source is not None and source.name == "COMMANDLINE" for source in sources):
            raise UsageError(f"options of `kvfs bench {context.invoked_subcommand}` stand behind its name")
        return
    if access not in ("trusted", "isolated"):
        raise UsageError(f"--access is trusted or isolated, not {access!r}")
    free = os.statvfs(directory)
    if free.f_bavail * free.f_frsize < _NEEDED_BYTES:
        raise UsageError(f"the benchmark needs {_NEEDED_BYTES >> 30} GiB of free disk at {directory.resolve()}")
    rounds = 3 if quick else rounds
    fresh_rounds = 0 if quick else max(1, rounds // 2)
    console = Console(stderr=True)
    found: list[Row] = []
    with scratch_below(directory) as scratch, console.status("starting") as status:
        for shape, num_sets in _SHAPES:
            found += rows.transfers(
                shape, _below(scratch), num_sets, rounds, fresh_rounds, cast(Access, access), status.update
            )
        for shape, _ in _SHAPES:
            found += movement(shape, _below(scratch), rounds, cast(Access, access), status.update)
        found += hits_under_writes(_below(scratch), rounds, cast(Access, access), status.update)
        found += rows.prompts(_below(scratch), rounds, status.update)
        found += rows.files(_below(scratch), rounds, status.update)
        found += crowd(_below(scratch), status.update)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    console = Console()
    console.print(_table(found))
    console.print(
        f"kvfs {kvfs.__version__}, Python {platform.python_version()}, Linux {platform.release()}, {rounds} rounds, {access}"
    )


def _below(scratch: Path) -> Path:
    """A directory of its own for each part."""
    path = scratch / str(len(list(scratch.iterdir())))
    path.mkdir()
    return path


def _values(row: Row) -> Iterator[tuple[str, float | None]]:
    yield from (("GB/s", row.gb_s), ("ms", row.ms), ("B", row.bytes), ("", row.share))


def _table(found: list[Row]) -> Table:
    table = Table(title="kvfs bench")
    columns: list[tuple[str, Any]] = [
        ("path", "left"),
        ("chunk", "right"),
        ("measured", "right"),
        ("limit", "right"),
        ("", "left"),
        ("ratio", "right"),
    ]
    for name, justify in columns:
        table.add_column(name, justify=justify)
    for row in found:
        unit, value = next((unit, value) for unit, value in _values(row) if value is not None)
        chunk = f"{row.chunk_bytes >> 20} MiB" if row.chunk_bytes else ""
        table.add_row(row.name, chunk, f"{value:g} {unit}", f"{row.limit:g} {unit}", row.limit_name, f"{row.ratio:.2f}")
    return table
