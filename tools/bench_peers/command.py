"""The command: a bar while it lasts, a table or JSON at the end, nothing left behind."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

import kvfs
from kvfs.errors import UsageError
from kvfs.tools.bench.scratch import scratch_below
from kvfs.tools.bench_peers.finding import VERSION, installed_lmcache, is_known
from kvfs.tools.bench_peers.measuring import MODELS, STEPS_A_ROUND, Measured, Model, measure
from kvfs.tools.bench_peers.results import OURS, Comparison
from kvfs.tools.environments import chosen_python
from kvfs.tools.interrupting import interruptible
from kvfs.tools.progress import step_bar

EXAMPLES = """
make bench-peers

Sets LMCache up where it is not (1.2 GB, once), then compares: some minutes, 7 GiB of disk and 7 of memory for a while.

kvfs bench peers --dir /data --json > peers.json

On the device of /data, for scripts: every time that was taken is in it.

kvfs bench peers --rounds 1 --num-chunks 4

A look at whether it works, no figures.
"""
_PEERS = ("LocalCPU", "LocalDisk", "fs_native", "MP")

Flag = typer.Option


def bench_peers(
    directory: Annotated[
        Path, Flag("--dir", help="Directory on the device to measure; emptied of our files afterwards.")
    ] = Path(),
    rounds: Annotated[int, Flag(min=1, help="Rounds, after one to warm up; the median counts.")] = 7,
    num_chunks: Annotated[
        int | None, Flag(min=2, help="Chunks a set: 128 of 3 MiB and 32 of 32 MiB unless told otherwise.")
    ] = None,
    python: Annotated[
        Path | None,
        Flag(metavar="PATH", help=f"Python of an environment with LMCache {VERSION}; found if there is one."),
    ] = None,
    as_json: Annotated[bool, Flag("--json", help="Results, with every time, as JSON on stdout.")] = False,
) -> None:
    """Compare with LMCache on the same device, in turns; every byte of every load is compared, outside the time.

    LMCache runs in a process of its own, as in an engine, on its defaults: LocalCPU; LocalDisk through the page cache;
    fs_native with O_DIRECT and 4 threads, its fastest. kvfs is a daemon with a mount and a client. Every load ends in
    memory outside the cache, as an engine's; MP is how its server looks a prompt up; cold means that no page of a file is cached, and for kvfs that the chunk is
    on NVMe only. A store ends when it counts as done: for kvfs when it is on the device and would survive a power loss;
    for LocalDisk when write(2) has returned; for fs_native when the file is renamed; neither of the two syncs.
    """
    found_python = chosen_python(python, installed_lmcache, is_known, f"LMCache {VERSION}", "bench-peers")
    models = [
        model if num_chunks is None else msgspec.structs.replace(model, num_chunks=num_chunks) for model in MODELS
    ]
    check_room(directory, models)
    compared = compare(found_python, models, rounds, directory)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(compared), indent=2).decode())
        return
    console = Console()
    console.print(table(compared))
    for aside in compared.asides:
        console.print(f"{aside.name}, {_size(aside.chunk_bytes)}: {aside.seconds * 1e3:.1f} ms", highlight=False)
    console.print(
        f"kvfs {compared.kvfs}, LMCache {compared.lmcache}, torch {compared.torch}, Python {compared.python}, "
        f"Linux {compared.kernel}, {compared.cpus} CPUs, {rounds} rounds",
        highlight=False,
    )


def compare(python: str, models: list[Model], rounds: int, directory: Path) -> Comparison:
    """Make all rounds with all models, a bar on the terminal meanwhile."""
    console = Console(stderr=True)
    found: list[Measured] = []
    with (
        interruptible() as ignore,
        scratch_below(directory) as scratch,
        step_bar(console) as bar,
    ):
        task = bar.add_task("starting", total=STEPS_A_ROUND * (rounds + 1) * len(models) + 1)
        try:
            for number, model in enumerate(models):
                below = scratch / model.name
                below.mkdir()
                found.append(
                    measure(
                        python, model, rounds, below, lambda what: bar.update(task, description=what, advance=1),
                        with_lookup=number == 0,
                    )
                )  # fmt: skip
        finally:
            ignore()
    lmcache, torch = found[0].versions
    return Comparison(
        kvfs.__version__, lmcache, torch, platform.python_version(), platform.release(), os.cpu_count() or 0, rounds,
        sorted((row for each in found for row in each.rows), key=lambda row: row.num_bytes == 0),
        [aside for each in found for aside in each.asides],
    )  # fmt: skip


def table(compared: Comparison) -> Table:
    """A row for each thing that all do."""
    made = Table(title="kvfs bench peers, medians in GB/s and ms", box=None, padding=(0, 1), collapse_padding=True)
    made.add_column("", no_wrap=True)
    for name in ("chunk", OURS, *_PEERS, "ratio", "bar"):
        made.add_column(name, justify="right", no_wrap=True)
    for row in compared.rows:
        made.add_row(
            row.name, _size(row.chunk_bytes), *(row.value(who) if who in row.seconds else "" for who in (OURS, *_PEERS)),
            f"{row.ratio:.2f}", f"{'' if row.is_met else '!'}{'≥' if row.num_bytes else '≤'}{row.bar:g}",
        )  # fmt: skip
    made.caption = "ratio: to the fastest peer of the row; ! in front of a bar: missed"
    return made


def check_room(directory: Path, models: list[Model]) -> None:
    """Raise UsageError if disk or memory does not suffice."""
    try:
        free = os.statvfs(directory)
    except OSError as error:
        raise UsageError(f"--dir: {directory}: {error.strerror}") from error
    needed = max(model.disk_bytes for model in models)
    if free.f_bavail * free.f_frsize < needed:
        raise UsageError(f"the comparison needs {needed / (1 << 30):.1f} GiB of free disk at {directory.resolve()}")
    memory = max(model.memory_bytes for model in models)
    if (available := _available_memory()) < memory:
        raise UsageError(
            f"the comparison needs {memory / (1 << 30):.1f} GiB of memory, {available / (1 << 30):.1f} GiB are "
            "available: --num-chunks makes it smaller"
        )


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel tells no MemAvailable")


def _size(chunk_bytes: int) -> str:
    if not chunk_bytes:
        return ""
    return f"{chunk_bytes >> 20} MiB" if chunk_bytes >= 1 << 20 else f"{chunk_bytes >> 10} KiB"
