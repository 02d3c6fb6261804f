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

MIN_BEGINNING = 8
"""Digits of a key that name a prefix without a star: as many as `kvfs ls` prints, by which nothing is met by accident."""
_PATTERN = re.compile(r"[0-9a-f*?\[\]!-]+(/[0-9a-f*?\[\]!-]+)*")


def is_prefix(text: str) -> bool:
    """Whether this may be the PATH of a prefix."""
    return _PATTERN.fullmatch(text.strip("/")) is not None


def checked_prefix(text: str) -> str:
    """A PATH without slashes around it; raises UsageError for what cannot be one."""
    if not is_prefix(text):
        raise UsageError(f"{text!r} is not the PATH of a prefix: copy one that `kvfs ls MOUNTPOINT NAMESPACE` prints")
    return text.strip("/")


_BEGINNING = re.compile(rf"[0-9a-f]{{{MIN_BEGINNING},31}}")
_DIGITS = re.compile(r"[0-9a-f]+")


def find_prefixes(path: str, namespace: str, prefix: str, beat: Beat) -> list[str]:
    """The directories of a namespace in the mount at `path` that a PATH means.

    What `kvfs ls` prints is understood without its stars too.
    """
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


def unmatched_sentence(prefixes: list[str], path: str = "", namespaces: Iterable[str] = ()) -> str:
    """Says that PATHs fit no prefix, and what may have been meant; chunks are looked for in the mount at `path`."""
    for prefix in prefixes:
        for name in namespaces:
            chunk = os.path.join(path, name, "chunks", prefix + SUFFIX)
            if _DIGITS.fullmatch(prefix) and os.path.exists(chunk):
                return f"{prefix} is no prefix, but a chunk inside of one: {chunk}"
    short = next((prefix for prefix in prefixes if _DIGITS.fullmatch(prefix) and len(prefix) < MIN_BEGINNING), None)
    hint = f"; for all that begin so write '{short}*'" if short else ""
    return f"no prefix is named {', '.join(prefixes)} (any more){hint}"


def _fitting(directory: str, pattern: str) -> list[str]:
    names = [name for name in names_in(directory) if not name.endswith(SUFFIX)]
    if _BEGINNING.fullmatch(pattern):
        pattern += "*"
    return fnmatch.filter(names, pattern)
