"""The handlers, called as pyfuse3 calls them, over a real store. What a kernel makes of them is in tests/e2e."""

from __future__ import annotations

import errno
import inspect
import os
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyfuse3
import pytest
import trio
import trio.testing

from kvfs.catalog import Chunk
from kvfs.chunk import checksum, geometry
from kvfs.config import Settings, VolumeSetting
from kvfs.errors import CorruptChunk
from kvfs.intake import Handed, Reservation, WindowSlot
from kvfs.keys import extend, key_of, root
from kvfs.messages import NewChunk
from kvfs.metrics import Counters
from kvfs.mount import tier_work
from kvfs.mount.control import ControlFiles
from kvfs.mount.errnos import Faults
from kvfs.mount.guarding import GuardedOperations
from kvfs.mount.operations import Operations
from kvfs.mount.tree import ROOT_INODE, Tree
from kvfs.namespace import Namespace
from kvfs.opening import open_store
from kvfs.store import Store
from kvfs.system import System

CONTEXT: Any = SimpleNamespace(pid=1)  # only who made a draft sees anything else


def handlers(kind: type) -> set[str]:
    return {name for name, value in vars(kind).items() if inspect.iscoroutinefunction(value)}


def test_every_handler_is_wrapped() -> None:
    for name in handlers(Operations):
        if not name.startswith("_"):
            assert getattr(Operations, name).is_guarded, name


def test_every_handler_of_pyfuse3_is_decided_on() -> None:
    """What is left to pyfuse3 answers ENOSYS, which is right for these and no others."""
    left = handlers(pyfuse3.Operations) - handlers(Operations)
    assert left == {"access", "poll"}


@pytest.mark.expect_log("lookup failed")
async def test_an_unexpected_error_is_an_errno_and_never_the_end_of_the_daemon() -> None:
    class Failing(GuardedOperations):
        def __init__(self, counters: Counters) -> None:
            self.faults = Faults(counters)

        async def lookup(self, *args: Any) -> Any:
            raise ZeroDivisionError

        async def getattr(self, *args: Any) -> Any:
            raise CorruptChunk("flipped")

        async def read(self, *args: Any) -> Any:
            await trio.sleep_forever()

        async def open(self, *args: Any) -> Any:
            raise pyfuse3.FUSEError(errno.EXDEV)

    counters = Counters()
    failing = Failing(counters)
    assert await errno_from(failing.lookup()) == errno.EIO
    assert await errno_from(failing.getattr()) == errno.EIO
    assert await errno_from(failing.open()) == errno.EXDEV
    assert counters.mount_errors == 1  # a corrupt chunk is no fault of the mount
    with trio.move_on_after(0) as scope:
        await failing.read()
    assert scope.cancelled_caught


async def errno_from(waiting: Any) -> int:
    with pytest.raises(pyfuse3.FUSEError) as caught:
        await waiting
    return int(caught.value.errno)


