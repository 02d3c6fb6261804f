"""kill -9 of a benchmark: what it started ends with it, and the next one clears away what it left."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.mount import mountpoint
from kvfs.testing import DEADLINE_S, processes, wait_until
from kvfs.tools.bench.scratch import lock_above, scratch_below
from kvfs.tools.tied import tied

from .conftest import KVFS, kvfs


def mounts_below(path: Path) -> list[str]:
    return [mount.path for mount in mountpoint.mounts() if Path(mount.path).is_relative_to(path)]


@pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse")
def test_a_killed_benchmark(tmp_path: Path) -> None:
    """Its daemon unmounts and ends; its files go with the next benchmark in the same directory."""
    with subprocess.Popen(
        [KVFS, "bench", "million", "--num-chunks=100000", f"--dir={tmp_path}"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            wait_until(lambda: mounts_below(tmp_path) or process.poll() is not None, "its daemon has mounted")
            assert process.poll() is None
        finally:
            process.kill()
    wait_until(lambda: not mounts_below(tmp_path), "the daemon has unmounted")

    def is_unused() -> bool:
        with open(next(tmp_path.glob("kvfs-bench-*/.in-use")), "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    wait_until(is_unused, "the daemon has ended")
    [left] = tmp_path.iterdir()
    with scratch_below(tmp_path) as path:
        assert list(tmp_path.iterdir()) == [path]
        assert left != path
    assert not list(tmp_path.iterdir())


def test_what_is_in_use_is_not_cleared_away(tmp_path: Path) -> None:
    """Nor what is no scratch directory of a benchmark; a daemon in one keeps it, also when its benchmark is dead."""
    other = tmp_path / "kvfs-bench-of-mine"
    other.mkdir()
    with scratch_below(tmp_path) as first, scratch_below(tmp_path) as second:
        assert {other, first, second} == set(tmp_path.iterdir())
        lock = lock_above(str(first / "mount-x"))
        assert Path(lock).parent == first
        command = tied(["sleep", "600"], signal.SIGTERM, lock)
        (first / "kept").touch()
    assert lock_above(str(tmp_path)) == ""
    left = tmp_path / "kvfs-bench-left"
    left.mkdir()
    lock = str(left / ".in-use")
    Path(lock).touch()
    command[command.index("sleep") - 1] = lock
    with subprocess.Popen(command) as process:
        try:
            wait_until(lambda: "sleep" in processes.command_line(process.pid).split()[:1], "it has become the command")
            with scratch_below(tmp_path):
                assert left.exists()
        finally:
            process.kill()
    with scratch_below(tmp_path):
        assert not left.exists()
    assert list(tmp_path.iterdir()) == [other]


def test_a_tied_process_ends_with_its_parent(tmp_path: Path) -> None:
    """By the signal that it was tied with; what its parent started is not signalled while that lives."""
    script = f"""
import os, signal, subprocess, sys
from kvfs.tools.tied import tied
child = "import signal, sys; signal.sigwait({{signal.SIGTERM}}); open({str(tmp_path / "told")!r}, 'w')"
masked = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}}); print('up', flush=True); " + child
process = subprocess.Popen(tied([sys.executable, "-c", masked], signal.SIGTERM), stdout=subprocess.PIPE)
process.stdout.readline()
print(process.pid, flush=True)
signal.pause()
""".replace("{{", "{").replace("}}", "}")
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert processes.is_alive(child)
        assert not (tmp_path / "told").exists()
        parent.kill()
    wait_until((tmp_path / "told").exists, "the child was told", DEADLINE_S)
    wait_until(lambda: not processes.is_alive(child), "the child has ended")


def test_one_whose_parent_is_gone_already_does_not_begin() -> None:
    command = tied(["echo", "begun"], signal.SIGTERM)
    command[command.index("echo") - 3] = "1"
    done = subprocess.run(command, capture_output=True, check=True, timeout=DEADLINE_S)
    assert done.stdout == b""


def test_a_benchmark_says_what_it_needs(tmp_path: Path) -> None:
    """A directory that is not there is one sentence."""
    told = kvfs("bench", "million", f"--dir={tmp_path}/none")
    assert told.returncode == 2
    assert told.stderr.count("\n") == 1


@pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse")
def test_the_mount_of_a_killed_demo_ends(tmp_path: Path) -> None:
    """That of `kvfs bench vllm`, too: it is unmounted, and written, by a daemon that ends; it begins again before that."""
    script = """
import signal, sys
from pathlib import Path
from kvfs.tools.demo.mounting import Mount
mount = Mount(Path(sys.argv[1]), "16MiB", "16MiB")
mount.start()
mount.stop()
mount.start()
print("up", flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as demo:
        try:
            assert demo.stdout is not None
            assert demo.stdout.readline() == "up\n"
            assert mounts_below(tmp_path) == [f"{tmp_path}/mnt"]
        finally:
            demo.kill()
    wait_until(lambda: not mounts_below(tmp_path), "the daemon has unmounted")
    wait_until(lambda: "ended" in (tmp_path / "daemon.log").read_text().splitlines()[-1], "it has ended in order")
