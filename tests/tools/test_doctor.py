"""`kvfs doctor`: what it says of this machine, of places, and of machines that lack something."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.arena import Arena
from kvfs.testing import DEADLINE_S
from kvfs.tools.doctor import gpu, machine, places
from kvfs.tools.doctor.command import line
from kvfs.tools.doctor.finding import Finding

from .conftest import Mount, kvfs

needs_fuse = pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse")


def names_of(text: str) -> dict[str, str]:
    """Verdict by name, of the printed lines."""
    found = {}
    for printed in text.splitlines()[:-1]:
        verdict, rest = printed.split(None, 1)
        found[rest.split("  ")[0]] = verdict
    return found


@needs_fuse
def test_this_machine(tmp_path: Path) -> None:
    """It can run kvfs, for the tests do; each thing is said in one line, in the same words as with --json."""
    plain, as_json = kvfs("doctor", tmp_path), kvfs("doctor", tmp_path, "--json")
    assert (plain.returncode, as_json.returncode) == (0, 0), plain.stdout + plain.stderr
    assert plain.stdout.splitlines()[-1] == "kvfs: can run here"
    document = json.loads(as_json.stdout)
    assert document["can_run"]
    found = {finding["name"]: finding for finding in document["findings"]}
    verdicts = names_of(plain.stdout)
    assert verdicts.keys() == found.keys()
    for name, finding in found.items():
        assert verdicts[name] == ("ok" if finding["is_ok"] else "no")
        assert finding["what"]
        assert not (finding["is_ok"] and finding["advice"])
    assert {
        "FUSE device",
        "memory",
        "arena",
        "CUDA",
        "kvikio",
        "GPUDirect Storage",
        "NVMe to the GPU",
        "kernel",
    } <= found.keys()
    assert found["kvfs"]["what"].startswith("0.")
    assert not list(tmp_path.iterdir()), "nothing is left in the directory"


@needs_fuse
def test_what_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = kvfs("doctor", tmp_path / "no" / "where", tmp_path / "file")
    assert result.returncode == 1
    assert f"NO  {tmp_path}/no/where" in result.stdout
    assert "does not exist, or is not to be seen by this user -> is the disk mounted?" in result.stdout
    assert "it is not a directory" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("kvfs: cannot run here, 2 things missing: ")
    assert result.stderr == ""
    assert json.loads(kvfs("doctor", tmp_path / "file", "--json").stdout)["can_run"] is False


@needs_fuse
def test_a_running_mount(mount: Mount) -> None:
    mount.start()
    found = {finding["name"]: finding for finding in mount.json("doctor")["findings"]}
    status = json.loads((mount.path / ".kvfs" / "status.json").read_bytes())
    assert found[f"{mount.path}: daemon"]["is_ok"]
    assert status["ram"]["kind"] in found[f"{mount.path}: arena"]["what"]
    assert found[f"{mount.path}: direct I/O"]["is_ok"] == (status["nvme"]["kind"] == "direct")
    inside = kvfs("doctor", mount.path / "files")
    assert inside.returncode == 1
    assert "it lies inside the mount" in inside.stdout


def test_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    """Its parent counts: kvfs makes the last directory."""
    found = list(places.findings(str(tmp_path / "kvfs")))
    assert any(finding.name.endswith("direct I/O") and finding.is_ok for finding in found)
    assert not list(tmp_path.iterdir())


def test_a_directory_in_memory() -> None:
    found = {finding.name: finding for finding in places.findings("/dev/shm")}
    unfit = found["/dev/shm: file system"]
    assert not unfit.is_ok
    assert "lies in memory" in unfit.what
    assert not unfit.is_needed


AS_NOBODY = """
import os, sys
from kvfs.tools.doctor import machine, places
import kvfs.mount.operations
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
for finding in [*machine.findings(), *places.findings(sys.argv[1])]:
    print(finding.is_needed and not finding.is_ok, finding.what)
