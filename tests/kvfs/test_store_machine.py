"""A state machine of the store: random operations on real tiers, with held devices, failing ones, crashes and restarts.

The model is small. What is visible follows from the event log alone; every event has to be one that an operation called
for, or an eviction that was allowed. What a chunk's bytes are follows from its chain value.

The store's event loop runs in a thread; a rule hands it one function and waits for it. Trio's clock stands still between
the rules, so that no deadline passes but where a rule says so. Which operations happen depends on hypothesis alone;
how far write-behind has come when they do depends on threads, unless a rule holds the device. So preconditions look at
nothing that follows from it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import math
import os
import shutil
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
import trio.lowlevel
import trio.testing
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvfs import residency, volume_writer
from kvfs.catalog import NOWHERE, Chunk, ChunkTable
from kvfs.config import POLICIES
from kvfs.errors import CapacityError, UnavailableError
from kvfs.index import FILE_NAME as INDEX
from kvfs.intake import Handed, Reservation, WindowSlot
from kvfs.messages import StoreStatus
from kvfs.opening import open_store
from kvfs.pins import FOREVER
from kvfs.stripes import Stripe
from kvfs.testing import LosingSystem, checksums_of, settings_in
from kvfs.volume import FILE_NAME as VOLUME

from .store_checks import Checks
from .store_loop import HANGS_AFTER_S, Loop
from .store_model import NAMESPACES, NODE_AT, NODES, QUOTAS, Hold, Model, Node

STORED, EXISTS, REFUSED, BAD = StoreStatus.STORED, StoreStatus.EXISTS, StoreStatus.REFUSED, StoreStatus.BAD

RAM_BYTES = 2 << 20
VOLUME_BYTES = (3 << 20, 5 << 20, 12 << 20, None)
HOLDS_ALL_BYTES = 12 << 20
STEPS_OF_A_LIFE = 15
"""After so many the store may be restarted; hypothesis would choose to do it all the time."""

a_node = st.sampled_from(NODES)
some_nodes = st.lists(a_node, min_size=1, max_size=6)


class StoreMachine(Checks, RuleBasedStateMachine):
    """See the module. Each method named `_do_…` runs in the event loop's thread."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.root = directory
        self.loop = Loop()
        self.lives = itertools.count()
        self.model = Model()
        self.system = LosingSystem()
        self.is_up = False

    # lives of the store

    @initialize(nvme=st.sampled_from(VOLUME_BYTES), policy=st.sampled_from(POLICIES), volumes=st.integers(1, 2))
    def begin(self, nvme: int | None, policy: str, volumes: int) -> None:
        self.nvme = nvme
        self.places = ["nvme", "nvme2"][: volumes if nvme else 0]
        self.policy = policy
        self.directory = self.root / str(next(self.lives))
        self.directory.mkdir()
        self._open()
        assert not self.model.visible

    def _open(self) -> None:
        self.system = LosingSystem()
        self.model = Model()
        self.ended = trio.Event()
        opened: concurrent.futures.Future[None] = concurrent.futures.Future()

        async def live() -> None:
            try:
                async with open_store(
                    settings_in(
                        self.directory,
                        ram=RAM_BYTES,
                        nvme=self.nvme,
                        volumes=len(self.places),
                        io_threads=4,
                        policy=self.policy,
                    ),
                    self.system,
                ) as self.store:
                    self.tables = [self.store.attach(namespace) for namespace in NAMESPACES]
                    self.numbers = {table.directory: number for number, table in enumerate(self.tables)}
                    self.model.known.update(self.store.catalog.chunks())
                    self.model.visible.update(self._node_of(chunk) for chunk in self.model.known)
                    self.model.num_bytes = [table.stored_bytes for table in self.tables]
                    self.store.on_change.append(
                        lambda change, chunk, _: self.model.known.add(chunk) if change == "published" else None
                    )
                    self._watch_extents()
                    opened.set_result(None)
                    await self.ended.wait()
            finally:
                if not opened.done():
                    opened.set_exception(RuntimeError("the store did not open"))

        self.life = self.loop.start(live)
        opened.result(timeout=HANGS_AFTER_S)
        self.is_up = True

    def _watch_extents(self) -> None:
        """From now on no extent becomes free that a committed row still names."""
        for stripe in self.store._residency.nvme or ():
            self._watch(stripe)

    def _watch(self, stripe: Stripe) -> None:
        path, put = Path(stripe.directory) / INDEX, stripe.eraser.put

        def checked(offset: int, length: int) -> None:
            with contextlib.closing(sqlite3.connect(path)) as index:
                rows = index.execute(
                    "SELECT 1 FROM chunks WHERE offset < ? AND offset + length > ?", (offset + length, offset)
                )
                assert rows.fetchone() is None, "an extent is free whose row is still there"
            put(offset, length)

        stripe.eraser.put = checked  # type: ignore[method-assign]

    def _close(self) -> None:
        """Whatever is dirty is written; only then does time pass for the end, which waits for it a minute at most."""
        self.give_everything_back()
        self._flush()
        self.loop._token.run_sync_soon(self.ended.set)
        self.life.result(timeout=HANGS_AFTER_S)
        self.is_up = False

    def teardown(self) -> None:
        self.system.open_gates()
        self.system.write_error = self.system.sync_error = self.system.read_error = 0
        try:
            if self.is_up:
                self._close()
                assert self.store.statistics().num_leases == 0
        finally:
            self.model.holds.clear()  # no view may outlive the arena
            if self.is_up:
                self.loop._token.run_sync_soon(self.ended.set)
            self.loop.end()
            shutil.rmtree(self.root)

    def _table(self, node: Node) -> ChunkTable:
        return self.tables[node.namespace]

    # storing

    def _do_reserve(self, node: Node) -> Reservation | None:
        result = self.store.reserve(self._table(node), node.new)
        if isinstance(result, Reservation):
            return result
        if result is REFUSED:
            table = self._table(node)
            size = table.stored_bytes + table.reserved_bytes + node.geo.file_bytes
            is_bypassed = self.nvme is None and node.new.position > 0  # what would go next is what it is built on
            if (table.quota_bytes is None or size <= table.quota_bytes) and not is_bypassed:
                self._assert_ram_is_under_pressure()
        else:
            assert result is EXISTS
            assert self._chunk(node) is not None
        return None

    def _assert_ram_is_under_pressure(self) -> None:
        """Room is refused only if nothing that is there may go."""
        volumes = self.store.statistics().volumes
        for chunk in self.store.catalog.chunks():
            must_be_clean = bool(volumes) and not volumes[chunk.volume].is_degraded
            is_kept = self.store._residency.pins.is_held(chunk) and (not volumes or chunk.is_dirty)
            assert chunk.ram == NOWHERE or chunk.leases or is_kept or (must_be_clean and chunk.is_dirty), chunk

    async def _do_publish(self, taken: Sequence[tuple[Node, Reservation]], bad: int = -1) -> list[StoreStatus]:
        """Publish all at once, number `bad` with wrong bytes, as a session does it."""
        window = os.memfd_create("test-window", os.MFD_CLOEXEC)
        try:
            handed = []
            for number, (node, reservation) in enumerate(taken):
                payload = node.payload if number != bad else node.payload[:-1] + bytes([node.payload[-1] ^ 1])
                offset = number << 20
                os.pwrite(window, payload, offset)
                handed.append(Handed(reservation, WindowSlot(window, offset), checksums_of(node.payload, node.geo)))
            self.being_published = [*taken]
            statuses = await self.store.publish(handed)
            self.being_published = []
        finally:
            os.close(window)
        for number, ((node, _), status) in enumerate(zip(taken, statuses, strict=True)):
            assert (status is BAD) == (number == bad)
            assert status in (STORED, EXISTS, BAD)
            assert status is BAD or self._chunk(node) is not None
        chunks = [self._chunk(node) for node, _ in taken]
        self.store.stored([chunk for chunk in chunks if chunk is not None])
        return statuses

    being_published: list[tuple[Node, Reservation]] = []  # noqa: RUF012 - replaced, never changed

    @rule(nodes=some_nodes)
    def reserve(self, nodes: list[Node]) -> None:
        async def work() -> None:
            for node in nodes:
                reservation = self._do_reserve(node)
                if reservation is not None:
                    self.model.reservations.append((node, reservation))

        self.loop.run(work)

    @rule(count=st.integers(1, 4), bad=st.sampled_from([-1, 0, 1]))
    def publish(self, count: int, bad: int) -> None:
        taken = self.model.reservations[:count]
        del self.model.reservations[:count]
        if taken:
            self.loop.run(lambda: self._do_publish(taken, bad if bad < len(taken) else -1))

    @rule(number=st.integers(0, 20))
    def abort(self, number: int) -> None:
        async def work() -> None:
            if self.model.reservations:
                self.store.abort(self.model.reservations.pop(number % len(self.model.reservations))[1])

        self.loop.run(work)

    @rule(nodes=some_nodes, bad=st.sampled_from([-1, -1, 0]))
    def store_prompts(self, nodes: list[Node], bad: int) -> None:
        """What an engine does at the end of each prefill: the missing chunks of a prompt, in one publish."""

        async def work() -> None:
            for node in nodes:
                await self._do_store_path(node, bad)

        self.loop.run(work)

    @rule(first=st.integers(0, len(NODES) - 1), stride=st.sampled_from([1, 5, 7, 11]))
    def store_nearly_all(self, first: int, stride: int) -> None:
        """More than RAM holds, one by one; where write-behind can make room it gets the time to."""
        can_wait = self.is_device_free

        async def work() -> None:
            for number in range(18):
                node = NODES[(first + number * stride) % len(NODES)]
                for _ in range(20 if can_wait else 0):
                    if self.store.statistics().dirty_bytes < RAM_BYTES // 2:
                        break
                    await trio.to_thread.run_sync(time.sleep, 0.0005)
                reservation = self._do_reserve(node)
                if reservation is not None:
                    await self._do_publish([(node, reservation)])

        self.loop.run(work)

    async def _do_store_path(self, node: Node, bad: int = -1) -> None:
        taken = []
        for key in node.path:
            step = NODE_AT[node.namespace, key]
            reservation = self._do_reserve(step)
            if reservation is not None:
                taken.append((step, reservation))
        if taken:
            await self._do_publish(taken, bad)

    # finding, loading, holding

    def _do_hold(self, node: Node, chunk: Chunk, *, is_leased: bool = False) -> Hold:
        if not is_leased:
            self._tidy()
            self.store.lease(chunk)
        hold = Hold(node, chunk, node.file(chunk.created_ns))
        self.model.holds.append(hold)
        return hold

    def _do_release(self, hold: Hold) -> None:
        self.model.holds.remove(hold)
        hold.view = None
        self.store.release(hold.chunk)
        self._tidy()

    def _do_match(self, node: Node) -> list[Hold]:
        stored = [key for key in node.path if key in self._table(node).chunks]
        expected = [key for key, other in zip(node.path, stored, strict=False) if key == other]
        self._tidy()
        found = self.store.match(self._table(node), node.path)
        assert [chunk.key for chunk in found] == expected
        return [self._do_hold(self._node_of(chunk), chunk, is_leased=True) for chunk in found]

    @rule(node=a_node)
    def match(self, node: Node) -> None:
        """The prefix is as long as what is stored, and is held from then on."""

        async def work() -> None:
            self._do_match(node)

        self.loop.run(work)

    @rule(nodes=some_nodes, is_kept=st.booleans())
    def load(self, nodes: list[Node], is_kept: bool) -> None:
        """Match, promote what is cold, touch; while the device is held the promotions stay under way."""
        can_wait = self.is_device_free

        async def work() -> None:
            for node in nodes:
                await self._do_load(node, is_kept, can_wait)

        self.loop.run(work)

    @property
    def is_device_free(self) -> bool:
        system = self.system
        return system.read_gate.is_set() and system.write_gate.is_set() and system.sync_gate.is_set()

    async def _do_load(self, node: Node, is_kept: bool, can_wait: bool) -> None:
        holds = self._do_match(node)
        chunks = [hold.chunk for hold in holds]
        sources = [chunk.tier for chunk in chunks]
        cold = [chunk for chunk in chunks if chunk.ram == NOWHERE]
        started = self.store.promote(cold) if cold else []
        if None in started:
            self._assert_ram_is_under_pressure()
        for promotion in started:
            if promotion is not None and promotion not in self.model.promotions:
                self.model.promotions.append(promotion)
        for promotion in started if can_wait else ():
            if promotion is not None:
                await promotion.wait_for_layers(4)
                assert promotion.error is None or isinstance(promotion.error, UnavailableError), promotion.error
                assert promotion.error is None or self.model.had_read_error
        self.store.touch(chunks, sources)
        for hold in [] if is_kept else holds:
            self._do_release(hold)

    @rule(nodes=some_nodes)
    def hold(self, nodes: list[Node]) -> None:
        """Lease chunks and keep what is read of them, as open files do."""

        async def work() -> None:
            for node in nodes:
                chunk = self._chunk(node)
                if chunk is not None:
                    hold = self._do_hold(node, chunk)
                    if chunk.ram != NOWHERE:
                        hold.view = await self.store.read(chunk, 0, chunk.length)

        self.loop.run(work)

    @rule(number=st.integers(0, 30), count=st.integers(1, 6))
    def release(self, number: int, count: int) -> None:
        async def work() -> None:
            for _ in range(min(count, len(self.model.holds))):
                self._do_release(self.model.holds[number % len(self.model.holds)])

        self.loop.run(work)

    async def _do_read(self, node: Node) -> None:
        chunk = self._chunk(node)
        if chunk is None:
            return
        hold = self._do_hold(node, chunk)
        try:
            assert bytes(await self.store.read(chunk, 0, chunk.length)) == hold.expected
            assert bytes(await self.store.read(chunk, 5000, 300)) == hold.expected[5000:5300]
            facts = await self.store.facts(chunk)
            assert (facts.chain, facts.created_ns) == (node.new.chain, chunk.created_ns)
        except UnavailableError:
            assert self.model.had_read_error
        finally:
            self._do_release(hold)

    @precondition(lambda self: self.is_device_free)
    @rule(node=a_node)
    def read(self, node: Node) -> None:
        self.loop.run(lambda: self._do_read(node))

    @precondition(lambda self: self.is_device_free)
    @rule(number=st.integers(0, 30))
    def read_what_is_held(self, number: int) -> None:
        """Though it may be removed by now, and its name stored again."""

        async def work() -> None:
            if not self.model.holds:
                return
            hold = self.model.holds[number % len(self.model.holds)]
            try:
                assert bytes(await self.store.read(hold.chunk, 0, hold.chunk.length)) == hold.expected
            except UnavailableError:
                assert self.model.had_read_error

        self.loop.run(work)

    # removing

    async def _do_remove(self, chunks: Sequence[Chunk]) -> None:
        if self.is_device_free:
            await self.store.remove(chunks)
        else:  # it is out of sight at once; until the header is erased it does not return
            self.loop._nursery.start_soon(self.store.remove, [*chunks])
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
        assert all(chunk.is_removed for chunk in chunks)

    @rule(nodes=st.lists(a_node, min_size=1, max_size=2), is_recursive=st.booleans())
    def remove(self, nodes: list[Node], is_recursive: bool) -> None:
        """Files, or whole prefix directories. When it returns they are gone for good."""

        async def work() -> None:
            doomed = {chunk for node in nodes if (chunk := self._chunk(node)) is not None}
            if is_recursive:
                doomed = {below for chunk in doomed if chunk.home is not None for below in chunk.home.subtree()}
            gone = [(chunk.volume, chunk.table.numbers[chunk.volume], chunk.key) for chunk in doomed if self.nvme]
            await self._do_remove(sorted(doomed, key=lambda chunk: chunk.inode))
            if self.nvme and self.is_device_free:
                for volume, place in enumerate(self.places):
                    with contextlib.closing(sqlite3.connect(self.directory / place / INDEX)) as index:
                        rows = {(volume, *row) for row in index.execute("SELECT namespace, key FROM chunks")}
                    assert not rows.intersection(gone)

        self.loop.run(work)

    # pins

    @rule(nodes=st.lists(a_node, min_size=1, max_size=3))
    def pin(self, nodes: list[Node]) -> None:
        """Those of them that are there. When it returns they are pinned for good."""

        async def work() -> None:
            self._do_take_events()
            found = [node for node in nodes if node in self.model.visible]
            before = self.model.pinned
            self.model.pinned = before.union(found)
            size = sum(node.geo.file_bytes for node in self.model.held)
            lowest = self.store.capacity().total_bytes
            try:
                await self.store.limits.pin([chunk for node in found if (chunk := self._chunk(node))], FOREVER)
            except CapacityError:
                assert size > lowest * 3 // 4 // len(self.places or [""]), (
                    "a volume may be full of pins before the tier is"
                )
                self.model.pinned = before

        self.loop.run(work)

    @rule(nodes=st.lists(a_node, min_size=1, max_size=8))
    def unpin(self, nodes: list[Node]) -> None:
        self.loop.run(lambda: self._do_unpin(nodes))

    async def _do_unpin(self, nodes: Sequence[Node]) -> None:
        self._do_take_events()
        number = len(self.model.pinned.intersection(nodes))
        self.model.pinned.difference_update(nodes)
        chunks = [chunk for node in dict.fromkeys(nodes) if (chunk := self._chunk(node)) is not None]
        assert await self.store.limits.unpin(chunks) == number

    # limits of namespaces

    @property
    def is_rare_step(self) -> bool:
        """Whether what empties the cache may be done: done all the time it would leave nothing to look at."""
        return self.model.num_steps % 8 == 7

    @rule(number=st.integers(0, len(NAMESPACES) - 1), quota=st.sampled_from(QUOTAS))
    def set_quota(self, number: int, quota: int | None) -> None:
        self.model.quotas[number] = quota
        self.loop.run(lambda: self.store.limits.set_quota(self.tables[number], quota))

    @precondition(lambda self: self.is_rare_step)
    @rule(number=st.integers(0, len(NAMESPACES) - 1))
    def expire(self, number: int) -> None:
        """Everything is too old: what is left is held, or something that is left is built on it."""
        table = self.tables[number]

        async def work() -> None:
            self._do_take_events()
            self.model.is_expiring = True
            was_leased = {chunk for chunk in table.chunks.values() if chunk.leases}  # write-behind may end meanwhile
            await self.store.limits.set_max_age(table, 0)
            self._do_take_events()
            needed = {chunk.parent for chunk in table.chunks.values()}
            for chunk in table.chunks.values():
                node = self._node_of(chunk)
                assert node in self.model.held or chunk in was_leased or chunk.key in needed
            await self.store.limits.set_max_age(table, None)
            self.model.is_expiring = False

        self.loop.run(work)

    @precondition(lambda self: self.is_rare_step)
    @rule(number=st.integers(0, len(NAMESPACES) - 1))
    def remove_namespace(self, number: int) -> None:
        """With all that is in it, and it is used again at once."""
        table = self.tables[number]

        async def work() -> None:
            for node, reservation in [*self.model.reservations]:
                if reservation.table is table:
                    self.store.abort(reservation)
                    self.model.reservations.remove((node, reservation))
            await self._do_remove([*table.chunks.values()])
            self._do_take_events()
            self.store.remove_namespace(table)
            await self.store.settle()
            for volume, place in enumerate(self.places):
                with contextlib.closing(sqlite3.connect(self.directory / place / INDEX)) as index:
                    for name in ("chunks", "pins", "limits"):
                        row = (table.numbers[volume],)
                        found = index.execute(f"SELECT count(*) FROM {name} WHERE namespace = ?", row)
                        assert found.fetchone() == (0,)
            self.tables[number] = self.store.attach(NAMESPACES[number])
            self.model.quotas[number] = None

        self.loop.run(work)

    # all at once

    @rule(storing=some_nodes, removing=st.lists(a_node, max_size=2), loading=some_nodes, reading=some_nodes)
    def at_once(self, storing: list[Node], removing: list[Node], loading: list[Node], reading: list[Node]) -> None:
        """Several tasks, with no order between them but the one that the loop gives."""
        can_wait = self.is_device_free

        async def remove(nodes: list[Node]) -> None:
            await trio.lowlevel.checkpoint()
            await self._do_remove([chunk for node in nodes if (chunk := self._chunk(node)) is not None])

        async def work() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._do_store_path, storing[0])
                nursery.start_soon(remove, removing)
                for node in loading:
                    nursery.start_soon(self._do_load, node, False, can_wait)
                for node in reading if can_wait else ():
                    nursery.start_soon(self._do_read, node)

        self.loop.run(work)

    # the device

    @precondition(lambda self: self.nvme)
    @rule(gate=st.sampled_from(["read_gate", "write_gate", "sync_gate"]))
    def hold_device(self, gate: str) -> None:
        getattr(self.system, gate).clear()

    @precondition(lambda self: not self.is_device_free)
    @rule()
    def let_device_go(self) -> None:
        self.system.open_gates()

    @precondition(lambda self: self.nvme)
    @rule(what=st.sampled_from(["read_error", "write_error", "sync_error"]), number=st.sampled_from([5, 28]))
    def device_fails(self, what: str, number: int) -> None:
        setattr(self.system, what, number)
        self.model.had_read_error |= what == "read_error"

    @precondition(lambda self: self.system.read_error or self.system.write_error or self.system.sync_error)
    @rule()
    def device_works(self) -> None:
        self.system.read_error = self.system.write_error = self.system.sync_error = 0

    @rule()
    def time_passes(self) -> None:
        """Retries come, and uses are saved."""

        async def work() -> None:
            self.loop.clock.jump(31.0)
            await trio.lowlevel.checkpoint()

        self.loop.run(work)

    # durability

    def give_everything_back(self, num_kept: int = 0) -> None:
        """Release what is held, but for `num_kept`, abort what is reserved, and let the device work."""
        self.system.open_gates()
        self.device_works()

        async def work() -> None:
            for hold in self.model.holds[num_kept:]:
                self._do_release(hold)
            for _, reservation in self.model.reservations:
                self.store.abort(reservation)
            self.model.reservations.clear()

        self.loop.run(work)

    def _flush(self) -> None:
        async def work() -> None:
            if self.nvme != HOLDS_ALL_BYTES:  # there might never be a gap between what is held
                await self._do_unpin(NODES)
            while any(promotion.num_left for promotion in self.model.promotions):
                await trio.lowlevel.checkpoint()  # their leases may be the last of removed chunks
            assert await self.store.flush(1e9)
            await self.store.limits.sweep()  # what became clean may go for a quota; then nothing more is due
            assert await self.store.flush(1e9)
            self._do_check()
            self._do_check_quiet()
            self.model.evicted.clear()

        self.loop.run_while_time_passes(work)

    @rule(num_kept=st.integers(0, 1))
    def flush(self, num_kept: int) -> None:
        """With at most one chunk held there is room for everything in the end, and nothing stays dirty or leased."""
        self.give_everything_back(num_kept)
        self._flush()

    @precondition(lambda self: self.model.num_steps > STEPS_OF_A_LIFE)
    @rule()
    def restart(self) -> None:
        """Everything that was visible at the end is there again, with its uses."""
        self._close()
        self._do_take_events()
        before = {node: chunk.hits for node in self.model.visible if (chunk := self._chunk(node))}
        pinned, quotas = self.model.pinned, self.model.quotas
        self._open()
        self.model.pinned = pinned & self.model.visible
        self.model.quotas = quotas if self.nvme else self.model.quotas
        assert self.model.visible == (set(before) if self.nvme else set())
        for node in self.model.visible:
            chunk = self._chunk(node)
            assert chunk is not None
            assert chunk.hits == before[node]
        self._check_recovered()

    @precondition(lambda self: self.model.num_steps > STEPS_OF_A_LIFE)
    @rule(is_flushed=st.booleans())
    def crash(self, is_flushed: bool) -> None:
        """Power loss: what was clean is there, what was removed is not, and what is there is right."""
        if is_flushed:
            self.flush(1)
        self._check()
        to = self.root / str(next(self.lives))
        pinned, quotas = set(self.model.pinned), self.model.quotas
        clean, visible, may_return = self.loop.run(lambda: self._do_crash(to))
        self._close()
        shutil.rmtree(self.directory)
        self.directory = to
        self._open()
        self.model.pinned = pinned & self.model.visible
        self.model.quotas = quotas if self.nvme else self.model.quotas
        assert clean <= self.model.visible <= visible | may_return
        if is_flushed and self.nvme:
            assert self.model.visible == visible
        self._check_recovered()

    async def _do_crash(self, to: Path) -> tuple[set[Node], set[Node], set[Node]]:
        """Copy what a machine that died now would find. Nothing else happens in the loop meanwhile."""
        self._do_check()
        clean = {self._node_of(chunk) for chunk in self.store.catalog.chunks() if chunk.nvme != NOWHERE}
        to.mkdir()  # noqa: ASYNC240 - nothing else happens in the loop meanwhile
        if self.nvme:
            was_open = self.system.write_gate.is_set()
            self.system.write_gate.clear()
            for place in self.places:
                (to / place).mkdir()
                for name in (INDEX + "-wal", INDEX, VOLUME):
                    shutil.copy(self.directory / place / name, to / place / name)
                self.system.lose(to / place / VOLUME)
            if was_open:
                self.system.write_gate.set()
        return clean, set(self.model.visible), set(self.model.evicted)

    def _check_recovered(self) -> None:
        async def work() -> None:
            for node in NODES:
                await self._do_read(node)
            assert self.store.counters.corrupt == 0

        self.loop.run(work)

    # after every step

    @invariant()
    def everything_adds_up(self) -> None:
        self.model.num_steps += 1
        self._check()


