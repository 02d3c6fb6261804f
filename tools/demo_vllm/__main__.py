"""The demo: prepare, mount, serve, ask, show, clean up.

Exit codes: 0, 1 if a run was wrong or could not be made, 130 after Ctrl-C. Whatever happens, the servers are ended, the
mount is taken away and its directory removed.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import msgspec
from rich.console import Console

from kvfs.errors import KvfsError
from kvfs.tools.demo import model
from kvfs.tools.demo.entry import keep_logs, run_demo, write_result
from kvfs.tools.demo.mounting import NVME, RAM, Mount, scratch_directory
from kvfs.tools.demo_vllm import report
from kvfs.tools.demo_vllm.finding import find_vllm
from kvfs.tools.demo_vllm.runs import NUM_TOKENS, Run, Task
from kvfs.tools.demo_vllm.server import SERVED_NAME, serve

TOKENS_PER_CHUNK = 256
FLAGS = (
    "--dtype", "float32", "--max-model-len", "4096", "--max-num-batched-tokens", "4096", "--block-size", "256",
    "--enable-prompt-tokens-details",
)  # fmt: skip


def run(console: Console, out: Path) -> int:
    """Run the demo and write `out`; returns the exit code."""
    python = find_vllm()
    with console.status("preparing the model") as status:
        directory = model.prepare(status.update)
    console.print(f"vLLM: {python}", highlight=False, soft_wrap=True)
    console.print(f"model: {model.NAME}, float32, {directory}", highlight=False, soft_wrap=True)
    with scratch_directory(out.parent) as scratch:
        mount = Mount(scratch)
        try:
            with console.status("mounting kvfs"):
                mount.start()
            console.print(f"mount: {mount.path}, {RAM} of RAM, {NVME} on disk", highlight=False, soft_wrap=True)
            console.print(f"prompt: {NUM_TOKENS:,} tokens, asked with the OpenAI client", highlight=False)
            runs: dict[str, Run] = {}
            metrics = _ask(console, python, directory, mount, scratch, ["computed", "own_cache", "same_server"], runs)
            metrics = _ask(console, python, directory, mount, scratch, ["new_server"], runs) or metrics
            write_result(out, list(runs.values()))
            return _show(console, runs, metrics, out)
        except KvfsError as error:
            kept = keep_logs(scratch.glob("*.log"), out.parent / "logs")
            raise KvfsError(f"{error}; see {kept}") from error
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # no second Ctrl-C while it cleans up
            with console.status("unmounting"):
                mount.destroy()


def _ask(
    console: Console, python: str, directory: Path, mount: Mount, scratch: Path, names: list[str], runs: dict[str, Run]
) -> list[str]:
    """Start a server, do some runs, end it; the connector's lines in its /metrics."""
    log = scratch / f"server-{names[0]}.log"
    with console.status("starting a vLLM server") as status, serve(python, directory, mount.path, log, FLAGS) as server:
        status.update(f"asking: {names[0]}")
        task = msgspec.json.encode(Task(server.url, SERVED_NAME, str(directory), names)).decode()
        lines = server.ask("kvfs.tools.demo_vllm.asking", task, scratch / f"asking-{names[0]}.log")
        for number, line in enumerate(lines):
            made = msgspec.json.decode(line, type=Run)
            runs[made.run] = made
            console.print(
                f"  {made.run}: {made.ttft_ms:,.0f} ms, {made.tokens_reused:,} tokens reused", highlight=False
            )
            status.update(f"asking: {names[number + 1]}" if number + 1 < len(names) else "ending the server")
        return server.metrics("vllm:kvfs_")


def _show(console: Console, runs: dict[str, Run], metrics: list[str], out: Path) -> int:
    console.print()
    console.print(report.table(runs))
    for line in report.verdict(runs):
        console.print(line, highlight=False)
    console.print(f"new_server: {report.load_ms(metrics):,.0f} ms of it were its load from kvfs", highlight=False)
    console.print("\n[bold]$ curl -s …/metrics | grep kvfs_hit_tokens[/bold]", highlight=False)
    for line in metrics:
        if line.startswith("vllm:kvfs_hit_tokens_total"):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    mistakes = report.mistakes(runs, TOKENS_PER_CHUNK)
    for mistake in mistakes:
        console.print(f"[bold red]wrong:[/bold red] {mistake}", highlight=False)
    console.print(f"result: {out}", highlight=False, soft_wrap=True)
    return 1 if mistakes else 0


def main() -> int:
    """Entry point of `python -m kvfs.tools.demo_vllm`."""
    return run_demo("kvfs-demo-vllm", "One prompt through two vLLM servers.", "demo/vllm.json", run)


if __name__ == "__main__":
    sys.exit(main())
