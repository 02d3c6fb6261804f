"""The results for people: what was asked, of which tiers, and a line for each policy."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from rich.console import Console
from rich.table import Table

from kvfs.config import format_size
from kvfs.tools.simulate.comparing import Setting
from kvfs.tools.simulate.report import Result
from kvfs.tools.simulate.traces import Trace
from kvfs.tools.words import format_count, format_duration

_MIN_WIDTH = 120
_NONE = "–"
_PREFETCHED = {"begun": "begun", "useful": "useful", "wasted": "wasted", "dropped": "not begun in time"}


def show(setting: Setting, results: Sequence[Result]) -> None:
    """Print all of it."""
    trace, chunk_bytes = setting.trace, setting.chunk_bytes
    parts = [
        f"{format_count(len(trace.requests), 'request')} in {format_duration(trace.seconds)}",
        f"{format_count(trace.num_references, 'chunk')} asked for, {trace.num_chunks:,} different",
        f"of {_tokens(trace)} tokens, {format_size(chunk_bytes)} {'each' if trace.is_uniform else 'on average'}",
    ]
    typer.echo("; ".join(parts))
    tiers = [("RAM", setting.ram_bytes), *([("NVMe", setting.nvme_bytes)] if setting.nvme_bytes else [])]
    typer.echo(
        ", ".join(f"{name} {format_size(size)} = {format_count(size // chunk_bytes, 'chunk')}" for name, size in tiers)
    )
    if setting.hints:
        told = " and ".join(sorted(setting.hints))
        typer.echo(f"hints from what the trace knows of the future: {told}; + marks who heeds them")
    _print([{"policy": _name(found), **_found(found)} for found in results])
    restricted = [found for found in results if found.always_admitted is not None]
    if restricted:
        typer.echo("\nadmission: what it saves NVMe, and what that costs")
        _print([{"policy": _name(found), **_admission(found)} for found in restricted])
    _prefetched(results, "while requests waited", "prefetches")
    _prefetched(results, "because a chain goes on with them", "read_aheads")


def _tokens(trace: Trace) -> str:
    found = sorted({tokens for tokens, _ in trace.namespaces}) or [trace.tokens_per_chunk]
    return " or ".join(map(str, found))


def _prefetched(results: Sequence[Result], why: str, prefix: str) -> None:
    rows = [
        {"policy": _name(of), **{said: f"{getattr(of, f'{prefix}_{name}'):,}" for name, said in _PREFETCHED.items()}}
        for of in results
        if getattr(of, f"{prefix}_begun")
    ]
    if rows:
        typer.echo(f"\nchunks prefetched {why}")
        _print(rows)


def _print(rows: Sequence[dict[str, str]]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    Console(width=max(Console().width, _MIN_WIDTH)).print(table)


def _name(of: Result) -> str:
    return of.policy + "".join(f" +{hint}" for hint in of.hints) + (" (so far)" if of.is_partial else "")


def _found(of: Result) -> dict[str, str]:
    return {
        "tokens found": _percent(of.token_hit_rate),
        "in RAM": _percent(of.ram_token_hit_rate),
        "on NVMe": _percent(of.nvme_token_hit_rate),
        "loaded": format_size(of.loaded_ram_bytes + of.loaded_nvme_bytes),
        "NVMe writes a day": _size(of.written_bytes_a_day),
        "TTFT mean": _seconds(of.ttft_s.get("mean")),
        "p99": _seconds(of.ttft_s.get("p99")),
        "input tokens/s": f"{of.input_tokens_s:,.0f}",
    }


def _admission(of: Result) -> dict[str, str]:
    always = of.always_admitted
    assert always is not None
    return {
        "tokens found without it": _percent(always.token_hit_rate),
        "with it": _percent(of.token_hit_rate),
        "price in points": f"{100 * (always.token_hit_rate - of.token_hit_rate):.2f}",
        "NVMe writes a day without it": _size(always.written_bytes_a_day),
        "with": _size(of.written_bytes_a_day),
        "TTFT mean without": _seconds(always.ttft_s.get("mean")),
    }


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _size(num_bytes: float | None) -> str:
    return _NONE if num_bytes is None else format_size(round(num_bytes))


def _seconds(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"
