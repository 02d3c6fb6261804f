"""The command for a million chunks: what finding, remembering, listing and starting again take when there are so many.

All are stored by a client through a daemon, as an engine does, and end on NVMe: 4 KiB of payload each, so that what is
measured is the number of chunks. Nothing is evicted, so there are no ghosts.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

import kvfs
from kvfs import keys
from kvfs.chunk import geometry
from kvfs.client import Client
from kvfs.errors import UsageError
from kvfs.tools.bench import rig
from kvfs.tools.bench.crowd import anonymous_bytes, list_all
from kvfs.tools.bench.empty_mount import empty_mount
from kvfs.tools.bench.results import Row
from kvfs.tools.bench.scratch import scratch_below
from kvfs.tools.interrupting import entered, interruptible
from kvfs.tools.progress import step_bar

EXAMPLES = """
kvfs bench million

Some minutes, 9 GiB of disk below the current directory, 1 GiB of memory.

kvfs bench million --num-chunks 100000 --dir /data --json

Fewer, on the device of /data, for scripts.
"""

_PROMPT_CHUNKS = 390  # 100,000 tokens
_FEW = 1_000
_NUM_MATCHES = 400
_RAM_BYTES = 256 << 20
_UNTIL_CLEAN = 40  # prompts in a row, then what is dirty has to be written: a full tier refuses
_INDEX_BYTES = 512  # a chunk, its log included: an upper bound for the room that is asked for
_WARM_BAR, _RANDOM_BAR, _RANDOM_BAR_MS = 1.2, 15.0, 1.0
_MEMORY_BAR_BYTES, _START_BAR_MS, _LIST_BAR_MS = 600.0, 5_000.0, 10_000.0

Say = Callable[[str, int], None]
Flag = typer.Option


def bench_million(
    directory: Annotated[
        Path, Flag("--dir", help="Directory for mount and volume; emptied of our files afterwards.")
    ] = Path(),
    num_chunks: Annotated[int, Flag(min=2 * _FEW, help="Chunks that are stored.")] = 1_000_000,
    as_json: Annotated[bool, Flag("--json", help="Rows as JSON on stdout.")] = False,
) -> None:
    """Store a million chunks, and measure what so many cost.

    match_warm: the same prompt of 390 chunks again and again, beside the same in a daemon that has 1,000 chunks, in turns;
    match_random: prompts in random order, beside that, and in ms; memory_a_chunk: growth of the daemon's own memory, divided; restart: from
    the start of a daemon until its mount answers; list: `ls -f` of their directory, also beside that of a file system of pyfuse3's that
    does nothing but list as many names. Each stands beside its bar.
    """
    shape = rig.Shape(4 << 10, 1, model="million")
    needed = num_chunks * (geometry(shape.namespace, rig.TOKENS_PER_CHUNK).file_bytes + _INDEX_BYTES) + (64 << 20)
    try:
        free = os.statvfs(directory)
    except OSError as error:
        raise UsageError(f"--dir: {directory}: {error.strerror}") from error
    if free.f_bavail * free.f_frsize < needed:
        raise UsageError(
            f"{num_chunks:,} chunks need {needed / (1 << 30):.1f} GiB of free disk at {directory.resolve()}"
        )
    console = Console(stderr=True)
    with (
        interruptible() as ignore,
        scratch_below(directory) as scratch,
        step_bar(console) as bar,
    ):
        task = bar.add_task("starting", total=num_chunks)
        try:
            found = list(
                measure(scratch, shape, num_chunks, lambda what, more: bar.update(task, description=what, advance=more))
            )
        finally:
            ignore()
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    table = Table(title=f"{num_chunks:,} chunks")
    table.add_column("")
    for name in ("measured", "bar", "ratio"):
        table.add_column(name, justify="right")
    for row in found:
        value = f"{row.ms:,.3f} ms" if row.ms is not None else f"{row.bytes:,.0f} B"
        unit = "ms" if row.ms is not None else "B"
        table.add_row(row.name, value, f"{row.limit:,.4g} {unit}", f"{row.ratio:.2f}")
    console = Console()
    console.print(table)
    console.print(
        f"kvfs {kvfs.__version__}, Python {platform.python_version()}, Linux {platform.release()}, {os.cpu_count()} CPUs"
    )


def measure(directory: Path, shape: rig.Shape, num_chunks: int, say: Say) -> Iterator[Row]:
    """The rows, with their bars; `say` is told what is done, and how many more chunks are stored."""
    namespace = shape.namespace
    file_bytes = geometry(namespace, rig.TOKENS_PER_CHUNK).file_bytes
    num_prompts = max(3, round(num_chunks / _PROMPT_CHUNKS))
    settings = rig.settings(directory, "m", _RAM_BYTES, (num_prompts + 2) * _PROMPT_CHUNKS * file_bytes, "trusted")
    source = rig.noise(_PROMPT_CHUNKS * shape.chunk_bytes)
    few = round(_FEW / _PROMPT_CHUNKS)
    small = rig.settings(directory, "few", _RAM_BYTES, (few + 2) * _PROMPT_CHUNKS * file_bytes, "trusted")
    with entered(rig.Daemon(settings)) as daemon, rig.client(daemon, namespace) as client:
        for number in range(few):
            rig.store(client, _prompt(shape, number), source)
            say("the first thousand", _PROMPT_CHUNKS)
        daemon.wait_until_clean()
        before = anonymous_bytes(daemon.pid)
        for number in range(few, num_prompts):
            rig.store(client, _prompt(shape, number), source)
            say("storing", _PROMPT_CHUNKS)
            if number % _UNTIL_CLEAN == 0:
                daemon.wait_until_clean()
        daemon.wait_until_clean()
        stored = num_prompts * _PROMPT_CHUNKS
        grown = (anonymous_bytes(daemon.pid) - before) / (stored - few * _PROMPT_CHUNKS)
        say("matching", 0)
        with entered(rig.Daemon(small)) as few_daemon, rig.client(few_daemon, namespace) as few_client:
            for number in range(few):
                rig.store(few_client, _prompt(shape, number), source)
            few_daemon.wait_until_clean()
            few_s, warm_s, random_s = _matches(shape, few_client, client, num_prompts)
        say("listing", 0)
        list_s = list_all(Path(daemon.mount, namespace.directory, "chunks"), stored)
        say("listing as many names of an empty file system", 0)
        with empty_mount(directory / "empty", stored) as empty:
            empty_s = list_all(empty, stored)
        say("ending the daemon", 0)
    say("starting it again", 0)
    started = time.perf_counter()
    with entered(rig.Daemon(settings)) as daemon, rig.client(daemon, namespace) as client:
        restart_s = time.perf_counter() - started
        _match(client, _prompt(shape, num_prompts - 1).chains)
    yield _time("match_warm", warm_s, few_s * _WARM_BAR)
    yield _time("match_random", random_s, few_s * _RANDOM_BAR)
    yield _time("match_random, absolute", random_s, _RANDOM_BAR_MS / 1e3)
    yield Row("memory_a_chunk", 0, "bar", _MEMORY_BAR_BYTES, round(grown / _MEMORY_BAR_BYTES, 3), bytes=round(grown, 1))
    yield _time("restart", restart_s, _START_BAR_MS / 1e3)
    yield _time("list", list_s, _LIST_BAR_MS / 1e3)
    yield _time("list, beside an empty file system", list_s, empty_s)


def _time(name: str, took_s: float, bar_s: float) -> Row:
    return Row(name, 0, "bar", round(bar_s * 1e3, 4), round(took_s / bar_s, 3), ms=round(took_s * 1e3, 4))


def _prompt(shape: rig.Shape, number: int) -> rig.Prompt:
    """The chain of a random prompt; a hundred times faster than `rig.Prompt.random`, for any token will do."""
    tokens = array("I", random.Random(number).randbytes(_PROMPT_CHUNKS * rig.TOKENS_PER_CHUNK * keys.TOKEN_BYTES))
    root = keys.root(shape.namespace.identity.fingerprint())
    return rig.Prompt(keys.KeyChain(root, rig.TOKENS_PER_CHUNK, tokens))


def _matches(shape: rig.Shape, few: Client, many: Client, num_prompts: int) -> list[float]:
    """Medians of seconds, taken in turns: one prompt among a thousand chunks, it among all, any prompt among all."""
    warm, order = _prompt(shape, 0).chains, random.Random(1)
    times: list[list[float]] = [[], [], []]
    for _ in range(_NUM_MATCHES):
        other = _prompt(shape, order.randrange(num_prompts)).chains
        for found, client, chains in zip(times, (few, many, many), (warm, warm, other), strict=True):
            _match(client, warm)  # the other daemon, and this client for it, have emptied the caches of the processor
            found.append(_match(client, chains))
    return [statistics.median(found) for found in times]


def _match(client: Client, chains: list[keys.ChainHash]) -> float:
    """Seconds that a match takes; all has to be found."""
    started = time.perf_counter()
    lease = client.match(chains)
    took_s = time.perf_counter() - started
    lease.release()
    if lease.count != len(chains):
        raise AssertionError(f"{lease.count} of {len(chains)} chunks were found")
    return took_s
