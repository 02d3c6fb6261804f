"""The life of a daemon: it ends cleanly, takes over what a killed one left, and refuses what cannot be."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvfs.client import Client
from kvfs.errors import UnavailableError
from kvfs.mount import mountpoint
from kvfs.testing import DEADLINE_S, tiny_namespace


def is_mounted(daemon: Any) -> bool:
    return mountpoint.mount_at(str(daemon.path)) is not None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_everything_is_written(daemon: Any, engines: Any, number: signal.Signals) -> None:
    daemon.start()
    engines(daemon.path).store("abc")
    assert daemon.stop(number) == 0
    assert not is_mounted(daemon)
    assert os.listdir(daemon.path) == []
    assert os.listdir(daemon.run_directory) == []
    daemon.start()
    again = engines(daemon.path)
    assert os.getxattr(again.file("abc"), "user.kvfs.tier") == b"nvme"
    assert again.file("abc").read_bytes()[-4096:-2048] == b"c" * 2048
    again.load("abc")


def kvfs(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvfs.tools.cli", *map(str, words)]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=DEADLINE_S, cwd="/"
    )


def test_a_daemon_that_still_writes_is_shown(daemon: Any, engines: Any, wait: Any) -> None:
    """Status says how much is left, with an exit code of its own; umount waits for it; a mount says what to do."""
    daemon.start()
    index = sqlite3.connect(daemon.directory / "volume/index.sqlite", isolation_level=None)
    umount = None
    try:
        engine = engines(daemon.path)
        engine.store("a")
        wait(lambda: os.getxattr(engine.file("a"), "user.kvfs.dirty") == b"0", "it is on NVMe")
        index.execute("BEGIN IMMEDIATE")  # nothing can become durable
        engine.store("abc")
        pid = daemon.pid
        os.kill(pid, signal.SIGTERM)
        wait(lambda: list(daemon.run_directory.glob("*/ending.json")), "it is ending")
        wait(lambda: not is_mounted(daemon), "it is unmounted")
        said = kvfs("status", daemon.path)
        assert (said.returncode, said.stderr) == (3, "")
        sentence = (
            f"kvfs: the daemon of {daemon.path} (process {pid}) is ending: 2 chunks, 16.0 KiB, are still to be written"
        )
        assert said.stdout == f"{sentence} to NVMe\n"
        document = json.loads(kvfs("status", daemon.path, "--json").stdout)
        assert document == {
            "mountpoint": str(daemon.path), "state": "ending", "pid": pid, "num_dirty": 2, "dirty_bytes": 16384,
        }  # fmt: skip
        everywhere = kvfs("status")
        assert f"(process {pid}) is ending" in " ".join(everywhere.stdout.split())
        assert "another kvfs daemon is ending and writes what is dirty: `kvfs umount` waits" in daemon.refusal()
        umount = subprocess.Popen(
            [sys.executable, "-m", "kvfs.tools.cli", "umount", str(daemon.path)],
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        assert umount.stderr is not None
        assert umount.stderr.readline().startswith(sentence)
    finally:
        index.rollback()
        index.close()
        if umount is not None:
            umount.communicate(timeout=DEADLINE_S)
    assert umount.returncode == 0
    assert daemon.ended() == 0
    assert kvfs("status", daemon.path).returncode == 2
    assert os.listdir(daemon.run_directory) == []


@pytest.mark.heavy
@pytest.mark.parametrize("first", ["a signal", "kvfs umount"])
def test_a_second_signal_does_not_end_it_while_it_writes(daemon: Any, engines: Any, wait: Any, first: str) -> None:
    """Nor does the one that `kvfs umount` sends after a second: what is dirty is written as soon as that is possible."""
    daemon.start()
    index = sqlite3.connect(daemon.directory / "volume/index.sqlite", isolation_level=None)
    umount = None
    try:
        engines(daemon.path).store("a")
        index.execute("BEGIN IMMEDIATE")  # nothing can become durable
        engines(daemon.path).store("abc")
        if first == "a signal":
            os.kill(daemon.pid, signal.SIGTERM)
        else:
            umount = subprocess.Popen([sys.executable, "-m", "kvfs.tools.cli", "umount", str(daemon.path)], cwd="/")
        wait(lambda: not is_mounted(daemon), "it is unmounted")
        if umount is not None:
            wait(lambda: "got SIGTERM: stopping already" in daemon.log, "umount has asked it to end")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(daemon.pid, number)
            wait(lambda number=number: f"got {number.name}: stopping already" in daemon.log, f"it got {number.name}")
        assert daemon.process.poll() is None
    finally:
        index.rollback()
        index.close()
        if umount is not None:
            assert umount.wait(DEADLINE_S) == 0
    assert daemon.ended() == 0
    daemon.start()
    again = engines(daemon.path)
    assert os.getxattr(again.file("abc"), "user.kvfs.tier") == b"nvme"
    again.load("abc")


def test_an_unmount_from_outside_ends_it(daemon: Any, engines: Any) -> None:
    daemon.start()
    engines(daemon.path).store("abc")
    assert mountpoint.unmount(str(daemon.path))
    assert daemon.ended() == 0
    assert os.listdir(daemon.run_directory) == []
    daemon.start()
    engines(daemon.path).load("abc")


def test_a_busy_mount_is_detached(daemon: Any, engines: Any) -> None:
    daemon.start()
    engine = engines(daemon.path)
    engine.store("a")
    descriptor = os.open(engine.file("a"), os.O_RDONLY)
    try:
        assert len(os.read(descriptor, 8)) == 8
        assert daemon.stop() == 0
        assert not is_mounted(daemon)
        with pytest.raises(OSError, match="not connected"):
            os.fstat(descriptor)
    finally:
        with contextlib.suppress(OSError):  # closing, too, finds nobody at the other end
            os.close(descriptor)
    assert f"{daemon.path} is busy" in daemon.log
    daemon.start()
    engines(daemon.path).load("a")


def test_what_a_killed_daemon_left_is_cleared(daemon: Any, engines: Any, wait: Any) -> None:
    """Its mount, its socket; what was clean is there again."""
    daemon.start()
    engine = engines(daemon.path)
    engine.store("abc")
    wait(lambda: os.getxattr(engine.file("abc"), "user.kvfs.dirty") == b"0", "the chunks are clean")
    assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
    assert is_mounted(daemon)
    with pytest.raises(OSError, match="Transport endpoint is not connected"):
        os.listdir(daemon.path)
    assert os.listdir(daemon.run_directory) != []
    daemon.start()
    assert f"clearing the mount on {daemon.path} that a dead daemon left" in daemon.log
    assert sum(mount.path == str(daemon.path) for mount in mountpoint.mounts()) == 1
    engines(daemon.path).load("abc")
    assert daemon.stop() == 0
    assert not is_mounted(daemon)


def test_what_cannot_be_mounted_on_is_refused(daemon: Any, tmp_path: Path) -> None:
    daemon.path.mkdir()
    (daemon.path / "x").touch()
    assert "is not empty" in daemon.refusal()
    (daemon.path / "x").unlink()
    daemon.path.rmdir()
    daemon.path.touch()
    assert "is not a directory" in daemon.refusal()
    assert os.listdir(daemon.run_directory) == []


def test_a_mount_that_the_system_refuses(daemon: Any) -> None:
    """The store is open by then: it is closed again, and there is a sentence and no traceback."""
    if os.geteuid() != 0:
        pytest.skip("only root can hide /dev/fuse from a process")
    hidden = ["unshare", "--mount", "sh", "-c", 'mount --bind /dev/null /dev/fuse && exec "$@"', "sh"]
    result = subprocess.run(
        [*hidden, *daemon.command()], capture_output=True, text=True, check=False, timeout=60, cwd="/"
    )
    assert result.returncode == 2, result.stderr
    assert f"kvfs: cannot mount on {daemon.path}" in result.stderr
    assert "Traceback" not in result.stderr
    assert os.listdir(daemon.run_directory) == []
    daemon.start()


def test_a_second_daemon_is_refused(mounted: Any, engine: Any) -> None:
    """On the same mount point, and on the same volume."""
    engine.store("a")
    assert f"kvfs is already mounted on {mounted.path}" in mounted.refusal()
    first, mounted.path = mounted.path, mounted.directory / "other"
    try:
        told = mounted.refusal()
    finally:
        mounted.path = first
    assert "volume" in told
    assert mountpoint.mount_at(str(mounted.directory / "other")) is None
    assert len(os.listdir(mounted.run_directory)) == 1
    engine.load("a")


@pytest.mark.heavy
def test_a_stopped_daemon_is_not_mistaken_for_a_dead_one(mounted: Any, engine: Any) -> None:
    engine.store("a")
    os.kill(mounted.pid, signal.SIGSTOP)
    try:
        assert f"mounted on {mounted.path} does not answer" in mounted.refusal()
    finally:
        os.kill(mounted.pid, signal.SIGCONT)
    engine.load("a")


def test_closing_a_file_waits_for_a_stopped_daemon(mounted: Any, engine: Any, reap: Any) -> None:
    """It says what became of what was written, so it has to ask. Who has no file open is not concerned."""
    engine.store("a")
    script = "import os, sys; f = os.open(sys.argv[1], 0); print('open', flush=True); sys.stdin.read(); os.close(f); print('closed')"
    command = [sys.executable, "-c", script, engine.file("a")]
    reader = reap(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    assert reader.stdout.readline() == b"open\n"
    os.kill(mounted.pid, signal.SIGSTOP)
    try:
        reader.stdin.close()
        subprocess.run(["true"], check=True, timeout=DEADLINE_S)
        assert reader.poll() is None
    finally:
        os.kill(mounted.pid, signal.SIGCONT)
    assert reader.stdout.read() == b"closed\n"


def test_a_killed_reader_gives_its_lease_back(mounted: Any, engine: Any, reap: Any, wait: Any) -> None:
    engine.store("a")
    script = "import os, sys, time; f = open(sys.argv[1], 'rb'); f.read(1); print('open', flush=True); time.sleep(600)"
    reader = reap(subprocess.Popen(["python3", "-c", script, engine.file("a")], stdout=subprocess.PIPE))
    assert reader.stdout.readline() == b"open\n"

    def num_leases() -> int:
        return int(json.loads((mounted.path / ".kvfs/status.json").read_bytes())["num_leases"])

    assert num_leases() == 1
    reader.kill()
    wait(lambda: num_leases() == 0, "the lease ends")


def test_the_mount_point_may_have_a_blank_in_its_name(daemon: Any, engines: Any) -> None:
    daemon.path = daemon.directory / "a mount\\point"
    daemon.start()
    engines(daemon.path).store("a")
    assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
    daemon.start()
    assert daemon.stop() == 0
    assert not is_mounted(daemon)


def test_rotten_bytes_are_never_shown(daemon: Any, engines: Any, wait: Any) -> None:
    """A bit that flipped on the volume is an error to whoever reads the file, and the chunk is dropped."""
    daemon.start()
    engines(daemon.path).store("abc")
    assert daemon.stop() == 0
    volume = daemon.directory / "volume" / "volume"
    data = bytearray(volume.read_bytes())
    data[data.index(b"b" * 2048) + 1234] ^= 1
    volume.write_bytes(data)
    daemon.start()
    engine = engines(daemon.path)
    assert engine.file("a").read_bytes()[-4096:-2048] == b"a" * 2048
    with pytest.raises(OSError, match="Input/output error"):
        engine.file("ab").read_bytes()
    wait(lambda: not engine.file("ab").exists(), "its name goes")
    events = [json.loads(line) for line in (daemon.path / ".kvfs/events").read_text().splitlines()]
    assert [event["event"] for event in events if event.get("key") == engine.key("ab")] == ["corrupt"]
    assert engine.client.match(engine.chains("abc")).count == 1


def is_attached(client: Client) -> bool:
    """Whether it attaches now, within its deadline."""
    try:
        client.attach()
    except UnavailableError:
        return False
    return True


@pytest.mark.heavy
@pytest.mark.leaves("a mount")  # the stopped daemon's, until it is killed
def test_a_mount_that_hangs_does_not_hide_what_is_mounted_there_later(daemon: Any, tmp_path: Path, wait: Any) -> None:
    """One thread waits for a stopped daemon; the mount that took its place is asked by another."""
    daemon.start()
    client = Client(daemon.path, tiny_namespace(), deadline_s=0.3)
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        for _ in range(3):
            with pytest.raises(UnavailableError, match="did not answer within"):
                client.attach()
        assert sum(thread.name == "kvfs-attach" for thread in threading.enumerate()) == 1
        assert mountpoint.unmount(str(daemon.path), lazy=True)
        second = type(daemon)(tmp_path, tmp_path / "s")
        second.start(nvme=None)
        try:
            wait(lambda: is_attached(client), "the other mount is asked")
            client.close()
        finally:
            second.clean_up()
    finally:
        daemon.process.kill()
        daemon.process.wait()
        daemon.process = None
    wait(lambda: not any(thread.name == "kvfs-attach" for thread in threading.enumerate()), "the thread has ended")
