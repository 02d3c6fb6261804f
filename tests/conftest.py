"""Guards around every test: nothing is left behind, and nothing unexpected is logged.

What a test may leave is said with a mark: ``@pytest.mark.leaves("a mount")``. What it may log at WARNING or above is
said with ``@pytest.mark.expect_log("a regular expression")`` or, inside the test, with the fixture `expect_log`.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

END_DEADLINE_S = 5.0  # for processes and mounts that are on their way out when a test ends
# A shell that puts a command in the background lets it ignore Ctrl-C, and so would all it starts, the daemons and demos
# of our tests among them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def _mounts(temporary: Path) -> set[str]:
    """Mounts below the run's temporary directory, the only place where tests mount."""
    lines = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines()
    return {f"mount on {path}" for path in (line.split()[4] for line in lines) if Path(path).is_relative_to(temporary)}


def _shared_memory(_: Path) -> set[str]:
    """Files in /dev/shm, those of other programs aside."""
    names = [name for name in os.listdir("/dev/shm") if name.startswith(("kvfs", "psm_", "torch_"))]
    return {f"shared memory /dev/shm/{name}" for name in names}


def _children(_: Path) -> set[str]:
    """Processes that this one started and that have not ended, or that nobody waited for."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except OSError:
            continue
        for pid in pids:
            try:
                command = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if not any(helper in command for helper in _HELPERS):
                found.add(f"process {pid} {command[:200] or '(ended, nobody waited for it)'}")
    return found


_TRACES: dict[str, Callable[[Path], set[str]]] = {
    "a mount": _mounts,
    "shared memory": _shared_memory,
    "a process": _children,
}


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a test that leaves a mount, a file in /dev/shm or a child process behind."""
    allowed = {mark.args[0] for mark in request.node.iter_markers("leaves")}
    watched = {what: look for what, look in _TRACES.items() if what not in allowed}
    temporary = tmp_path_factory.getbasetemp()
    before = {what: look(temporary) for what, look in watched.items()}
    yield
    deadline = time.monotonic() + END_DEADLINE_S
    while left := sorted(trace for what, look in watched.items() for trace in look(temporary) - before[what]):
        if time.monotonic() > deadline:
            pytest.fail("the test left behind: " + "; ".join(left))
        time.sleep(0.02)


class _Unexpected(logging.Handler):
    """Keeps records at WARNING and above that match none of `patterns`."""

    def __init__(self, patterns: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.patterns = patterns
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(f"{record.levelname} {record.name}: {record.getMessage()}")

    def unexpected(self) -> list[str]:
        return [text for text in self.records if not any(re.search(pattern, text) for pattern in self.patterns)]


@pytest.fixture(autouse=True)
def expect_log(request: pytest.FixtureRequest) -> Iterator[Callable[[str], None]]:
    """Fail a test that logs a warning or an error which it did not announce; call it to announce one."""
    handler = _Unexpected([mark.args[0] for mark in request.node.iter_markers("expect_log")])
    root = logging.getLogger()
    root.addHandler(handler)
    yield handler.patterns.append
    root.removeHandler(handler)
    if found := handler.unexpected():
        pytest.fail("unexpected in the log: " + "; ".join(found[:5]))
