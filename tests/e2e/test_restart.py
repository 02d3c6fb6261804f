"""A RAM tier that outlives its daemon, as an operator sees it: an upgrade, a kill, giving the memory back; and sync."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs import kept
from kvfs.mount.sockets import directory_for
from kvfs.testing import DEADLINE_S, wait_until

from .conftest import Daemon, Engine

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount the tmpfs of an arena that is kept")
AUTO = "--huge-pages=auto"


def kvfs(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvfs.tools.cli", *arguments]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=DEADLINE_S, cwd="/",
        env={**os.environ, "COLUMNS": "250"},  # so that no table breaks its lines
    )  # fmt: skip


@pytest.fixture
def place(daemon: Daemon) -> Iterator[Path]:
    place = Path(directory_for(str(daemon.path), str(daemon.run_directory)), kept.DIRECTORY_NAME)
    yield place
    if daemon.process is not None:
        daemon.stop()
    if kept.is_mounted(place):
        kept.remove(place)


def num_chunks(daemon: Daemon, engine: Engine) -> int:
    return len(os.listdir(engine.chunks)) if engine.chunks.exists() else 0


@needs_root
def test_an_upgrade(daemon: Daemon, place: Path, engines: Callable[[Path], Engine]) -> None:
    """`umount --keep-ram`, mount: a RAM cache has all it had; an ordinary umount then gives the memory back."""
    daemon.start(AUTO, nvme=None)
    engine = engines(daemon.path)
    engine.store("abc")
    result = kvfs("umount", str(daemon.path), "--keep-ram")
    assert (result.returncode, result.stderr) == (0, "")
    assert "16.0 MiB of RAM stay for the next mount there" in result.stdout
    assert daemon.ended() == 0
    result = kvfs("status", str(daemon.path))
    assert result.returncode == 2
    assert "16.0 MiB of RAM stay for the next mount there with --ram 16MiB; `kvfs umount" in result.stderr
    everywhere = " ".join(kvfs("status").stdout.split())
    assert "16.0 MiB of RAM stay for the next mount there with --ram 16MiB" in everywhere
    daemon.start(AUTO, nvme=None)
    wait_until(lambda: num_chunks(daemon, engine) == 3, "the chunks are taken over")
    wait_until(lambda: engine.client.match(engine.chains("abc")).count == 3, "the engine has attached again")
    engine.load("abc")
    wait_until(lambda: "took 3 chunks" in daemon.log, "the log says so")
    result = kvfs("umount", str(daemon.path))
    assert result.returncode == 0
    assert daemon.ended() == 0
    assert not place.exists()


@needs_root
def test_a_daemon_that_was_killed(daemon: Daemon, place: Path, engines: Callable[[Path], Engine]) -> None:
    """What was dirty is there at the next mount; a removed chunk is not; `umount` of a dead mount gives all back."""
    daemon.start(AUTO)
    engine = engines(daemon.path)
    engine.store("abcd")
    engine.file("abcd").unlink()
    daemon.stop(signal.SIGKILL)
    daemon.start(AUTO)
    wait_until(lambda: num_chunks(daemon, engine) == 3, "the chunks are taken over")
    wait_until(lambda: engine.client.match(engine.chains("abcd")).count == 3, "the engine has attached again")
    engine.load("abc")
    daemon.stop(signal.SIGKILL)
    assert "16.0 MiB of RAM stay" in kvfs("status", str(daemon.path)).stderr
    result = kvfs("umount", str(daemon.path))
    assert result.returncode == 0, result.stderr
    assert "16.0 MiB of RAM, kept for the next mount" in result.stdout
    assert not place.exists()
    assert kvfs("umount", str(daemon.path)).returncode == 2


@pytest.mark.heavy
@needs_root
def test_giving_back_without_a_mount(daemon: Daemon, place: Path) -> None:
    """Kept, and nobody mounts again: `umount` clears it, `destroy` of the volume too, and a living daemon keeps its own."""
    for give_back in (["umount", str(daemon.path)], ["destroy", str(daemon.directory / "volume"), "--yes"]):
        daemon.start(AUTO)
        assert not kept.remove_if_left(place)
        assert kvfs("umount", str(daemon.path), "--keep-ram").returncode == 0
        assert daemon.ended() == 0
        assert kept.is_mounted(place)
        result = kvfs(*give_back)
        assert result.returncode == 0, result.stderr
        assert not place.exists()


@pytest.mark.heavy
@needs_root
def test_two_daemons_and_other_settings(daemon: Daemon, place: Path, engines: Callable[[Path], Engine]) -> None:
    """A second daemon is refused and harms nothing; other sizes of RAM begin empty, and the log says so."""
    daemon.start(AUTO, nvme=None)
    engine = engines(daemon.path)
    engine.store("abc")
    assert "already mounted" in daemon.refusal(AUTO)
    assert kept.is_mounted(place)
    engine.load("abc")
    daemon.stop(signal.SIGKILL)
    daemon.start(AUTO, ram="32MiB", nvme=None)
    assert (
        "WARNING kvfs.kept: 3 chunks, 24.0 KiB, that were in RAM since the daemon before this one could not be"
        in daemon.log
    )
    assert "ram was 16MiB then and is 32MiB now, and only a mount with the ram of before takes it over" in daemon.log
    assert num_chunks(daemon, engine) == 0


def test_a_memfd_cannot_be_kept(mounted: Daemon) -> None:
    """It is said at the start, and where it is asked for."""
    assert "a sealed memfd: it ends with this daemon" in mounted.log
    result = kvfs("umount", str(mounted.path), "--keep-ram")
    assert result.returncode == 2
    assert "cannot outlive its daemon" in result.stderr
    assert mounted.process is not None
    assert mounted.process.poll() is None


def test_sync(mounted: Daemon, engine: Engine) -> None:
    """After `kvfs sync`, and after the fsync of a directory or a file, nothing of it is dirty."""
    ways = [
        lambda: json.loads(kvfs("sync", str(mounted.path), "--json").stdout)["has_nvme"],
        lambda: kvfs("sync", str(mounted.path)).returncode == 0,
        lambda: fsync(engine.directory),
        lambda: fsync(engine.prefixes),
        lambda: subprocess.run(["sync", str(engine.chunks)], check=True, timeout=DEADLINE_S),
    ]
    for number, way in enumerate(ways):
        path = chr(ord("a") + number) * 3
        engine.store(path)
        assert way()
        assert {os.getxattr(engine.file(path[:end]), "user.kvfs.dirty") for end in (1, 2, 3)} == {b"0"}
    engine.store("xyz")
    assert fsync(engine.file("xyz"))
    assert os.getxattr(engine.file("xyz"), "user.kvfs.dirty") == b"0"


def fsync(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return True


def test_sync_of_a_ram_cache(daemon: Daemon) -> None:
    """There is nothing to wait for."""
    daemon.start(nvme=None)
    result = kvfs("sync", str(daemon.path))
    assert result.returncode == 0
    assert "is a RAM cache" in result.stdout


@pytest.mark.heavy
@needs_root
def test_what_other_settings_drop_is_said_at_the_mount(
    daemon: Daemon, place: Path, engines: Callable[[Path], Engine], tmp_path: Path
) -> None:
    """On the terminal: what went, why, and what would have kept it; by the size of RAM, and by the volumes."""

    def mount(*flags: str) -> str:
        result = kvfs(
            "mount", str(daemon.path), AUTO, f"--socket-directory={daemon.run_directory}", "--background", *flags
        )
        assert result.returncode == 0, result.stderr
        return result.stderr

    one, two = f"--nvme={tmp_path}/one:16MiB", f"--nvme={tmp_path}/two:16MiB"
    assert mount("--ram=16MiB", one) == ""
    engines(daemon.path).store("abc")
    assert kvfs("umount", str(daemon.path), "--keep-ram").returncode == 0
    assert mount("--ram=16MiB", one) == ""
    assert kvfs("umount", str(daemon.path), "--keep-ram").returncode == 0
    what = (
        "kvfs: 3 chunks, 24.0 KiB, that were in RAM since the daemon before this one could not be taken over and went: "
    )
    assert mount("--ram=16MiB", two) == (
        f"{what}it belongs to {tmp_path}/one, and only a mount with the volumes of before takes it over\n"
    )
    engines(daemon.path).store("abc")
    assert kvfs("umount", str(daemon.path), "--keep-ram").returncode == 0
    assert mount("--ram=24MiB", two) == (
        f"{what}ram was 16MiB then and is 24MiB now, and only a mount with the ram of before takes it over; "
        "what NVMe has is there\n"
    )
    assert kvfs("umount", str(daemon.path)).returncode == 0
