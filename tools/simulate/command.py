"""`kvfs simulate`: the command, its options and what is wrong with them. What it does is in the modules beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from kvfs.durations import parse_duration
from kvfs.errors import UsageError
from kvfs.policies import named
from kvfs.tools.cli import EXIT_INTERRUPTED
from kvfs.tools.simulate import hints as hinting
from kvfs.tools.simulate import options, table
from kvfs.tools.simulate.comparing import OPTIMUM, Comparison
from kvfs.tools.simulate.report import Machine
from kvfs.tools.simulate.sizes import DEFAULT_BYTES_PER_TOKEN, bytes_per_token
from kvfs.tools.simulate.traces import STDIN, Reading, Trace, read
from kvfs.tools.words import format_count

EXAMPLES = """
kvfs simulate conversation.jsonl.gz --ram 5%

How many tokens of the prompts a RAM cache of a twentieth of the trace would have had, with three policies and with the
best that is possible.

kvfs simulate week/*.jsonl --ram 64GiB --nvme 1TiB --policy learned,lru --model Llama-3-8B/config.json

Both tiers, sizes from a model, and how much the drive would be written a day.

kvfs simulate week.jsonl --ram 64GiB --nvme 1TiB --policy lru --admission second-use --write-budget 500GiB

The same with fewer writes: what that saves the drive, and what it costs in hits. As for kvfs mount.

kvfs simulate week.jsonl --ram 64GiB --nvme 1TiB --policy lru --queue-time 2s --nvme-bandwidth 6GiB --prefill-rate 8000

Requests that wait two seconds for their turn, while what they will load comes from NVMe into RAM; and times to the first
token on a machine of yours. kvfs bench says what its tiers give.

kvfs simulate sessions.jsonl.gz --ram 2% --session-gap 300s --json | jq '.[] | {policy, hit_rate}'

Sessions without dates, begun five minutes apart on average.

kvfs simulate conversation.jsonl.gz --ram 5% --hints closed

What it would be worth if the engine said when a conversation is over. With --hints expect: that an agent waits for a tool.

kvfs simulate week.jsonl.gz --ram 64GiB --policy lru,learned,opt --plot pictures/

Pictures too: hit rate over time, by request, by room; reuse, lengths, distances. What `kvfs record` wrote will do as a trace.

A trace has one JSON object a line, gzipped or not: Mooncake's {"timestamp": ms, "input_length": tokens, "hash_ids": [block, ...]}, or
sessions {"block_size": tokens, "requests": [{"t": s, "in": tokens, "hash_ids": [...]}, ...]}. Lines of the first kind may also have
"block_size", and "namespace" with its "bytes_per_token", as those of `kvfs record` do. Several files share one cache, and no prefix; - is the standard input. Each block counts as a whole one.
"""

Flag = typer.Option
_STEP = 64  # requests between two looks at the bar


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
            show_default=f"what a recording says, else {DEFAULT_BYTES_PER_TOKEN}, an 8B model",
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
    prefill_rate: Annotated[
        float,
        Flag(metavar="TOKENS", help="Tokens a second that the engine computes; 10,000 are an 8B model on a large GPU."),
    ] = 10_000.0,
    admission: Annotated[
        str, Flag(metavar="always|second-use", help="Which chunks are written to NVMe, as for kvfs mount.")
    ] = "always",
    write_budget: Annotated[
        str | None, Flag(metavar="SIZE", show_default="no bound", help="Most that is written to NVMe a day (UTC).")
    ] = None,
    queue_time: Annotated[
        str,
        Flag(
            metavar="TIME", help="A request waits so long, its chunks are prefetched meanwhile. Not part of the TTFT."
        ),
    ] = "0s",
    load_chunks: Annotated[
        int,
        Flag(
            metavar="N",
            show_default="all of a prompt",
            help="Chunks that an engine loads at a time; what follows is read ahead meanwhile.",
        ),
    ] = 0,
    hints: Annotated[
        str | None,
        Flag(
            metavar="closed,expect",
            help="Tell the policy, after each request, what of it is never asked for again; what is within a minute.",
        ),
    ] = None,
    plot: Annotated[
        str | None, Flag(metavar="DIR", help="Draw what was found there, and curves of room against hits (PNG).")
    ] = None,
    as_json: Annotated[bool, Flag("--json", help="For programs: a list, one object a policy.")] = False,
) -> None:
    """Replay recorded requests through the tiers and policies of the store, and say what they would have found.

    Policies, tiers, admission and prefetching are those of `kvfs mount`, their very code. Times are predicted for one request
    alone: bytes at the bandwidth of their tier, then the rest of the prompt at the prefill rate. Ctrl-C shows what there is so far.
    """
    makers = options.policies(policy)
    options.check_numbers(prefill_rate, bytes_a_token, tokens_per_chunk)
    rule, budget_bytes = options.admission(admission, write_budget, nvme)
    pace = options.pace(queue_time, load_chunks, nvme)
    given = hinting.parse(hints) if hints is not None else frozenset()
    asked_for = bytes_a_token or (bytes_per_token(Path(model)) if model is not None else None)
    bandwidths = (
        options.bandwidth("--ram-bandwidth", ram_bandwidth),
        options.bandwidth("--nvme-bandwidth", nvme_bandwidth),
    )
    machine = Machine(*bandwidths, prefill_rate, asked_for or DEFAULT_BYTES_PER_TOKEN)
    reading = Reading(tokens_per_chunk, parse_duration(session_gap, "--session-gap"), seed, asked_for)
    draw = _drawing(Path(plot)) if plot is not None else None
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    trace: Trace | None = None
    comparison: Comparison | None = None
    is_interrupted = False
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            trace = _read([Path(name) for name in traces], reading, bar)
            setting = options.setting(trace, machine, ram, nvme, rule, budget_bytes, pace, given)
            comparison = Comparison(setting, options.for_trace(makers, trace), _watching(bar, len(trace.requests)))
            comparison.run()
            if draw is not None:
                comparison.draw_curves()
    except KeyboardInterrupt:
        is_interrupted = True
    results = [*comparison.results.values()] if comparison is not None else []
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(results)).decode())
    elif comparison is not None and results:
        table.show(comparison.setting, results)
    if draw is not None and comparison is not None and results:
        what = "both tiers" if comparison.setting.nvme_bytes else "RAM"
        for path in draw(comparison.setting.trace, comparison.tallies, comparison.curves, comparison.capacity, what):
            typer.echo(str(path), err=True)
    if trace is not None and not trace.is_uniform and comparison is not None and OPTIMUM in makers:
        typer.echo(
            f"{OPTIMUM} is left out: it is known for chunks of one size only, and the namespaces of this trace differ",
            err=True,
        )
    if trace is not None and trace.num_out_of_order and not as_json:
        typer.echo(
            f"{format_count(trace.num_out_of_order, 'line')} came earlier than the one before; all were played in order of time",
            err=True,
        )
    if is_interrupted:
        if not results:
            typer.echo("kvfs: interrupted before a request was played: there is nothing to show", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)


def _drawing(directory: Path) -> Callable[..., list[Path]]:
    """What draws there. Raises UsageError without matplotlib, or where nothing can be written, before anything takes time."""
    from kvfs.tools.simulate import plot

    plot.check(directory)
    return partial(plot.draw, directory)


def _watching(bar: Progress, num_requests: int) -> Callable[[str, Iterator[None]], Iterator[None]]:
    """A bar for each replay."""

    def watch(name: str, steps: Iterator[None]) -> Iterator[None]:
        task = bar.add_task(name, total=num_requests)
        try:
            for index, _ in enumerate(steps):
                if not index % _STEP:
                    bar.update(task, completed=index)
                yield
        finally:
            bar.remove_task(task)

    return watch


def _read(paths: list[Path], reading: Reading, bar: Progress) -> Trace:
    try:
        total = sum(path.stat().st_size for path in paths if path != STDIN)
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from error
    task = bar.add_task("reading", total=total or None)
    trace = read(paths, reading, lambda amount: bar.advance(task, amount))
    bar.remove_task(task)
    return trace
