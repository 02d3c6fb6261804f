"""Opening a store: memory, volume and index are checked, opened and recovered; and closing it, what is dirty first.

Everything that an operator can mend is refused here in one sentence, before anything is changed.
"""

from __future__ import annotations

import errno
import logging
import sqlite3
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from kvfs.arena import Arena
from kvfs.catalog import Chunk
from kvfs.commits import Commits
from kvfs.config import MIN_TIER_BYTES, Settings, VolumeSetting, exact_size, format_size
from kvfs.documents import Documents
from kvfs.erasing import Eraser
from kvfs.errors import UsageError
from kvfs.index import FILE_NAME, Index
from kvfs.memory import largest_arena
from kvfs.metrics import Counters, EventLog
from kvfs.policies import Policy
from kvfs.policies import named as policies
from kvfs.recovery import Contents, read, recover
from kvfs.residency import Residency
from kvfs.scanning import has_chunks
from kvfs.store import Store
from kvfs.stripes import Stripe, Stripes
from kvfs.system import System
from kvfs.tiers.nvme import NvmeTier
from kvfs.tiers.ram import RamTier
from kvfs.unclaimed import PatientAllocator
from kvfs.volume import FILE_NAME as VOLUME
from kvfs.volume import Volume

log = logging.getLogger(__name__)

_MAX_WINDOWS = 16
_GONE = (
    errno.EIO, errno.ENXIO, errno.ENODEV, errno.EROFS, errno.ESTALE, errno.ENOTCONN, errno.EUCLEAN, errno.EREMOTEIO,
    errno.ETIMEDOUT,
)  # fmt: skip
"""What the system says of a device that failed, or is not there."""


def _check_memory(settings: Settings, system: System) -> None:
    """Refuse what would bring the kernel to kill processes: the arena is filled at once."""
    available = system.available_memory()
    if available is None or settings.ram_bytes <= (most := largest_arena(available, settings.window_bytes)):
        return
    hint = f"; beside one window and a reserve {most >> 20}MiB fit" if most >= MIN_TIER_BYTES else ""
    raise UsageError(
        f"ram is {format_size(settings.ram_bytes)}, but only {format_size(available)} of memory are free{hint}"
    )


@contextmanager
def _told(what: str) -> Iterator[None]:
    """What the system refuses at the start is for the operator to mend: one sentence."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise UsageError(f"cannot open {what}: {error.strerror or error}{where}") from error
    except sqlite3.Error as error:
        raise UsageError(f"cannot open {what}: the index cannot be read: {error}") from error


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


def _tell_of_unclaimed(stripes: Iterable[Stripe]) -> None:
    left = [extent for stripe in stripes for extent in _unclaimed(stripe.tier)]
    if left:
        log.info(
            "%s of the volume are kept as an index that was lost left them, as long as there is other room",
            format_size(sum(length for _, length in left)),
        )


def _unclaimed(nvme: NvmeTier) -> list[tuple[int, int]]:
    return nvme.extents.unclaimed if isinstance(nvme.extents, PatientAllocator) else []


def _keep_what_is_left(index: Index, nvme: NvmeTier) -> None:
    """Remember what of an unclaimed volume is still as it was."""
    left = _unclaimed(nvme)
    try:
        if left != index.unclaimed():
            index.keep_unclaimed(left)
    except sqlite3.Error as error:  # more is held back than need be
        log.warning("the index could not be written: %s", error)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A volume that is there."""

    volume: Volume
    index: Index
    contents: Contents
    documents: Documents

    def stripe(self, number: int, settings: Settings, policy: Policy[Chunk], counters: Counters) -> Stripe:
        tier = NvmeTier(self.volume, settings.io_threads, policy)
        commits = Commits(self.index, self.documents)
        directory = str(self.volume.path.parent)
        return Stripe(number, directory, self.volume.identity, tier, commits, Eraser(tier, counters))


def _open_volume(where: VolumeSetting, system: System) -> _Opened:
    directory = Path(where.directory)
    with ExitStack() as undo, _told(f"the volume in {directory}"):
        volume = Volume.open(directory, where.size_bytes, system)
        undo.callback(volume.close)
        index = Index.open(directory / FILE_NAME, volume.identity)
        undo.callback(index.close)
        _hold_back(volume, index)
        documents = Documents(directory)
        with _told(f"the documents of the namespaces in {documents.path}"):
            contents = read(index, documents)
        undo.pop_all()
    return _Opened(volume, index, contents, documents)


async def _open_volumes(
    settings: Settings, system: System, events: EventLog, opened: list[_Opened]
) -> list[VolumeSetting]:
    """Open the volumes, appending to `opened`; returns those that are gone.

    One is gone if the others know it and its file is not there, or its device fails: a drive that died, or is not mounted,
    does not keep the cache down, and nothing is made in the place where it should be. What nobody knows yet is made, and
    what an operator did wrong is refused, as in a cache of one volume.
    """
    found: dict[str, _Opened] = {}
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


def _may_be_there(where: VolumeSetting) -> bool:
    try:
        return Path(where.directory, VOLUME).exists()
    except OSError:
        return True


def _remember(opened: Iterable[_Opened], directories: list[str]) -> None:
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


@asynccontextmanager
async def open_store(settings: Settings, system: System | None = None) -> AsyncIterator[Store]:
    """A running store with these settings. Leaving the context flushes what is dirty, for at most a minute.

    Raises UsageError for what an operator has to mend.
    """
    system = system or System()
    _check_memory(settings, system)
    make_policy = policies.maker(settings.policy)
    events, counters = EventLog(system), Counters()
    windows = settings.window_bytes * _MAX_WINDOWS
    with _told("the RAM tier"):
        arena = await trio.to_thread.run_sync(
            lambda: Arena.create(
                settings.ram_bytes,
                huge_pages=settings.huge_pages == "auto",
                window_budget_bytes=windows,
                is_shared=settings.access == "trusted",
            )
        )
    opened: list[_Opened] = []
    try:
        missing = await _open_volumes(settings, system, events, opened)
        stripes = [
            each.stripe(number, settings, make_policy(system.monotonic), counters) for number, each in enumerate(opened)
        ]
        ram = RamTier(arena, make_policy(system.monotonic))
        residency = Residency(ram, Stripes(stripes) if stripes else None, counters, events, system)
        if stripes:
            await trio.to_thread.run_sync(recover, residency, [each.contents for each in opened])
            _tell_of_unclaimed(stripes)
        async with trio.open_nursery() as nursery:
            volumes = [each.volume for each in opened]
            store = Store(settings, system, residency, nursery, arena, volumes, missing)
            life = trio.CancelScope(shield=True)
            store.run_in(nursery, life)
            try:
                await residency.settle()  # rows that were dropped are gone before their extents are used
                yield store
            finally:
                with trio.CancelScope(shield=True):
                    if not await store.flush():
                        log.error("not everything could be written to NVMe; dirty chunks are lost")
                life.cancel()
                nursery.cancel_scope.cancel()
        for each, stripe in zip(opened, stripes, strict=True):
            _keep_what_is_left(each.index, stripe.tier)
    finally:
        for each in opened:
            each.index.close()
            each.volume.close()
        arena.close()