class BlockedSystem(System):
    """Reads from the volume hang while `go` is clear, as those of a hung device do."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.go.wait()
        return super().preadv(fd, buffers, offset)


def settings(tmp_path: Path, *, nvme: bool = False) -> Settings:
    volume: dict[str, Any] = {"nvme": (VolumeSetting(str(tmp_path), 4 << 20),)} if nvme else {}
    return Settings(mountpoint=str(tmp_path / "m"), ram_bytes=4 << 20, huge_pages="never", **volume)


def operations_on(store: Store, nursery: trio.Nursery) -> Operations:
    control = ControlFiles(store, "/mnt/x", "/run/x/session.sock")
    tree = Tree(store.catalog, control.size, store.system.time_ns(), store.system.monotonic)
    operations = Operations(store, tree, control, Faults(store.counters), nursery)
    store.on_change.append(operations.removal.changed)
    store.on_renamed.append(operations.removal.renamed)
    return operations


async def publish(store: Store, namespace: Namespace, num_chunks: int = 1) -> list[Chunk]:
    """A chain of chunks, parents first."""
    table = store.attach(namespace)
    geo = geometry(namespace, 16)
    payload = bytes(range(256)) * (geo.payload_bytes // 256) + bytes(geo.pad_bytes)
    sums = tuple(
        checksum(payload[begin - geo.header_bytes : end - geo.header_bytes])
        for begin, end in map(geo.layer_range, range(namespace.num_layers))
    )
    window = os.memfd_create("window")
    chain = root(namespace.identity.fingerprint())
    keys = []
    try:
        os.write(window, payload)
        for position in range(num_chunks):
            parent, chain = chain, extend(chain, position.to_bytes(64, "little"))
            reservation = store.reserve(table, NewChunk(chain, key_of(parent), position, 16))
            assert isinstance(reservation, Reservation)
            await store.publish([Handed(reservation, WindowSlot(window, 0), sums)])
            keys.append(key_of(chain))
    finally:
        os.close(window)
    return [table.chunks[key] for key in keys]


async def walk(operations: Operations, *names: str) -> Any:
    entry: Any = await operations.getattr(ROOT_INODE, CONTEXT)
    for name in names:
        entry = await operations.lookup(entry.st_ino, name.encode(), CONTEXT)
    return entry


async def test_a_chunk_is_leased_while_it_is_open(tmp_path: Path, namespace: Namespace, nursery: trio.Nursery) -> None:
    """Removed meanwhile, it is readable until the last RELEASE, and then its inode goes with the last FORGET."""
    async with open_store(settings(tmp_path)) as store:
        operations = operations_on(store, nursery)
        [chunk] = await publish(store, namespace)
        chunks = await walk(operations, namespace.directory, "chunks")
        entry = await operations.lookup(chunks.st_ino, chunk.file_name.encode(), CONTEXT)
        opened = await operations.open(entry.st_ino, os.O_RDONLY, CONTEXT)
        assert chunk.leases == 1
        before = bytes(await operations.read(opened.fh, 0, 1 << 20))
        assert len(before) == chunk.length
        await operations.unlink(chunks.st_ino, chunk.file_name.encode(), CONTEXT)
        assert await errno_from(operations.lookup(chunks.st_ino, chunk.file_name.encode(), CONTEXT)) == errno.ENOENT
        assert bytes(await operations.read(opened.fh, 0, 1 << 20)) == before
        assert (await operations.getattr(entry.st_ino, CONTEXT)).st_nlink == 0
        await operations.release(opened.fh)
        assert chunk.leases == 0
        assert await errno_from(operations.open(entry.st_ino, os.O_RDONLY, CONTEXT)) == errno.ENOENT
        await operations.forget([(entry.st_ino, 1)])
        assert await errno_from(operations.getattr(entry.st_ino, CONTEXT)) == errno.ESTALE


async def test_reads_end_at_the_end(tmp_path: Path, namespace: Namespace, nursery: trio.Nursery) -> None:
    async with open_store(settings(tmp_path)) as store:
        operations = operations_on(store, nursery)
        [chunk] = await publish(store, namespace)
        entry = await walk(operations, namespace.directory, "chunks", chunk.file_name)
        opened = await operations.open(entry.st_ino, os.O_RDONLY, CONTEXT)
        whole = bytes(await operations.read(opened.fh, 0, chunk.length))
        assert bytes(await operations.read(opened.fh, 4095, 3)) == whole[4095:4098]
        assert bytes(await operations.read(opened.fh, chunk.length - 5, 100)) == whole[-5:]
        assert bytes(await operations.read(opened.fh, chunk.length, 100)) == b""
        assert bytes(await operations.read(opened.fh, chunk.length + 100, 100)) == b""
        operations.close()
        assert chunk.leases == 0


async def test_the_kernel_is_told_of_the_other_name(
    tmp_path: Path, namespace: Namespace, nursery: trio.Nursery
) -> None:
    """Of the name being unlinked the kernel knows itself."""
    async with open_store(settings(tmp_path)) as store:
        operations = operations_on(store, nursery)
        dropped: list[tuple[int, bytes]] = []
        operations.invalidations.put = dropped.append  # type: ignore[method-assign]
        a, b, c = await publish(store, namespace, 3)
        chunks = await walk(operations, namespace.directory, "chunks")
        run = await walk(operations, namespace.directory, "prefixes", a.key.hex())
        await operations.lookup(run.st_ino, c.file_name.encode(), CONTEXT)
        await operations.unlink(run.st_ino, c.file_name.encode(), CONTEXT)
        assert dropped == [(chunks.st_ino, c.file_name.encode())]
        dropped.clear()
        await operations.lookup(chunks.st_ino, b.file_name.encode(), CONTEXT)
        await store.remove([b], "evict")
        assert sorted(dropped) == sorted([(place, b.file_name.encode()) for place in (chunks.st_ino, run.st_ino)])


async def test_what_the_kernel_does_not_know_it_is_not_told_of(
    tmp_path: Path, namespace: Namespace, nursery: trio.Nursery
) -> None:
    """An eviction run over a million chunks that nobody listed costs nothing here."""
    async with open_store(settings(tmp_path)) as store:
        operations = operations_on(store, nursery)
        dropped: list[tuple[int, bytes]] = []
        operations.invalidations.put = dropped.append  # type: ignore[method-assign]
        await store.remove(await publish(store, namespace, 3), "evict")
        assert dropped == []


async def test_a_hung_tier_leaves_the_rest_of_the_mount_alone(
    tmp_path: Path, namespace: Namespace, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few requests wait for a device, some stand in line, more fail at once: the main loop has tasks left."""
    monkeypatch.setattr(tier_work, "MAX_IN_LINE", 10)
    async with open_store(settings(tmp_path, nvme=True)) as store:
        await publish(store, namespace, 1)
    system = BlockedSystem()
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(settings(tmp_path, nvme=True), system))
        stack.callback(system.go.set)
        system.go.clear()
        operations = operations_on(store, nursery)
        [chunk] = store.catalog.chunks()
        assert chunk.nvme >= 0
        assert chunk.ram < 0
        entry = await walk(operations, namespace.directory, "chunks", chunk.file_name)
        opened = await operations.open(entry.st_ino, os.O_RDONLY, CONTEXT)
        sizes: list[int] = []

        async def read() -> None:
            sizes.append(len(await operations.read(opened.fh, 0, 100)))

        async with trio.open_nursery() as readers:
            for _ in range(tier_work.MAX_AT_WORK + 10):
                readers.start_soon(read)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert await errno_from(operations.read(opened.fh, 0, 100)) == errno.EIO
            assert (await operations.getattr(entry.st_ino, CONTEXT)).st_size == chunk.length
            assert sizes == []
            system.go.set()
        assert sizes == [100] * (tier_work.MAX_AT_WORK + 10)
        await operations.release(opened.fh)
        assert chunk.leases == 0


