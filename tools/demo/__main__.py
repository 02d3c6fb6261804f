"""The demo: prepare, mount, run, show, clean up.

Exit codes: 0, 1 if a run was wrong or could not be made, 130 after Ctrl-C. Whatever happens, the mount is taken away,
the processes that were started are ended, and their directory is removed.
"""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path

from rich.console import Console

from kvfs.errors import KvfsError
from kvfs.tools.demo import model, report
from kvfs.tools.demo.entry import keep_logs, run_demo, write_result
from kvfs.tools.demo.mounting import NVME, RAM, Mount, scratch_directory
from kvfs.tools.demo.processes import run_worker
from kvfs.tools.demo.prompt import NUM_TOKENS
from kvfs.tools.demo.runs import REPETITIONS, Answer, Run, median

TOKENS_PER_CHUNK = 256


def run(console: Console, out: Path) -> int:
    """Run the demo and write `out`; returns the exit code."""
    with console.status("preparing the model") as status:
        directory = model.prepare(status.update)
    console.print(f"model: {model.NAME}, float32, {directory}", highlight=False, soft_wrap=True)
    with scratch_directory(out.parent) as scratch:
        mount = Mount(scratch)
        try:
            runs, text = _measure(console, mount, directory, scratch)
            write_result(out, list(runs.values()))
            return _show(console, mount, runs, text, out)
        except KvfsError as error:
            kept = keep_logs(scratch.glob("*.log"), out.parent / "logs")
            raise KvfsError(f"{error}; see {kept}") from error
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # no second Ctrl-C while it cleans up
            with console.status("unmounting"):
                mount.destroy()


def _measure(console: Console, mount: Mount, directory: Path, scratch: Path) -> tuple[dict[str, Run], str]:
    """All runs, by name, and what the model answered."""
    found: dict[str, list[Run]] = {name: [] for name in report.MEANING}

    def work(kind: str, note: str = "") -> Answer:
        with console.status(f"{kind}{note}") as status:
            answer = run_worker(
                kind,
                mount.path,
                directory,
                scratch / f"{kind}.log",
                lambda stage: status.update(f"{kind}{note}: {stage}"),
            )
        for made in answer.runs:
            found[made.run].append(made)
        last = found[kind][-1]
        console.print(f"  {kind}{note}: {last.ttft_ms:,.0f} ms, {last.tokens_reused:,} tokens reused", highlight=False)
        return answer

    with console.status("mounting kvfs"):
        mount.start()
    console.print(f"mount: {mount.path}, {RAM} of RAM, {NVME} on disk", highlight=False, soft_wrap=True)
    console.print(f"prompt: {NUM_TOKENS:,} tokens of text; each run in a process of its own", highlight=False)
    answer = work("cold")
    work("warm")
    for number in range(REPETITIONS):
        with console.status("stopping and starting the daemon"):
            mount.stop()
            mount.start()
        work("restarted", f" {number + 1} of {REPETITIONS}")
    prefix = mount.prefix(answer.prefix)
    shutil.rmtree(prefix)
    console.print(f"$ rm -rf {prefix.relative_to(mount.path)}", highlight=False, soft_wrap=True)
    work("evicted")
    return {name: median(runs) for name, runs in found.items()}, answer.text


def _show(console: Console, mount: Mount, runs: dict[str, Run], text: str, out: Path) -> int:
    console.print()
    console.print(report.table(runs))
    console.print(f"answer: {text.strip()!r}", highlight=False, markup=False, soft_wrap=True)
    for line in report.verdict(runs):
        console.print(line, highlight=False)
    console.print()
    report.look(console, mount.path)
    mistakes = report.mistakes(runs, TOKENS_PER_CHUNK)
    for mistake in mistakes:
        console.print(f"[bold red]wrong:[/bold red] {mistake}", highlight=False)
    console.print(f"result: {out}", highlight=False, soft_wrap=True)
    return 1 if mistakes else 0


def main() -> int:
    """Entry point of `python -m kvfs.tools.demo`."""
    return run_demo("kvfs-demo", "One prompt, cold, warm, restarted and evicted.", "demo/result.json", run)


if __name__ == "__main__":
    sys.exit(main())
