"""The tiers of a store, opened: its arena and its volumes, side by side.

What an operator can mend is refused here in one sentence.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from kvfs import kept as kept_places
from kvfs.arena import Arena
from kvfs.catalog import Chunk
from kvfs.chunk import align
from kvfs.collecting import uncollected
from kvfs.commits import Commits
from kvfs.config import MIN_TIER_BYTES, Settings, VolumeSetting, exact_size, format_size
from kvfs.documents import Documents
from kvfs.erasing import Eraser
from kvfs.errors import UsageError
from kvfs.index import FILE_NAME, Index
from kvfs.memory import largest_arena
from kvfs.metrics import Counters, EventLog
from kvfs.policies import Policy
from kvfs.recovery import Contents, read
from kvfs.scanning import has_chunks
from kvfs.stripes import Stripe
from kvfs.system import System
from kvfs.tiers.nvme import NvmeTier
from kvfs.volume import FILE_NAME as VOLUME
from kvfs.volume import Volume

log = logging.getLogger(__name__)

_MAX_WINDOWS = 16
_GONE = (
    errno.EIO, errno.ENXIO, errno.ENODEV, errno.EROFS, errno.ESTALE, errno.ENOTCONN, errno.EUCLEAN, errno.EREMOTEIO,
    errno.ETIMEDOUT,
)  # fmt: skip
"""What the system says of a device that failed, or is not there."""


@contextmanager
def told(what: str) -> Iterator[None]:
    """What the system refuses at the start is for the operator to mend: one sentence."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise UsageError(f"cannot open {what}: {error.strerror or error}{where}") from error
    except sqlite3.Error as error:
        raise UsageError(f"cannot open {what}: the index cannot be read: {error}") from error


def _check_memory(settings: Settings, system: System) -> None:
    """Refuse what would bring the kernel to kill processes: the arena is filled at once."""
    available = system.available_memory()
    if available is None or settings.ram_bytes <= (most := largest_arena(available, settings.window_bytes)):
        return
    hint = f"; beside one window and a reserve {most >> 20}MiB fit" if most >= MIN_TIER_BYTES else ""
    raise UsageError(
        f"ram is {format_size(settings.ram_bytes)}, but only {format_size(available)} of memory are free{hint}"
    )


def _arena(settings: Settings, system: System, place: Path | None) -> Callable[[], Arena]:
    """What gives the arena of the daemon before us, or a new one, which takes long. Raises UsageError if there is no memory."""
    windows = settings.window_bytes * _MAX_WINDOWS
    facts = dropped = None
    if place is not None:
        size = align(settings.ram_bytes)
        facts = kept_places.facts_of(
            os.path.realpath(settings.mountpoint), size, tuple(where.directory for where in settings.nvme)
        )
        kept = kept_places.find(place, facts, windows)
        if isinstance(kept, kept_places.Kept):
            return partial(Arena.of, kept, windows)
        dropped = kept
    _check_memory(settings, system)
    return partial(
        Arena.create,
        settings.ram_bytes,
        huge_pages=settings.huge_pages == "auto",
        window_budget_bytes=windows,
        is_shared=settings.access == "trusted",
        place=place,
        facts=facts,
        dropped=dropped,
    )


@dataclass(frozen=True, slots=True)
class OpenedVolume:
    """A volume that is there, its index, what stands in that (until it is taken), and what its namespaces are."""

    volume: Volume
    index: Index
    contents: list[Contents]  # until it is taken
    documents: Documents

    def stripe(self, number: int, settings: Settings, policy: Policy[Chunk], counters: Counters) -> Stripe:
        """It as one of the volumes of a store, under this number."""
        tier = NvmeTier(self.volume, settings.io_threads, policy)
        commits = Commits(self.index, self.documents)
        directory = str(self.volume.path.parent)
        return Stripe(number, directory, self.volume.identity, tier, commits, Eraser(tier, counters))


async def open_tiers(
    settings: Settings, system: System, place: Path | None, events: EventLog, opened: list[OpenedVolume]
) -> tuple[Arena, list[VolumeSetting]]:
    """The arena, and the volumes that are missing; what is `opened` is appended. If one of both fails nothing stays open.

    They are opened side by side: each takes seconds where it is large.
    """
    with told("the RAM tier"):
        make_arena = await trio.to_thread.run_sync(_arena, settings, system, place)
    arenas: list[Arena] = []
    missing: list[VolumeSetting] = []
    failures: list[UsageError] = []

    async def open_arena() -> None:
        try:
            with told("the RAM tier"):
                arenas.append(await trio.to_thread.run_sync(make_arena))
        except UsageError as error:
            failures.insert(0, error)

    async def open_volumes() -> None:
        try:
            missing.extend(await _open_volumes(settings, system, events, opened))
        except UsageError as error:
            failures.append(error)

    try:
        with uncollected():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(open_arena)
                nursery.start_soon(open_volumes)
        if failures:
            raise failures[0]
    except BaseException:
        close_tiers(arenas, opened)
        raise
    return arenas[0], missing


