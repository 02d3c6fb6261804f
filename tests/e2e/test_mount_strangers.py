"""What is mounted where a kvfs mount was, or under an odd name, is left alone and found again."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfs.mount import mountpoint

from .conftest import Daemon, Engine

MNT_DETACH = 2


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs takes root")
def test_what_was_mounted_in_its_place_stays(mounted: Daemon, engines: Callable[[Path], Engine]) -> None:
    """A daemon whose mount was detached lives on while a file is open in it; at its end it unmounts nobody else's."""
    engine = engines(mounted.path)
    engine.store("abc")
    path = str(mounted.path)
    libc = ctypes.CDLL(None, use_errno=True)
    held = os.open(engine.file("abc"), os.O_RDONLY)
    try:
        assert mountpoint.unmount(path, lazy=True)
        assert libc.mount(b"stranger", path.encode(), b"tmpfs", 0, None) == 0, os.strerror(ctypes.get_errno())
        mounted.path.joinpath("precious").touch()
        assert os.read(held, 8)
        engine.load("abc")
        assert mounted.stop() == 0
        assert mounted.path.joinpath("precious").exists()
    finally:
        libc.umount2(path.encode(), MNT_DETACH)
        with contextlib.suppress(OSError):  # whose daemon has ended
            os.close(held)


@pytest.mark.parametrize(
    "name",
    [
        "new\nline",
        "link",
        *(
            pytest.param(name, marks=pytest.mark.heavy)
            for name in ("line\u2028end", "carriage\rreturn", "sp ace", "ba\\ck")
        ),
    ],
)
def test_odd_names_are_found_again(daemon: Daemon, name: str) -> None:
    """A daemon that was killed leaves a mount that the next finds under the same name, whatever that is."""
    daemon.path = daemon.directory / name
    if name == "link":
        daemon.directory.joinpath("real").mkdir()
        daemon.path.symlink_to("real")
    daemon.start(nvme=None)
    before = mountpoint.mount_at(mountpoint.resolve(str(daemon.path)))
    assert before is not None
    assert before.is_ours
    assert daemon.process is not None
    daemon.process.kill()
    daemon.ended()
    daemon.start(nvme=None)
    assert daemon.path.joinpath("README.txt").exists()
    assert daemon.stop() == 0
    assert mountpoint.mount_at(mountpoint.resolve(str(daemon.path))) is None
