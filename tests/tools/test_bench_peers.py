"""`kvfs bench peers` and `kvfs bench million`, tiny: what is compared, what is refused, and that Ctrl-C leaves nothing.

The parts with LMCache run where `make bench-peers` has set it up, and are skipped elsewhere.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from kvfs.errors import UsageError
from kvfs.testing import DEADLINE_S
from kvfs.tools.bench_peers import command, results
from kvfs.tools.bench_peers.finding import VERSION, installed_lmcache
from kvfs.tools.bench_peers.measuring import MODELS, Model

from .conftest import KVFS, kvfs

TINY = Model("tiny", 2, 2, 64, 32)
needs_fuse = pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse")


@pytest.fixture(scope="module")
def lmcache() -> str:
    """The Python of an environment with LMCache."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("there is no /dev/fuse")
    python = installed_lmcache()
    if python is None:
        pytest.skip(f"there is no LMCache {VERSION} here: tools/bootstrap_lmcache.sh sets one up")
    return python


@pytest.mark.lmcache
@pytest.mark.heavy
def test_everything_is_compared(lmcache: str, tmp_path: Path) -> None:
    """Every row has its peers, and a time of each for every round; the bytes of all loads were those stored."""
    found = command.compare(lmcache, [TINY], 2, tmp_path)
    disk = {"kvfs", "LocalDisk", "fs_native"}
    assert {row.name: set(row.seconds) for row in found.rows} == {
        "store": disk, "cold_one_by_one": disk, "cold_batch": disk, "ram_load": {"kvfs", "LocalCPU"},
        "store_default": {"kvfs", "LocalDisk"}, "lookup": {"kvfs", "MP"},
    }  # fmt: skip
    times = {len(each) for row in found.rows if row.name != "lookup" for each in row.seconds.values()}
    assert times == {2}
    assert found.lmcache == VERSION
    assert list(tmp_path.iterdir()) == []


@pytest.mark.lmcache
@pytest.mark.heavy
def test_ctrl_c_leaves_nothing(lmcache: str, tmp_path: Path) -> None:
    """No mount, no process, no shared memory (see tests/conftest.py), and no file."""
    process = subprocess.Popen(
        [KVFS, "bench", "peers", "--num-chunks=4", f"--dir={tmp_path}", f"--python={lmcache}"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        give_up = time.monotonic() + DEADLINE_S
        while not any(tmp_path.glob("*/*/lmcache/fs_native/*")):  # it stores
            assert time.monotonic() < give_up
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        process.terminate()
        process.wait(DEADLINE_S)
    assert (process.returncode, output, errors) == (130, "", "")
    assert list(tmp_path.iterdir()) == []


def test_without_an_environment_it_is_said_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFS_LMCACHE_PYTHON", str(tmp_path / "none"))
    found = kvfs("bench", "peers", f"--dir={tmp_path}")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == (
        f"kvfs: there is no LMCache {VERSION} here: `make bench-peers` sets one up, --python PATH names an "
        "environment's Python\n"
    )


@pytest.mark.parametrize("changes", [{"--python": "/bin/false"}, {"--rounds": "0"}, {"--num-chunks": "1"}])
def test_what_cannot_be_is_refused(changes: dict[str, str]) -> None:
    found = kvfs("bench", "peers", *(f"{name}={value}" for name, value in changes.items()))
    assert found.returncode == 2
    assert next(iter(changes)) in found.stderr
    assert found.stderr.count("\n") == 1


def test_a_disk_that_is_too_small_is_told(tmp_path: Path) -> None:
    """Before anything is started."""
    with pytest.raises(UsageError, match=r"needs [\d.]+ GiB of free disk"):
        command.check_room(tmp_path, [Model("huge", 32, 8, 128, 1 << 30)])
    with pytest.raises(UsageError, match="No such file"):
        command.check_room(tmp_path / "none", list(MODELS))


def test_the_best_peer_counts() -> None:
    """Its speed is what ours is divided by; times are the other way round."""
    row = results.speed_row("x", 1, 100, {"kvfs": [2.0, 2.0], "a": [1.0, 3.0], "b": [1.0, 1.0]}, 0.95)
    assert (row.against, row.ratio, row.is_met) == ("b", 0.5, False)
    assert results.speed_row("x", 1, 100, {"kvfs": [1.0], "a": [2.0], "b": [1.0]}, 2.0, "a").is_met
    assert results.time_row("x", {"kvfs": [1.0], "a": [2.0]}, 0.5).is_met
    assert not results.time_row("x", {"kvfs": [1.1], "a": [2.0]}, 0.5).is_met


def test_the_chunks_have_the_sizes_that_are_told() -> None:
    assert [model.chunk_bytes >> 20 for model in MODELS] == [3, 32]


@needs_fuse
@pytest.mark.heavy
def test_many_chunks_are_measured(tmp_path: Path) -> None:
    """Every row is there, of chunks that were really stored, found, listed and found again by a second daemon."""
    found = kvfs("bench", "million", "--num-chunks=2000", f"--dir={tmp_path}", "--json")
    assert found.returncode == 0, found.stderr
    rows = {row["name"]: row for row in json.loads(found.stdout)}
    assert list(rows) == [
        "match_warm", "match_random", "match_random, absolute", "memory_a_chunk", "restart", "list",
        "list, beside an empty file system",
    ]  # fmt: skip
    assert all(row.get("ms", row.get("bytes", 0)) > 0 for row in rows.values())
    assert list(tmp_path.iterdir()) == []


def test_too_many_chunks_are_refused(tmp_path: Path) -> None:
    found = kvfs("bench", "million", "--num-chunks=1000000000", f"--dir={tmp_path}")
    assert found.returncode == 2
    assert "of free disk at" in found.stderr
