"""The power goes at every step of every verb: what was called clean is there, nothing is wrong, and the store goes on.

Each verb is played once on a disk that is recorded. Then every disk that a machine could find at any of its steps is
opened and looked at; `kvfs.recording` says which those are. KVFS_SEED and KVFS_TORN (how many random variants of each
step that changes what may be found) choose them; the seed is in every failure.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
import trio
import trio.testing
import xxhash

from kvfs.catalog import NOWHERE, Chunk, ChunkTable
from kvfs.chunk import geometry
from kvfs.errors import CorruptChunk
from kvfs.index import FILE_NAME as INDEX
from kvfs.keys import Key, KeyChain
from kvfs.messages import StoreStatus, Tier
from kvfs.namespace import Namespace
from kvfs.opening import open_store
from kvfs.pins import FOREVER
from kvfs.recording import Disk, Files, Point, RecordingSystem, disk_in, points
from kvfs.store import Store
from kvfs.testing import (
    FaultySystem,
    chain_of,
    eventually,
    hold_one_of_two,
    new_chunks,
    payload_of,
    read_all,
    settings_in,
    sized_namespace,
    store_chain,
    store_chunk,
)
from kvfs.volume import FILE_NAME as VOLUME

from .volumes import chunk_file, rebuilt

MIB = 1 << 20
NS = sized_namespace(196 << 10)  # five of them fill the smallest volume
OTHER = sized_namespace(48 << 10, "tests/other")


class Observed(NamedTuple):
    """What the store had said by then.

    Attributes: clean: what is; gone: what a removal that returned took; tried: what anybody tried to store; pinned,
    unpinned: what a call that returned pinned, or let go, and no other call is changing; quotas: what the quota may be;
    spaces_gone: namespaces that were removed.
    """

    clean: frozenset[Key] = frozenset()
    gone: frozenset[Key] = frozenset()
    tried: frozenset[Key] = frozenset()
    pinned: frozenset[Key] = frozenset()
    unpinned: frozenset[Key] = frozenset()
    quotas: frozenset[int | None] = frozenset({None})
    spaces_gone: frozenset[str] = frozenset()


@dataclass
class World:
    """A store that is played with, and what has to be true of it.

    Attributes: gone, pinned, unpinned, quotas, spaces_gone: see `Observed`; places: of every key that is tried its chain
    and position.
    """

    directory: Path
    system: FaultySystem
    clean_before: frozenset[Key] = frozenset()
    gone: set[Key] = field(default_factory=set)
    pinned: set[Key] = field(default_factory=set)
    unpinned: set[Key] = field(default_factory=set)
    quotas: set[int | None] = field(default_factory=lambda: {None})
    spaces_gone: set[str] = field(default_factory=set)
    places: dict[Key, tuple[KeyChain, int, Namespace]] = field(default_factory=dict)
    store: Store | None = None
    table: ChunkTable | None = None

    def observe(self) -> Observed:
        """In any thread, and while the loop goes on: copies of what belongs to it are taken at one stroke."""
        clean = self.clean_before
        if self.store is not None:
            tables = list(self.store.catalog.tables.values())
            chunks = [chunk for table in tables for chunk in list(table.chunks.values())]
            clean = frozenset(chunk.key for chunk in chunks if chunk.nvme != NOWHERE and not chunk.is_removed)
        return Observed(
            clean, frozenset(self.gone), frozenset(self.places), frozenset(self.pinned), frozenset(self.unpinned),
            frozenset(self.quotas), frozenset(self.spaces_gone),
        )  # fmt: skip

    def know(self, chain: KeyChain, namespace: Namespace = NS) -> KeyChain:
        """Something will be stored of this chain: it may be found from now on."""
        for position, key in enumerate(chain.keys):
            self.places[key] = (chain, position, namespace)
        return chain

    async def stored(self, chain: KeyChain, begin: int = 0, *, table: ChunkTable | None = None) -> list[StoreStatus]:
        """Store chunks of a chain, each in a publish of its own."""
        assert self.store is not None
        assert self.table is not None
        table = table or self.table
        self.know(chain, table.namespace)
        statuses = []
        for new, key in zip(new_chunks(chain, begin), chain.keys[begin:], strict=True):
            self.gone.discard(key)
            while (status := await store_chunk(self.store, table, new)) is StoreStatus.REFUSED:
                await self.flush()
            statuses.append(status)
        return statuses

    async def pin(self, chain: KeyChain, *positions: int, until_ns: int | None = FOREVER) -> None:
        """Pin chunks, or (None) end their pins."""
        assert self.store is not None
        keys = {chain.keys[position] for position in positions}
        self.pinned -= keys
        self.unpinned -= keys
        chunks = [self.chunks[key] for key in keys]
        if until_ns is None:
            await self.store.limits.unpin(chunks)
            self.unpinned |= keys
        else:
            await self.store.limits.pin(chunks, until_ns)
            self.pinned |= keys

    async def limit(self, quota_bytes: int | None) -> None:
        """Set the quota of the first namespace."""
        assert self.store is not None
        assert self.table is not None
        self.quotas.add(quota_bytes)
        await self.store.limits.set_quota(self.table, quota_bytes)
        self.quotas = {quota_bytes}

    async def admit(self, chain: KeyChain, position: int, *, is_whole: bool = True) -> None:
        """Copy a chunk in, in two pieces; its last byte but the padding may be wrong."""
        assert self.store is not None
        assert self.table is not None
        self.know(chain)
        raw = bytearray(chunk_file(NS, chain, position, 7))
        raw[-5000] ^= not is_whole
        staging = self.store.staging
        staged = staging.create(self.store.catalog.next_inode(), len(raw), len(raw))
        await staging.write(staged, 0, raw[:70_000])
        await staging.write(staged, 70_000, raw[70_000:])
        if is_whole:
            await self.store.admit(staged, self.table, chain.keys[position])
        else:
            with pytest.raises(CorruptChunk):
                await self.store.admit(staged, self.table, chain.keys[position])
            staging.drop(staged)

    async def remove_namespace(self, namespace: Namespace) -> None:
        assert self.store is not None
        self.store.remove_namespace(self.store.catalog.tables[namespace.directory])
        await self.store.settle()
        self.spaces_gone.add(namespace.directory)

    async def remove(self, chain: KeyChain, *positions: int) -> None:
        assert self.store is not None
        keys = [chain.keys[position] for position in positions]
        self.pinned.difference_update(keys)
        await self.store.remove([self.chunks[key] for key in keys])
        self.gone.update(keys)

    async def flush(self) -> None:
        assert self.store is not None
        assert await self.store.flush()

    @property
    def chunks(self) -> dict[Key, Chunk]:
        """Those of the first namespace."""
        assert self.table is not None
        return self.table.chunks

    def chunk(self, chain: KeyChain, position: int) -> Chunk:
        return self.chunks[chain.keys[position]]


# the verbs

FIRST, SECOND, THIRD = (chain_of(NS, 3, seed) for seed in range(3))


async def nothing(world: World) -> None:
    """Only opening and closing."""


async def first_three(world: World) -> None:
    await world.stored(FIRST)
    await world.flush()


async def storing(world: World) -> None:
    """One by one, a group being written while another is made durable; the last are dirty when the store ends."""
    await world.stored(FIRST)
    await world.flush()
    await world.stored(SECOND)


async def storing_in_short_writes(world: World) -> None:
    """The device takes 68 KiB at a time."""
    world.system.max_transfer = 68 << 10
    await world.stored(chain_of(NS, 2, 7))
    await world.flush()


async def storing_at_once(world: World) -> None:
    """Many small chunks in a group, written as one run, of a namespace that is new."""
    assert world.store is not None
    table = world.store.attach(OTHER)
    world.system.write_gate.clear()
    await world.stored(chain_of(OTHER, 8), table=table)
    world.system.open_gates()
    await world.flush()
    await world.stored(chain_of(OTHER, 2, 1), table=table)


async def with_gaps(world: World) -> None:
    """Two prompts on the volume, a chunk of each gone."""
    for chain in (FIRST, SECOND):
        await world.stored(chain)
        await world.flush()
    for chain in (FIRST, SECOND):
        await world.remove(chain, 1)


async def storing_groups_that_overlap(world: World) -> None:
    """A write takes long: the next group is written beside it, and some of that is removed before either is durable."""
    await _two_groups(world, 0)


async def failing_beside_another(world: World) -> None:
    """The same, and the write that took long fails: its group is written again, elsewhere, behind the other."""
    await _two_groups(world, errno.EIO)
    await world.stored(THIRD)


async def _two_groups(world: World, error: int) -> None:
    assert world.store is not None
    assert world.table is not None
    chain, beside = world.know(chain_of(NS, 3, 3)), chain_of(NS, 2, 4)
    held = await hold_one_of_two(world.system, world.store, world.table, new_chunks(chain))
    num_written = world.system.num_written
    await world.stored(beside)  # the second waits for one of the two groups to be durable
    await eventually(lambda: world.system.num_written > num_written)
    assert all(world.chunks[key].is_dirty for key in (*chain.keys[1:], *beside.keys))
    world.system.held_error = error
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.remove, beside, 0)
        await eventually(lambda: beside.keys[0] not in world.chunks)
        held.set()
    await world.flush()


async def evicting(world: World) -> None:
    """The volume is full, so what is stored takes the extents of what is evicted."""
    for seed in range(3, 7):
        await world.stored(chain_of(NS, 2, seed))
        await world.flush()
    await world.stored(FIRST)


async def removing(world: World) -> None:
    """And storing others in their place, and the same again."""
    await world.remove(FIRST, 1)
    await world.stored(SECOND)
    await world.flush()
    await world.remove(SECOND, 0, 1, 2)
    await world.stored(FIRST, 1)
    await world.flush()
    await world.remove(FIRST, 2)


async def removing_what_is_being_written(world: World) -> None:
    """While it is written, while it is synced, and while its row is committed."""
    assert world.store is not None
    for seed, gate in ((3, world.system.write_gate), (4, world.system.sync_gate)):
        gate.clear()
        chain = chain_of(NS, 2, seed)
        await world.stored(chain)
        num_calls = len(world.system.writes) + world.system.num_syncs
        with trio.move_on_after(0.05):  # it may be on its way already
            await eventually(lambda n=num_calls: len(world.system.writes) + world.system.num_syncs > n)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.remove, chain, 0)
            await trio.lowlevel.checkpoint()
            world.system.open_gates()
        await world.flush()
    async with held_index(world) as let_go:
        chain = chain_of(NS, 2, 5)
        await world.stored(chain)
        num_syncs = world.system.num_syncs
        await eventually(lambda: world.system.num_syncs > num_syncs)
        let_go.start_soon(world.remove, chain, 0)
    await world.stored(SECOND)
    await world.flush()


async def removing_while_storing(world: World) -> None:
    """The commits of removals take long: nothing may take their extents before, nor a row come that was taken back."""
    async with held_index(world) as let_go:
        let_go.start_soon(world.remove, FIRST, 1)
        await eventually(lambda: FIRST.keys[1] not in world.chunks)
        num_syncs = world.system.num_syncs
        chain = chain_of(NS, 1, 3)
        await world.stored(chain)
        await eventually(lambda: world.system.num_syncs > num_syncs)
        await trio.testing.wait_all_tasks_blocked()
        let_go.start_soon(world.remove, chain, 0)
        await eventually(lambda: chain.keys[0] not in world.chunks)
        await world.stored(chain_of(NS, 1, 4))
    await world.flush()
    await world.stored(SECOND)


@asynccontextmanager
async def held_index(world: World) -> AsyncIterator[trio.Nursery]:
    """No commit succeeds before the end of the block; what was started in the nursery ends then."""
    with contextlib.closing(sqlite3.connect(world.directory / INDEX, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        async with trio.open_nursery() as nursery:
            yield nursery
            await trio.testing.wait_all_tasks_blocked()
            other.execute("ROLLBACK")


async def promoting(world: World) -> None:
    """Loads bring chunks into RAM and save their use; nothing of it changes what is there."""
    assert world.store is not None
    chunks = [world.chunk(FIRST, position) for position in range(3)]
    for chunk in chunks:
        world.store.lease(chunk)
    for promotion in world.store.promote(chunks):
        assert promotion is not None
        await promotion.wait_for_layers(4)
    world.store.touch(chunks, [Tier.NVME] * 3)
    for chunk in chunks:
        world.store.release(chunk)
    await world.flush()
    await world.stored(SECOND)


async def verifying(world: World) -> None:
    """One chunk is damaged: it is found, dropped, and its extent used again."""
    assert world.store is not None
    for chunk in [world.chunk(FIRST, position) for position in range(3)]:
        await world.store.examine(chunk)
    assert world.store.counters.corrupt == 1
    await world.stored(SECOND)


async def failing(world: World) -> None:
    """Writes and syncs fail, some of them after the fact, and are tried again."""
    for seed, what in ((3, "write_error"), (4, "sync_error")):
        setattr(world.system, what, 5)
        await world.stored(chain_of(NS, 1, seed))
        assert world.store is not None
        await eventually(lambda: world.store.statistics().nvme.is_degraded)  # type: ignore[union-attr]
        setattr(world.system, what, 0)
        await world.flush()
    await world.stored(SECOND)


async def pinning(world: World) -> None:
    """Clean chunks, dirty ones and again; unpinning; and what is pinned is in the way of what is stored."""
    await world.pin(FIRST, 1)
    await world.stored(SECOND, 0)
    await world.pin(SECOND, 0)
    await world.flush()
    await world.pin(FIRST, 1, until_ns=None)
    await world.pin(FIRST, 0)
    for seed in (3, 4):
        await world.stored(chain_of(NS, 2, seed))
        await world.flush()
    assert FIRST.keys[0] in world.chunks
    await world.pin(FIRST, 0, until_ns=None)
    await world.remove(SECOND, 0)


async def limiting(world: World) -> None:
    """A quota, another and none, while chunks come."""
    for number, quota_bytes in enumerate((1 << 30, 1 << 31, None)):
        await world.limit(quota_bytes)
        await world.stored(chain_of(NS, 1, 10 + number))
    await world.flush()
    await world.limit(1 << 32)


async def removing_namespaces(world: World) -> None:
    """One that is emptied, one that never held anything, and the first again, with others in its place."""
    assert world.store is not None
    other, empty = sized_namespace(48 << 10, "tests/other"), sized_namespace(48 << 10, "tests/empty")
    table = world.store.attach(other)
    world.store.attach(empty)
    chain = chain_of(other, 2)
    await world.stored(chain, table=table)
    await world.flush()
    await world.remove_namespace(empty)
    await world.store.remove(list(table.chunks.values()))
    world.gone.update(chain.keys)
    await world.remove_namespace(other)
    world.spaces_gone.remove(other.directory)
    table = world.store.attach(other)
    await world.stored(chain, table=table)
    await world.flush()
    await world.store.remove(list(table.chunks.values()))
    world.gone.update(chain.keys)
    await world.remove_namespace(other)
    await world.stored(SECOND)
    await world.flush()


async def admitting(world: World) -> None:
    """Copied in leaf first, one of them wrong, one there already, until they are clean; and removed again."""
    chain = chain_of(NS, 3, 3)
    await world.admit(chain, 2)
    await world.admit(chain, 1, is_whole=False)
    await world.flush()
    await world.admit(chain, 1)
    await world.admit(FIRST, 0)
    await world.admit(chain, 0)
    await world.flush()
    await world.remove(chain, 1)
    await world.admit(SECOND, 0)


async def erasing(world: World) -> None:
    """What is removed is found by no scan: while others are stored, and where it was."""
    await world.remove(FIRST, 1)
    await world.stored(chain_of(NS, 1, 3))
    await world.remove(FIRST, 0, 2)
    await world.flush()
    await world.stored(SECOND)
    await world.flush()
    await world.remove(SECOND, 0, 1, 2)


def a_damaged_chunk(directory: Path) -> frozenset[Key]:
    """One byte in the middle of the second chunk is flipped."""
    with index_of(directory) as rows:
        offset, length = next((row[2], row[3]) for row in rows if row[1] == FIRST.keys[1])
    with directory.joinpath(VOLUME).open("r+b") as file:
        file.seek(offset + length // 2)
        byte = file.read(1)[0]
        file.seek(offset + length // 2)
        file.write(bytes([byte ^ 1]))
    return frozenset({FIRST.keys[1]})


def a_damaged_index(directory: Path) -> frozenset[Key]:
    """The row of the second chunk claims the extent of the third, as no index of ours does."""
    connection = sqlite3.connect(directory / INDEX, isolation_level=None)
    connection.execute("UPDATE chunks SET offset = (SELECT offset FROM chunks WHERE position = 2) WHERE position = 1")
    connection.close()
    return frozenset({FIRST.keys[1]})


@dataclass
class Verb:
    """What is played, on what.

    Attributes: before: what the store held already; damage: done to the disk then, says which chunks it cost;
    nvme_before, nvme: sizes of the volume; loses_index: the index is lost with the power, and made anew by a scan.
    """

    play: Callable[[World], Awaitable[None]]
    before: Callable[[World], Awaitable[None]] | None = first_three
    damage: Callable[[Path], frozenset[Key]] | None = None
    nvme_before: int = MIB
    nvme: int = MIB
    loses_index: bool = False


VERBS = {
    "create": Verb(nothing, None),
    "create-and-store": Verb(storing, None),
    "store": Verb(storing, nvme_before=2 * MIB, nvme=2 * MIB),
    "store-short-writes": Verb(storing_in_short_writes, nothing),
    "store-at-once": Verb(storing_at_once, nothing),
    "store-overlapping": Verb(storing_groups_that_overlap, with_gaps, nvme_before=2 * MIB, nvme=2 * MIB),
    "fail-overlapping": Verb(failing_beside_another, with_gaps, nvme_before=2 * MIB, nvme=2 * MIB),
    "evict": Verb(evicting),
    "remove": Verb(removing),
    "remove-while-storing": Verb(removing_while_storing),
    "remove-dirty": Verb(removing_what_is_being_written, nothing),
    "grow": Verb(storing, nvme_before=MIB, nvme=2 * MIB),
    "promote": Verb(promoting),
    "verify": Verb(verifying, damage=a_damaged_chunk),
    "recover": Verb(storing, damage=a_damaged_index),
    "pin": Verb(pinning),
    "quota": Verb(limiting, nvme_before=2 * MIB, nvme=2 * MIB),
    "namespace": Verb(removing_namespaces, nvme_before=2 * MIB, nvme=2 * MIB),
    "admit": Verb(admitting, nvme_before=2 * MIB, nvme=2 * MIB),
    "erase": Verb(erasing, nvme_before=2 * MIB, nvme=2 * MIB, loses_index=True),
    "failing-device": Verb(failing, nvme_before=2 * MIB, nvme=2 * MIB),
}

# looking at a disk


class index_of:  # noqa: N801 - reads like the function that it is to its users
    """The rows (namespace, key, offset, length) of an index that nobody has open."""

    def __init__(self, directory: Path) -> None:
        self._connection = sqlite3.connect(directory / INDEX)

    def __enter__(self) -> list[tuple[int, bytes, int, int]]:
        return self._connection.execute("SELECT namespace, key, offset, length FROM chunks ORDER BY offset").fetchall()

    def __exit__(self, *_: object) -> None:
        self._connection.close()


@dataclass
class Inspector:
    """Opens disks and looks at them. `damaged`: chunks that the disk had lost before."""

    root: Path
    world: World
    settings: dict[str, int]
    damaged: frozenset[Key]
    loses_index: bool = False
    num_disks: int = 0
    seen: set[bytes] = field(default_factory=set)
    rows_of: dict[bytes, list[tuple[int, bytes, int, int]]] = field(default_factory=dict)

    def no_row_names_what_is_written(self, point: Point) -> None:
        """What is being written lies in no extent that the index could name after a crash now."""
        for files in point.files:
            for _, key, offset, length in self._rows(files):
                for begin, data in point.pending:
                    is_apart = begin + len(data) <= offset or offset + length <= begin
                    clean = point.observed[0].clean | point.observed[1].clean
                    is_own = key in clean or len(point.files) == 2  # written by the very group that is committed now
                    assert is_apart or is_own, f"written over the extent of {key.hex()}, whose row is still there"

    def _rows(self, files: Files) -> list[tuple[int, bytes, int, int]]:
        name = digest(files)
        if name not in self.rows_of:
            with tempfile.TemporaryDirectory(dir=self.root) as directory:
                Disk(None, files).put(Path(directory))
                self.rows_of[name] = []
                if INDEX in files:
                    with index_of(Path(directory)) as rows:
                        self.rows_of[name] = rows
        return self.rows_of[name]

    async def inspect(self, disk: Disk, before: Observed, behind: Observed) -> None:
        """Whatever is found on the disk has to be true of one that was observed so, and the store has to go on."""
        name = digest(
            disk.files,
            disk.volume,
            repr([[sorted(map(repr, part)) for part in one] for one in (before, behind)]).encode(),
        )
        if name in self.seen:
            return
        self.seen.add(name)
        self.num_disks += 1
        directory = self.root / "disk"
        disk.put(directory / "nvme")
        if self.loses_index and disk.volume is not None:
            for path in directory.glob(f"nvme/{INDEX}*"):
                path.unlink()
            rebuilt(directory)
        async with open_store(settings_in(directory, **self.settings)) as store:
            assert not (before.spaces_gone | behind.spaces_gone).intersection(store.catalog.tables), (
                "a namespace is back"
            )
            table = store.attach(NS)
            chunks = {chunk.key: chunk for chunk in store.catalog.chunks()}
            expected = (before.clean | behind.clean) - self.damaged
            assert expected <= set(chunks), f"{len(expected - set(chunks))} clean chunks are gone"
            assert not (before.gone | behind.gone).intersection(chunks), "a removed chunk is back"
            assert set(chunks) <= before.tried | behind.tried | self.world.clean_before, "a name out of nowhere"
            pinned = {key for key, chunk in chunks.items() if store.limits.end_of_pin(chunk) is not None}
            expected = (before.pinned | behind.pinned) & set(chunks)
            assert expected <= pinned or self.loses_index, f"{len(expected - pinned)} pins are gone"
            assert not pinned & (before.unpinned | behind.unpinned), "a pin that had been ended is back"
            assert table.quota_bytes in before.quotas & behind.quotas or not chunks, "another quota"
            self._check_extents(store)
            for key, chunk in chunks.items():
                if key not in self.damaged:
                    assert await self._is_right(store, chunk), f"chunk {key.hex()} is wrong"
            if not self.damaged:
                assert store.counters.corrupt == 0
            await self._goes_on(store, table)
            self._check_extents(store)
            with index_of(directory / "nvme") as rows:
                assert {row[1] for row in rows} == {chunk.key for chunk in store.catalog.chunks()}

    async def _is_right(self, store: Store, chunk: Chunk) -> bool:
        chain, position, namespace = self.world.places[chunk.key]
        geo = geometry(namespace, chain.tokens_per_chunk)
        raw = await read_all(store, chunk)
        return raw[geo.header_bytes :][: geo.payload_bytes] == payload_of(chain.chains[position], geo)

    def _check_extents(self, store: Store) -> None:
        extents = sorted((chunk.nvme, chunk.length) for chunk in store.catalog.chunks() if chunk.nvme != NOWHERE)
        for (begin, length), (follower, _) in itertools.pairwise(extents):
            assert begin + length <= follower, "an extent has two owners"
        nvme = store.statistics().nvme
        assert nvme is not None
        assert nvme.used_bytes == sum(length for _, length in extents)

    async def _goes_on(self, store: Store, table: ChunkTable) -> None:
        """A chunk can be stored, removed, stored again and read, whatever there was."""
        chain = chain_of(NS, 2, 99)
        assert await store_chain(store, table, chain) == [StoreStatus.STORED] * 2
        assert await store.flush(60)
        await store.remove([table.chunks[chain.keys[0]]])
        assert await store_chunk(store, table, new_chunks(chain)[0]) is StoreStatus.STORED
        assert await store.flush(60)
        geo = geometry(NS, chain.tokens_per_chunk)
        for key, value in zip(chain.keys, chain.chains, strict=True):
            raw = await read_all(store, table.chunks[key])
            assert raw[geo.header_bytes :][: geo.payload_bytes] == payload_of(value, geo)


def digest(files: Files, *others: bytes | None) -> bytes:
    found = xxhash.xxh3_128()
    for part in [*itertools.chain.from_iterable((name.encode(), files[name]) for name in sorted(files)), *others]:
        found.update(b"none" if part is None else len(part).to_bytes(8, "little") + part)
    return found.digest()


@pytest.fixture
def disks() -> Iterator[Path]:
    """Where disks are opened: in memory, as what is on them is decided (129 ms each on a real disk, 55 here).

    A process of its own removes it once the pipe to it is closed, so that it also goes with a killed test.
    """
    directory = tempfile.mkdtemp(prefix="kvfs-crash-points-", dir="/dev/shm")
    command = ["sh", "-c", 'read -r _; rm -rf -- "$0"', directory]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        yield Path(directory)


async def play_and_crash(played: Path, disks: Path, verb: Verb, seed: int, num_random: int) -> tuple[int, int]:
    """Play the verb, then crash at each of its steps; returns how many steps there were, and how many disks."""
    directory = played / "play"
    directory.mkdir()
    world = World(directory / "nvme", FaultySystem())
    damaged: frozenset[Key] = frozenset()

    async def live(system: FaultySystem, nvme: int, work: Callable[[World], Awaitable[None]]) -> None:
        async with open_store(settings_in(directory, ram=2 * MIB, nvme=nvme), system) as store:
            world.table, world.system, world.store = store.attach(NS), system, store
            await work(world)

    if verb.before is not None:
        await live(FaultySystem(), verb.nvme_before, verb.before)
        damaged = verb.damage(directory / "nvme") if verb.damage is not None else damaged
        world.clean_before = world.observe().clean - damaged
    world.store = None
    system = RecordingSystem(directory / "nvme")
    system.observe = world.observe
    with system.recording() as recorded:
        await live(system, verb.nvme, verb.play)
    rng = random.Random(seed)
    inspector = Inspector(disks, world, {"ram": 2 * MIB, "nvme": verb.nvme}, damaged, verb.loses_index)
    before: tuple[object, ...] = ()
    for point in points(recorded):
        here = (point.durable, point.pending, point.has_volume, point.files, point.observed)
        if here == before:  # a return, or the begin of a sync: the same disks may be found, and the same has to be true
            continue
        before = here
        inspector.no_row_names_what_is_written(point)
        for how, disk in point.images(rng, num_torn=num_random, num_random=num_random):
            try:
                await inspector.inspect(disk, *point.observed)
            except BaseException as error:
                error.add_note(f"at step {point.number} ({point.step}), unsynced: {how}; KVFS_SEED={seed}")
                raise
    return len(recorded.entries), inspector.num_disks


LOG = pytest.mark.expect_log(
    "two chunks claim|was dropped|writing to NVMe|was cut from|there is no index|cannot be true"
)


@LOG
@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
async def test_the_power_goes_at_every_step(tmp_path: Path, disks: Path, verb: str) -> None:
    """All of what was not synced reached the disk, none of it, and KVFS_TORN random parts of it, others at every run."""
    seed = int(os.environ.get("KVFS_SEED", random.SystemRandom().randrange(100_000)))
    num_random = int(os.environ.get("KVFS_TORN", "2"))
    num_steps, num_disks = await play_and_crash(tmp_path, disks, VERBS[verb], seed, num_random)
    print(f"KVFS_SEED={seed} {verb}: {num_steps} steps, {num_disks} disks")


@pytest.mark.slow
async def test_killed_at_any_step_of_a_rebuild(tmp_path: Path) -> None:
    """Of the index, old or new, one is there and complete, whichever file had been made, renamed or removed by then."""
    async with open_store(settings_in(tmp_path, nvme=2 * MIB)) as store:
        table = store.attach(NS)
        await store_chain(store, table, FIRST)
        await store_chain(store, store.attach(OTHER), chain_of(OTHER, 2))
        await store.flush()
        await store.limits.pin(list(table.chunks.values())[:1], FOREVER)
    disks: dict[bytes, tuple[str, Disk]] = {}
    with watched(tmp_path / "nvme", lambda step, disk: disks.setdefault(digest(disk.files, disk.volume), (step, disk))):
        rebuilt(tmp_path)
    assert len(disks) > 5
    for number, (step, disk) in enumerate(disks.values()):
        directory = tmp_path / f"disk-{number}"
        for repairs in (False, True):
            disk.put(directory / "nvme")
            if repairs:
                rebuilt(directory)
            async with open_store(settings_in(directory, nvme=2 * MIB)) as store:
                chunks = store.attach(NS).chunks
                assert set(chunks) == set(FIRST.keys), step
                assert set(store.attach(OTHER).chunks) == set(chain_of(OTHER, 2).keys), step
                assert store.limits.end_of_pin(chunks[FIRST.keys[0]]) == FOREVER, step
                for chunk in store.catalog.chunks():
                    await store.examine(chunk)
                assert store.counters.corrupt == 0


_watching: list[tuple[Path, Callable[[str, Disk], object]]] = []


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    """Called before each thing that is done to a file."""
    if _watching and event in ("open", "os.rename", "os.link", "os.remove", "os.mkdir", "sqlite3.connect"):
        (directory, seen), _watching[:] = _watching[0], []
        if str(directory) in str(arguments[0]):
            seen(f"{event} {arguments[0]}", disk_in(directory))
        _watching.append((directory, seen))


@contextlib.contextmanager
def watched(directory: Path, seen: Callable[[str, Disk], object]) -> Iterator[None]:
    """Hand over what a directory holds before each file in it is opened, made, renamed or removed, and at the end."""
    if not _is_watched:
        sys.addaudithook(_watch)
        _is_watched.append(True)
    _watching.append((directory, seen))
    try:
        yield
    finally:
        _watching.clear()
    seen("the end", disk_in(directory))


_is_watched: list[bool] = []
"""A hook of the interpreter cannot be removed again."""


async def test_a_commit_of_the_index_is_durable_when_it_returns(tmp_path: Path) -> None:
    """What the record takes for granted: SQLite syncs its log at each commit, and its directory when it made the log."""
    async with open_store(settings_in(tmp_path)) as store:
        (stripe,) = store._residency.nvme or ()
        connection = stripe.commits._index._connection
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
