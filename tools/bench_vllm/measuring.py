"""Makes the runs: mounts, serves, asks, and takes everything away again.

Whatever happens, the servers are ended, the mount is taken away and its directory removed; after Ctrl-C, too.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvfs.errors import KvfsError
from kvfs.tools import mounted
from kvfs.tools.bench.scratch import scratch_below
from kvfs.tools.bench_vllm.asking import Task
from kvfs.tools.bench_vllm.results import Answer, Line, Pass, PassOver
from kvfs.tools.bench_vllm.runs import Plan
from kvfs.tools.demo.entry import keep_logs
from kvfs.tools.demo.mounting import Mount
from kvfs.tools.demo_vllm.server import SERVED_NAME, serve
from kvfs.tools.interrupting import interruptible

LOGS = "kvfs-bench-vllm-logs"
Say = Callable[[str, int], None]
"""Is told what is being done, and how many more requests are answered."""


def measure(plan: Plan, directory: Path, say: Say, done: Callable[[Pass], None]) -> None:
    """Make all runs; `done` is told each pass when it is over. All files lie in `directory`, after an error only the logs."""
    with interruptible() as ignore, scratch_below(directory) as scratch:
        mount: Mount | None = None
        try:
            for run in plan.runs:
                if run != "restarted":
                    if mount is not None:
                        shutil.rmtree(mount.path.parent)
                    sizes = plan.mount_sizes(run)
                    mount = _make(scratch, run, *sizes) if sizes is not None else None
                if mount is not None:
                    say(f"{run}: mounting kvfs", 0)
                    mount.start()
                _serve(plan, run, mount, scratch, say, done)
                if mount is not None:
                    say(f"{run}: unmounting", 0)
                    mount.stop()
        except KvfsError as error:
            logs = [*scratch.glob("*.log"), *scratch.glob("*/*.log")]  # mounts lie below that
            raise KvfsError(f"{error}; see {keep_logs(logs, directory / LOGS)}") from error
        finally:
            ignore()
            if mount is not None:
                mount.destroy()


def _serve(plan: Plan, run: str, mount: Mount | None, scratch: Path, say: Say, done: Callable[[Pass], None]) -> None:
    """One run: a server of its own, asked everything as often as the plan says."""
    say(f"{run}: starting vLLM", 0)
    path, log = mount.path if mount is not None else None, scratch / f"server-{run}.log"
    with serve(plan.python, Path(plan.model), path, log, plan.server_flags(run)) as server:
        task = Task(server.url, SERVED_NAME, plan.model, plan.workload, plan.num_passes, run)
        lines = server.ask(
            "kvfs.tools.bench_vllm.asking", msgspec.json.encode(task).decode(), scratch / f"asking-{run}.log"
        )
        answers: list[Answer] = []
        number, before = 1, _counters(mount)
        with contextlib.closing(lines):
            for raw in lines:
                line = msgspec.json.decode(raw, type=Line)
                if isinstance(line, Answer):
                    answers.append(line)
                    say(f"{run}: pass {number}", 1)
                elif isinstance(line, PassOver):
                    now = _counters(mount)
                    done(Pass.of(run, number, answers, line, dict(now - before)))
                    answers, number, before = [], number + 1, now
                else:
                    say(f"{run}: {line.stage}", 0)
                    before = _counters(mount)
        say(f"{run}: ending vLLM", 0)


def _counters(mount: Mount | None) -> Counter[str]:
    """The counters of kvfs."""
    return Counter(mounted.read_status(str(mount.path))["counters"]) if mount is not None else Counter()


def _make(scratch: Path, run: str, ram: str, nvme: str | None) -> Mount:
    directory = scratch / run
    directory.mkdir()
    return Mount(directory, ram, nvme)
