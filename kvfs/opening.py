"""Opening a store: memory, volume and index are checked, opened and recovered; and closing it, what is dirty first.

Everything that an operator can mend is refused here in one sentence, before anything is changed.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import trio

from kvfs import remembering
from kvfs.arena import Arena
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
            store.run_in(nursery, life)
            if commits is not None:
                nursery.start_soon(remembering.keep, residency, commits)
            try:
                await residency.settle()  # rows that were dropped are gone before their extents are used
                yield store
            finally:
                with trio.CancelScope(shield=True):
                    if not await store.flush():
                        log.error("not everything could be written to NVMe; dirty chunks are lost")
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