def close_tiers(arenas: Iterable[Arena], opened: Iterable[OpenedVolume]) -> None:
    """Close what was opened."""
    for each in opened:
        each.index.close()
        each.volume.close()
    for arena in arenas:
        arena.close()


def _open_volume(where: VolumeSetting, system: System) -> OpenedVolume:
    directory = Path(where.directory)
    with ExitStack() as undo, told(f"the volume in {directory}"):
        volume = Volume.open(directory, where.size_bytes, system)
        undo.callback(volume.close)
        index = Index.open(directory / FILE_NAME, volume.identity)
        undo.callback(index.close)
        _hold_back(volume, index)
        documents = Documents(directory)
        with told(f"the documents of the namespaces in {documents.path}"):
            contents = read(index, documents)
        undo.pop_all()
    return OpenedVolume(volume, index, [contents], documents)


async def _open_volumes(
    settings: Settings, system: System, events: EventLog, opened: list[OpenedVolume]
) -> list[VolumeSetting]:
    """Open the volumes, appending to `opened`; returns those that are gone.

    One is gone if the others know it and its file is not there, or its device fails: a drive that died, or is not mounted,
    does not keep the cache down, and nothing is made in the place where it should be. What nobody knows yet is made, and
    what an operator did wrong is refused, as in a cache of one volume.
    """
    found: dict[str, OpenedVolume] = {}
    failed: dict[str, UsageError] = {}
    try:
        for where in settings.nvme:
            if len(settings.nvme) == 1 or _may_be_there(where):
                try:
                    found[where.directory] = await trio.to_thread.run_sync(_open_volume, where, system)
                except UsageError as error:
                    if not _says_that_it_is_gone(error):
                        raise
                    failed[where.directory] = error
        known = {directory for each in found.values() for directory in each.index.volumes()}
        for where in settings.nvme:
            if where.directory in found:
                continue
            if where.directory not in known:
                if where.directory in failed:
                    raise failed[where.directory]
                found[where.directory] = await trio.to_thread.run_sync(_open_volume, where, system)
            elif where.directory not in failed:
                failed[where.directory] = UsageError(
                    f"the volume in {where.directory} is not there any more (is the disk mounted? to begin a new one: "
                    f"kvfs format {where.directory} {exact_size(where.size_bytes)})"
                )
    finally:
        opened += [found[where.directory] for where in settings.nvme if where.directory in found]
    for directory, reason in failed.items():
        log.error("%s: the cache goes on without it, and looks for it again at the next start", reason)
        events.append("volume_missing", volume=directory, reason=str(reason))
    _remember(opened, [where.directory for where in settings.nvme])
    return [where for where in settings.nvme if where.directory in failed]


def _hold_back(volume: Volume, index: Index) -> None:
    """If the index was lost, let what is on the volume stay there as long as there is other room, and say so."""
    if not index.is_new:
        return
    if volume.is_new or not has_chunks(volume):
        index.keep_unclaimed([])
        return
    index.keep_unclaimed((begin, end - begin) for begin, end in volume.written())
    log.error(
        "there is no index of the chunks that are on the volume in %s: the cache begins empty. To have them back, unmount "
        "and run: kvfs fsck %s --rebuild. Until then they are written over only when there is no other room",
        volume.path.parent, volume.path.parent,
    )  # fmt: skip


def _may_be_there(where: VolumeSetting) -> bool:
    try:
        return Path(where.directory, VOLUME).exists()
    except OSError:
        return True


def _remember(opened: Iterable[OpenedVolume], directories: list[str]) -> None:
    """Let each volume know the others."""
    for each in opened:
        try:
            if len(directories) > 1 and each.index.volumes() != directories:
                each.index.keep_volumes(directories)
        except sqlite3.Error as error:
            log.warning("the index could not be written: %s", error)


def _says_that_it_is_gone(error: UsageError) -> bool:
    """Whether a device is to blame, and not what an operator asked for."""
    cause = error.__cause__
    if isinstance(cause, sqlite3.Error):
        return getattr(cause, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY)
    return isinstance(cause, OSError) and cause.errno in _GONE
