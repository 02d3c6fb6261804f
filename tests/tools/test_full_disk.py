"""Commands where a file system is full: beside the volume, and where they write to. One sentence, and nothing half left."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.client import Client
from kvfs.errors import UnavailableError
from kvfs.keys import KeyChain, root
from kvfs.testing import DEADLINE_S, wait_until
from kvfs.tools.trace_file import TraceFile

from .conftest import KVFS, NAMESPACE, Mount, kvfs, store

pytestmark = [
    pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system"),
]
NAME = NAMESPACE.directory


class Disk:
    """A small file system of its own."""

    def __init__(self, path: Path, size: str) -> None:
        self.path = path
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "kvfs-test", path]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"no small file system can be mounted here: {made.stderr.strip()}")

    def fill(self) -> None:
        """Leave no block."""
        with self.path.joinpath("filler").open("wb", buffering=0) as file:
            for size in (1 << 20, 4096):
                with contextlib.suppress(OSError):  # there is no room for one more
                    while True:
                        file.write(bytes(size))

    def free(self) -> None:
        self.path.joinpath("filler").unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "disk", "24M")
    yield disk
    subprocess.run(["umount", disk.path], check=True)


@pytest.fixture
def full(mount: Mount, disk: Disk) -> Iterator[Mount]:
    """A mount with 300 clean chunks whose volume lies on a file system that has no room left."""
    mount.flags[1] = f"--nvme={disk.path}/volume:16MiB"
    mount.start()
    store(mount.path, list(range(16 * 300)))
    assert kvfs("sync", mount.path).returncode == 0
    disk.fill()
    yield mount
    if disk.path.joinpath("filler").exists():
        disk.free()
    assert kvfs("umount", mount.path).returncode == 0


@pytest.mark.heavy
def test_changes_without_room_beside_the_volume(full: Mount, disk: Disk) -> None:
    """ENOSPC for plain calls; commands say what it means; the status shows it; with room all of it is durable."""
    sentence = f"no room is left beside the volume in {disk.path}/volume: this is in force"
    pinned = kvfs("pin", full.path, "tiny", "--for=forever")
    assert pinned.returncode == 1
    assert pinned.stderr.startswith(f"kvfs: {sentence}")
    assert pinned.stderr.count("\n") == 1
    assert full.json("status")["num_pinned"] == 300
    with pytest.raises(OSError, match="No space left on device"):
        os.setxattr(next(full.path.joinpath(NAME, "prefixes").iterdir()), "user.kvfs.pin", b"3h")
    assert full.json("status")["volumes"][0]["is_disk_full"]
    assert "its file system is full" in " ".join(kvfs("status", full.path).stdout.replace("│", " ").split())
    for words in (["quota", "tiny", "4MiB"], ["rm", "tiny", "--all"]):
        told = kvfs(words[0], full.path, *words[1:])
        if told.returncode:  # SQLite may find room for a small change in what it has
            assert told.returncode == 1
            assert told.stderr.splitlines()[-1].startswith(f"kvfs: {sentence}")
    disk.free()
    wait_until(lambda: not full.json("status")["volumes"][0]["is_disk_full"], "the index is written again")
    assert kvfs("quota", full.path, "tiny", "5MiB").returncode == 0


def fault(mount: Mount) -> str:
    return str(mount.json("status")["volumes"][0]["fault"])


def said(result: subprocess.CompletedProcess[str]) -> str:
    """What a command printed, without the frame and the folding of a panel."""
    return " ".join((result.stdout + result.stderr).replace("│", " ").split())


@pytest.mark.heavy
def test_stores_without_room_beside_the_volume(full: Mount, disk: Disk) -> None:
    """Status, doctor and sync say that the disk is full, how much is missing and what to do; with room it goes on."""
    store(full.path, list(range(100_000, 100_000 + 16 * 500)))  # more rows than SQLite has room for in what it has
    wait_until(lambda: fault(full) == "disk_full", "it is noticed")
    shown = said(kvfs("status", full.path))
    assert "degraded: disk full" in shown
    assert "its file system is full, 0 B are free and 16.0 MiB missing" in shown
    assert "free room beside" in shown
    assert "device" not in shown.split("tier")[1].split("stores")[0]
    doctor = kvfs("doctor", full.path)
    assert doctor.returncode == 1
    assert f"NO  {full.path}: volume in {disk.path}/volume  its file system is full" in doctor.stdout
    assert "can run here, but something has failed" in doctor.stdout.splitlines()[-1]
    assert "kvfs_volume_disk_full{" in (full.path / ".kvfs" / "metrics").read_text()
    assert "its file system is full" in kvfs("sync", full.path).stderr
    disk.free()
    wait_until(lambda: fault(full) == "", "it is written")
    assert kvfs("doctor", full.path).returncode == 0
    wait_until(lambda: full.json("status")["num_dirty"] == 0, "all of it is")


@pytest.mark.heavy
def test_a_volume_that_is_removed_under_its_daemon(mount: Mount, tmp_path: Path) -> None:
    """It is noticed, said, and nothing is called durable any more; where its files come back it goes on."""
    mount.start()
    store(mount.path, list(range(16 * 3)))
    assert kvfs("sync", mount.path).returncode == 0
    (tmp_path / "volume").rename(tmp_path / "elsewhere")
    store(mount.path, list(range(500, 500 + 16 * 3)))
    wait_until(lambda: fault(mount) == "gone", "it is noticed")
    assert "degraded: gone" in said(kvfs("status", mount.path))
    doctor = kvfs("doctor", mount.path)
    assert doctor.returncode == 1
    assert "its files were removed, or its disk was unmounted, under the daemon" in doctor.stdout
    assert mount.json("status")["num_dirty"] == 3
    assert "its files were removed" in kvfs("sync", mount.path).stderr
    (tmp_path / "elsewhere").rename(tmp_path / "volume")
    wait_until(lambda: fault(mount) == "", "it is there again")
    assert kvfs("sync", mount.path).returncode == 0
    (tmp_path / "volume").rename(tmp_path / "elsewhere")
    wait_until(lambda: fault(mount) == "gone", "it is noticed where nothing is written, too")
    (tmp_path / "elsewhere").rename(tmp_path / "volume")
    wait_until(lambda: fault(mount) == "", "it is there again")
    assert kvfs("umount", mount.path).returncode == 0


@pytest.fixture
def source(mount: Mount) -> Iterator[Mount]:
    """A mount with 8 MiB of chunks."""
    mount.start()
    store(mount.path, list(range(16 * 1000)))
    yield mount
    assert kvfs("umount", mount.path).returncode == 0


def test_export_to_a_full_disk(source: Mount, tmp_path: Path) -> None:
    """No archive that is half one, and the one that was there before stays; in a directory whole chunks only."""
    disk = Disk(tmp_path / "small", "4M")
    try:
        archive = disk.path / "all.tar"
        archive.write_bytes(b"what was there before")
        told = kvfs("export", source.path, "tiny", archive)
        assert told.returncode == 2
        assert told.stderr.splitlines()[-1].endswith("No space left on device")
        assert archive.read_bytes() == b"what was there before"
        assert os.listdir(disk.path) == ["all.tar"]
        told = kvfs("export", source.path, "tiny", disk.path / "plain")
        assert told.returncode == 2
        assert told.stderr.splitlines()[-1].endswith("No space left on device")
        chunks = disk.path / "plain" / NAME / "chunks"
        assert len(os.listdir(chunks)) > 100
        for name in os.listdir(chunks):
            assert chunks.joinpath(name).read_bytes() == source.path.joinpath(NAME, "chunks", name).read_bytes()
        json.loads(disk.path.joinpath("plain", NAME, "namespace.json").read_bytes())
    finally:
        subprocess.run(["umount", disk.path], check=True)


def test_an_export_that_succeeds_replaces_what_was_there(source: Mount, tmp_path: Path) -> None:
    archive = tmp_path / "all.tar"
    archive.write_bytes(b"what was there before")
    assert kvfs("export", source.path, "tiny", archive).returncode == 0
    with tarfile.open(archive) as file:
        assert len(file.getmembers()) == 1001
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_record_on_a_full_disk(source: Mount, disk: Disk, name: str) -> None:
    """What was written before is a whole trace; one sentence says why it ended."""
    file = disk.path / name
    process = subprocess.Popen([KVFS, "record", source.path, file], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "Ctrl-C ends it" in process.stderr.readline()
    chain = KeyChain(root(NAMESPACE.identity.fingerprint()), 16, list(range(16 * 1000)))
    try:
        with Client(source.path, NAMESPACE, deadline_s=DEADLINE_S) as client:
            client.match(chain.chains).release()
            wait_until(lambda: file.stat().st_size > 1000, "the first request is in the file")
            disk.fill()

            def has_ended() -> bool:
                client.match(chain.chains).release()
                return process.poll() is not None

            wait_until(has_ended, "it ends")
        _, said = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1
    assert said.splitlines()[-1] == f"kvfs: it ended because cannot write {file}: No space left on device"
    raw = gzip.decompress(file.read_bytes()) if name.endswith(".gz") else file.read_bytes()
    requests = [json.loads(line) for line in raw.splitlines()]
    assert f"{len(requests)} request" in said
    assert all(len(request["hash_ids"]) == 1000 for request in requests)


@pytest.mark.parametrize("name", ["t", "t.gz"])
def test_a_trace_is_whole_wherever_it_ends(disk: Disk, name: str) -> None:
    """After each flush, for readers beside it; and cut back to the last flush by a write that fails."""
    path = disk.path / name
    lines: list[bytes] = []

    def put(number: int) -> None:
        for _ in range(number):
            lines.append(os.urandom(20_000).hex().encode() + b"\n")
            file.write(lines[-1])
            file.flush()

    with TraceFile(str(path), may_replace=False) as file:
        put(20)
        disk.fill()
        with pytest.raises(UnavailableError, match="No space left on device"):
            put(10)
    read = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
    assert read == b"".join(lines[: read.count(b"\n")])
    assert read.count(b"\n") in (len(lines) - 1, len(lines) - 2)
