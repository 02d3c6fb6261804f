"""Programs that are run on a mount, as a user runs them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvfs.testing import DEADLINE_S


def run(*command: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    """Its end, whatever it is; messages are in English."""
    options = {"timeout": DEADLINE_S, "env": {**os.environ, "LC_ALL": "C", "TZ": "UTC"}, **more}
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **options)


def succeeds(*command: str | Path, **more: Any) -> str:
    """What it prints; fails if it has anything to complain of."""
    result = run(*command, **more)
    if (result.returncode, result.stderr) != (0, ""):
        pytest.fail(f"{command}: {result}")  # an assertion would shorten what was said
    return result.stdout
