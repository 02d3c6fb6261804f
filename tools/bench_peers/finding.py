"""Where an LMCache is: set up by tools/bootstrap_lmcache.sh, or named by whoever has one."""

from __future__ import annotations

from kvfs.tools.environments import find_python, last_line

VERSION = "0.5.6"
_LOOK = "from importlib.metadata import version; import torch; print(version('lmcache'))"


def installed_lmcache() -> str | None:
    """The Python of the LMCache that the script has set up; only the one in KVFS_LMCACHE_PYTHON where that is set."""
    return find_python("KVFS_LMCACHE_PYTHON", f"lmcache-{VERSION}-*", is_known)


def is_known(python: str) -> bool:
    """Whether this Python has the LMCache that the comparison is written for."""
    return last_line(python, _LOOK) == VERSION
