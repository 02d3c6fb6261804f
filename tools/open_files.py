"""Who keeps a mount busy, found in /proc: links there are read without asking the mount, so this never hangs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

MAX_SHOWN = 5
_DELETED = " (deleted)"


def users_of(path: str, proc: Path = Path("/proc")) -> list[str]:
    """Processes with a file, or their working directory, at or below `path`, as "name (pid)"; others' as far as we may see."""
    found = []
    for directory in sorted(proc.glob("[0-9]*"), key=lambda entry: int(entry.name)):
        if any(_is_below(link, path) for link in _links(directory)):
            with contextlib.suppress(OSError):
                name = directory.joinpath("comm").read_bytes().decode(errors="replace").strip()
                found.append(f"{name} ({directory.name})")
    return found


def described(users: list[str]) -> str:
    """A few of them in half a sentence."""
    more = len(users) - MAX_SHOWN
    return ", ".join(users[:MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _links(process: Path) -> list[str]:
    links = [process / "cwd", process / "root"]
    for kind in ("fd", "map_files"):
        with contextlib.suppress(OSError):
            links += [process / kind / name for name in os.listdir(process / kind)]
    targets = []
    for link in links:
        with contextlib.suppress(OSError):
            targets.append(os.readlink(link))
    return targets


def _is_below(target: str, path: str) -> bool:
    target = target.removesuffix(_DELETED)
    return target == path or target.startswith(path.rstrip("/") + "/")
