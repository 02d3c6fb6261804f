"""fake-cuda: real code, the real kvikio among it, on a libcuda of our own (fakecuda.c).

Each scenario runs in a process of its own, since a libcuda stays loaded. Nothing is measured here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfs.testing import DEADLINE_S

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HAS_LIBRARY = "import ctypes; ctypes.CDLL('libcuda.so.1')"


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, compiled; skipped where it would stand in for a real one."""
    if subprocess.run([sys.executable, "-c", HAS_LIBRARY], capture_output=True, check=False).returncode == 0:
        pytest.skip("there is a real libcuda here: tests marked gpu say more than fake-cuda")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler for tests/fake_cuda/fakecuda.c")
    library = tmp_path_factory.mktemp("fake_cuda") / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([compiler, *flags, "-o", library, HERE / "fakecuda.c", "-lpthread"], check=True, timeout=DEADLINE_S)
    return library


@pytest.fixture(scope="session")
def kvikio_python() -> str:
    """A Python that has the real kvikio."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kvfs", "envs")
    python = cache / f"kvikio-26.10.0-py{sys.version_info[0]}{sys.version_info[1]}" / "bin" / "python"
    if not (python.parent.parent / ".kvfs").exists():
        pytest.skip("there is no environment with kvikio: tools/bootstrap_kvikio.sh makes one (make test-device does)")
    return str(python)


@pytest.fixture
def run_scenario(fake_library: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs a function of scenarios.py; returns what it logged and printed, and fails as it does."""

    def run(name: str, python: str = sys.executable, *, fake: bool = True) -> str:
        command = [python, "-X", "faulthandler", str(HERE / "scenarios.py"), name, str(tmp_path)]
        own = {"PYTHONPATH": str(ROOT), "FAKE_CUDA": str(fake_library) if fake else "", "XDG_CACHE_HOME": str(tmp_path)}
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=2 * DEADLINE_S, env={**os.environ, **own},
            cwd=tmp_path,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout + result.stderr
        assert not (tmp_path / "cufile.log").exists()
        return result.stdout + result.stderr

    return run
