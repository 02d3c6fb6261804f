"""A system that does not let us mount: the sentence says why, in the foreground and in the background alike."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

KVFS = str(Path(sys.executable).parent / "kvfs")
DEADLINE_S = 30.0

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up what root may do"),
    pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse"),
]


def sentence(directory: Path, *before: str, flags: list[str]) -> str:
    result = subprocess.run(
        [*before, KVFS, "mount", str(directory / "mnt"), "--ram=16MiB", "--huge-pages=never",
         f"--socket-directory={directory}/run", *flags],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=DEADLINE_S,
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


@pytest.mark.parametrize("flags", [[], ["--background"]])
def test_without_the_right_to_mount(tmp_path: Path, flags: list[str]) -> None:
    """As in a container without CAP_SYS_ADMIN."""
    if shutil.which("setpriv") is None or shutil.which("fusermount3") is None:
        pytest.skip("setpriv and fusermount3 are needed")
    said = sentence(tmp_path, "setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", flags=flags)
    assert said == f"kvfs: cannot mount on {tmp_path}/mnt: mount failed: Operation not permitted\n"


def in_own_mounts(script: str) -> list[str]:
    """What runs a command after `script`, in a mount namespace that ends with it."""
    command = ["unshare", "--mount", "sh", "-ec", f'{script}; exec "$@"', "sh"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*command, "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("mount namespaces cannot be made here")
    return command


@pytest.mark.parametrize("flags", [[], ["--background"]])
def test_without_a_fuse_device(tmp_path: Path, flags: list[str]) -> None:
    """As where the kernel's module is not loaded."""
    devices = tmp_path / "dev"
    devices.mkdir()
    script = f"mount -t tmpfs none {devices}; cp -a /dev/null /dev/urandom {devices}; mount --bind {devices} /dev"
    said = sentence(tmp_path, *in_own_mounts(script), flags=flags)
    assert said == f"kvfs: cannot mount on {tmp_path}/mnt: device not found, try 'modprobe fuse' first\n"


@pytest.mark.parametrize("flags", [[], ["--background"]])
def test_a_volume_on_a_read_only_file_system(tmp_path: Path, flags: list[str]) -> None:
    (tmp_path / "ro").mkdir()
    before = in_own_mounts(f"mount -t tmpfs -o ro none {tmp_path}/ro")
    said = sentence(tmp_path, *before, flags=[f"--nvme={tmp_path}/ro:16MiB", *flags])
    assert said.startswith(f"kvfs: cannot open the volume in {tmp_path}/ro: Read-only file system")


def test_without_descriptors(tmp_path: Path) -> None:
    """What no part of the start has words for is a sentence all the same, and no traceback."""
    if shutil.which("prlimit") is None:
        pytest.skip("prlimit is needed")
    said = sentence(tmp_path, "prlimit", "--nofile=8:8", flags=[])
    assert said.startswith("kvfs: cannot ")
    assert "Too many open files" in said
