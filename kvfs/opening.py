"""Opening a store: memory, volume and index are checked, opened and recovered; and closing it, what is dirty first.

Everything that an operator can mend is refused here in one sentence, before anything is changed.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import trio

from kvfs import kept as kept_places
from kvfs import remembering
from kvfs.arena import Arena
from kvfs.chunk import align
from kvfs.commits import Commits
from kvfs.config import MIN_TIER_BYTES, Settings, format_size
from kvfs.documents import Documents
from kvfs.errors import UsageError
from kvfs.index import FILE_NAME, Index
from kvfs.memory import largest_arena
from kvfs.metrics import Counters, EventLog
from kvfs.policies import named as policies
from kvfs.recovery import recover
from kvfs.residency import Residency
from kvfs.scanning import has_chunks
from kvfs.store import Store
from kvfs.system import System
from kvfs.takeover import Takeover
from kvfs.tiers.nvme import NvmeTier
from kvfs.tiers.ram import RamTier
from kvfs.unclaimed import PatientAllocator
from kvfs.volume import Volume

log = logging.getLogger(__name__)

_MAX_WINDOWS = 16


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


def _tell_of_unclaimed(nvme: NvmeTier) -> None:
    left = nvme.extents.unclaimed if isinstance(nvme.extents, PatientAllocator) else []
    if left:
        log.info(
            "%s of the volume are kept as an index that was lost left them, as long as there is other room",
            format_size(sum(length for _, length in left)),
        )


def _keep_what_is_left(index: Index, nvme: NvmeTier) -> None:
    """Remember what of an unclaimed volume is still as it was."""
    left = nvme.extents.unclaimed if isinstance(nvme.extents, PatientAllocator) else []
    try:
        if left != index.unclaimed():
            index.keep_unclaimed(left)
    except sqlite3.Error as error:  # more is held back than need be
        log.warning("the index could not be written: %s", error)


def _open_arena(settings: Settings, system: System, place: Path | None) -> Arena:
    """The arena of the daemon before us, or a new one. Blocks."""
    windows = settings.window_bytes * _MAX_WINDOWS
    facts = None
    if place is not None:
        size = align(settings.ram_bytes)
        facts = kept_places.facts_of(os.path.realpath(settings.mountpoint), size, settings.nvme_directory)
        kept = kept_places.find(place, facts, windows)
        if kept is not None:
            return Arena.of(kept, windows)
    _check_memory(settings, system)
    return Arena.create(
        settings.ram_bytes,
        huge_pages=settings.huge_pages == "auto",
        window_budget_bytes=windows,
        is_shared=settings.access == "trusted",
        place=place,
        facts=facts,
    )


def _bind(kept: kept_places.Kept, volume: Volume | None) -> None:
    """Let the arena belong to the volume; the chunks of another are forgotten. Raises OSError."""
    identity = volume.identity.hex() if volume is not None else ""
    found = kept_places.read_facts(kept.path)
    if found is not None and found.volume != identity:
        log.warning("the RAM tier of the daemon before this one belongs to another volume: it begins empty")
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


def _leave(arena: Arena, *, is_flushed: bool) -> None:
    """An end in order: the arena goes, unless somebody wants it to stay, or what is dirty is nowhere else."""
    arena.is_to_stay = arena.kept is not None and (arena.kept.is_to_stay() or not is_flushed)
    if not is_flushed and arena.is_to_stay:
        log.error("not everything could be written to NVMe; what is dirty stays in RAM, for the next mount here")
    elif not is_flushed:
        log.error("not everything could be written to NVMe; dirty chunks are lost")
    elif arena.is_to_stay:
        log.info("the RAM tier stays, for the next mount here: %s", format_size(arena.size_bytes))


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
    with _told("the RAM tier"):
        arena = await trio.to_thread.run_sync(_open_arena, settings, system, place)
    volume: Volume | None = None
    index: Index | None = None
    try:
        nvme = commits = documents = None
        if settings.nvme_directory is not None and settings.nvme_bytes is not None:
            directory = Path(settings.nvme_directory)
            with _told(f"the volume in {directory}"):
                volume = Volume.open(directory, settings.nvme_bytes, system)
                index = Index.open(directory / FILE_NAME, volume.identity)
                await trio.to_thread.run_sync(_hold_back, volume, index)
            nvme = NvmeTier(volume, settings.io_threads, make_policy(system.monotonic))
            documents = Documents(directory)
            commits = Commits(index, nvme.extents.free, documents)
        ram = RamTier(arena, make_policy(system.monotonic))
        residency = Residency(ram, nvme, commits, counters, events, system)
        if index is not None and nvme is not None and commits is not None and documents is not None:
            with _told(f"the documents of the namespaces in {documents.path}"):
                nvme.extents = await trio.to_thread.run_sync(
                    recover, residency, nvme, commits, index, documents, system.time_ns()
                )
            commits.use(nvme.extents.free)
            _tell_of_unclaimed(nvme)
        async with trio.open_nursery() as nursery:
            store = Store(settings, system, residency, nursery, arena, volume)
            life = trio.CancelScope(shield=True)
            takeover, is_taking_over = None, False
            if arena.kept is not None:
                with _told("the RAM tier"):
                    _bind(arena.kept, volume)
                    takeover = _begin_takeover(arena.kept, store, residency, settings.io_threads)
                arena.is_to_stay = False  # from here on an end in order is one
            store.run_in(nursery, life)
            if commits is not None:
                nursery.start_soon(remembering.keep, residency, commits)
            try:
                await residency.settle()  # rows that were dropped are gone before their extents are used
                if takeover is not None:
                    store.settle_taken_over = takeover.settle
                    nursery.start_soon(takeover.run)
                    is_taking_over = True
                elif place is not None:
                    is_never = os.geteuid() == 0 and settings.huge_pages == "never"
                    why = "huge_pages is never" if is_never else "only root can keep it"
                    log.info(
                        "the RAM tier is a sealed memfd: it ends with this daemon, no other can take it over (%s)", why
                    )
                yield store
            finally:
                with trio.CancelScope(shield=True):
                    if takeover is not None and is_taking_over:
                        await takeover.is_over.wait()  # what is dirty may be among what was not looked at yet
                        takeover.life.cancel()
                    _leave(arena, is_flushed=await store.flush())
                    if commits is not None:
                        await remembering.at_the_end(residency, commits)
                life.cancel()
                nursery.cancel_scope.cancel()
        if index is not None and nvme is not None:
            _keep_what_is_left(index, nvme)
    finally:
        if index is not None:
            index.close()
        if volume is not None:
            volume.close()
        arena.close()
