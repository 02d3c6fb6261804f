"""`kvfs simulate`: the command. What it does is in the modules beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvfs.chunk import geometry
from kvfs.config import MAX_TIER_BYTES, format_size, parse_size
from kvfs.durations import parse_duration
from kvfs.errors import UsageError
from kvfs.policies import named
from kvfs.tools.cli import EXIT_INTERRUPTED
from kvfs.tools.simulate import optimum, report
from kvfs.tools.simulate.replay import MakePolicy, Replay, Tally, ends, namespace_of
from kvfs.tools.simulate.report import Machine, Result
from kvfs.tools.simulate.sizes import DEFAULT_BYTES_PER_TOKEN, bytes_per_token, tier_bytes
from kvfs.tools.simulate.traces import Reading, Trace, read
from kvfs.tools.words import format_count, format_duration

EXAMPLES = """
kvfs simulate conversation.jsonl.gz --ram 5%

How many tokens of the prompts a RAM cache of a twentieth of the trace would have had, with three policies and with the
best that is possible.

kvfs simulate week/*.jsonl --ram 64GiB --nvme 1TiB --policy learned,lru --model Llama-3-8B/config.json

Both tiers, sizes from a model, and how much the drive would be written a day.

kvfs simulate sessions.jsonl.gz --ram 2% --session-gap 300s --json | jq '.[] | {policy, hit_rate}'

Sessions without dates, begun five minutes apart on average.

kvfs simulate conversation.jsonl.gz --ram 5% --policy lru,opt --closed

What it would be worth if the engine said when a conversation is over.

kvfs simulate week.jsonl.gz --ram 64GiB --policy lru,learned,opt --plot pictures/

Pictures too: hit rate over time, by request, by room; reuse, lengths, distances. What `kvfs record` wrote will do as a trace.

A trace has one JSON object a line, gzipped or not: Mooncake's {"timestamp": ms, "input_length": tokens, "hash_ids": [block, ...]}, or
sessions {"block_size": tokens, "requests": [{"t": s, "in": tokens, "hash_ids": [...]}, ...]}. Several files share one cache, and
no prefix. Each block counts as a whole one.
"""

OPTIMUM = "opt"
Flag = typer.Option
_STEP = 64  # requests between two looks at the bar
_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of the capacity curves
_MAX_BYTES_PER_TOKEN = 1 << 28
_MAX_TOKENS_PER_CHUNK = 1 << 16


def simulate(
    traces: Annotated[list[str], typer.Argument(metavar="TRACE...", help="Files with requests.", show_default=False)],
    ram: Annotated[str, Flag(metavar="SIZE|SHARE", help="RAM tier: 64GiB, or 5% of the trace's different chunks.")],
    nvme: Annotated[
        str | None, Flag(metavar="SIZE|SHARE", help="NVMe tier below it, likewise. None: a RAM cache.")
    ] = None,
    policy: Annotated[
        str,
        Flag(
            metavar="NAME,...",
            help=f"Which to compare: {', '.join(named.NAMES)}, package.module:Class, and {OPTIMUM}, the best that is possible.",
        ),
    ] = "lru,learned,opt",
    bytes_a_token: Annotated[
        int | None,
        Flag(
            "--bytes-per-token",
            metavar="N",
            show_default=f"{DEFAULT_BYTES_PER_TOKEN}, an 8B model",
            help="Bytes of a token's KV.",
        ),
    ] = None,
    model: Annotated[str | None, Flag(metavar="CONFIG", help="A model's config.json, to take that from.")] = None,
    tokens_per_chunk: Annotated[
        int | None,
        Flag(
            metavar="N",
            show_default="the trace's blocks, 256 where they are small",
            help="Tokens of a chunk, a multiple of the blocks.",
        ),
    ] = None,
    session_gap: Annotated[
        str, Flag(metavar="TIME", help="Sessions without dates begin so far apart, on average (at random).")
    ] = "60s",
    seed: Annotated[int, Flag(metavar="N", help="Of that chance.")] = 0,
    ram_bandwidth: Annotated[str, Flag(metavar="SIZE", help="Bytes a second out of RAM.")] = "20GiB",
    nvme_bandwidth: Annotated[str, Flag(metavar="SIZE", help="Bytes a second from NVMe.")] = "5GiB",
    prefill_rate: Annotated[float, Flag(metavar="TOKENS", help="Tokens a second that the engine computes.")] = 10_000.0,
    closed: Annotated[
        bool, Flag("--closed", help="Tell the policy, after each request, what of it is never asked for again.")
    ] = False,
    plot: Annotated[
        str | None, Flag(metavar="DIR", help="Draw what was found there, and curves of room against hits (PNG).")
    ] = None,
    as_json: Annotated[bool, Flag("--json", help="For programs: a list, one object a policy.")] = False,
) -> None:
    """Replay recorded requests through the tiers and policies of the store, and say what they would have found.

    The policies are the ones of `kvfs mount --policy`, their very code. Times are predicted for one request alone: bytes at
    the bandwidth of their tier, then the rest of the prompt at the prefill rate. Ctrl-C shows what there is so far.
    """
    names, makers = _policies(policy)
    _check_numbers(prefill_rate, bytes_a_token, tokens_per_chunk)
    per_token = bytes_a_token or (bytes_per_token(Path(model)) if model is not None else DEFAULT_BYTES_PER_TOKEN)
    machine = Machine(float(_above_zero(ram_bandwidth)), float(_above_zero(nvme_bandwidth)), prefill_rate, per_token)
    reading = Reading(tokens_per_chunk, parse_duration(session_gap, "--session-gap"), seed)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    results: list[Result] = []
    tallies: dict[str, Tally] = {}
    curves: dict[str, list[tuple[float, float]]] = {}
    draw = _drawing() if plot is not None else None
    trace, sizes, chunk_bytes = None, (0, 0), 0
    is_interrupted = False
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            trace = _read([Path(name) for name in traces], reading, bar)
            chunk_bytes = geometry(
                namespace_of(0, trace.tokens_per_chunk, per_token), trace.tokens_per_chunk
            ).file_bytes
            sizes = _sizes(ram, nvme, trace, chunk_bytes)
            for name in names:
                tally = Tally()
                started_s = time.perf_counter()
                try:
                    if name == OPTIMUM:
                        steps = _best(trace, sizes[0] // chunk_bytes, sizes[1] // chunk_bytes, tally)
                    else:
                        replay = Replay(
                            trace, makers[name], per_token, *sizes, tally, has_ghosts=name not in named.BLIND_TO_USES
                        )
                        steps = _play(replay, trace, closed)
                    _run(name, steps, trace, tally, bar)
                finally:
                    took_s = time.perf_counter() - started_s
                    tally.cut()
                    if tally.ram:
                        tallies[name] = tally
                        has_nvme, is_optimum = bool(sizes[1]), name == OPTIMUM
                        results.append(
                            report.result(name, trace, tally, machine, took_s, has_nvme=has_nvme, is_optimum=is_optimum)
                        )
            if draw is not None:
                _draw_curves(trace, names, makers, per_token, sizes, chunk_bytes, curves, bar)
    except KeyboardInterrupt:
        is_interrupted = True
    if draw is not None and trace is not None and results:
        room = max(sizes) // chunk_bytes / trace.num_chunks
        what = "both tiers" if sizes[1] else "RAM"
        for path in draw(Path(plot or "."), trace, tallies, curves, room, what):
            typer.echo(str(path), err=True)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(results)).decode())
    elif trace is not None and results:
        _show(trace, sizes, chunk_bytes, results)
    if trace is not None and trace.num_out_of_order and not as_json:
        typer.echo(
            f"{format_count(trace.num_out_of_order, 'line')} came earlier than the one before; all were played in order of time",
            err=True,
        )
    if is_interrupted:
        if not results:
            typer.echo("kvfs: interrupted before a request was played: there is nothing to show", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)


def _drawing() -> Callable[..., list[Path]]:
    """What draws. Raises UsageError without matplotlib, before anything else takes time."""
    from kvfs.tools.simulate import plot

    return plot.draw


def _draw_curves(
    trace: Trace,
    names: list[str],
    makers: dict[str, MakePolicy],
    per_token: int,
    sizes: tuple[int, int],
    chunk_bytes: int,
    curves: dict[str, list[tuple[float, float]]],
    bar: Progress,
) -> None:
    """Hits of every policy by the room in all: that of the lowest tier, since a tier above it does not add to what is found."""
    shares = sorted({*_SHARES, min(1.0, max(sizes) // chunk_bytes / trace.num_chunks)})
    for name in names:
        points = curves.setdefault(name, [])
        for share in shares:
            room = max(1, int(trace.num_chunks * share))
            tally = Tally()
            if name == OPTIMUM:
                steps = _best(trace, room, 0, tally)
            else:
                has_ghosts = name not in named.BLIND_TO_USES
                replay = Replay(trace, makers[name], per_token, room * chunk_bytes, 0, tally, has_ghosts=has_ghosts)
                steps = _play(replay, trace, False)
            _run(f"{name}, {100 * share:.3g} %", steps, trace, tally, bar, policy=name)
            points.append((share, (sum(tally.ram) + sum(tally.nvme)) / trace.num_references))


def _policies(text: str) -> tuple[list[str], dict[str, MakePolicy]]:
    """The policies to compare, each once, and what makes them. Raises UsageError."""
    names = [*dict.fromkeys(name for part in text.split(",") if (name := part.strip()))]
    choices = f"{', '.join(named.NAMES)}, {OPTIMUM}, or package.module:Class"
    if not names:
        raise UsageError(f"--policy names none: it is one or more, with commas between them, of {choices}")
    for name in names:
        if ":" not in name and name not in (*named.NAMES, OPTIMUM):
            raise UsageError(f"there is no policy {name!r}: it must be one of {choices}")
    return names, {name: named.maker(name) for name in names if name != OPTIMUM}


def _check_numbers(prefill_rate: float, bytes_a_token: int | None, tokens_per_chunk: int | None) -> None:
    if not 0 < prefill_rate < inf:
        raise UsageError("--prefill-rate is a number of tokens above 0")
    if bytes_a_token is not None and not 0 < bytes_a_token <= _MAX_BYTES_PER_TOKEN:
        raise UsageError(f"--bytes-per-token is between 1 and {_MAX_BYTES_PER_TOKEN:,}")
    if tokens_per_chunk is not None and not 0 < tokens_per_chunk <= _MAX_TOKENS_PER_CHUNK:
        raise UsageError(f"--tokens-per-chunk is between 1 and {_MAX_TOKENS_PER_CHUNK:,}")


def _run(name: str, steps: Iterator[None], trace: Trace, tally: Tally, bar: Progress, policy: str = "") -> None:
    """Play all. What a user's own policy raises, or brings about, is told in one sentence."""
    task = bar.add_task(name, total=len(trace.requests))
    name = policy or name
    try:
        for index, _ in enumerate(steps):
            if not index % _STEP:
                bar.update(task, completed=index)
    except Exception as error:
        if name in named.NAMES or name == OPTIMUM:
            raise
        raise UsageError(
            f"policy {name!r} failed at request {len(tally.ram) + 1:,}: {type(error).__name__}: {error}"
        ) from error
    finally:
        bar.remove_task(task)


def _above_zero(text: str) -> int:
    size = parse_size(text)
    if not size:
        raise UsageError("a bandwidth is above 0")
    return size


def _read(paths: list[Path], reading: Reading, bar: Progress) -> Trace:
    try:
        total = sum(path.stat().st_size for path in paths)
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from error
    task = bar.add_task("reading", total=total)
    trace = read(paths, reading, lambda amount: bar.advance(task, amount))
    bar.remove_task(task)
    return trace


def _sizes(ram: str, nvme: str | None, trace: Trace, chunk_bytes: int) -> tuple[int, int]:
    sizes = [tier_bytes(text, trace.num_chunks, chunk_bytes) if text else 0 for text in (ram, nvme)]
    for size, name in zip(sizes, ("ram", "nvme"), strict=True):
        if (name == "ram" or nvme) and not chunk_bytes <= size <= MAX_TIER_BYTES:
            raise UsageError(
                f"--{name} is {format_size(size)}: it holds at least a chunk, {format_size(chunk_bytes)} here, and at most "
                f"{format_size(MAX_TIER_BYTES)}"
            )
    return sizes[0], sizes[1]


def _play(replay: Replay, trace: Trace, closed: bool) -> Iterator[None]:
    if not closed:
        yield from map(replay.request, trace.requests)
        return
    for request, end in zip(trace.requests, ends(trace), strict=True):
        replay.request(request)
        if end >= 0:
            replay.close(end)
        yield


def _best(trace: Trace, num_ram: int, num_nvme: int, tally: Tally) -> Iterator[None]:
    """The optimum of each tier alone: no policy has more of both."""
    in_ram = optimum.hits(trace, num_ram)
    in_all = optimum.hits(trace, num_nvme) if num_nvme > num_ram else optimum.hits(trace, num_ram)
    for ram, both in zip(in_ram, in_all, strict=True):
        tally.ram.append(ram)
        tally.nvme.append(max(both - ram, 0))
        yield


def _show(trace: Trace, sizes: tuple[int, int], chunk_bytes: int, results: list[Result]) -> None:
    parts = [
        f"{format_count(len(trace.requests), 'request')} in {format_duration(trace.seconds)}",
        f"{format_count(trace.num_references, 'chunk')} asked for, {trace.num_chunks:,} different",
        f"of {trace.tokens_per_chunk} tokens, {format_size(chunk_bytes)} each",
    ]
    typer.echo("; ".join(parts))
    tiers = [f"RAM {format_size(sizes[0])} = {sizes[0] // chunk_bytes:,} chunks"]
    if sizes[1]:
        tiers.append(f"NVMe {format_size(sizes[1])} = {sizes[1] // chunk_bytes:,} chunks")
    typer.echo(", ".join(tiers))
    table = Table(box=None, pad_edge=False)
    for heading in report.HEADINGS:
        table.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    for found in results:
        table.add_row(*report.row(found))
    Console(width=max(Console().width, 120)).print(table)
