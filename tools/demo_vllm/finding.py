"""Where a vLLM is: installed, or set up for the CPU by tools/bootstrap_vllm.sh."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from kvfs.errors import KvfsError

VERSIONS = ("0.32.",)
SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "bootstrap_vllm.sh"
_LOOK = "import vllm, xxhash, msgspec; print(vllm.__version__)"


def find_vllm() -> str:
    """The Python of an installed vLLM that kvfs knows, else of the one that the script sets up.

    Raises KvfsError with one sentence if there is none and none can be made.
    """
    named = os.environ.get("KVFS_VLLM_PYTHON")
    installed = [named] if named else [shutil.which("python3"), shutil.which("python")]
    for python in filter(None, installed):
        if _version(python).startswith(VERSIONS):
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


def _version(python: str) -> str:
    done = subprocess.run([python, "-c", _LOOK], capture_output=True, text=True, check=False, cwd="/")
    return done.stdout.strip().rpartition("\n")[2]
