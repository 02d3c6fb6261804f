"""Limits: what a person has said of chunks and namespaces, made durable and kept to: pins, quotas, ages.

A quota bounds the bytes of a namespace's chunk files. A store beyond it evicts the namespace's own least worthy chunks,
or is refused at once. An age bounds how long a chunk may lie unused; it counts as used when anything built on it was.
What is pinned, or held by a client, stays in either case.

Concurrency: belongs to the event loop's thread. Methods that are `async` return when what was asked for is durable; it
is in force before.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple
from weakref import WeakKeyDictionary

import trio

from kvfs.catalog import NOWHERE, Chunk, ChunkTable, last_needed
from kvfs.config import format_size
from kvfs.durations import NS
from kvfs.errors import CapacityError, UnavailableError, UsageError
from kvfs.keys import Key
from kvfs.pins import FOREVER
from kvfs.residency import Residency
from kvfs.system import System

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 60.0  # whatever happens: the wall clock may be set
_AT_ONCE = 2000
_PINNED_AT_MOST = (3, 4)
_SHARE_AT_ONCE = 32  # of a quota: looking for victims takes time, a million chunks are passed over in 0.13 s
_SMALL_SHARE = 16  # a namespace with less than this part of all chunks looks at its own only
_LOOK_AGAIN_S = 0.05  # when nothing could go
_LOOKING_TAKES = 20  # of the time that looking took: it has a twentieth at most
_COPY_DEADLINE_S = 20.0  # for a copy, which unlike an engine can wait
_EXPIRED_AT_ONCE = 500


def _is_any(_: Chunk) -> bool:
    return True


def _has_room(table: ChunkTable, length: int) -> bool:
    """Whether a namespace may have so much more as it is."""
    return table.quota_bytes is None or table.stored_bytes + table.reserved_bytes + length <= table.quota_bytes


class Went(NamedTuple):
    """What a namespace lost to its limits. Attributes: num_chunks, size_bytes."""

    num_chunks: int
    size_bytes: int

    def __sub__(self, before: Went) -> Went:
        return Went(self.num_chunks - before.num_chunks, self.size_bytes - before.size_bytes)


class Limits:
    """The limits of one store. `run` must be running for anything to end in time."""

    def __init__(self, residency: Residency, system: System) -> None:
        self._residency = residency
        self._system = system
        self._wake = trio.Event()
        self._full_until: WeakKeyDictionary[ChunkTable, float] = WeakKeyDictionary()  # of trio's clock
        self._went: WeakKeyDictionary[ChunkTable, Went] = WeakKeyDictionary()
        self._due: set[ChunkTable] = set()  # over their quota, and something of theirs may go now
        residency.on_last_lease = self._may_let_go

    # pins

    async def pin(self, chunks: Sequence[Chunk], until_ns: int) -> int:
        """Pin chunks until then, nanoseconds since the epoch or FOREVER; returns how many were there.

        Raises CapacityError if more than 3/4 of the lowest tier, or of a volume, would have to stay, with nothing pinned;
        UnavailableError if it may not be durable.
        """
        residency, pins = self._residency, self._residency.pins
        to_hold = pins.to_hold(chunk for chunk in chunks if not chunk.is_removed)
        if residency.nvme is None:
            self._check_pinned("the tier", to_hold, pins.held_bytes, residency.capacity)
        for stripe in residency.nvme or ():
            there = [chunk for chunk in to_hold if chunk.volume == stripe.number]
            what = "the tier" if len(residency.nvme or ()) == 1 else f"the volume in {stripe.directory}"
            self._check_pinned(what, there, stripe.held_bytes, stripe.tier.extents.capacity)
        count = 0
        remaining = iter(chunks)
        while some := list(islice(remaining, _AT_ONCE)):
            for chunk in some:
                if not chunk.is_removed:
                    pins.pin(chunk, until_ns)
                    self._keep(chunk, until_ns)
                    count += 1
            await trio.lowlevel.checkpoint()
        if count:
            until = "forever" if until_ns == FOREVER else until_ns
            residency.events.append("pin", namespace=chunks[0].table.directory, chunks=count, until_ns=until)
        self._wake.set()
        await residency.settle(chunks)
        return count

    def _check_pinned(self, what: str, to_hold: Iterable[Chunk], held_bytes: int, capacity: int) -> None:
        """Raise CapacityError if too much of a volume, or of a RAM cache, would be held with these."""
        part, whole = _PINNED_AT_MOST
        most = capacity * part // whole
        needed = sum(chunk.length for chunk in to_hold)
        if needed and held_bytes + needed > most:
            reason = (
                f"pins may hold {format_size(most)}, {part}/{whole} of {what}: {format_size(held_bytes)} are held, "
                f"and {format_size(needed)} more were to be"
            )
            log.warning("a pin was refused: %s", reason)
            self._residency.events.append("pin_refused", reason=reason)
            raise CapacityError(reason)

    async def unpin(self, chunks: Iterable[Chunk]) -> int:
        """End the pins of these chunks; returns how many had one. Raises UnavailableError if it may not be durable."""
        remaining = iter(chunks)
        unpinned: list[Chunk] = []
        while some := list(islice(remaining, _AT_ONCE)):
            ended = [chunk for chunk in some if self._residency.pins.unpin(chunk)]
            self._ended(ended)
            unpinned += ended
            await trio.lowlevel.checkpoint()
        await self._residency.settle(unpinned)
        return len(unpinned)

    def end_of_pin(self, chunk: Chunk) -> int | None:
        """When a chunk's pin ends, nanoseconds since the epoch or FOREVER; None if it is not pinned."""
        return self._residency.pins.end_of(chunk, self._system.time_ns())

    def common_end(self, chunks: Iterable[Chunk]) -> int | None:
        """The first end among the pins of these chunks, None unless every one is pinned."""
        return self._residency.pins.common_end(chunks, self._system.time_ns()) if self._residency.pins else None

    def _keep(self, chunk: Chunk, until_ns: int | None) -> None:
        if self._residency.nvme is not None:
            self._residency.nvme.of(chunk).pin(chunk, until_ns)

    def _ended(self, chunks: list[Chunk]) -> None:
        by_namespace: dict[str, int] = {}
        for chunk in chunks:
            self._keep(chunk, None)
            by_namespace[chunk.table.directory] = by_namespace.get(chunk.table.directory, 0) + 1
        for table in {chunk.table for chunk in chunks} & self._residency.over_quota:
            self._may_let_go(table)
        for directory, count in by_namespace.items():
            self._residency.events.append("unpin", namespace=directory, chunks=count)

    def went(self, table: ChunkTable) -> Went:
        """What a namespace has lost to its quota and its age since the store was opened."""
        return self._went.get(table, Went(0, 0))

    def _goes(self, chunk: Chunk) -> None:
        before = self.went(chunk.table)
        self._went[chunk.table] = Went(before.num_chunks + 1, before.size_bytes + chunk.length)

    # quotas

    async def set_quota(self, table: ChunkTable, quota_bytes: int | None) -> None:
        """Bound the bytes of a namespace, or not any more. What is too much goes now, as far as it may go."""
        self._check_present(table)
        table.quota_bytes = quota_bytes
        await self._changed(table)

    def make_room(self, table: ChunkTable, length: int, parent: Chunk | None) -> bool:
        """Whether a namespace may have `length` bytes more, after an eviction of its own if need be.

        What leads to `parent`, which the new chunk is built on, does not go for it. Counts a refusal.
        """
        has_room = self._make_room(table, length, parent)
        self._residency.counters.stores_over_quota += not has_room
        return has_room

    async def make_room_for_copy(self, table: ChunkTable, length: int, parent: Key, position: int) -> bool:
        """The same for a chunk that is copied in, to this position of its chain; true until the next await.

        Nor does anything go that was copied in before and does not stand deeper. What may go, and is not on NVMe yet, is
        waited for.
        """
        end_s = trio.current_time() + _COPY_DEADLINE_S
        while not _has_room(table, length):
            await trio.sleep_until(min(end_s, self._full_until.get(table, 0.0)))
            can_wait = trio.current_time() < end_s and self._may_have_room_soon(table, position)
            place = None if can_wait else position  # what may be the deepest is not on NVMe yet
            may_go = partial(self._residency.copied_in.may_go_for, position=place)
            if self._make_room(table, length, table.chunks.get(parent), may_go):
                break
            if not can_wait:
                self._residency.counters.stores_over_quota += 1
                return False
        return True

    def _may_have_room_soon(self, table: ChunkTable, position: int) -> bool:
        """Whether something that is not on NVMe yet may go for a chunk that is copied in to this position."""
        residency = self._residency
        return residency.nvme is not None and any(
            chunk.is_dirty
            and residency.copied_in.may_go_for(chunk, position)
            and not (residency.pins.is_held(chunk) or chunk in residency.kept_back)
            for chunk in table.chunks.values()
        )

    def _make_room(
        self, table: ChunkTable, length: int, parent: Chunk | None, may_go: Callable[[Chunk], bool] = _is_any
    ) -> bool:
        quota = table.quota_bytes
        if quota is None or _has_room(table, length):
            return True
        if length <= quota and trio.current_time() >= self._full_until.get(table, 0.0):
            started_s = self._system.monotonic()
            missing = table.stored_bytes + table.reserved_bytes + length - quota
            kept = frozenset(parent.prefix() if parent else ())
            wanted = max(missing, quota // _SHARE_AT_ONCE)
            self._evict(table, missing, wanted, lambda victim: victim not in kept and may_go(victim))
            if _has_room(table, length):
                return True
            took_s = self._system.monotonic() - started_s
            self._full_until[table] = trio.current_time() + max(_LOOK_AGAIN_S, _LOOKING_TAKES * took_s)
        return False

    def _evict(self, table: ChunkTable, needed: int, wanted: int, may_go: Callable[[Chunk], bool] = _is_any) -> None:
        """Evict chunks of a namespace, the least worthy first, until `wanted` bytes of it are gone or none may go.

        Of what a copy has just brought no more goes than is `needed`.
        """
        victims: list[Chunk] = []
        freed = 0
        for victim in self._in_order(table):
            if freed >= wanted or (freed >= needed and self._residency.copied_in.depth(victim) is not None):
                break
            if not may_go(victim) and self._residency.copied_in.depth(victim) is not None:
                break  # the copy itself is less worthy than all that follows
            if victim.leases or not may_go(victim):
                continue
            freed += victim.length
            victims.append(victim)
        for victim in victims:
            self._residency.counters.evictions_quota += 1
            self._goes(victim)
            self._residency.discard(victim, "evict", "quota")

    def _in_order(self, table: ChunkTable) -> Iterator[Chunk]:
        """The chunks of a namespace that may go, those first that admission keeps from NVMe: nobody has used them twice."""
        residency = self._residency
        if not residency.kept_back:
            return self._in_lowest(table)
        kept_back = residency.ram.policy.victims(lambda chunk: chunk.table is table and chunk in residency.kept_back)
        return itertools.chain(kept_back, self._in_lowest(table))

    def _in_lowest(self, table: ChunkTable) -> Iterator[Chunk]:
        """Those in the lowest tier that are not held, in its order of eviction, or by last use if they are few."""
        residency = self._residency
        nvme = residency.nvme
        if len(table.chunks) * _SMALL_SHARE >= (len(residency.ram.policy) if nvme is None else nvme.num_chunks):
            if nvme is not None:
                return nvme.victims(table)
            return residency.ram.policy.victims(lambda chunk: chunk.table is table)
        tier = "ram" if nvme is None else "nvme"
        needed_ns = last_needed(table.chunks.values())
        few = [
            chunk for chunk in table.chunks.values()
            if getattr(chunk, tier) != NOWHERE and not residency.pins.is_held(chunk)
        ]  # fmt: skip
        few.sort(key=lambda chunk: (needed_ns.get(chunk, chunk.last_used_ns), -chunk.position))
        copied_in = self._residency.copied_in
        copied = [chunk for chunk in few if copied_in.depth(chunk) is not None]
        deepest = iter(sorted(copied, key=lambda chunk: -chunk.position))
        return (chunk if copied_in.depth(chunk) is None else next(deepest) for chunk in few)

    # ages

    async def set_max_age(self, table: ChunkTable, max_age_ns: int | None) -> None:
        """Bound how long chunks of a namespace may lie unused, or not any more. What is too old goes now."""
        self._check_present(table)
        table.max_age_ns = max_age_ns
        await self._changed(table)

    async def _expire(self, table: ChunkTable, max_age_ns: int) -> None:
        """Remove what is too old, from the leaves up, a little at a time."""
        before_ns = self._system.time_ns() - max_age_ns
        chunks = [*table.chunks.values()]
        newest = chunks[-1].inode if chunks else 0
        old: list[Chunk] = []
        needed: set[Key] = set()  # something that stays is built on these
        for start in range(0, len(chunks), _AT_ONCE):
            for chunk in chunks[start : start + _AT_ONCE]:
                if chunk.last_used_ns < before_ns:
                    old.append(chunk)
                else:
                    needed.add(chunk.parent)
            await trio.lowlevel.checkpoint()
        old.sort(key=lambda chunk: -chunk.position)
        for start in range(0, len(old), _EXPIRED_AT_ONCE):
            for chunk in reversed(table.chunks.values()):  # in order of inodes: those that came while this waited
                if chunk.inode <= newest:
                    break
                needed.add(chunk.parent)
            some = old[start : start + _EXPIRED_AT_ONCE]
            for chunk in some:
                if not chunk.is_removed and self._is_expired(chunk, before_ns) and chunk.key not in needed:
                    self._residency.counters.expired += 1
                    self._goes(chunk)
                    self._residency.discard(chunk, "expire")
                elif not chunk.is_removed:
                    needed.add(chunk.parent)
            await self._residency.settle(some)

    def _is_expired(self, chunk: Chunk, before_ns: int) -> bool:
        return chunk.last_used_ns < before_ns and not chunk.leases and not self._residency.pins.is_held(chunk)

    # both

    def _check_present(self, table: ChunkTable) -> None:
        if self._residency.catalog.tables.get(table.directory) is not table:
            raise UsageError(f"the namespace {table.directory} was removed")

    async def _changed(self, table: ChunkTable) -> None:
        before = self.went(table)
        for stripe in self._residency.nvme or ():
            stripe.limit(table)
        try:
            await self._sweep(table)
        finally:
            went = self.went(table) - before
            self._residency.events.append(
                "limits", namespace=table.directory, quota_bytes=table.quota_bytes, max_age_ns=table.max_age_ns,
                evicted_chunks=went.num_chunks, evicted_bytes=went.size_bytes,
            )  # fmt: skip
        await self._residency.settle()

    async def _sweep(self, table: ChunkTable) -> None:
        """Let go of what a namespace may not have."""
        self._full_until.pop(table, None)
        self._keep_to_quota(table)
        if table.max_age_ns is not None:
            await self._expire(table, table.max_age_ns)

    def _keep_to_quota(self, table: ChunkTable) -> None:
        """Evict what is too much as far as it may go; the rest when somebody lets go of it."""
        self._due.discard(table)
        if table.quota_bytes is None or _has_room(table, 0):
            self._residency.over_quota.discard(table)
            return
        started_s = self._system.monotonic()
        missing = table.stored_bytes + table.reserved_bytes - table.quota_bytes
        self._evict(table, missing, missing)
        if _has_room(table, 0):
            self._residency.over_quota.discard(table)
            return
        self._residency.over_quota.add(table)
        took_s = self._system.monotonic() - started_s
        self._full_until[table] = trio.current_time() + max(_LOOK_AGAIN_S, _LOOKING_TAKES * took_s)

    def _may_let_go(self, table: ChunkTable) -> None:
        """Something of a namespace that is over its quota is held no more."""
        self._due.add(table)
        self._wake.set()

    def forget(self, table: ChunkTable) -> None:
        """A namespace was removed."""
        self._due.discard(table)
        self._residency.over_quota.discard(table)

    async def sweep(self) -> None:
        """Let go of what no namespace may have now."""
        self._residency.copied_in.expire()
        for table in [*self._residency.catalog.tables.values()]:
            try:
                await self._sweep(table)
            except UnavailableError:
                pass  # it is gone from view, and its rows are tried again; who writes the index says so

    def look(self) -> None:
        """End the pins that are over."""
        self._ended(self._residency.pins.end(self._system.time_ns()))

    async def run(self) -> None:
        """Do what is due when it is, for ever."""
        next_sweep = trio.current_time() + _LOOK_EVERY_S
        while True:
            self.look()
            if trio.current_time() >= next_sweep:
                await self.sweep()
                next_sweep = trio.current_time() + _LOOK_EVERY_S
            for table in [*self._due]:
                if trio.current_time() >= self._full_until.get(table, 0.0):
                    self._keep_to_quota(table)
            left_s = min(
                next_sweep - trio.current_time(),
                (self._residency.pins.next_end_ns - self._system.time_ns()) / NS,
                *(self._full_until.get(table, 0.0) - trio.current_time() for table in self._due),
            )
            with trio.move_on_after(max(0.0, left_s)):
                await self._wake.wait()
            self._wake = trio.Event()
