"""Hints as extended attributes of chunks and of directories of the prefix view; what they mean is in `kvfs.hints`.

class: a number; expect: how long the use is still expected ("60s"); closed: "1". "0", "no", nothing, or removing it takes
the hint back. Said of a directory it counts for all chunks below it, as they are then; a chunk that is closed closes what
is built on it. A directory shows what is true of all its chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, inf

from kvfs.catalog import Chunk
from kvfs.durations import parse_duration
from kvfs.errors import UsageError
from kvfs.heeding import is_closed
from kvfs.hints import MAX_CLASS, Said
from kvfs.mount.nodes import Node
from kvfs.policies.hint import NOTHING
from kvfs.prefixes import PrefixDirectory

OF_HINTS = ("class", "expect", "closed")
_NO = ("0", "no", "")


def hintable(node: Node) -> Iterable[Chunk] | None:
    """The chunks that a hint on this node is for; None if it can have none."""
    if isinstance(node, Chunk):
        return () if node.is_removed else (node,)
    return node.subtree() if isinstance(node, PrefixDirectory) else None


def hinted_names(node: Node, now_s: float) -> list[str]:
    """Which of them are shown."""
    return [name for name in OF_HINTS if hint_value(node, name, now_s) is not None]


def hint_value(node: Node, name: str, now_s: float) -> str | None:
    """The value of one of `OF_HINTS`, None if nothing was said."""
    chunks = hintable(node)
    if chunks is None:
        return None
    if name == "class":
        class_ = _common((chunk.hint or NOTHING).class_ for chunk in chunks)
        return str(class_) if class_ else None
    if name == "closed":
        return "1" if _common(is_closed(chunk) for chunk in chunks) else None
    until_s = inf
    for chunk in chunks:
        until_s = min(until_s, (chunk.hint or NOTHING).until_s)
        if until_s <= now_s:
            return None
    return f"{ceil(until_s - now_s)}s" if until_s < inf else None


def is_said(node: Node, name: str) -> bool:
    """Whether it was said of any of the chunks that are meant."""
    field = {"class": 0, "expect": 1, "closed": 2}[name]
    return any(chunk.hint is not None and chunk.hint[field] != NOTHING[field] for chunk in meant(node, name))


def _common(values: Iterable[int]) -> int:
    """What all of them are; 0 if there are none, or they differ."""
    first: int | None = None
    for value in values:
        if not value or (first is not None and value != first):
            return 0
        first = value
    return first or 0


def meant(node: Node, name: str) -> Iterable[Chunk]:
    """The chunks that get the hint: those of the node, and below a single one what is built on it, if it is closed."""
    if name == "closed" and isinstance(node, Chunk) and not node.is_removed:
        return [node, *node.table.prefixes.descendants(node)]
    return hintable(node) or ()


def parse_hint(name: str, value: bytes | None) -> Said:
    """What a value says. Raises UsageError."""
    text = (value or b"").decode("ascii", "replace").strip("\0 \n")
    if name == "class":
        if text not in _NO and not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_CLASS))):
            raise UsageError(f"a class is a number from 0 to {MAX_CLASS}, not {text!r}")
        said = Said(class_=0 if text in _NO else int(text))
    elif name == "expect":
        said = Said(expect_s=0.0 if text in _NO else parse_duration(text, name))
    elif text in ("1", "yes", *_NO):
        said = Said(is_closed=text not in _NO)
    else:
        raise UsageError(f"closed is 1 or 0, not {text!r}")
    said.check()
    return said
