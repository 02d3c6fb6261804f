"""Guards around every test: nothing is left behind, and nothing unexpected is logged.

What a test may leave is said with a mark: ``@pytest.mark.leaves("a mount")``. After the whole run, and with no
exceptions, nothing of it may be left on the machine: no mount, no process however far it went into the background, no
shared memory, no socket directory, no temporary directory. Other runs on the same machine are told apart. What it may log at WARNING or above is
said with ``@pytest.mark.expect_log("a regular expression")`` or, inside the test, with the fixture `expect_log`.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvfs.config import default_socket_directory
from kvfs.mount.sockets import directory_for
from kvfs.testing import processes

END_DEADLINE_S = 20.0  # for processes and mounts that are on their way out when a test ends
# A shell that puts a command in the background lets it ignore Ctrl-C, and so would all it starts, the daemons and demos
# of our tests among them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says what else the machine does. The examples are the same at every run, so that a change
# fails for what it does and not by chance; with KVFS_FUZZ set they are others each time.
settings.register_profile(
    "kvfs", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="KVFS_FUZZ" not in os.environ
)
settings.load_profile("kvfs")

RUN = f"kvfs-{os.getpid()}-"
"""Temporary directories of this run that lie elsewhere begin with it."""
_MARK = f"KVFS_TEST_RUN={RUN}"
os.environ.update([_MARK.split("=")])  # whatever the run starts inherits it, and all that those start
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def _mounts(temporary: Path) -> set[str]:
    """Mounts below the run's temporary directory, the only place where tests mount."""
    lines = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines()
    below = f"{temporary}/"
    return {f"mount on {path}" for path in (line.split()[4] for line in lines) if path.startswith(below)}


def _shared_memory(_: Path) -> set[str]:
    """Files in /dev/shm, those of other programs aside."""
    names = [name for name in os.listdir("/dev/shm") if name.startswith(("kvfs", "psm_", "torch_"))]
    return {f"{_SHARED}{name}" for name in names}


_SHARED = "shared memory /dev/shm/"


def _others_have(traces: set[str]) -> set[str]:
    """Of files in /dev/shm those that a process of somebody else has mapped, or whose name has its number."""
    found: set[str] = set()
    wanted = {trace for trace in traces if trace.startswith(_SHARED)}
    if not wanted:
        return found
    for pid in processes.pids():
        if pid != os.getpid() and _MARK.encode() not in processes.environment(pid):
            maps = processes.maps(pid)
            found |= {trace for trace in wanted if f"/dev/shm/{trace.removeprefix(_SHARED)}" in maps}
            found |= {trace for trace in wanted if str(pid) in re.findall(r"\d+", trace)}
    return found


def _descriptors(temporary: Path) -> set[str]:
    """Descriptors of this process for FUSE, and for files of the run. (Memory lives as long as anybody's view of it.)"""
    return {
        f"descriptor {number} of {target}"
        for number, target in processes.open_files(os.getpid())
        if target.startswith(("/dev/fuse", str(temporary)))
    }


def _children(_: Path) -> set[str]:
    """Processes that this one started and that have not ended, or that nobody waited for."""
    commands = {pid: processes.command_line(pid) for pid in processes.children()}
    return {
        f"process {pid} {command[:200] or '(ended, nobody waited for it)'}"
        for pid, command in commands.items()
        if not any(helper in command for helper in _HELPERS)
    }


_TRACES: dict[str, Callable[[Path], set[str]]] = {
    "a mount": _mounts,
    "shared memory": _shared_memory,
    "a process": _children,
    "a descriptor": _descriptors,
}


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a test that leaves a mount, a file in /dev/shm, a child process or a descriptor behind."""
    allowed = {mark.args[0] for mark in request.node.iter_markers("leaves")}
    watched = {what: look for what, look in _TRACES.items() if what not in allowed}
    temporary = tmp_path_factory.getbasetemp()
    before = {what: look(temporary) for what, look in watched.items()}
    yield
    deadline = time.monotonic() + END_DEADLINE_S
    while left := {trace for what, look in watched.items() for trace in look(temporary) - before[what]}:
        left -= _others_have(left)
        if not left:
            break
        gc.collect()
        if time.monotonic() > deadline:
            pytest.fail("the test left behind: " + "; ".join(sorted(left)))
        time.sleep(0.02)


def _processes_of_the_run() -> set[str]:
    """Every process that has the run's mark and is not about to end with this one, whoever its parent is now."""
    found = set()
    for pid in processes.pids():
        if pid != os.getpid() and _MARK.encode() in processes.environment(pid):
            command = processes.command_line(pid)
            if not any(helper in command for helper in _HELPERS):
                found.add(f"process {pid} {command[:200]}")
    return found


def _socket_directories(temporary: Path) -> set[str]:
    """What daemons on mounts of this run left where sockets lie unless told otherwise."""
    parent = default_socket_directory()
    names = set(os.listdir(parent)) if os.path.isdir(parent) else set()
    if not names:
        return names
    paths = (os.path.join(top, name) for top, inner, _ in os.walk(temporary) for name in inner)
    return {f"{parent}/{name}" for name in names & {os.path.basename(directory_for(path, "")) for path in paths}}


@pytest.fixture(scope="session", autouse=True)
def _the_run_leaves_nothing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail the run that leaves anything on the machine."""
    temporary = tmp_path_factory.getbasetemp()
    shared = _shared_memory(temporary)
    yield
    deadline = time.monotonic() + END_DEADLINE_S
    while True:
        left = _mounts(temporary) | _processes_of_the_run() | _socket_directories(temporary)
        left |= {str(path) for path in Path(tempfile.gettempdir()).glob(f"{RUN}*")}
        new = _shared_memory(temporary) - shared
        left |= new - _others_have(new)
        if not left:
            return
        if time.monotonic() > deadline:
            pytest.fail("the run left behind: " + "; ".join(sorted(left)))
        time.sleep(0.1)


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
