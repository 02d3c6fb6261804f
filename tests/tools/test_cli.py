"""The `kvfs` command in a process of its own: help, exit codes, one sentence for each mistake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

KVFS = str(Path(sys.executable).parent / "kvfs")


def kvfs(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [KVFS, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=60)


def test_version() -> None:
    import kvfs as package

    result = kvfs("--version")
    assert (result.returncode, result.stdout) == (0, f"kvfs {package.__version__}\n")


@pytest.mark.parametrize("command", ["mount", "umount", "status", "ls"])
def test_help_teaches_by_example(command: str) -> None:
    result = kvfs(command, "--help")
    assert result.returncode == 0
    assert f"kvfs {command} /mnt/kvfs" in result.stdout
    assert "[bold]" not in result.stdout


def test_help_names_the_commands() -> None:
    result = kvfs("--help")
    assert all(f" {command} " in result.stdout for command in ("mount", "umount", "status", "ls"))


@pytest.mark.parametrize("background", [[], ["--background"]])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["mount"], "mountpoint is not set"),
        (["mount", "/nowhere"], "ram is not set"),
        (["mount", "/nowhere", "--ram", "4GB"], "ram: '4GB' is not a size"),
        (["mount", "/nowhere", "--ram=1GiB", "--nvme=/data"], "nvme is '/data'; write a directory, a colon and a size"),
        (["mount", "/nowhere", "--ram=1GiB", "--config=/nowhere/kvfs.toml"], "cannot read the settings in /nowhere"),
        (["mount", "/nowhere", "--ram=1GiB", "--huge-pages=2M"], "huge_pages is '2M'; it must be auto or never"),
    ],
)
def test_mistakes_end_with_one_sentence(arguments: list[str], sentence: str, background: list[str]) -> None:
    result = kvfs(*arguments, *background)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"kvfs: {sentence}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["umount", "status", "ls"])
def test_a_directory_that_is_no_mount(command: str, tmp_path: Path) -> None:
    result = kvfs(command, tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith(f"kvfs: kvfs is not mounted on {tmp_path}")


def test_a_mount_of_something_else() -> None:
    result = kvfs("status", "/proc")
    assert (result.returncode, result.stderr) == (2, "kvfs: what is mounted on /proc is not kvfs but proc\n")


def test_a_mount_point_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = kvfs("mount", tmp_path / "file", "--ram=16MiB", "--socket-directory", tmp_path / "run")
    assert result.returncode == 2
    assert "is not a directory" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_daemons_sentence_reaches_the_caller(tmp_path: Path) -> None:
    """What a background daemon dies of is told by the command that started it."""
    (tmp_path / "mnt").mkdir()
    (tmp_path / "mnt" / "file").touch()
    log = tmp_path / "kvfs.log"
    result = kvfs(
        "mount", tmp_path / "mnt", "--ram=16MiB", "--background", "--log-file", log,
        "--socket-directory", tmp_path / "run",
    )  # fmt: skip
    assert result.returncode == 2
    assert "is not empty" in result.stderr
    assert result.stderr.count("\n") == 1
    assert "is not empty" in log.read_text()


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    result = kvfs("mount", tmp_path / "mnt", "--ram=16MiB", "--background", "--log-file", tmp_path)
    assert result.returncode == 2
    assert result.stderr == f"kvfs: cannot write the log to {tmp_path}: Is a directory\n"
