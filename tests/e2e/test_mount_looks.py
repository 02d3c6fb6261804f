"""Looking at a real mount with the tools that everybody has."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from kvfs.mount import mountpoint

from .commands import run

Run = Callable[..., str]


@pytest.fixture
def sh(mounted: Any) -> Run:
    """Runs a command in the mount; its output."""

    def sh(*command: str | Path, code: int = 0) -> str:
        result = run(*command, cwd=mounted.path, errors="replace")
        assert result.returncode == code, (command, result.stdout, result.stderr)
        return result.stdout + result.stderr

    return sh


def test_ls(sh: Run, engine: Any) -> None:
    assert sh("ls", "-A").split() == [".kvfs", "README.txt"]
    engine.store("abc")
    engine.store("abx")
    assert sh("ls", "-A").split() == [".kvfs", "README.txt", engine.directory.name]
    assert sh("ls", engine.directory).split() == ["chunks", "namespace.json", "prefixes"]
    names = sorted(f"{engine.key(path)}.safetensors" for path in ("a", "ab", "abc", "abx"))
    assert sh("ls", engine.chunks).split() == names
    assert sh("ls", engine.prefixes).split() == [engine.key("a")]
    branch = engine.prefixes / engine.key("a")
    assert set(sh("ls", branch).split()) == {
        f"{engine.key('a')}.safetensors", f"{engine.key('ab')}.safetensors", engine.key("abc"), engine.key("abx"),
    }  # fmt: skip
    assert sh("ls", branch / engine.key("abx")).split() == [f"{engine.key('abx')}.safetensors"]


def test_ls_sorts_by_last_use(sh: Run, engine: Any, wait: Any) -> None:
    """`ls -ltu` shows what engines loaded, and only that: reading a file is no use."""
    for path in ("a", "b", "c"):
        engine.store(path)
    engine.load("b")
    sh("cat", engine.file("a"))
    first = f"{engine.key('b')}.safetensors"
    wait(lambda: sh("ls", "-tu", engine.chunks).split()[0] == first, "the cached attributes expire")
    by_age = sh("ls", "-tr", engine.chunks).split()
    assert by_age == [f"{engine.key(path)}.safetensors" for path in ("a", "b", "c")]
    assert os.getxattr(engine.file("a"), "user.kvfs.hits") == b"0"
    assert os.getxattr(engine.file("b"), "user.kvfs.hits") == b"1"


def test_stat(sh: Run, engine: Any) -> None:
    engine.store("ab")
    one = engine.file("ab")
    other = engine.prefixes / engine.key("a") / one.name
    assert os.path.samefile(one, other)
    seen = one.stat()
    assert seen.st_nlink == 2
    assert seen.st_size % 4096 == 0
    assert seen.st_blocks * 512 == seen.st_size
    assert abs(seen.st_mtime - time.time()) < 60
    assert (seen.st_uid, seen.st_gid) == (os.geteuid(), os.getegid())
    assert sh("stat", "-c", "%A", one, engine.chunks).split() == ["-rw-r-----", "drwxr-x---"]


def test_du_and_df(sh: Run, engine: Any, wait: Any) -> None:
    """Both names of a chunk are counted once, and df tells what the largest tier holds."""
    engine.store("abcdef")
    size = sum(engine.file("abcdef"[:length]).stat().st_size for length in range(1, 7))
    count = int(sh("du", "-s", "-B1", engine.chunks, engine.prefixes).split()[0])
    assert count == size
    json_bytes = -(-len((engine.directory / "namespace.json").read_bytes()) // 512) * 512
    assert int(sh("du", "-s", "-B1", engine.directory).split()[0]) == size + json_bytes

    def used() -> int:
        return int(sh("df", "-B1", "--output=used", ".").split()[-1])

    before = used()
    assert before >= size
    total = int(sh("df", "-B1", "--output=size", ".").split()[-1])
    assert (16 << 20) - (64 << 10) <= total <= 16 << 20
    assert "fuse.kvfs" in sh("df", "--output=fstype", ".")
    assert int(sh("df", "--output=iused", ".").split()[-1]) == 6
    os.unlink(engine.file("abcdef"))
    wait(lambda: used() < before, "removed bytes come back")


def test_getfattr(sh: Run, engine: Any) -> None:
    engine.store("ab")
    text = sh("getfattr", "-d", "--absolute-names", engine.file("ab"))
    found = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    checksum = found.pop("user.kvfs.checksum").strip('"')
    assert len(checksum) >= 16
    int(checksum, 16)
    assert found.pop("user.kvfs.tier") in ('"ram"', '"ram+nvme"')
    assert found.pop("user.kvfs.dirty") in ('"0"', '"1"')
    assert found == {
        "user.kvfs.hits": '"0"',
        "user.kvfs.key": f'"{engine.key("ab")}"',
        "user.kvfs.parent": f'"{engine.key("a")}"',
        "user.kvfs.position": '"1"',
        "user.kvfs.tokens": '"16"',
    }
    assert sh("getfattr", "-d", engine.chunks, "README.txt") == ""
    assert "No such attribute" in sh("getfattr", "-n", "user.kvfs.nothing", engine.file("ab"), code=1)
    assert "No such attribute" in sh("getfattr", "-n", "user.kvfs.tier", "README.txt", code=1)


def test_copies_are_safetensors_files(sh: Run, engine: Any, tmp_path: Path) -> None:
    """`cp`, `cat` and `cmp` see the same bytes by both names, and the library reads the mounted file itself."""
    engine.store("ab")
    one = engine.file("ab")
    other = engine.prefixes / engine.key("a") / one.name
    sh("cp", one, tmp_path / "copy.safetensors")
    sh("cmp", other, tmp_path / "copy.safetensors")
    for path in (one, tmp_path / "copy.safetensors"):
        with safe_open(path, "np") as tensors:
            assert set(tensors.keys()) >= {"layers.0.k", "layers.0.v", "layers.1.k", "layers.1.v"}
            assert tensors.metadata()["key"] == engine.key("ab")
            assert set(tensors.get_tensor("layers.1.v").tobytes()) == {ord("b")}
    sh("cp", "-r", engine.prefixes, tmp_path / "export")
    assert len(list((tmp_path / "export").rglob("*.safetensors"))) == 2


def test_a_shared_mapping_outlives_its_descriptor(engine: Any) -> None:
    engine.store("a")
    with engine.file("a").open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
    os.unlink(engine.file("a"))
    with mapping:
        assert mapping[-4096:-2048] == b"a" * 2048


def test_find_and_grep(sh: Run, engine: Any) -> None:
    engine.store("abc")
    found = sh("find", ".", "-type", "f", "-name", "*.safetensors").split()
    assert len(found) == 6  # each has two names
    assert len(set(sh("find", ".", "-samefile", engine.file("abc")).split())) == 2
    assert sh("grep", "-rl", "--binary-files=text", f'"key":"{engine.key("abc")}"', engine.chunks).split() == [
        str(engine.file("abc"))
    ]
    assert "This is kvfs" in sh("grep", "-r", "This is", "README.txt")
    assert sh("grep", "-rlq", "kvfs", ".") == ""


def test_control_files(sh: Run, engine: Any, mounted: Any) -> None:
    engine.store("ab")
    status = json.loads(sh("cat", ".kvfs/status.json"))
    assert status["pid"] == mounted.pid
    assert status["mountpoint"] == str(mounted.path)
    assert status["num_chunks"] == 2
    assert status["num_sessions"] == 1
    assert status["uptime_s"] > 0
    assert status["counters"]["mount_errors"] == 0
    assert "kvfs_stores_published_total 2.0" in sh("cat", ".kvfs/metrics")
    assert f'mountpoint = "{mounted.path}"' in sh("cat", ".kvfs/config.toml")
    assert os.readlink(mounted.path / ".kvfs/session").startswith(str(mounted.run_directory))
    assert os.stat(mounted.path / ".kvfs/session").st_mode & 0o077 == 0  # follows the link to the socket
    assert len(sh("cat", "README.txt").splitlines()) <= 25
    for name in ("README.txt", ".kvfs/config.toml", ".kvfs/events", f"{engine.directory.name}/namespace.json"):
        assert (mounted.path / name).stat().st_size == len((mounted.path / name).read_bytes()) > 0


def test_tail_follows_the_events(engine: Any, mounted: Any, reap: Any) -> None:
    events = mounted.path / ".kvfs/events"
    tail = reap(
        subprocess.Popen(["tail", "-n", "+1", "-s", "0.1", "-f", events], stdout=subprocess.PIPE, cwd="/", bufsize=0)
    )
    engine.store("ab")
    os.unlink(engine.file("ab"))
    seen: list[dict[str, Any]] = []
    while not seen or seen[-1]["event"] != "rm":
        line = tail.stdout.readline()
        assert line
        seen.append(json.loads(line))
    assert [event["event"] for event in seen] == ["namespace", "publish", "publish", "rm"]
    assert seen[-1]["key"] == engine.key("ab")


def test_read_ahead_is_raised(mounted: Any) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may raise the read-ahead")
    mount = mountpoint.mount_at(str(mounted.path))
    assert mount is not None
    assert Path(f"/sys/class/bdi/{mount.device}/read_ahead_kb").read_text().strip() == "1024"
