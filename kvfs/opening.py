"""Opening a store: memory, volume and index are checked, opened and recovered; and closing it, what is dirty first.

Everything that an operator can mend is refused here in one sentence, before anything is changed.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import trio

from kvfs import kept as kept_places
from kvfs import remembering
from kvfs.arena import Arena
from kvfs.catalog import Chunk
from kvfs.chunk import align
from kvfs.collecting import uncollected
from kvfs.commits import Commits
from kvfs.config import MIN_TIER_BYTES, Settings, VolumeSetting, exact_size, format_size
from kvfs.documents import Documents
from kvfs.erasing import Eraser
from kvfs.errors import UnavailableError, UsageError
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
from kvfs.takeover import Takeover
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


def _arena(settings: Settings, system: System, place: Path | None) -> Callable[[], Arena]:
    """What gives the arena of the daemon before us, or a new one, which takes long. Raises UsageError if there is no memory."""
    windows = settings.window_bytes * _MAX_WINDOWS
    facts = None
    if place is not None:
        size = align(settings.ram_bytes)
        facts = kept_places.facts_of(
            os.path.realpath(settings.mountpoint), size, tuple(where.directory for where in settings.nvme)
        )
        kept = kept_places.find(place, facts, windows)
        if kept is not None:
            return partial(Arena.of, kept, windows)
    _check_memory(settings, system)
    return partial(
        Arena.create,
        settings.ram_bytes,
        huge_pages=settings.huge_pages == "auto",
        window_budget_bytes=windows,
        is_shared=settings.access == "trusted",
        place=place,
        facts=facts,
    )


def _bind(kept: kept_places.Kept, volumes: Iterable[Volume]) -> None:
    """Let the arena belong to the volumes; the chunks of others are forgotten. Raises OSError."""
    identity = " ".join(sorted(volume.identity.hex() for volume in volumes))
    found = kept_places.read_facts(kept.path)
    if found is not None and found.volume != identity:
        log.warning("the RAM tier of the daemon before this one belongs to other volumes: it begins empty")
        kept.forget_chunks()
    kept.write_facts(msgspec.structs.replace(kept.facts, volume=identity))


def _begin_takeover(kept: kept_places.Kept, store: Store, residency: Residency, num_threads: int) -> Takeover:
    """Let nothing be allocated where a chunk may be, and know all namespaces. Raises OSError."""
    for document in kept.documents.read().by_directory.values():
        known = store.catalog.tables.get(document.namespace.directory)
        try:
            if known is None:
                store.attach(document.namespace, document.created_ns)
        except UsageError as error:
            log.warning("a namespace in the arena is not taken over: %s", error)
    for table in store.catalog.tables.values():
        store.remember(table)
    takeover = Takeover(residency, kept.record, num_threads, store.take_over)
    takeover.claim()
    residency.ram.record = kept.record
    return takeover


async def _flush(store: Store) -> bool:
    """Whether all of it is on NVMe now."""
    try:
        return await store.flush()
    except UnavailableError as error:
        log.error("what was removed last may come back: %s", error)
        return not store.statistics().num_dirty


def _leave(arena: Arena, store: Store, *, is_flushed: bool) -> None:
    """An end in order: the arena goes, unless somebody wants it to stay, or what is dirty is nowhere else."""
    arena.is_to_stay = arena.kept is not None and (arena.kept.is_to_stay() or not is_flushed)
    if not is_flushed:
        store.unwritten = store.what_is_unwritten(is_kept=arena.is_to_stay)
        log.error("%s", store.unwritten.sentence)
    elif arena.is_to_stay:
        log.info("the RAM tier stays, for the next mount here: %s", format_size(arena.size_bytes))


@dataclass(frozen=True, slots=True)
class _Opened:
    """A volume that is there."""

    volume: Volume
    index: Index
    contents: list[Contents]  # until it is taken
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
    return _Opened(volume, index, [contents], documents)


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


async def _open_tiers(
    settings: Settings, system: System, place: Path | None, events: EventLog, opened: list[_Opened]
) -> tuple[Arena, list[VolumeSetting]]:
    """The arena, and the volumes that are missing; what is `opened` is appended. If one of both fails nothing stays open.

    They are opened side by side: each takes seconds where it is large.
    """
    with _told("the RAM tier"):
        make_arena = await trio.to_thread.run_sync(_arena, settings, system, place)
    arenas: list[Arena] = []
    missing: list[VolumeSetting] = []
    failures: list[UsageError] = []

    async def open_arena() -> None:
        try:
            with _told("the RAM tier"):
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
        _close(arenas, opened)
        raise
    return arenas[0], missing


def _close(arenas: Iterable[Arena], opened: Iterable[_Opened]) -> None:
    for each in opened:
        each.index.close()
        each.volume.close()
    for arena in arenas:
        arena.close()


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
async def open_store(
    settings: Settings, system: System | None = None, place: Path | None = None
) -> AsyncIterator[Store]:
    """A running store with these settings. Leaving the context flushes what is dirty, for at most a minute.

    In `place` the arena outlives us, if we are killed or told to leave it, and is taken over from the daemon before us;
    the caller holds a lock on it. Raises UsageError for what an operator has to mend.
    """
    system = system or System()
    make_policy = policies.maker(settings.policy)
    events, counters = EventLog(system), Counters()
    opened: list[_Opened] = []
    arena, missing = await _open_tiers(settings, system, place, events, opened)
    try:
        with uncollected():
            stripes = [
                each.stripe(number, settings, make_policy(system.monotonic), counters)
                for number, each in enumerate(opened)
            ]
            ram = RamTier(arena, make_policy(system.monotonic))
            residency = Residency(ram, Stripes(stripes) if stripes else None, counters, events, system)
            if stripes:
                contents = [each.contents.pop() for each in opened]
                await trio.to_thread.run_sync(recover, residency, contents, system.time_ns())
                del contents  # a hundred megabytes, for a million chunks
        _tell_of_unclaimed(stripes)
        async with trio.open_nursery() as nursery:
            volumes = [each.volume for each in opened]
            store = Store(settings, system, residency, nursery, arena, volumes, missing)
            life = trio.CancelScope(shield=True)
            takeover = None
            if arena.kept is not None:
                with _told("the RAM tier"):
                    _bind(arena.kept, volumes)
                    takeover = _begin_takeover(arena.kept, store, residency, settings.io_threads)
                arena.is_to_stay = False  # from here on an end in order is one
            store.run_in(nursery, life)
            nursery.start_soon(remembering.keep, residency)
            try:
                await residency.settle(
                    patience_s=math.inf
                )  # rows that were dropped are gone before their extents are used
                if takeover is not None:
                    store.settle_taken_over = takeover.settle
                    nursery.start_soon(takeover.run)
                    store.is_taking_over = True
                yield store
            finally:
                with trio.CancelScope(shield=True):
                    if takeover is not None and store.is_taking_over:
                        await takeover.is_over.wait()  # what is dirty may be among what was not looked at yet
                        takeover.life.cancel()
                    store.is_taking_over = False
                    _leave(arena, store, is_flushed=await _flush(store))
                    await remembering.at_the_end(residency)
                life.cancel()
                nursery.cancel_scope.cancel()
        for each, stripe in zip(opened, stripes, strict=True):
            _keep_what_is_left(each.index, stripe.tier)
    finally:
        _close([arena], opened)
