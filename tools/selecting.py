"""Which prefixes of a namespace a command is for: PATHs that `kvfs ls` prints, whole or as patterns.

Concurrency: blocks, and says through `beat` that it gets on; see `mounted.ask`.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable

from kvfs.chunk import SUFFIX
from kvfs.errors import UsageError
from kvfs.tools.mounted import Beat

_PATTERN = re.compile(r"[0-9a-f*?\[\]!-]+(/[0-9a-f*?\[\]!-]+)*")


def is_prefix(text: str) -> bool:
    """Whether this may be the PATH of a prefix."""
    return _PATTERN.fullmatch(text.strip("/")) is not None


def checked_prefix(text: str) -> str:
    """A PATH without slashes around it; raises UsageError for what cannot be one."""
    if not is_prefix(text):
        raise UsageError(f"{text!r} is not the PATH of a prefix: copy one that `kvfs ls MOUNTPOINT NAMESPACE` prints")
    return text.strip("/")


def find_prefixes(path: str, namespace: str, prefix: str, beat: Beat) -> list[str]:
    """The directories of a namespace in the mount at `path` that a PATH means."""
    places = [os.path.join(path, namespace, "prefixes")]
    for pattern in prefix.split("/"):
        places = [os.path.join(place, fit) for place in places for fit in _fitting(place, pattern)]
        beat()
    return places


def outermost(places: Iterable[str]) -> list[str]:
    """The directories among these that lie in no other of them."""
    found: list[str] = []
    for place in sorted(set(places)):
        if not (found and place.startswith(f"{found[-1]}/")):
            found.append(place)
    return found


def names_in(directory: str) -> list[str]:
    """What a directory holds; nothing if it is gone."""
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def _fitting(directory: str, pattern: str) -> list[str]:
    names = [name for name in names_in(directory) if not name.endswith(SUFFIX)]
    return fnmatch.filter(names, pattern)
