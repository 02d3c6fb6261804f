"""`kvfs quota`: what namespaces may have, and how long it may lie unused."""

from __future__ import annotations

import errno
import os
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import msgspec
import typer

from kvfs.config import format_size, parse_size
from kvfs.durations import parse_duration
from kvfs.errors import UsageError
from kvfs.tools import listing, mounted
from kvfs.tools.mounted import Beat
from kvfs.tools.progress import STEP_DEADLINE_S
from kvfs.tools.words import format_count, format_share

EXAMPLES = """
kvfs quota /mnt/kvfs

What each namespace has and may have.

kvfs quota /mnt/kvfs SmolLM2 20GiB

Its chunks' files have 20 GiB at most; the least worthy go at once, and for later ones.

kvfs quota /mnt/kvfs SmolLM2 --max-age 3d

What was not used for three days goes; --max-age none ends that.

kvfs quota /mnt/kvfs SmolLM2 none

No quota any more.
"""

NONE = "none"
_HEADINGS = ("namespace", "stored", "quota", "full", "max age")


@dataclass(frozen=True)
class Limits:
    """A namespace: bytes of its chunks, and most that it may have; seconds after which what lies unused goes.

    evicted_chunks, evicted_bytes: what went at once since one of the two was set by this command.
    """

    namespace: str
    stored_bytes: int
    quota_bytes: int | None
    max_age_s: float | None
    evicted_chunks: int = 0
    evicted_bytes: int = 0

    @property
    def consequence(self) -> str:
        """What the new limits came to, for people."""
        if not self.evicted_chunks:
            went = f"nothing of {self.namespace} had to go"
        else:
            count, size = format_count(self.evicted_chunks, "chunk"), format_size(self.evicted_bytes)
            went = f"{count}, {size}, of {self.namespace} went for it"
        over = self.stored_bytes - self.quota_bytes if self.quota_bytes is not None else 0
        return f"{went}; {format_size(over)} too much are pinned or in use, and go when they may" if over > 0 else went

    @property
    def row(self) -> tuple[str, ...]:
        """The same for people."""
        quota = NONE if self.quota_bytes is None else format_size(self.quota_bytes)
        full = "–" if self.quota_bytes is None else format_share(self.stored_bytes, self.quota_bytes)
        return (self.namespace, format_size(self.stored_bytes), quota, full, self.max_age)

    @property
    def max_age(self) -> str:
        """As it is set."""
        if self.max_age_s is None:
            return NONE
        days, hours = self.max_age_s / 86_400, self.max_age_s / 3600
        return f"{days:g}d" if days >= 1 else f"{hours:g}h" if hours >= 1 else f"{self.max_age_s:g}s"


def quota(
    mountpoint: Annotated[str, typer.Argument(help="Where the cache is mounted.")],
    namespace: Annotated[str | None, typer.Argument(help="A namespace, or the beginning of its name.")] = None,
    size: Annotated[str | None, typer.Argument(metavar="SIZE|none", help="Its new quota, such as 20GiB.")] = None,
    max_age: Annotated[
        str | None, typer.Option("--max-age", metavar="AGE|none", help="What lies unused for longer goes: 12h, 3d.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Bytes and seconds, for programs.")] = False,
) -> None:
    """Show or set how much namespaces may hold, and for how long.

    What is too much, or too old, goes at once, and how much that was is said. What is pinned or in use stays in any case. Other
    namespaces lose nothing to a quota.
    """
    if namespace is None and max_age is not None:
        raise UsageError("say whose --max-age: kvfs quota MOUNTPOINT NAMESPACE --max-age AGE")
    if size is not None and size != NONE:
        _check_size(size)
    if max_age is not None and max_age != NONE:
        parse_duration(max_age, "--max-age")
    path = mounted.find(mountpoint)
    wanted = {"quota": size, "max_age": max_age}
    found = mounted.ask(path, lambda beat: _set_and_look(path, namespace, wanted, beat), STEP_DEADLINE_S)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode([asdict(one) for one in found]), indent=2))
        return
    if not found:
        typer.echo("kvfs: nothing is stored here", err=True)
        return
    rows = [_HEADINGS, *(one.row for one in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        line = "  ".join(cells).rstrip()
        typer.echo(line if number else typer.style(line, dim=True))
    if size is not None or max_age is not None:
        typer.echo(f"kvfs: {found[0].consequence}")


def _check_size(text: str) -> None:
    """Raise UsageError for what would remove more than was meant: less than the quota says goes at once."""
    size = parse_size(text)
    if text.strip().replace(".", "").isdecimal():
        raise UsageError(f"a quota of {text} what? Write {text.strip()}GiB, or another unit")
    if not size:
        raise UsageError("a quota of nothing would remove everything: `none` ends a quota, `kvfs rm` removes")


def _set_and_look(path: str, namespace: str | None, wanted: dict[str, str | None], beat: Beat) -> list[Limits]:
    names = listing.namespace_names(path) if namespace is None else [listing.find_namespace(path, namespace, beat)]
    found = []
    for name in names:
        directory = os.path.join(path, name)
        try:
            before = _evicted(directory)
            for attribute, value in wanted.items():
                if value is not None:
                    _set(path, directory, attribute, value)
                    beat()
            chunks, size = (now - then for now, then in zip(_evicted(directory), before, strict=True))
            found.append(replace(_look(directory, name), evicted_chunks=chunks, evicted_bytes=size))
        except FileNotFoundError:  # it was removed
            if namespace is not None:
                raise UsageError(f"the namespace {name} is gone") from None
        beat()
    return found


def _evicted(directory: str) -> tuple[int, int]:
    """Chunks, and bytes, that a namespace has lost to its limits so far; a daemon of an earlier version does not say."""
    try:
        chunks, size = (int(os.getxattr(directory, f"user.kvfs.evicted_{what}")) for what in ("chunks", "bytes"))
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise
        return 0, 0
    return chunks, size


def _set(path: str, directory: str, attribute: str, value: str) -> None:
    try:
        with mounted.changing(path):
            os.setxattr(directory, f"user.kvfs.{attribute}", value.encode())
    except PermissionError as error:
        raise UsageError(f"you may not set limits in {path}: ask root, or whoever mounted it") from error


def _look(directory: str, name: str) -> Limits:
    stored, quota, max_age = (
        os.getxattr(directory, f"user.kvfs.{attribute}").decode() for attribute in ("stored_bytes", "quota", "max_age")
    )
    return Limits(
        name,
        int(stored),
        None if quota == NONE else parse_size(quota),
        None if max_age == NONE else parse_duration(max_age, "max_age"),
    )
