"""`kvfs export` and `kvfs import` on real mounts: directories, archives, streams, and what is refused on the way."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.mount import mountpoint
from kvfs.testing import DEADLINE_S, wait_until
from kvfs.testing.processes import command_line

from .conftest import KVFS, NAMESPACE, Mount, assert_refused, kvfs, store

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse")
NAME = NAMESPACE.directory


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Mount]:
    """A second mount, empty."""
    path = tmp_path / "target"
    flags = ["--ram=16MiB", f"--socket-directory={tmp_path.parent}/run", "--huge-pages=never"]
    mount = Mount(path, flags)
    mount.start()
    yield mount
    if mount.is_mounted:
        kvfs("umount", path)
    if mount.is_mounted:
        mountpoint.unmount(str(path), lazy=True)


@pytest.fixture
def source(mount: Mount) -> Iterator[Mount]:
    mount.start()
    yield mount
    assert kvfs("umount", mount.path).returncode == 0


def stored(mount: Mount) -> dict[str, tuple[bytes, int]]:
    """Content and time of each chunk."""
    chunks = mount.path / NAME / "chunks"
    return {path.stem: (path.read_bytes(), path.stat().st_mtime_ns) for path in chunks.iterdir()}


@pytest.mark.parametrize("form", ["plain", "a.tar"])
def test_out_and_in(source: Mount, target: Mount, tmp_path: Path, form: str) -> None:
    """All that was there is there again; the second time nothing is copied."""
    keys = store(source.path, list(range(16 * 6)))
    branch = store(source.path, [*range(32), *range(500, 532)])
    place = tmp_path / form
    result = kvfs("export", source.path, "tiny", place)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "kvfs: exported 8 chunks, 64.0 KiB\n"
    written = [place, *place.rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in written} == {0o600} | ({0o700} if form == "plain" else set())
    result = kvfs("import", target.path, place)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "kvfs: imported 8 chunks, 64.0 KiB\n"
    assert stored(target) == stored(source)
    assert set(stored(target)) == {*keys, *branch}
    assert os.listdir(target.path / NAME / "prefixes") == [keys[0]]
    assert kvfs("import", target.path, place).stdout == "kvfs: imported 0 chunks, 0 B; 8 were there already\n"
    if form == "plain":
        assert kvfs("export", source.path, "tiny", place).stdout.endswith("8 were there already\n")
        assert kvfs("import", target.path, place / NAME).stdout.endswith("8 were there already\n")
    assert kvfs("verify", target.path).returncode == 0
    assert target.json("status")["num_staging"] == 0


def test_a_prefix_through_a_pipe(source: Mount, target: Mount) -> None:
    """It comes with what it is built on, parents first, so that it can be loaded."""
    keys = store(source.path, list(range(16 * 4)))
    branch = store(source.path, [*range(32), *range(500, 532)])
    command = [KVFS, "export", str(source.path), "tiny", f"{keys[0][:8]}*/{branch[2][:8]}*", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        result = subprocess.run(
            [KVFS, "import", str(target.path), "-", "--json"],
            stdin=process.stdout, capture_output=True, text=True, check=True, timeout=DEADLINE_S,
        )  # fmt: skip
        assert process.stderr is not None
        assert process.stderr.read() == b"kvfs: exported 4 chunks, 32.0 KiB\n"
    done = json.loads(result.stdout)
    assert (done["chunks"], done["bytes"], done["refused"], done["namespaces"]) == (4, 32768, [], [NAME])
    assert set(stored(target)) == {*branch}


def test_other_tools_archives(source: Mount, target: Mount, tmp_path: Path) -> None:
    """Of tar, with the prefix view and hard links, in any order and below another directory, compressed or not."""
    store(source.path, list(range(16 * 4)))
    archive = tmp_path / "x.tar"
    parts = [f"./{NAME}/{part}" for part in ("namespace.json", "prefixes", "chunks")]
    subprocess.run(["tar", "-C", source.path, "-czf", archive, *parts], check=True)
    assert kvfs("import", target.path, archive).stdout == "kvfs: imported 4 chunks, 32.0 KiB\n"
    assert stored(target) == stored(source)


def test_what_is_refused_is_named(source: Mount, target: Mount, tmp_path: Path) -> None:
    """The rest is copied all the same; a path in an archive leads nowhere."""
    keys = store(source.path, list(range(16 * 4)))
    assert kvfs("export", source.path, "tiny", tmp_path / "plain").returncode == 0
    plain = tmp_path / "plain" / NAME / "chunks"
    path = plain / f"{keys[1]}.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:5000] + bytes([raw[5000] ^ 1]) + raw[5001:])
    os.truncate(plain / f"{keys[2]}.safetensors", 100)
    result = kvfs("import", target.path, tmp_path / "plain")
    assert result.returncode == 1
    assert result.stdout == "kvfs: imported 2 chunks, 16.0 KiB; 2 refused\n"
    assert f"{path}  layer 0 does not have its checksum\n" in result.stderr
    assert set(stored(target)) == {keys[0], keys[3]}

    hostile = tmp_path / "hostile.tar"
    with tarfile.open(hostile, "w") as archive:
        for name, content in {
            f"../../{NAME}/chunks/{keys[1]}.safetensors": raw,
            f"/etc/{NAME}/chunks/{keys[2]}.safetensors": b"x",
            f"tiny-f32-r0of1-000000000000/chunks/{keys[1]}.safetensors": raw,
            f"{NAME}/namespace.json": b"{}",
            f"../../../{tmp_path.name}-escaped": b"x",
        }.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    result = kvfs("import", target.path, hostile, "--json")
    assert result.returncode == 1
    done = json.loads(result.stdout)
    assert (done["chunks"], len(done["refused"])) == (1, 3)
    assert set(stored(target)) == {keys[0], keys[1], keys[3]}
    hostile.write_bytes(hostile.read_bytes()[:5000])
    result = kvfs("import", target.path, hostile)
    assert result.returncode == 2
    assert "is no archive, or not whole" in result.stderr


def test_an_interrupt_leaves_whole_chunks(source: Mount, target: Mount, tmp_path: Path) -> None:
    """The head of what was to be copied, which can be used; what was done is said."""
    keys = store(source.path, list(range(16 * 1000)))
    place = tmp_path / "plain"
    command = [KVFS, "export", str(source.path), "tiny", str(place), "--json"]
    chunks = place / NAME / "chunks"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: chunks.exists() and len(os.listdir(chunks)) > 5, "it has begun")
        process.send_signal(signal.SIGINT)
        told, complaints = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, complaints) == (130, "")
    done = json.loads(told)
    assert done["interrupted"] is True
    assert 5 <= done["chunks"] < len(keys)
    assert {path.stem for path in chunks.iterdir()} == set(keys[: done["chunks"]])

    with (
        contextlib.suppress(BrokenPipeError),
        subprocess.Popen(  # it need not read on once it is told to end
            [KVFS, "import", str(target.path), "-", "--json"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stdin is not None
        wait_until(lambda: "import" in command_line(process.pid), "it has begun")
        pipe = io.FileIO(process.stdin.fileno(), "wb", closefd=False)  # nothing is left to write at its end
        with contextlib.suppress(BrokenPipeError), tarfile.open(fileobj=pipe, mode="w|") as archive:
            archive.add(place / NAME / "namespace.json", f"{NAME}/namespace.json")
            for key in keys[:5]:  # an archive is read in records of 10 KiB
                archive.add(chunks / f"{key}.safetensors", f"{NAME}/chunks/{key}.safetensors")
            wait_until(lambda: (target.path / NAME / "chunks").exists() and keys[0] in stored(target), "it copies")
            process.send_signal(signal.SIGINT)
            told = process.stdout.read() if process.stdout is not None else ""
    assert process.wait(DEADLINE_S) == 130
    assert json.loads(told)["interrupted"] is True
    assert set(stored(target)) <= set(keys[:5])
    assert target.json("status")["num_staging"] == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["import", "/nowhere", "x"], "kvfs is not mounted on /nowhere"),
        (["export", "/nowhere", "tiny", "x"], "kvfs is not mounted on /nowhere"),
        (["export", "/nowhere", "tiny"], "missing argument"),
    ],
)
def test_mistakes_end_with_one_sentence(arguments: list[str], sentence: str) -> None:
    assert_refused(kvfs(*arguments), sentence)


@pytest.mark.heavy
def test_more_mistakes(source: Mount, tmp_path: Path) -> None:
    [key] = store(source.path, list(range(16)))
    for arguments, sentence in (
        (["import", source.path, tmp_path / "x"], f"there is no {tmp_path}/x\n"),
        (["import", source.path, tmp_path / "x.tar"], "cannot read"),
        (["import", source.path, tmp_path / "volume"], "there is no namespace.json"),
        (["export", source.path, "tiny", "ffff*", tmp_path / "x"], "no prefix is named ffff* (any more)"),
        (["export", source.path, "other", tmp_path / "x"], "there is no namespace 'other'"),
        (["export", source.path, "tiny", "/dev/null/x"], "cannot write to /dev/null/x"),
        (["export", source.path, "tiny", tmp_path / "no/x"], f"there is no directory {tmp_path}/no"),
        (["export", source.path, "tiny", tmp_path / "x.tar.gz"], "archives are not compressed here"),
        (["export", source.path, "tiny", tmp_path / "x.tgz"], "archives are not compressed here"),
        (["export", source.path, "tiny", "0123*", "4567*"], "'4567*' is the PATH of a prefix"),
        (["export", source.path, "tiny", key], f"'{key}' is the PATH of a prefix"),
        (["export", source.path, "tiny", key[:8]], f"'{key[:8]}' is the PATH of a prefix"),
    ):
        result = kvfs(*arguments)
        assert (result.returncode, result.stdout) == (2, ""), result
        assert sentence in result.stderr
        assert result.stderr.count("\n") == 1
    leader, follower = pty.openpty()
    command = [KVFS, "export", str(source.path), "tiny", "-"]
    result = subprocess.run(
        command, stdout=follower, stderr=subprocess.PIPE, check=False, timeout=DEADLINE_S, text=True
    )
    os.close(leader)
    os.close(follower)
    assert result.returncode == 2
    assert "nothing for a terminal" in result.stderr
    assert sys.stdout is not None


@pytest.mark.heavy
def test_what_is_evicted_again_is_told_of(source: Mount, tmp_path: Path) -> None:
    """Of a quota, which is named, and of a cache that is too small."""
    for number in range(20):
        store(source.path, list(range(1000 * number, 1000 * number + 160)))
    place = tmp_path / "plain"
    assert kvfs("export", source.path, "tiny", place).returncode == 0
    assert kvfs("rm", source.path, "tiny", "--all").returncode == 0
    assert kvfs("quota", source.path, "tiny", "64KiB").returncode == 0
    result = kvfs("import", source.path, place)
    assert result.returncode == 1
    assert f"the quota of {NAME} is 64KiB" in result.stdout + result.stderr  # at the end, or where none could go
    small = Mount(tmp_path / "small", ["--ram=1MiB", *source.flags[2:4]])
    small.start()
    try:
        result = kvfs("import", small.path, place)
        assert result.returncode == 1
        assert "the cache has no room now" in result.stderr
        count = len(stored(small))
        assert result.stderr.startswith(f"kvfs: imported {count} chunks")
        assert 50 < count < 150
    finally:
        assert kvfs("umount", small.path).returncode == 0


@pytest.mark.heavy
def test_no_room(source: Mount, tmp_path: Path) -> None:
    """What does not fit ends it with one sentence, after what was done; here everything is leased by readers."""
    keys = store(source.path, list(range(16 * 3)))
    assert kvfs("export", source.path, "tiny", tmp_path / "plain").returncode == 0
    assert kvfs("rm", source.path, "tiny", "--all").returncode == 0
    chunks = source.path / NAME / "chunks"
    for number in range(1024):  # as many files as may be staged
        os.close(os.open(chunks / f".{number}", os.O_CREAT | os.O_WRONLY))
    result = kvfs("import", source.path, tmp_path / "plain")
    assert (result.returncode, result.stdout) == (1, "")
    assert "the cache has no room now" in result.stderr
    for number in range(1024):
        (chunks / f".{number}").unlink()
    assert kvfs("import", source.path, tmp_path / "plain").returncode == 0
    assert set(stored(source)) == set(keys)
