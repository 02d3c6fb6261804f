"""Pins on a real mount, as people set them: setfattr on chunks, prefixes and namespaces."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from .commands import succeeds

PIN, UNTIL = "user.kvfs.pin", "user.kvfs.pinned_until"


def setfattr(path: Path, value: str | None, name: str = PIN) -> None:
    succeeds("setfattr", *(["-x", name] if value is None else ["-n", name, "-v", value]), path)


def getfattr(path: Path) -> dict[str, str]:
    """What ``getfattr -d`` shows of a file or directory."""
    lines = succeeds("getfattr", "--absolute-names", "-d", path).splitlines()[1:]
    return {name: value.strip('"') for name, _, value in (line.partition("=") for line in lines if line)}


def pinned(engine: Any, *paths: str) -> list[bool]:
    return [PIN in getfattr(engine.file(path)) for path in paths]


def refused(path: Path, value: bytes) -> int | None:
    try:
        os.setxattr(path, PIN, value)
    except OSError as error:
        return error.errno
    return None


def test_a_chunk(engine: Any) -> None:
    """What getfattr shows is what setfattr accepts, and when it ends; without a pin neither is there."""
    engine.store("ab")
    file = engine.file("ab")
    facts = set(getfattr(file))
    assert facts == {
        f"user.kvfs.{name}" for name in ("tier", "hits", "position", "tokens", "parent", "checksum", "dirty", "key")
    }
    setfattr(file, "2h")
    shown = getfattr(file)
    assert set(shown) == facts | {PIN, UNTIL}
    assert 7100 < int(shown[PIN].removesuffix("s")) <= 7200
    left_s = datetime.fromisoformat(shown[UNTIL]).timestamp() - datetime.now(UTC).timestamp()
    assert 7100 < left_s <= 7200
    setfattr(file, shown[PIN])
    setfattr(file, "forever")
    assert (getfattr(file)[PIN], getfattr(file)[UNTIL]) == ("forever", "forever")
    assert pinned(engine, "a", "ab") == [False, True]
    for ending in ("no", "", None):
        setfattr(file, "3d")
        setfattr(file, ending)
        assert set(getfattr(file)) == facts
    with pytest.raises(OSError, match="No data available"):
        os.removexattr(file, PIN)
    for wrong in (b"2", b"2 weeks", b"-1h", b"\xff\xfe", b"h" * 1000, b"1e9d"):
        assert refused(file, wrong) == errno.EINVAL
    assert refused(engine.directory / "namespace.json", b"2h") == errno.ENOTSUP


def test_a_pin_ends(engine: Any, wait: Any) -> None:
    engine.store("a")
    setfattr(engine.file("a"), "1s")
    setfattr(engine.file("a"), "0.05s")
    wait(lambda: PIN not in os.listxattr(engine.file("a")), "the pin ends")


def test_a_prefix_and_a_namespace(engine: Any) -> None:
    """All that is there now, with the branches; what comes later is not pinned, and so the whole is not any more."""
    for path in ("abcd", "abxy", "q"):
        engine.store(path)
    top = engine.prefixes / engine.key("a")
    branch = next(path for path in top.rglob("*") if path.name == engine.key("abx"))
    setfattr(branch, "2h")
    assert pinned(engine, "ab", "abx", "abxy", "abc") == [False, True, True, False]
    assert int(getfattr(branch)[PIN].removesuffix("s")) <= 7200
    assert getfattr(top) == {}
    setfattr(top, "forever")
    assert pinned(engine, "a", "ab", "abcd", "abxy", "q") == [True] * 4 + [False]
    assert getfattr(top) == {PIN: "forever", UNTIL: "forever"}
    setfattr(branch, "no")
    assert pinned(engine, "abx", "abxy", "abcd") == [False, False, True]
    setfattr(engine.directory, "1h")
    assert PIN in getfattr(engine.directory)
    engine.store("qr")
    assert PIN not in getfattr(engine.directory)
    assert pinned(engine, "abxy", "q", "qr") == [True, True, False]
    setfattr(engine.directory, None)
    assert pinned(engine, "a", "abcd", "abxy", "q") == [False] * 4


@pytest.mark.heavy
def test_what_is_pinned_outlives_what_is_not(engine: Any, mounted: Any) -> None:
    """More than the cache holds is stored; the pinned prompt is there to its beginning. rm takes it all the same."""
    engine.store("abc")
    setfattr(engine.file("abc"), "forever")
    size = engine.file("abc").stat().st_size
    status = mounted.path / ".kvfs/status.json"
    for start in range(0x100, 0x1000, 64):
        if json.loads(status.read_bytes())["counters"]["evictions_nvme"] > 200:
            break
        for number in range(start, start + 64):
            engine.try_store("".join(chr(number * 64 + step) for step in range(32)))
    now = json.loads(status.read_bytes())
    assert now["counters"]["evictions_nvme"] > 200
    assert (now["num_pinned"], now["held_bytes"]) == (1, 3 * size)
    engine.load("abc")
    succeeds("rm", engine.file("abc"))
    assert json.loads(status.read_bytes())["held_bytes"] == 0


def test_pins_have_their_limit(daemon: Any, engines: Callable[[Path], Any]) -> None:
    daemon.start(ram="1MiB", nvme=None)
    engine = engines(daemon.path)
    for number in range(100, 200):
        engine.try_store(chr(number))
    assert refused(engine.directory, b"1h") == errno.ENOSPC
    assert "pins may hold 768.0 KiB, 3/4 of the tier" in daemon.log
    assert json.loads((daemon.path / ".kvfs/status.json").read_bytes())["num_pinned"] == 0


def test_a_pin_is_there_after_a_kill(daemon: Any, engines: Callable[[Path], Any], wait: Any) -> None:
    """When setfattr has returned, kill -9 does not end the pin."""
    daemon.start()
    engine = engines(daemon.path)
    engine.store("abc")
    wait(lambda: os.getxattr(engine.file("abc"), "user.kvfs.dirty") == b"0", "the chunks are clean")
    until = None
    for value in ("forever", "no", "2h"):
        setfattr(engine.file("abc"), value)
        daemon.stop(signal.SIGKILL)
        daemon.start()
        shown = getfattr(engine.file("abc"))
        if value != "2h":
            assert shown.get(PIN) == (None if value == "no" else "forever")
            continue
        until = datetime.fromisoformat(shown[UNTIL]).timestamp()
        assert 7100 < until - time.time() <= 7200
    assert until is not None
    assert daemon.stop() == 0
    daemon.start()
    assert datetime.fromisoformat(getfattr(engine.file("abc"))[UNTIL]).timestamp() == until
