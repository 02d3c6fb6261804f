"""Limits of a namespace on a real mount: extended attributes of its directory."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .commands import succeeds

QUOTA, MAX_AGE, STORED = "user.kvfs.quota", "user.kvfs.max_age", "user.kvfs.stored_bytes"


def getfattr(path: Path) -> dict[str, str]:
    """What ``getfattr -d`` shows."""
    lines = succeeds("getfattr", "--absolute-names", "-d", path).splitlines()[1:]
    return {name: value.strip('"') for name, _, value in (line.partition("=") for line in lines if line)}


def refused(path: Path, name: str, value: bytes) -> int | None:
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        return error.errno
    return None


def test_limits(engine: Any) -> None:
    """They are shown as they are set, and none at first; what cannot be understood is refused."""
    engine.store("abc")
    directory = engine.directory
    size = engine.file("a").stat().st_size
    assert getfattr(directory) == {}
    told = {name: os.getxattr(directory, name).decode() for name in (QUOTA, MAX_AGE, STORED)}
    assert told == {QUOTA: "none", MAX_AGE: "none", STORED: str(3 * size)}
    for name, values in {QUOTA: ["20GiB", "1536MiB", "1234567"], MAX_AGE: ["3d", "36h", "90s"]}.items():
        for value in values:
            succeeds("setfattr", "-n", name, "-v", value, directory)
            assert getfattr(directory)[name] == value
    os.setxattr(directory, QUOTA, b"1.5 GiB")
    assert getfattr(directory)[QUOTA] == "1536MiB"
    for name, values in {QUOTA: [b"3 apples", b"20GB", b"-1"], MAX_AGE: [b"3", b"forever"]}.items():
        for value in values:
            assert refused(directory, name, value) == errno.EINVAL
    assert refused(directory, STORED, b"1") == errno.EPERM
    assert refused(engine.chunks, QUOTA, b"1GiB") == errno.ENOTSUP
    assert refused(engine.file("a"), QUOTA, b"1GiB") == errno.ENOTSUP
    os.removexattr(directory, QUOTA)
    os.setxattr(directory, MAX_AGE, b"none")
    assert getfattr(directory) == {}
    told = {name: os.getxattr(directory, name).decode() for name in (QUOTA, MAX_AGE, STORED)}
    assert told == {QUOTA: "none", MAX_AGE: "none", STORED: str(3 * size)}


def test_they_hold_after_a_kill(daemon: Any, engines: Callable[[Path], Any]) -> None:
    """When setfattr has returned they are there for good, and stores keep to them."""
    daemon.start()
    engine = engines(daemon.path)
    engine.store("a")
    size = engine.file("a").stat().st_size
    os.setxattr(engine.directory, QUOTA, str(4 * size).encode())
    os.setxattr(engine.directory, MAX_AGE, b"2h")
    daemon.stop(signal.SIGKILL)
    daemon.start()
    assert getfattr(engine.directory)[MAX_AGE] == "2h"
    again = engines(daemon.path)
    for path in ("abc", "xyz", "123", "q"):
        again.try_store(path)
        assert int(os.getxattr(engine.directory, STORED)) <= 4 * size


def test_old_chunks_go(engine: Any, wait: Any) -> None:
    """When the age is set, for those that are too old then."""
    engine.store("ab")
    wait(lambda: os.getxattr(engine.file("ab"), "user.kvfs.dirty") == b"0", "nothing is being written")
    os.setxattr(engine.directory, MAX_AGE, b"0s")
    assert os.listdir(engine.chunks) == []
    assert int(os.getxattr(engine.directory, STORED)) == 0
