"""Pythons with software that is not kvfs: named by the user, installed, or set up by a script (see bootstrap_env.sh)."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from kvfs.errors import UsageError


def find_python(
    variable: str, environments: str, is_known: Callable[[str], bool], others: Iterable[str | None] = ()
) -> str | None:
    """The first that `is_known`: of `others`, then of the environments that were set up, whose names match a pattern.

    Only the one that the environment variable names counts where that is set.
    """
    named = os.environ.get(variable)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kvfs", "envs")
    set_up = sorted(str(stamp.parent / "bin" / "python") for stamp in cache.glob(f"{environments}/.kvfs"))
    places = [named] if named else [*filter(None, others), *set_up]
    return next((python for python in places if is_known(python)), None)


def last_line(python: str, script: str) -> str:
    """The last line that a script prints in this Python; nothing if it fails, or there is no such Python.

    Its temporary files go with it: importing an engine alone leaves some.
    """
    with tempfile.TemporaryDirectory(prefix="kvfs-look-") as temporary:
        environment = {**os.environ, "TMPDIR": temporary}
        try:
            done = subprocess.run(
                [python, "-c", script], capture_output=True, text=True, check=False, cwd="/", env=environment
            )
        except OSError:
            return ""
    return "" if done.returncode else done.stdout.strip().rpartition("\n")[2]


def chosen_python(
    named: Path | None, find: Callable[[], str | None], is_known: Callable[[str], bool], wanted: str, target: str
) -> str:
    """What --python names, or else what is found. Raises UsageError if that has not what is `wanted`; `make TARGET` sets one up."""
    if named is not None:
        path = os.path.abspath(named)  # not resolved: a Python of an environment is a link, and is found by its name
        if not is_known(path):
            raise UsageError(f"--python: {path} has no {wanted}")
        return path
    found = find()
    if found is None:
        software = wanted.partition(" with ")[0]
        raise UsageError(
            f"there is no {software} here: `make {target}` sets one up, --python PATH names an environment's Python"
        )
    return found
