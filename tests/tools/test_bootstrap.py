"""The set-up script says what is missing: to root by installing it, to others by the command to run.

The script sees a system without FUSE through a PATH on which only the programs stand that it needs to find that out.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
BASICS = ("bash", "cat", "cut", "dirname", "mktemp", "readlink", "rm", "sha256sum", "tail", "uname")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A working copy without .venv, and beside it `bin`, a system without FUSE."""
    for name in ("pyproject.toml", "constraints.txt", "tools/bootstrap.sh", "kvfs/__init__.py"):
        target = tmp_path / "copy" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    (tmp_path / "bin").mkdir()
    for program in BASICS:
        found = shutil.which(program)
        assert found is not None
        (tmp_path / "bin" / program).symlink_to(found)
    (tmp_path / "bin" / "python3").symlink_to(Path(sys.executable).resolve())
    return tmp_path / "copy"


def add_program(copy: Path, name: str, script: str) -> None:
    program = copy.parent / "bin" / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def bootstrap(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = str(copy.parent / "bin")
    return subprocess.run(
        [copy / "tools" / "bootstrap.sh", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": path, "HOME": str(copy.parent)},
        stdin=subprocess.DEVNULL,
        timeout=60,
        start_new_session=True,
    )


def test_a_user_is_told_the_command(copy: Path) -> None:
    add_program(copy, "id", "echo 1000")
    add_program(copy, "apt-get", "exit 1")
    result = bootstrap(copy, "demo")
    assert result.returncode == 1
    command = (
        "sudo apt-get update && sudo apt-get install -y --no-install-recommends fuse3 attr pkg-config libfuse3-dev gcc"
    )
    assert f"kvfs set-up: missing system packages; run: {command}" in result.stderr
    assert not (copy / ".venv").exists()


def test_root_has_them_installed_and_sees_why_that_fails(copy: Path) -> None:
    add_program(copy, "id", "echo 0")
    add_program(copy, "apt-get", 'echo "apt-get $*"; test "$1" = update')
    result = bootstrap(copy, "dev")
    assert result.returncode == 1
    assert "kvfs set-up: installing system packages: fuse3 attr" in result.stdout
    assert "apt-get install -y -qq --no-install-recommends fuse3 attr" in result.stderr
    assert "kvfs set-up: apt-get could not install: fuse3 attr" in result.stderr


def test_an_interrupted_set_up_says_so(copy: Path) -> None:
    """Ctrl-C reaches the script and what it runs: that is no failure of what was running, and the exit code is 130."""
    add_program(copy, "id", "echo 0")
    add_program(copy, "apt-get", "kill -INT 0; exit 1")
    result = bootstrap(copy, "demo")
    assert result.returncode == 130
    assert result.stderr == "kvfs set-up: interrupted; the next run goes on\n"


def test_another_distribution_is_told_what_is_missing(copy: Path) -> None:
    result = bootstrap(copy)
    assert result.returncode == 1
    assert "missing: fuse3 attr" in result.stderr
    assert "your system's package manager" in result.stderr


def test_an_old_python_is_not_taken(copy: Path) -> None:
    """As a pyenv shim of a version that is not selected fails, so does this one; /usr/bin/python3 may still do."""
    (copy.parent / "bin" / "python3").unlink()
    add_program(copy, "python3", "exit 127")
    add_program(copy, "id", "echo 1000")
    result = bootstrap(copy)
    assert result.returncode == 1
    assert "no Python >= 3.11 found" in result.stderr or "missing: " in result.stderr


def test_an_unknown_argument(copy: Path) -> None:
    result = bootstrap(copy, "everything")
    assert (result.returncode, result.stderr) == (2, "usage: tools/bootstrap.sh [demo|dev]\n")
