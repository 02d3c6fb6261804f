"""`kvfs warm` on real mounts."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from kvfs.testing import DEADLINE_S, wait_until

from .conftest import KVFS, NAMESPACE, Mount, assert_refused, kvfs, store, store_three

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse")


def tiers(mount: Mount, keys: list[str]) -> list[str]:
    """Where chunks are."""
    chunks = Path(mount.path, NAMESPACE.directory, "chunks")
    return [os.getxattr(chunks / f"{key}.safetensors", "user.kvfs.tier").decode() for key in keys]


def uses(mount: Mount, keys: list[str]) -> list[tuple[bytes, int]]:
    """Hits and last use of chunks."""
    chunks = Path(mount.path, NAMESPACE.directory, "chunks")
    paths = [chunks / f"{key}.safetensors" for key in keys]
    return [(os.getxattr(path, "user.kvfs.hits"), path.stat().st_atime_ns) for path in paths]


def start_again(mount: Mount) -> None:
    """After that everything is on NVMe only."""
    assert kvfs("umount", mount.path).returncode == 0
    mount.start()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["warm"], "missing argument 'MOUNTPOINT [NAMESPACE [PREFIX]...] | FILE...'"),
        (["warm", "/nowhere"], "kvfs is not mounted on /nowhere"),
        (["warm", "/nowhere", "tiny", "../x"], "'../x' is not the PATH of a prefix"),
        (["warm", ""], "an argument is empty"),
    ],
)
def test_mistakes_end_with_one_sentence(arguments: list[str], sentence: str) -> None:
    assert_refused(kvfs(*arguments), sentence)


def test_prefixes_files_and_namespaces(mount: Mount) -> None:
    """What is named is in RAM afterwards, nothing else, and it was not used by that."""
    mount.start()
    keys, branch, other = store_three(mount.path)
    start_again(mount)
    everything = [*keys, *branch[1:], *other]
    before = uses(mount, everything)
    assert set(tiers(mount, everything)) == {"nvme"}

    done = mount.json("warm", "tiny", f"{keys[0]}/{branch[1]}")
    assert (done["chunks"], done["brought"], done["bytes"], done["left_out_bytes"]) == (2, 2, 2 * 8192, 0)
    assert tiers(mount, branch) == ["nvme", "ram+nvme", "ram+nvme"]
    result = kvfs("warm", mount.path / NAMESPACE.directory / "chunks" / f"{other[1]}.safetensors")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "kvfs: 1 chunk, 8.0 KiB in RAM, 1 from NVMe\n"
    assert tiers(mount, other) == ["nvme", "ram+nvme"]
    result = kvfs("warm", mount.path)
    assert result.stdout == "kvfs: 8 chunks, 64.0 KiB in RAM, 5 from NVMe\n"
    assert set(tiers(mount, everything)) == {"ram+nvme"}
    assert uses(mount, everything) == before
    result = kvfs("warm", mount.path, "tiny", "0123*")
    assert (result.stdout, result.returncode) == ("", 2)
    assert result.stderr == "kvfs: no prefix is named 0123* (any more)\n"
    result = kvfs("warm", mount.path / NAMESPACE.directory / "namespace.json")
    assert result.returncode == 2
    assert result.stderr.endswith("is no chunk\n")
    status = mount.json("status")
    assert (status["counters"]["warms_begun"], status["counters"]["loads_nvme"]) == (8, 0)
    assert kvfs("umount", mount.path).returncode == 0


@pytest.mark.heavy
def test_more_than_fits_is_said(mount: Mount) -> None:
    """As much as may be is brought, the last used prompt first."""
    mount.flags[0] = "--ram=1MiB"
    mount.start()
    prompts = [store(mount.path, list(range(1000 * number, 1000 * number + 480))) for number in range(6)]
    start_again(mount)
    result = kvfs("warm", mount.path, "tiny")
    assert result.returncode == 1
    assert result.stdout.startswith(
        "kvfs: 96 chunks, 768.0 KiB in RAM, 96 from NVMe; 84 did not fit: what is warm takes"
    )
    assert result.stderr == ""
    assert set(tiers(mount, prompts[-1])) == {"ram+nvme"}
    assert set(tiers(mount, prompts[0])) == {"nvme"}
    assert kvfs("umount", mount.path).returncode == 0


@pytest.mark.heavy
def test_it_can_be_ended(mount: Mount) -> None:
    """Exit code 130, and the daemon holds nothing for it."""
    mount.start()
    store(mount.path, list(range(320)))
    start_again(mount)
    process = subprocess.Popen([KVFS, "warm", str(mount.path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode in (0, 130, -signal.SIGINT)  # before it began, while it worked, or when it was done
    wait_until(lambda: mount.json("status")["num_leases"] == 0, "its session has ended")
    assert kvfs("umount", mount.path).returncode == 0
