"""Opening a store: memory, volume and index are checked, opened and recovered; and closing it, what is dirty first.

Everything that an operator can mend is refused here in one sentence, before anything is changed.
"""

from __future__ import annotations

import logging
import math
import sqlite3
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import trio

from kvfs import kept as kept_places
from kvfs import remembering
from kvfs.arena import Arena
from kvfs.collecting import uncollected
from kvfs.config import Settings, format_size
from kvfs.errors import UnavailableError, UsageError
from kvfs.index import Index
from kvfs.metrics import Counters, EventLog
from kvfs.opened_tiers import OpenedVolume, close_tiers, open_tiers, told
from kvfs.policies import named as policies
from kvfs.recovery import recover
from kvfs.residency import Residency
from kvfs.store import Store
from kvfs.stripes import Stripe, Stripes
from kvfs.system import System
from kvfs.takeover import Takeover
from kvfs.tiers.nvme import NvmeTier
from kvfs.tiers.ram import RamTier
from kvfs.unclaimed import PatientAllocator
from kvfs.volume import Volume

log = logging.getLogger(__name__)


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


def _bind(kept: kept_places.Kept, volumes: Iterable[Volume]) -> kept_places.Dropped | None:
    """Let the arena belong to the volumes; the chunks of others are forgotten, and returned. Raises OSError."""
    identity = " ".join(sorted(volume.identity.hex() for volume in volumes))
    found = kept_places.read_facts(kept.path)
    dropped = None
    if found is not None and found.volume != identity:
        dropped = kept.forget_chunks(found)
        log.warning("%s", dropped)
    kept.write_facts(msgspec.structs.replace(kept.facts, volume=identity))
    return dropped


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
    opened: list[OpenedVolume] = []
    arena, missing = await open_tiers(settings, system, place, events, opened)
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
                with told("the RAM tier"):
                    arena.dropped = _bind(arena.kept, volumes) or arena.dropped
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
                nursery.start_soon(store.policy.tell_recovered)
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
        close_tiers([arena], opened)
