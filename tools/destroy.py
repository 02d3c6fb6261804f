"""`kvfs destroy`: remove a volume with all that lies beside it."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from kvfs import kept
from kvfs.config import format_size
from kvfs.documents import DIRECTORY, Documents
from kvfs.errors import FormatError, KvfsError, UsageError
from kvfs.index import FILE_NAME as INDEX
from kvfs.index import SET_ASIDE, Index
from kvfs.rebuilding import UNFINISHED
from kvfs.tools.words import format_count
from kvfs.volume import FILE_NAME as VOLUME
from kvfs.volume import MAGIC, lock_directory

EXAMPLES = """
kvfs destroy /data/kvfs

Asks, and removes the volume, its index and the namespaces' documents; the directory too if nothing else is in it. What a
daemon of this volume left in RAM for the next mount goes with it.

kvfs destroy /data/kvfs --yes

Does not ask. What the drive itself still holds of the files is for blkdiscard, or for an encrypted file system.
"""

_LOGS = ("", "-wal", "-shm", "-journal")


def destroy(
    directory: Annotated[str, typer.Argument(help="Directory of the volume, as in --nvme DIR:SIZE.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove a volume that is not mounted, and every chunk on it."""
    place = Path(directory)
    try:
        lock_fd = lock_directory(place)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(f"there is no kvfs volume in {place}") from error
    except OSError as error:
        raise KvfsError(f"cannot open {place}: {error.strerror}") from error
    try:
        what = _described(place)
        if not yes:
            _ask(what)
        _remove_kept(place)
        _remove(place)
    except OSError as error:
        raise KvfsError(f"cannot remove {error.filename or place}: {error.strerror}") from error
    finally:
        os.close(lock_fd)
    typer.echo(f"kvfs: removed {what}")


def _described(place: Path) -> str:
    """The volume and what is on it; raises UsageError for what is none of ours."""
    path = place / VOLUME
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError as error:
        if not _is_left(place):
            raise UsageError(f"there is no kvfs volume in {place}") from error
        return f"what was left of a volume in {place}"
    except IsADirectoryError as error:
        raise UsageError(f"there is no kvfs volume in {place}") from error
    if magic != MAGIC and _is_left(place):
        raise UsageError(
            f"the superblock of {path} is damaged: kvfs fsck {place} --rebuild mends it; to be rid of it remove the file, and "
            "destroy what is left"
        )
    if magic != MAGIC:
        raise UsageError(f"{path} is not a kvfs volume; if it was one, and you want to be rid of it, remove the file")
    chunks = "chunks"
    try:
        with closing(Index.open_trusted(place / INDEX, None)) as index:
            chunks = format_count(len(index.chunks()), "chunk")
    except (FormatError, UsageError):
        pass
    return f"the volume of {format_size(size)} in {place}, with its {chunks}"


def _is_left(place: Path) -> bool:
    """Whether there is an index, or a document of a namespace, beside a volume that is lost."""
    try:
        Index.open_trusted(place / INDEX, None).close()
    except (FormatError, UsageError):
        return bool(Documents(place).read().by_directory)
    return True


def _ask(what: str) -> None:
    if not sys.stdin.isatty():
        raise UsageError(f"this removes {what}, for good: say --yes")
    if not typer.confirm(f"Remove {what}, for good?", err=True):
        typer.echo("kvfs: nothing was removed", err=True)
        raise typer.Exit(1)


def _remove_kept(place: Path) -> None:
    """What a daemon of this volume left in RAM goes with it."""
    for path in kept.places():
        facts = kept.read_facts(path)
        if facts is not None and any(Path(each).resolve() == place.resolve() for each in facts.nvme_directories):
            kept.remove_if_left(path)


def _remove(place: Path) -> None:
    """The volume goes last: as long as it is there, it says that the rest is ours."""
    for name in (INDEX, UNFINISHED):
        for suffix in _LOGS:
            place.joinpath(name + suffix).unlink(missing_ok=True)
    for name in (SET_ASIDE, SET_ASIDE + ".unfinished", VOLUME + ".unfinished"):
        place.joinpath(name).unlink(missing_ok=True)
    if place.joinpath(DIRECTORY).is_dir():
        Documents(place).destroy()
    place.joinpath(VOLUME).unlink(missing_ok=True)
    if not any(place.iterdir()):
        place.rmdir()
