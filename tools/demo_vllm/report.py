"""What the demo shows: the table, and what it makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvfs.tools.demo_vllm.runs import Run

MEANING = {
    "computed": "nothing was stored",
    "own_cache": "vLLM's own prefix cache, in the same process",
    "same_server": "from kvfs, after vLLM's own cache was emptied",
    "new_server": "from kvfs, in another process, after the first had ended",
}
BAR = 1.15


def table(runs: Mapping[str, Run]) -> Table:
    """The runs, one a line."""
    shown = Table(title="Time to first token", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("run", "TTFT", "÷ own_cache", "tokens", "reused", ""):
        shown.add_column(heading, justify="left" if heading in ("run", "") else "right")
    for run in runs.values():
        ratio = run.ttft_ms / runs["own_cache"].ttft_ms
        shown.add_row(
            run.run, f"{run.ttft_ms:,.0f} ms", f"{ratio:.2f}", f"{run.tokens:,}", f"{run.tokens_reused:,}",
            MEANING[run.run],
        )  # fmt: skip
    return shown


def verdict(runs: Mapping[str, Run]) -> list[str]:
    """How the times compare with what they should be; a busy machine may miss a bar, so this fails nothing."""
    lines = []
    for name in ("same_server", "new_server"):
        ratio = runs[name].ttft_ms / runs["own_cache"].ttft_ms
        word = "within" if ratio <= BAR else "[bold]above[/bold]"
        factor = runs["computed"].ttft_ms / runs[name].ttft_ms
        lines.append(
            f"{name}: {factor:.0f} × faster than computed; {ratio:.2f} × own_cache, {word} the bar of {BAR:g} ×"
        )
    return lines


def load_ms(metrics: Iterable[str]) -> float:
    """What a server's loads took, by its /metrics: from their order to their end, all together."""
    name = "vllm:kvfs_load_microseconds_total"
    return sum(float(line.rpartition(" ")[2]) for line in metrics if line.startswith(name)) / 1000


def mistakes(runs: Mapping[str, Run], tokens_per_chunk: int) -> list[str]:
    """What makes the demo fail: other tokens than computed, or chunks that were not reused."""
    found = []
    for run in runs.values():
        if not run.answer or run.answer != runs["computed"].answer:
            found.append(f"the run {run.run} generated other tokens than the run computed")
        wanted = 0 if run.run == "computed" else run.tokens // tokens_per_chunk * tokens_per_chunk
        if run.tokens_reused != wanted:
            found.append(f"the run {run.run} reused {run.tokens_reused} tokens, not {wanted}")
    return found
