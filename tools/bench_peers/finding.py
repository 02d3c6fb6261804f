"""Where an LMCache is: set up by tools/bootstrap_lmcache.sh, or named by whoever has one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

VERSION = "0.5.6"
_LOOK = "from importlib.metadata import version; print(version('lmcache')); import torch"


def installed_lmcache() -> str | None:
    """The Python of the LMCache that the script has set up; only the one in KVFS_LMCACHE_PYTHON where that is set."""
    named = os.environ.get("KVFS_LMCACHE_PYTHON")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kvfs", "envs")
    set_up = [str(record.parent / "bin" / "python") for record in sorted(cache.glob(f"lmcache-{VERSION}-*/.kvfs"))]
    return next((python for python in ([named] if named else set_up) if is_known(python)), None)


def is_known(python: str) -> bool:
    """Whether this Python has the LMCache that the comparison is written for."""
    try:
        done = subprocess.run([python, "-c", _LOOK], capture_output=True, text=True, check=False, cwd="/")
    except OSError:
        return False
    return done.returncode == 0 and done.stdout.split()[:1] == [VERSION]