COMMON = settings(
    deadline=None, print_blob=True, suppress_health_check=list(HealthCheck), phases=set(Phase) - {Phase.explain}
)
EXPECTED = pytest.mark.expect_log("writing to NVMe|could not be read|a pin was refused|could not be erased")


def play(directory: Path, how: settings) -> None:
    numbers = itertools.count()

    class Machine(StoreMachine):
        def __init__(self) -> None:
            root = directory / str(next(numbers))
            root.mkdir()
            super().__init__(root)

    run_state_machine_as_test(Machine, settings=how)


@pytest.fixture(autouse=True)
def _devices_may_take_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock jumps while threads work, so it does not say that a device hangs."""
    monkeypatch.setattr(residency, "PATIENCE_S", math.inf)
    monkeypatch.setattr(volume_writer, "_HANGS_AFTER_S", math.inf)


@EXPECTED
@pytest.mark.parametrize("max_examples", [10, pytest.param(50, marks=pytest.mark.heavy)])
def test_the_store_does_what_the_model_says(tmp_path: Path, max_examples: int) -> None:
    """The same operations at every run."""
    play(tmp_path, settings(COMMON, max_examples=max_examples, stateful_step_count=60, derandomize=True))


@EXPECTED
@pytest.mark.slow
def test_the_store_does_what_the_model_says_for_long(tmp_path: Path) -> None:
    """Others at every run; a failure prints what reproduces it."""
    play(tmp_path, settings(COMMON, max_examples=1500, stateful_step_count=100, derandomize=False))
