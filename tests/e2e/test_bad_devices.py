"""Mounts whose device fails or hangs: what goes on, what ends with one sentence, and what an end says of what is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvfs.mount import mountpoint
from kvfs.testing import DEADLINE_S

from .conftest import Daemon

SECONDS = 4.0  # a step of the end, and how long a device may not answer


class FaultyDaemon(Daemon):
    """See `faulty_daemon`. Attributes: seconds."""

    seconds = SECONDS

    def command(self, *flags: str, ram: str = "16MiB", nvme: str | None = "16MiB") -> list[str]:
        python, _, _, *words = super().command(*flags, ram=ram, nvme=nvme)
        script = Path(__file__).with_name("faulty_daemon.py")
        return [python, str(script), str(self.directory), str(self.seconds), *words]

    def tell(self, what: str, volume: str = "volume") -> None:
        """Let a volume "hang" or "fail"."""
        part = self.directory / f"{what}.part"
        part.write_text(str(self.directory / volume))
        part.rename(self.directory / what)

    def status(self) -> Any:
        return json.loads((self.path / ".kvfs/status.json").read_bytes())


@pytest.fixture
def faulty(daemon: Daemon) -> Any:
    """A daemon that can be told."""
    faulty = FaultyDaemon(daemon.directory, daemon.run_directory)
    yield faulty
    for what in ("hang", "fail"):
        faulty.directory.joinpath(what).unlink(missing_ok=True)
    faulty.clean_up()


def kvfs(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvfs.tools.cli", *map(str, words)]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=DEADLINE_S, cwd="/"
    )


def test_umount_says_what_a_failing_device_lost(faulty: FaultyDaemon, engines: Any) -> None:
    """How many chunks and bytes, why, and exit code 1; the daemon says the same. Nothing of it is left behind."""
    faulty.start()
    faulty.tell("fail")
    engines(faulty.path).store("abc")
    size = faulty.status()["dirty_bytes"]
    said = kvfs("umount", faulty.path)
    assert (said.returncode, said.stdout) == (1, "")
    sentence = f"3 chunks, {size >> 10}.0 KiB, could not be written to NVMe and are lost: [Errno 5] Input/output error"
    [line] = [line for line in said.stderr.splitlines() if "waiting" not in line]
    assert line.startswith(f"kvfs: {faulty.path} is unmounted, but {sentence} (the volume in ")
    assert faulty.ended() == 1
    assert sentence in faulty.log
    assert os.listdir(faulty.run_directory) == []
    faulty.directory.joinpath("fail").unlink()
    faulty.seconds = DEADLINE_S
    faulty.start()
    assert faulty.status()["num_chunks"] == 0
    assert kvfs("umount", faulty.path).stderr == ""
    assert faulty.ended() == 0


@pytest.mark.heavy
@pytest.mark.skipif(os.geteuid() != 0, reason="only a daemon of root has an arena that outlives it")
def test_ram_that_has_what_nvme_lacks_is_given_back_when_forced(faulty: FaultyDaemon, engines: Any) -> None:
    """An end that could not write is exit code 1 also where RAM stays; the next mount has it, or somebody gives it up."""
    faulty.start("--huge-pages=auto")
    faulty.tell("fail")
    engines(faulty.path).store("abc")
    said = kvfs("umount", faulty.path)
    assert said.returncode == 1
    assert "could not be written to NVMe and stay in RAM, for the next mount here" in said.stderr
    faulty.ended()
    refused = kvfs("umount", faulty.path)
    assert refused.returncode == 2
    assert "has 3 chunks" in refused.stderr
    assert "--force" in refused.stderr
    forced = kvfs("umount", faulty.path, "--force")
    assert forced.returncode == 0
    assert "are given back" in forced.stdout
    assert kvfs("umount", faulty.path).returncode == 2, "nothing is left"


@pytest.mark.heavy
def test_a_signal_says_it_too(faulty: FaultyDaemon, engines: Any) -> None:
    """In the foreground, on stderr; the next daemon there does not say it again."""
    faulty.start()
    faulty.tell("fail")
    engines(faulty.path).store("ab")
    assert faulty.stop() == 1
    assert "kvfs: 2 chunks, " in faulty.log
    faulty.directory.joinpath("fail").unlink()
    faulty.seconds = DEADLINE_S
    faulty.start()
    engines(faulty.path).store("ab")
    told = kvfs("umount", faulty.path)
    assert (told.returncode, told.stderr) == (0, "")
    assert faulty.ended() == 0


@pytest.mark.heavy
def test_a_volume_that_hangs(faulty: FaultyDaemon, engines: Any, wait: Any) -> None:
    """Hits, other volumes, stores, ls and status go on; changes end with a sentence; so does umount, and the daemon."""
    faulty.seconds = 2 * SECONDS  # which a busy machine has for the other volume
    second = f"--nvme={faulty.directory}/second:16MiB"
    faulty.start(second)
    engine = engines(faulty.path)
    engine.store("abcdefgh")
    wait(lambda: not faulty.status()["num_dirty"], "all of it is on NVMe")
    places = {path: os.getxattr(engine.file(path), "user.kvfs.volume").decode() for path in _prefixes("abcdefgh")}
    good, bad = ([path for path, place in places.items() if place.endswith(name)] for name in ("volume", "second"))
    assert good
    assert bad
    faulty.tell("hang", "second")
    engine.load("abcdefgh")
    engine.store("xyzuvw")
    assert len(os.listdir(engine.chunks)) == 14
    os.unlink(engine.file(good[-1]))
    with pytest.raises(OSError, match="Input/output error"):
        os.unlink(engine.file(bad[-1]))
    assert not engine.file(bad[-1]).exists()
    quota = kvfs("quota", faulty.path, engine.directory.name, "8MiB")
    assert quota.returncode == 0, quota.stderr
    removed = kvfs("rm", faulty.path, engine.directory.name, "--all")
    assert (removed.returncode, removed.stdout) == (1, "")
    assert removed.stderr.splitlines()[-1].endswith(
        "fails or does not answer, so this may not outlive the daemon; `kvfs status` says which"
    )
    wait(lambda: faulty.status()["volumes"][1]["is_degraded"], "it is said which volume that is")
    engine.store("pqrstuvw")
    begin = time.monotonic()
    said = kvfs("umount", faulty.path, "--timeout", "50")
    assert time.monotonic() - begin < 50
    assert said.returncode == 1, said
    assert "could not be written to NVMe and are lost" in said.stderr
    assert f"has not answered for {faulty.seconds:g} s" in said.stderr
    assert faulty.ended() == 1
    assert mountpoint.mount_at(str(faulty.path)) is None
    assert os.listdir(faulty.run_directory) == []


@pytest.mark.heavy
def test_a_daemon_that_is_told_to_end_while_its_device_hangs(
    faulty: FaultyDaemon, engines: Any, reap: Any, wait: Any
) -> None:
    """SIGTERM, with a reader in it and nothing dirty: mount and process go all the same."""
    faulty.seconds = DEADLINE_S
    faulty.start()
    engines(faulty.path).store("ab")
    assert faulty.stop() == 0
    faulty.seconds = SECONDS
    faulty.start()
    engine = engines(faulty.path)
    faulty.tell("hang")
    reader = reap(subprocess.Popen(["cat", engine.file("ab")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    wait(faulty.directory.joinpath("waits").exists, "the device is asked")
    assert faulty.stop(signal.SIGTERM) == 1
    assert "a device does not answer, so this process ends as it is" in faulty.log
    assert mountpoint.mount_at(str(faulty.path)) is None
    assert reader.wait(DEADLINE_S) != 0


def test_a_killed_warm_gives_back_what_it_held(faulty: FaultyDaemon, engines: Any, reap: Any, wait: Any) -> None:
    """Kill -9 while the device does not answer: the daemon ends its session, and with it the leases."""
    faulty.seconds = DEADLINE_S
    faulty.start()
    engines(faulty.path).store("abcdefgh")
    assert faulty.stop() == 0
    faulty.start()
    faulty.tell("hang")
    warm = reap(
        subprocess.Popen([sys.executable, "-m", "kvfs.tools.cli", "warm", faulty.path], stdout=subprocess.DEVNULL)
    )
    wait(lambda: faulty.status()["num_leases"] >= 8, "it holds what it warms")
    warm.kill()
    wait(lambda: faulty.status()["num_sessions"] == 0, "its session has ended")
    faulty.directory.joinpath("hang").unlink()
    wait(lambda: faulty.status()["num_leases"] == 0, "nothing is held for it")
    assert faulty.stop() == 0


def _prefixes(path: str) -> list[str]:
    return [path[:end] for end in range(1, len(path) + 1)]
