"""A real mount with two volumes: what people see of them, what each command does with one, and a disk that is gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def kvfs(*words: str | Path, code: int = 0) -> str:
    command = [sys.executable, "-m", "kvfs.tools.cli", *map(str, words)]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, cwd="/",
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert result.returncode == code, result.stderr + result.stdout
    return result.stdout + result.stderr


PATHS = [first + second for first in "abcdefgh" for second in "stuvwxyz"]


@pytest.mark.heavy
def test_two_directories_from_end_to_end(daemon: Any, engines: Any, wait: Any) -> None:
    disk = daemon.directory / "disk"
    disk.mkdir()
    second = f"--nvme={disk}/kvfs:16MiB"
    daemon.start(second)
    engine = engines(daemon.path)
    for path in PATHS:
        engine.store(path)
    files = {path: engine.file(path) for path in PATHS}
    wait(lambda: all(os.getxattr(file, "user.kvfs.dirty") == b"0" for file in files.values()), "all is clean")
    places = {path: os.getxattr(file, "user.kvfs.volume").decode() for path, file in files.items()}
    first_directory = f"{daemon.directory}/volume"
    assert set(places.values()) == {first_directory, f"{disk}/kvfs"}
    status = json.loads(kvfs("status", daemon.path, "--json"))
    assert [volume["directory"] for volume in status["volumes"]] == [first_directory, f"{disk}/kvfs"]
    assert all(volume["num_chunks"] for volume in status["volumes"])
    assert os.statvfs(daemon.path).f_blocks * os.statvfs(daemon.path).f_frsize == 2 * ((16 << 20) - 4096)
    assert "degraded" not in kvfs("status", daemon.path)
    assert f'kvfs_volume_used_bytes{{volume="{disk}/kvfs"}}' in (daemon.path / ".kvfs/metrics").read_text()
    assert f'nvme = ["{first_directory}:16MiB", "{disk}/kvfs:16MiB"]' in kvfs("config", daemon.path)
    content = {path: file.read_bytes() for path, file in files.items()}
    assert daemon.stop() == 0

    for place in (first_directory, disk / "kvfs"):
        kvfs("fsck", place, "--payload")
    disk.rename(daemon.directory / "away")
    daemon.start(second)
    engine = engines(daemon.path)
    for path, file in files.items():
        assert file.exists() == (places[path] == first_directory)
    assert "missing" in kvfs("status", daemon.path)
    volumes = json.loads(kvfs("status", daemon.path, "--json"))["volumes"]
    assert [volume["fault"] for volume in volumes] == ["", "missing"]
    assert "the cache goes on without it" in daemon.log
    assert daemon.stop() == 0

    (daemon.directory / "away").rename(disk)
    kvfs("fsck", disk / "kvfs", "--rebuild")
    daemon.start(second)
    engine = engines(daemon.path)
    for path, file in files.items():
        assert file.read_bytes() == content[path]
        engine.load(path)
    assert daemon.stop() == 0
    kvfs("destroy", disk / "kvfs", "--yes")
    daemon.start()
    assert all(file.exists() == (places[path] == first_directory) for path, file in files.items())


def test_a_first_start_with_a_typing_error(daemon: Any) -> None:
    said = daemon.refusal(f"--nvme={daemon.directory}/dsik/kvfs:16MiB")
    assert "dsik does not exist, and kvfs makes the last directory only; is the disk mounted?" in said