async def test_a_reader_of_a_hung_tier_is_told_in_time(
    tmp_path: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read itself cannot be cancelled; it goes on, holding what it needs."""
    monkeypatch.setattr(tier_work, "DEADLINE_S", 0.05)
    async with open_store(settings(tmp_path, nvme=True)) as store:
        await publish(store, namespace, 1)
    system = BlockedSystem()
    async with open_store(settings(tmp_path, nvme=True), system) as store, trio.open_nursery() as work:
        operations = operations_on(store, work)
        [chunk] = store.catalog.chunks()
        entry = await walk(operations, namespace.directory, "chunks", chunk.file_name)
        opened = await operations.open(entry.st_ino, os.O_RDONLY, CONTEXT)
        system.go.clear()
        try:
            assert await errno_from(operations.read(opened.fh, 0, 100)) == errno.ETIMEDOUT
            await operations.release(opened.fh)
            assert chunk.leases == 1
        finally:
            system.go.set()
    assert chunk.leases == 0


async def test_a_file_of_a_stale_inode(tmp_path: Path, nursery: trio.Nursery) -> None:
    async with open_store(settings(tmp_path)) as store:
        operations = operations_on(store, nursery)
        for waiting in (
            operations.getattr(1 << 30, CONTEXT),
            operations.open(1 << 30, 0, CONTEXT),
            operations.opendir(1 << 30, CONTEXT),
            operations.lookup(1 << 30, b"x", CONTEXT),
            operations.listxattr(1 << 30, CONTEXT),
        ):
            assert await errno_from(waiting) == errno.ESTALE


async def test_control_files_are_as_they_were_when_they_were_opened(
    tmp_path: Path, namespace: Namespace, nursery: trio.Nursery
) -> None:
    async with open_store(settings(tmp_path)) as store:
        operations = operations_on(store, nursery)
        entry = await walk(operations, ".kvfs", "status.json")
        opened = await operations.open(entry.st_ino, os.O_RDONLY, CONTEXT)
        before = await operations.read(opened.fh, 0, 1 << 20)
        await publish(store, namespace)
        assert await operations.read(opened.fh, 0, 1 << 20) == before
        again = await operations.open(entry.st_ino, os.O_RDONLY, CONTEXT)
        assert await operations.read(again.fh, 0, 1 << 20) != before
        assert await operations.readlink((await walk(operations, ".kvfs", "session")).st_ino, CONTEXT) == (
            b"/run/x/session.sock"
        )


async def test_the_kernel_keeps_the_pages_of_a_chunk(tmp_path: Path, namespace: Namespace) -> None:
    """From its second open on: before the first it may have had other bytes, and dropping pages makes an open slow."""
    async with open_store(settings(tmp_path)) as store, trio.open_nursery() as nursery:
        operations = operations_on(store, nursery)
        [chunk] = await publish(store, namespace)
        operations.inodes.remember(chunk)
        inode = pyfuse3.InodeT(chunk.inode)
        kept = []
        for _ in range(3):
            opened = await operations.open(inode, pyfuse3.FlagT(os.O_RDONLY), CONTEXT)
            kept.append(opened.keep_cache)
            await operations.release(opened.fh)
        assert kept == [False, True, True]
        await operations.forget([(inode, 1)])
        operations.inodes.remember(chunk)
        opened = await operations.open(inode, pyfuse3.FlagT(os.O_RDONLY), CONTEXT)
        assert not opened.keep_cache
        await operations.release(opened.fh)
