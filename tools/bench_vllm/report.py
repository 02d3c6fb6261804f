"""What is shown: the table, and how the runs compare with the bars."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table

import kvfs
from kvfs.tools.bench_vllm.results import Pass, Ratio, ratios
from kvfs.tools.bench_vllm.runs import MEANING, Plan

BAR_TTFT = 1.2
BAR_INPUT = 0.85
BAR_RESTARTED = 0.5
CLAIMED = "claimed for LMCache on such workloads: TTFT −68…−79 %, input throughput +179…+264 %"
ALONE, CEILING = "vllm", "ceiling"


class Bar(msgspec.Struct, frozen=True):
    """One comparison that should hold. Attributes: what, in words; value; limit; is_met."""

    what: str
    value: float
    limit: float
    is_met: bool


class Result(msgspec.Struct, frozen=True):
    """All of it, as `--json` shows it."""

    kvfs: str
    platform: str
    plan: Plan
    passes: list[Pass]
    ratios: list[Ratio]
    bars: list[Bar]


def result(plan: Plan, passes: Sequence[Pass]) -> Result:
    """What the passes come to."""
    beside = [*ratios(passes, CEILING), *ratios(passes, ALONE)]
    where = f"Python {platform.python_version()}, Linux {platform.release()}"
    return Result(kvfs.__version__, where, plan, list(passes), beside, bars(passes))


def bars(passes: Sequence[Pass]) -> list[Bar]:
    """The comparisons of first passes for which runs were made."""
    found = []
    first = {each.run: each for each in passes if each.number == 1}
    beside = {each.run: each for each in ratios(list(first.values()), CEILING)}
    for run in ("ram", "ram_nvme"):
        if run in beside and _from_kvfs(first[run]):
            ttft, speed = beside[run].ttft, beside[run].input_tokens_s
            found.append(Bar(f"{run}: mean TTFT ÷ ceiling, at most", ttft, BAR_TTFT, ttft <= BAR_TTFT))
            found.append(Bar(f"{run}: input tokens/s ÷ ceiling, at least", speed, BAR_INPUT, speed >= BAR_INPUT))
    if "restarted" in beside and _from_kvfs(first["restarted"]):
        ttft = beside["restarted"].ttft
        found.append(Bar("restarted: mean TTFT ÷ ceiling, at most", ttft, BAR_RESTARTED, ttft <= BAR_RESTARTED))
    return found


def _from_kvfs(one: Pass) -> int:
    return one.counts.ram + one.counts.nvme


def times(found: Result) -> Table:
    """The passes, one a line, with their times."""
    headings = ("TTFT ms", "p50", "p99", "end to end", "p50", "p99", "input/s")
    shown = _table("kvfs bench vllm: mean times, input tokens a second", headings)
    for each in found.passes:
        values = (
            *msgspec.structs.astuple(each.ttft_ms),
            *msgspec.structs.astuple(each.latency_ms),
            each.input_tokens_s,
        )
        _add(shown, found, each, [f"{value:,.0f}" for value in values])
    return shown


def comparison(found: Result) -> Table:
    """The passes, one a line: ratios to the ceiling and to vLLM alone, and where the prompts' tokens came from."""
    headings = (
        "TTFT\n÷ ceil.",
        "input/s\n÷ ceil.",
        "TTFT\n÷ vllm",
        "input/s\n÷ vllm",
        "com-\nputed",
        "engine",
        "ram",
        "nvme",
    )
    shown = _table("÷ the same pass of another run; prompt tokens by where their KV was", headings)
    beside = {(each.run, each.number, each.beside): each for each in found.ratios}
    for each in found.passes:
        against = [beside.get((each.run, each.number, name)) for name in (CEILING, ALONE)]
        tokens = [_thousands(each, name) for name in ("computed", "engine", "ram", "nvme")]
        _add(shown, found, each, [*(text for ratio in against for text in _both(ratio)), *tokens])
    return shown


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("run", no_wrap=True)
    for heading in ("pass", *headings):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _add(table: Table, found: Result, each: Pass, cells: Sequence[str]) -> None:
    table.add_row(each.run, str(each.number), *cells, end_section=each.number == found.plan.num_passes)


def _both(ratio: Ratio | None) -> tuple[str, str]:
    return (f"{ratio.ttft:.2f}", f"{ratio.input_tokens_s:.2f}") if ratio is not None else ("", "")


def _thousands(each: Pass, name: str) -> str:
    tokens: int = getattr(each.counts, name)
    if not tokens:
        return "·"
    return f"{tokens / 1000:.1f}k" if tokens < 10_000 else f"{tokens // 1000:,}k"


def remarks(found: Result) -> list[str]:
    """What stands below the table."""
    work = found.plan.workload
    lines = [
        f"{work.num_groups} groups × {work.prompts_per_group} prompts, {work.system_prompt_len:,} + {work.question_len} "
        f"tokens in, {work.output_len} out, concurrency {work.max_concurrency}, seed {work.seed}; {found.plan.dtype}, "
        f"engine cache for {found.plan.engine_prefixes} of the system prompts",
        *(f"{run:9} {MEANING[run]}" for run in found.plan.runs),
        "pass 1    nothing is there but what a restart left; pass 2: the same requests again, at the same server",
    ]
    lines += [
        f"{bar.what} {bar.limit:g}: {bar.value:.2f}, {'met' if bar.is_met else '[bold]missed[/bold]'}"
        for bar in found.bars
    ]
    lines += [
        f"{each.run}, pass {each.number}: no token came from kvfs, so there is nothing to judge: vLLM's own cache held what "
        "was asked for (--engine-prefixes)"
        for each in found.passes
        if each.run not in (ALONE, CEILING) and not _from_kvfs(each)
    ]
    alone = [each for each in found.ratios if each.beside == ALONE and each.run != CEILING]
    lines += [
        f"{each.run}, pass {each.number}, against vLLM alone: TTFT {each.ttft - 1:+.0%}, "
        f"input throughput {each.input_tokens_s - 1:+.0%}"
        for each in alone
    ]
    if alone:
        lines.append(CLAIMED)
    lines += [
        f"{each.run}, pass {each.number}: {each.daemon['promotions']} chunks were read from NVMe, of which "
        f"{each.daemon.get('prefetches_useful', 0)} were in RAM before they were asked for"
        for each in found.passes
        if each.daemon.get("promotions")
    ]
    lines += [f"[bold]{line}[/bold]" for line in complaints(found)]
    lines.append(f"kvfs {found.kvfs}, {found.platform}")
    return lines


def complaints(found: Result) -> list[str]:
    """What of the connector's work was lost in a pass, and makes its figures worse than they need be."""
    lost = {
        "loads_failed": "loads did not arrive in time or whole, and were computed",
        "chunks_refused": "chunks were refused",
        "chunks_dropped": "chunks were not stored because too many were waiting",
        "not_worth_it": "prefixes were computed though they were stored: that was measured to be cheaper",
        "bypasses": "requests were of a kind that kvfs does not serve",
    }
    return [
        f"{each.run}, pass {each.number}: {each.counts.connector[name]} {words}"
        for each in found.passes
        for name, words in lost.items()
        if each.counts.connector.get(name)
    ]