"""


@pytest.mark.parametrize("name", ["", "below"])
def test_a_directory_of_somebody_else(tmp_path: Path, name: str) -> None:
    """One that may not be entered is said to be in the way, in one line."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)
    closed.parent.chmod(0o755)
    command = [sys.executable, "-c", AS_NOBODY, str(closed / name)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    closed.chmod(0o700)
    assert result.returncode == 0, result.stderr
    assert any(text.startswith("True ") for text in result.stdout.splitlines()), result.stdout


def test_a_machine_without_fuse(tmp_path: Path) -> None:
    found = machine.fuse_device(tmp_path)
    assert (found.is_ok, found.is_needed) == (False, True)
    assert "--device /dev/fuse" in found.advice
    (tmp_path / "dev/fuse").mkdir(parents=True)
    assert "Is a directory" in machine.fuse_device(tmp_path).what


def test_no_fusermount3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    for user, is_needed in ((0, False), (1000, True)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        found = machine.fuse_helper()
        assert (found.is_ok, found.is_needed) == (False, is_needed)


@pytest.mark.parametrize(
    ("text", "is_ok"),
    [
        ("user_allow_other\n", True),
        ("#user_allow_other\n", False),
        (" user_allow_other # yes", True),
        ("", False),
        (None, False),
    ],
)
def test_allow_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, is_ok: bool) -> None:
    if text is not None:
        (tmp_path / "etc").mkdir()
        (tmp_path / "etc/fuse.conf").write_text(text)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert machine.allow_other(tmp_path).is_ok is is_ok


def test_a_container_without_memory(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable:   100000 kB\n")
    found = machine.memory(tmp_path)
    assert (found.is_ok, found.is_needed) == (False, True)
    (tmp_path / "proc/meminfo").write_text("MemAvailable:   8000000 kB\n")
    assert machine.memory(tmp_path).is_ok


def test_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Arena:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(Arena, "create", fails)
    found = machine.huge_pages()
    assert (found.is_ok, found.is_needed) == (False, True)


def test_arena_forms() -> None:
    assert machine.arena_form("tmpfs-huge").is_ok
    small = machine.arena_form("memfd")
    assert not small.is_ok
    assert "half the speed" in small.what
    assert "shmem_enabled" in small.advice


@pytest.mark.parametrize(
    ("release", "is_ok"), [("5.10.0-1", False), ("5.14", True), ("6.18.44-fc", True), ("odd", True)]
)
def test_kernels(release: str, is_ok: bool) -> None:
    assert machine.kernel(release).is_ok is is_ok


GDSCHECK = """#!/bin/sh
echo ' ============'
echo ' DRIVER CONFIGURATION:'
echo ' NVMe P2PDMA        : {p2p}'
echo ' NVMe               : Unsupported'
echo ' NVMeOF             : Unsupported'
"""


@pytest.mark.parametrize("p2p", ["Supported", "Unsupported"])
def test_the_word_of_gdscheck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, p2p: str) -> None:
    """Its lines as NVIDIA's documentation shows them."""
    (tmp_path / "run/udev").mkdir(parents=True)
    program = tmp_path / "gdscheck"
    program.write_text(GDSCHECK.format(p2p=p2p))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    found = gpu.gds(tmp_path)
    assert found.is_ok is (p2p == "Supported")
    assert ("NVMe P2PDMA" in found.what) == found.is_ok


def test_no_udev_no_gdscheck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "GDSCHECK", ("no-such-program",))
    assert "/run/udev" in gpu.gds(tmp_path).what
    (tmp_path / "run/udev").mkdir(parents=True)
    assert "nvidia-fs is not loaded" in gpu.gds(tmp_path).what
    (tmp_path / "proc/driver/nvidia-fs").mkdir(parents=True)
    assert gpu.gds(tmp_path).is_ok


@pytest.mark.parametrize(
    ("has_kvikio", "has_gds", "word"),
    [(False, False, "come through RAM"), (True, False, "buffers in host memory"), (True, True, "GPUDirect Storage")],
)
def test_how_chunks_get_from_nvme_to_a_gpu(has_kvikio: bool, has_gds: bool, word: str) -> None:
    found = gpu.from_nvme(True, has_kvikio=has_kvikio, has_gds=has_gds)
    assert (found.is_ok, bool(found.advice)) == (has_kvikio, not has_kvikio)
    assert word in found.what
    assert "without a GPU" in gpu.from_nvme(False, has_kvikio=has_kvikio, has_gds=has_gds).what


def test_names_of_others_are_escaped() -> None:
    assert line(Finding("a\x1bb", False, "c\nd", "e"), 5) == "no  a\\x1bb  c\\nd -> e"
