"""What the demo shows: the table, the verdict, and the mount as plain commands see it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvfs.tools.demo.runs import Run

MEANING = {
    "cold": "computed, then stored",
    "warm": "from RAM",
    "in_memory": "the engine kept it",
    "restarted": "from NVMe",
    "evicted": "computed again",
}
BARS = {"warm": 1.25, "restarted": 1.5}


def table(runs: Mapping[str, Run]) -> Table:
    """The runs, one a line."""
    shown = Table(title="Time to first token", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading, justify in (
        ("run", "left"), ("TTFT", "right"), ("÷ in_memory", "right"), ("tokens", "right"), ("reused", "right"),
        ("tier", "left"), ("", "left"),
    ):  # fmt: skip
        shown.add_column(heading, justify=justify)  # type: ignore[arg-type]
    ceiling = runs["in_memory"].ttft_ms
    for run in runs.values():
        shown.add_row(
            run.run, f"{run.ttft_ms:,.0f} ms", f"{run.ttft_ms / ceiling:.2f}", f"{run.tokens:,}",
            f"{run.tokens_reused:,}", run.tier, MEANING[run.run],
        )  # fmt: skip
    return shown


def mistakes(runs: Mapping[str, Run], tokens_per_chunk: int) -> list[str]:
    """What makes the demo fail: other tokens than computed, or chunks that were not reused."""
    found = []
    for run in runs.values():
        if run.output_sha256 != runs["cold"].output_sha256:
            found.append(f"the run {run.run} generated other tokens than the run cold")
        expected = "warm" in run.run or run.run == "restarted"
        if expected and run.tokens_reused < run.tokens // tokens_per_chunk * tokens_per_chunk:
            found.append(f"the run {run.run} reused {run.tokens_reused} tokens, not every full chunk")
        if run.run in ("cold", "evicted") and run.tokens_reused:
            found.append(f"the run {run.run} reused {run.tokens_reused} tokens, and nothing should have been there")
    for name, tier in (("warm", "ram"), ("restarted", "nvme")):
        if runs[name].tier != tier:
            found.append(f"the run {name} loaded from {runs[name].tier}, not from {tier}")
    return found


def verdict(runs: Mapping[str, Run]) -> list[str]:
    """How the times compare with what they should be; a busy machine may miss a bar, so this fails nothing."""
    lines = [f"warm is {runs['cold'].ttft_ms / runs['warm'].ttft_ms:.0f} × faster than cold"]
    for name, bar in BARS.items():
        ratio = runs[name].ttft_ms / runs["in_memory"].ttft_ms
        word = "within" if ratio <= bar else "[bold]above[/bold]"
        lines.append(f"{name} took {ratio:.2f} × in_memory, {word} the bar of {bar:g} ×")
    return lines


def look(console: Console, mount: Path) -> None:
    """Show the mount with `ls`, `getfattr` and `df`."""
    namespace = next(path for path in sorted(mount.iterdir()) if (path / "namespace.json").exists())
    chunk = min((namespace / "chunks").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for command in (
        ["ls", "-l", "."],
        ["ls", "-l", f"{namespace.name}/chunks"],
        ["getfattr", "-d", f"{namespace.name}/chunks/{chunk.name}"],
        ["df", "-h", "."],
    ):
        console.print(f"[bold]$ {' '.join(command)}[/bold]", highlight=False, soft_wrap=True)
        environment = {**os.environ, "LC_ALL": "C.UTF-8"}
        try:
            done = subprocess.run(command, cwd=mount, capture_output=True, text=True, check=False, env=environment)
            said = (done.stdout or done.stderr).rstrip()
        except FileNotFoundError:
            said = f"{command[0]} is not installed"
        console.print(said, highlight=False, markup=False, soft_wrap=True)
        console.print()
