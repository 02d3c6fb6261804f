"""The demo's mount: a daemon that ends with the demo, however that ends, and `kvfs umount`, on a directory that goes away."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvfs import config
from kvfs.errors import KvfsError
from kvfs.tools import background
from kvfs.tools.bench.scratch import lock_above

RAM = "1GiB"
NVME = "2GiB"
KVFS = (sys.executable, "-m", "kvfs.tools.cli")
PATIENCE_S = 60.0
INTERRUPT_PATIENCE_S = 10.0
_MOUNTPOINT = "mnt"


class Mount:
    """A kvfs mount with a volume beside it. Attributes: path: where it is mounted; log: the daemon's."""

    def __init__(self, directory: Path, ram: str = RAM, nvme: str | None = NVME) -> None:
        """The sizes are as `kvfs mount` takes them; without `nvme` there is no volume."""
        self.path = directory / _MOUNTPOINT
        self.log = directory / "daemon.log"
        self._volume = directory / "volume"
        self._ram = ram
        self._nvme = nvme
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Mount; raises KvfsError with the daemon's own sentence."""
        volumes = None
        if self._nvme is not None:
            self._volume.mkdir(exist_ok=True)
            volumes = [f"{self._volume}:{self._nvme}"]
        settings = config.load(
            None, {"mountpoint": str(self.path), "ram": self._ram, "nvme": volumes, "log_file": str(self.log)}
        )
        self._process = background.start_tied(settings, lock_above(str(self.path)))

    def stop(self) -> None:
        """Unmount, and wait until the daemon has written everything and ended."""
        _run("umount", str(self.path))
        if self._process is not None:
            _end(self._process)
            self._process = None

    def prefix(self, key: str) -> Path:
        """The directory of everything that begins with the chunk of this key."""
        found = list(self.path.glob(f"*/prefixes/{key}"))
        if len(found) != 1:
            raise KvfsError(f"the mount has {len(found)} prefixes {key}, not one")
        return found[0]

    def destroy(self) -> None:
        """Take the mount away, whatever state it is in, and end its daemon."""
        if self._process is None and not os.path.ismount(self.path):
            return
        with contextlib.suppress(KvfsError):
            self.stop()
            return
        _force(self.path)
        if self._process is not None:
            _end(self._process)


@contextlib.contextmanager
def scratch_directory(inside: Path) -> Iterator[Path]:
    """A directory in `inside` that is removed at the end, as is what a demo left there that was killed.

    Raises KvfsError if another demo is using `inside`.
    """
    inside.mkdir(parents=True, exist_ok=True)
    with (inside / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise KvfsError(f"another demo is running in {inside}") from None
        for left in inside.glob("run-*"):
            _force(left / _MOUNTPOINT)
            shutil.rmtree(left, ignore_errors=True)
        directory = Path(tempfile.mkdtemp(prefix="run-", dir=inside))
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _run(*arguments: str) -> str:
    """Run a command of kvfs and return what it printed; raises KvfsError with its last word."""
    # In a session of its own: Ctrl-C in the terminal is for the demo, which passes it on and waits.
    process = subprocess.Popen(
        [*KVFS, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired as error:
        raise KvfsError(f"`kvfs {arguments[0]}` has not ended after {PATIENCE_S:g} s") from error
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=INTERRUPT_PATIENCE_S)
            process.kill()
            process.communicate()
    if process.returncode:
        said = (stderr or stdout).strip().splitlines()[-1:] or [f"`kvfs {arguments[0]}` failed"]
        raise KvfsError(said[0].removeprefix("kvfs: "))
    return stdout


def _force(mountpoint: Path) -> None:
    """Take away what is mounted there, if anything is."""
    with contextlib.suppress(KvfsError):
        _run("umount", "--force", str(mountpoint))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a daemon that was unmounted, and end one that does not end by itself."""
    for number, patience_s in ((0, 10.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
            return
