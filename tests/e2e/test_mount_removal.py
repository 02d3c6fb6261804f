"""Removing chunks on a real mount: by the user, by the policy, while they are in use."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvfs.testing import soon

from .commands import run


def gone(path: Path) -> bool:
    try:
        os.stat(path)
    except FileNotFoundError:
        return True
    return False


@pytest.mark.parametrize("by", ["chunks", "prefixes"])
def test_rm_of_one_name_takes_the_other(engine: Any, by: str) -> None:
    """At once: the kernel does not go on serving what it had cached."""
    engine.store("ab")
    flat = engine.file("ab")
    deep = engine.prefixes / engine.key("a") / flat.name
    for path in (flat, deep):
        path.read_bytes()
    one, other = (flat, deep) if by == "chunks" else (deep, flat)
    assert run("rm", one).returncode == 0
    assert gone(one)
    soon(lambda: gone(other), "the other name goes")
    with pytest.raises(FileNotFoundError):
        other.read_bytes()
    assert engine.client.match(engine.chains("ab")).count == 1


def test_rm_erases_what_proves_a_chunk(mounted: Any, engine: Any, wait: Any) -> None:
    """When rm has returned, a scan of the volume finds the header of the removed chunk no more, though kill -9 follows."""
    engine.store("ab")
    wait(lambda: os.getxattr(engine.file("ab"), "user.kvfs.dirty") == b"0", "the chunks are clean")
    volume = mounted.directory / "volume" / "volume"
    marks = {path: f'"key":"{engine.key(path)}"'.encode() for path in ("a", "ab")}
    assert all(mark in volume.read_bytes() for mark in marks.values())
    assert run("rm", engine.file("ab")).returncode == 0
    mounted.stop(signal.SIGKILL)
    raw = volume.read_bytes()
    assert marks["a"] in raw
    assert marks["ab"] not in raw


def test_what_is_open_stays_readable(engine: Any) -> None:
    engine.store("a")
    with engine.file("a").open("rb", buffering=0) as file:
        os.unlink(engine.file("a"))
        assert os.fstat(file.fileno()).st_nlink == 0
        engine.store("b")  # would take the bytes if they were free
        data = file.readall()
    assert data[-4096:-2048] == b"a" * 2048
    assert gone(engine.file("a"))


def test_what_an_engine_holds_stays_readable_to_it(engine: Any) -> None:
    engine.store("ab")
    load = engine.client.load(engine.chains("ab"))
    os.unlink(engine.file("a"))
    os.unlink(engine.file("ab"))
    with load:
        assert set(load.layer(1, 0)) == {ord("b")}
    assert engine.client.match(engine.chains("ab")).count == 0


def test_rm_r_of_a_prefix(engine: Any) -> None:
    """Without -f and without an error, if nobody else is active; what does not continue the prefix stays."""
    for path in ("abcd", "abxyz", "abx12", "ab123", "q"):
        engine.store(path)
    top = engine.prefixes / engine.key("a")
    branch = next(path for path in top.rglob("*") if path.name == engine.key("abx"))
    result = run("rm", "-r", branch)
    assert (result.returncode, result.stderr) == (0, "")
    assert not branch.exists()
    assert engine.client.match(engine.chains("abxyz")).count == 2
    assert engine.client.match(engine.chains("abcd")).count == 4
    result = run("rm", "-r", top)
    assert (result.returncode, result.stderr) == (0, "")
    assert engine.client.match(engine.chains("abcd")).count == 0
    assert os.listdir(engine.prefixes) == [engine.key("q")]
    assert os.listdir(engine.chunks) == [f"{engine.key('q')}.safetensors"]


def test_rm_rf_of_a_namespace_in_use(engine: Any) -> None:
    """While a client is attached everything in it goes, and the namespace itself stays, and says so."""
    for path in ("abc", "axy"):
        engine.store(path)
    result = run("rm", "-rf", engine.directory)
    assert result.returncode == 1
    assert set(result.stderr.splitlines()) == {
        f"rm: cannot remove '{engine.directory / name}': Device or resource busy"
        for name in ("namespace.json", "chunks", "prefixes")
    }
    with pytest.raises(OSError, match="Device or resource busy"):
        os.rmdir(engine.directory)
    assert os.listdir(engine.chunks) == os.listdir(engine.prefixes) == []
    engine.store("abc")
    engine.load("abc")


@pytest.mark.parametrize("flag", ["-r", "-rf"])
def test_rm_r_of_a_namespace(mounted: Any, engines: Callable[[Path], Any], wait: Any, flag: str) -> None:
    """It goes without a trace, and for good; it comes back when a client attaches, empty."""
    engine = engines(mounted.path)
    for path in ("abc", "axy"):
        engine.store(path)
    with pytest.raises(OSError, match="Directory not empty"):
        os.rmdir(engine.directory)
    engine.client.close()
    status = mounted.path / ".kvfs/status.json"
    wait(lambda: json.loads(status.read_bytes())["num_sessions"] == 0, "the session ends")
    result = run("rm", flag, engine.directory)
    assert (result.returncode, result.stderr) == (0, "")
    assert gone(engine.directory)
    assert set(os.listdir(mounted.path)) == {"README.txt", ".kvfs"}
    mounted.stop(signal.SIGKILL)
    mounted.start()
    assert set(os.listdir(mounted.path)) == {"README.txt", ".kvfs"}
    for _ in range(3):  # what is removed and comes back is new to the kernel
        again = engines(mounted.path)
        again.store("ab")
        again.load("ab")
        assert len(os.listdir(again.chunks)) == 2
        assert (again.directory / "namespace.json").stat().st_size > 0
        again.client.close()
        wait(lambda: json.loads(status.read_bytes())["num_sessions"] == 0, "the session ends")
        assert run("rm", flag, again.directory).returncode == 0
        assert gone(again.directory)


def test_pieces_of_an_empty_namespace(mounted: Any, engines: Callable[[Path], Any], wait: Any) -> None:
    """They can be removed one by one, and are there again when a client comes."""
    engine = engines(mounted.path)
    engine.store("a")
    os.unlink(engine.file("a"))
    engine.client.close()
    status = mounted.path / ".kvfs/status.json"
    wait(lambda: json.loads(status.read_bytes())["num_sessions"] == 0, "the session ends")
    os.rmdir(engine.chunks)
    os.unlink(engine.directory / "namespace.json")
    assert os.listdir(engine.directory) == ["prefixes"]
    assert gone(engine.chunks)
    again = engines(mounted.path)
    again.store("ab")
    assert sorted(os.listdir(engine.directory)) == ["chunks", "namespace.json", "prefixes"]
    assert len(os.listdir(engine.chunks)) == 2
    assert again.file("ab").read_bytes()[-4096:-2048] == b"b" * 2048


def test_rmdir(engine: Any) -> None:
    """An empty prefix directory goes, a full one does not."""
    engine.store("ab")
    directory = engine.prefixes / engine.key("a")
    with pytest.raises(OSError, match="Directory not empty"):
        os.rmdir(directory)
    for name in os.listdir(directory):
        os.unlink(directory / name)
    os.rmdir(directory)
    assert gone(directory)
    engine.store("ab")
    assert len(os.listdir(directory)) == 2


def test_an_empty_directory_is_used_again(engine: Any) -> None:
    engine.store("ab")
    directory = engine.prefixes / engine.key("a")
    for name in os.listdir(directory):
        os.unlink(directory / name)
    assert os.listdir(directory) == []
    engine.store("ab")
    assert len(os.listdir(directory)) == 2


def test_removing_while_listing(engine: Any) -> None:
    """Entries that go while a directory is read are not shown twice, nor do they hide others."""
    paths = [chr(0x100 + number) for number in range(300)]
    for path in paths:
        engine.store(path)
    kept = {engine.file(path).name for path in paths[::2]}
    seen = []
    with os.scandir(engine.chunks) as entries:
        seen.append(next(entries).name)
        for path in paths[1::2]:
            os.unlink(engine.file(path))
        engine.store("new")
        seen += [entry.name for entry in entries]
    assert len(seen) == len(set(seen))
    assert kept <= set(seen)
    assert set(os.listdir(engine.chunks)) == kept | {engine.file("new"[:length]).name for length in (1, 2, 3)}


def test_evicted_names_vanish(daemon: Any, engines: Any) -> None:
    """Also those that the kernel has cached, and also in a cache without a volume."""
    daemon.start(ram="1MiB", nvme=None)
    engine = engines(daemon.path)
    engine.store("a")
    flat, deep = engine.file("a"), engine.prefixes / engine.key("a") / engine.file("a").name
    assert flat.stat().st_ino == deep.stat().st_ino
    for number in range(200):  # more than a MiB
        engine.store(chr(0x1000 + number))
        if gone(flat) or gone(deep):  # looking keeps both in the kernel's cache to the end
            break
    soon(lambda: gone(flat), "the flat name goes")
    soon(lambda: gone(deep), "the deep name goes")


def test_a_chunk_that_moved_has_its_new_name_only(engine: Any) -> None:
    """A second continuation splits a directory; the kernel forgets the old place of what moved."""
    engine.store("abcd")
    top = engine.prefixes / engine.key("a")
    name = engine.file("abcd").name
    before = (top / name).stat()
    engine.store("abx")
    soon(lambda: gone(top / name), "the old name goes")
    after = (top / engine.key("abc") / name).stat()
    assert (after.st_ino, after.st_nlink) == (before.st_ino, 2)
    assert sorted(os.listdir(top)) == sorted(
        [engine.file("a").name, engine.file("ab").name, engine.key("abc"), engine.key("abx")]
    )
