"""What tests of kvfs, and of whatever is built on it, share: fakes, tiny namespaces, chunks whose bytes follow from
their chain value; in `daemon` a daemon without FUSE in a process of its own.

Nothing here is used by kvfs itself. There are no mocks: a `FaultySystem` really reads and writes, until it is told to
fail.

Concurrency: the methods of a `FaultySystem` are called in the volume's threads, its attributes are set by the test.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from kvfs import keys
from kvfs.catalog import Chunk, ChunkTable
from kvfs.chunk import Geometry, checksum
from kvfs.client import Client
from kvfs.config import Settings, VolumeSetting
from kvfs.intake import Handed, Reservation, WindowSlot
from kvfs.keys import ChainHash, KeyChain
from kvfs.messages import NewChunk, StoreStatus, Tier
from kvfs.namespace import Identity, LayerRun, Namespace, TensorSpec
from kvfs.opening import open_store
from kvfs.store import Store
from kvfs.system import System
from kvfs.volume import aligned_buffer

DEADLINE_S = 60.0
"""For what has to come true, also on a machine that is busy with something else."""

# systems


class FaultySystem(System):
    """A system that counts what it does, and fails or waits when told to.

    Attributes:
        read_error, write_error, sync_error, allocate_error: an errno, or 0 for success.
        bad_place: errors and gates are those of files in this directory only, if one is named.
        bad_reads: offsets of the volume at which reads fail with EIO, whatever `read_error` says.
        max_transfer: bytes after which a read or write comes back short.
        reads, writes: (offset, length) of each so far; num_syncs.
        read_gate, write_gate, sync_gate: while clear, such calls wait. They are set at first.
        held_error: an errno with which writes fail that `hold_next_write` held, or 0; num_written: writes that came to
            their end.
        now_ns: the time, if it is to stand still.
    """

    def __init__(self) -> None:
        self.read_error = self.write_error = self.sync_error = self.allocate_error = 0
        self.bad_place: Path | None = None
        self.bad_reads: set[int] = set()
        self.max_transfer = 1 << 30
        self.reads: list[tuple[int, int]] = []
        self.writes: list[tuple[int, int]] = []
        self.num_syncs = 0
        self.read_gate, self.write_gate, self.sync_gate = (threading.Event() for _ in range(3))
        self.held_error = self.num_written = 0
        self._to_hold: list[threading.Event] = []
        self._holding: list[threading.Event] = []
        self.now_ns: int | None = None
        self.open_gates()

    def open_gates(self) -> None:
        """Let every call go on."""
        for gate in (self.read_gate, self.write_gate, self.sync_gate, *self._holding):
            gate.set()

    def hold_next_write(self) -> threading.Event:
        """Let the next write, and no other, wait until what is returned is set."""
        gate = threading.Event()
        self._holding.append(gate)
        self._to_hold.append(gate)
        return gate

    @property
    def is_holding(self) -> bool:
        """Whether each write that was to be held has begun."""
        return not self._to_hold

    def close_gates(self) -> None:
        """Let every call wait: the device hangs."""
        for gate in (self.read_gate, self.write_gate, self.sync_gate):
            gate.clear()

    def _pass(self, fd: int, gate: threading.Event) -> None:
        if self.bad_place is None or _place(fd) == self.bad_place:
            gate.wait()

    def _of(self, fd: int, error: int) -> int:
        if not error or self.bad_place is None:
            return error
        return error if _place(fd) == self.bad_place else 0

    def time_ns(self) -> int:
        """`now_ns`, or the real time."""
        return super().time_ns() if self.now_ns is None else self.now_ns

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `System`."""
        self._pass(fd, self.read_gate)
        self.reads.append((offset, sum(len(buffer) for buffer in buffers)))
        _raise(self._of(fd, self.read_error) or (errno.EIO if offset in self.bad_reads else 0))
        return super().preadv(fd, [buffers[0][: self.max_transfer]], offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        """See `System`."""
        self._pass(fd, self.write_gate)
        self.writes.append((offset, sum(len(buffer) for buffer in buffers)))
        with contextlib.suppress(IndexError):  # threads: nobody looks first
            self._to_hold.pop().wait()
            _raise(self.held_error)
        _raise(self._of(fd, self.write_error))
        count = super().pwritev(fd, [buffers[0][: self.max_transfer]], offset)
        self.num_written += 1
        return count

    def fdatasync(self, fd: int) -> None:
        """See `System`."""
        self._pass(fd, self.sync_gate)
        self.num_syncs += 1
        _raise(self._of(fd, self.sync_error))
        super().fdatasync(fd)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        """See `System`."""
        _raise(self._of(fd, self.allocate_error))
        super().fallocate(fd, offset, length)


class SlowSystem(System):
    """A system with a slow device. Attributes: read_delay_s: what each read takes longer; read_gate: while clear, reads wait."""

    def __init__(self) -> None:
        self.read_delay_s = 0.0
        self.read_gate = threading.Event()
        self.read_gate.set()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `System`."""
        self.read_gate.wait()
        if self.read_delay_s:
            time.sleep(self.read_delay_s)
        return super().preadv(fd, buffers, offset)


class LosingSystem(FaultySystem):
    """A system that remembers what a power loss could take: every write since the last sync, with the bytes before."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._unsynced: list[tuple[str, int, bytes]] = []  # of the volume in the directory of this name

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        """See `System`."""
        before = aligned_buffer(len(buffers[0]))
        with self._lock:
            count = System.preadv(self, fd, [before], offset)
            self._unsynced.append((_place(fd).name, offset, bytes(before[:count])))
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        """See `System`."""
        with self._lock:
            num_before = len(self._unsynced)
        super().fdatasync(fd)
        with self._lock:
            name, older = _place(fd).name, self._unsynced[:num_before]
            self._unsynced[:num_before] = [write for write in older if write[0] != name]

    def lose(self, volume: Path) -> None:
        """Take every write that was not synced back out of (a copy of) the volume, in a directory of the same name."""
        with self._lock, open(volume, "r+b") as file:
            for name, offset, before in reversed(self._unsynced):
                if name == volume.parent.name:
                    file.seek(offset)
                    file.write(before)


def _place(fd: int) -> Path:
    """The directory of an open file."""
    return Path(os.readlink(f"/proc/self/fd/{fd}")).parent


def _raise(number: int) -> None:
    if number:
        raise OSError(number, os.strerror(number))


# namespaces and chunks


def tiny_namespace(
    model: str = "tests/tiny", *, num_layers: int = 4, head_size: int = 40, tokens_per_chunk: int = 16, rank: int = 0
) -> Namespace:
    """A namespace whose chunks are small, whose layers differ, and whose payload needs padding."""
    identity = Identity(
        model=model, revision="1", kv_dtype="BF16", layout="test", num_layers=num_layers, num_kv_heads=3,
        head_size=head_size, tokens_per_chunk=tokens_per_chunk,
    )  # fmt: skip
    keys_, values = (TensorSpec(name, "BF16", (3, tokens_per_chunk, head_size), 1) for name in ("k", "v"))
    scale = TensorSpec("scale", "F32", (tokens_per_chunk,), 0)
    first = LayerRun(1, (keys_, values, scale))
    runs = (first, LayerRun(num_layers - 1, (keys_, values))) if num_layers > 1 else (first,)
    return Namespace(identity, runs, rank, rank + 1)


def sized_namespace(chunk_bytes: int, model: str = "tests/sized", num_layers: int = 4) -> Namespace:
    """A namespace whose chunk files have just under `chunk_bytes` bytes, in equal layers; for tests that count room."""
    identity = Identity(
        model=f"{model}-{chunk_bytes}", revision="1", kv_dtype="U8", layout="test", num_layers=num_layers,
        num_kv_heads=1, head_size=1, tokens_per_chunk=16,
    )  # fmt: skip
    row = (chunk_bytes - 4096) // num_layers // 16
    return Namespace(identity, (LayerRun(num_layers, (TensorSpec("kv", "U8", (16, row), 0),)),))


def chain_of(namespace: Namespace, num_chunks: int, seed: int = 0) -> KeyChain:
    """The chain of a prompt that `seed` names; prompts of different seeds share nothing."""
    step = namespace.identity.tokens_per_chunk
    root = keys.root(namespace.identity.fingerprint(), [str(seed)])
    return KeyChain(root, step, list(range(num_chunks * step)))


def payload_of(chain: ChainHash, geo: Geometry) -> bytes:
    """The payload of the chunk with this chain value: whoever knows the chain can tell right bytes from wrong ones."""
    block = b"".join(struct.pack("<I", number) + chain for number in range(113))  # 4068 bytes, no divisor of a page
    return (block * (geo.payload_bytes // len(block) + 1))[: geo.payload_bytes]


def layer_of(chain: ChainHash, geo: Geometry, layer: int) -> bytes:
    """The bytes of one layer of that payload."""
    places = geo.layers[layer]
    return payload_of(chain, geo)[places[0].begin : places[-1].end]


def checksums_of(payload: bytes, geo: Geometry) -> tuple[int, ...]:
    """The checksum of each layer."""
    return tuple(checksum(payload[places[0].begin : places[-1].end]) for places in geo.layers)


def new_chunks(chain: KeyChain, begin: int = 0, end: int | None = None) -> list[NewChunk]:
    """What a client sends to store chunks of a chain."""
    return [
        NewChunk(chain.chains[i], keys.key_of(chain.parent_of(i)), i, chain.tokens_per_chunk)
        for i in range(begin, len(chain.chains) if end is None else end)
    ]


@asynccontextmanager
async def open_table(
    directory: Path, namespace: Namespace | None = None, system: System | None = None, **settings: Any
) -> AsyncIterator[tuple[Store, ChunkTable]]:
    """A store with `settings_in` the directory, and the table of the namespace, `tiny_namespace` unless given."""
    async with open_store(settings_in(directory, **settings), system) as store:
        try:
            yield store, store.attach(namespace or tiny_namespace())
        finally:
            if isinstance(system, FaultySystem):  # a test that failed would wait for ever
                system.open_gates()


async def store_chunk(store: Store, table: ChunkTable, new: NewChunk, payload: bytes | None = None) -> StoreStatus:
    """Reserve and publish one chunk as a session does; the payload is that of `payload_of` unless given."""
    reservation = store.reserve(table, new)
    if not isinstance(reservation, Reservation):
        return reservation
    return await publish_chunk(store, reservation, payload)


async def publish_chunk(store: Store, reservation: Reservation, payload: bytes | None = None) -> StoreStatus:
    """Publish what was reserved. The checksums are those of the right payload, even if another is given."""
    geo = reservation.geometry
    right = payload_of(ChainHash(reservation.new.chain), geo)
    window_fd = os.memfd_create("test-window", os.MFD_CLOEXEC)
    try:
        os.pwrite(window_fd, right if payload is None else payload, 0)
        handed = Handed(reservation, WindowSlot(window_fd, 0), checksums_of(right, geo))
        return (await store.publish([handed]))[0]
    finally:
        os.close(window_fd)


async def store_chain(store: Store, table: ChunkTable, chain: KeyChain) -> list[StoreStatus]:
    """Store all chunks of a chain, one after the other."""
    return [await store_chunk(store, table, new) for new in new_chunks(chain)]


def load_right(client: Client, chain: KeyChain) -> set[bytes]:
    """Load a chain, chunk by chunk; whatever comes is compared with what it must be. Returns the keys that came."""
    load = client.load(chain.chains)
    found: set[bytes] = set()
    if load is None:
        return found
    with load:
        for index, source in enumerate(load.sources):
            if source is not Tier.NONE:
                geo = load.geometry(index)
                right = memoryview(payload_of(chain.chains[index], geo))
                for layer, places in enumerate(geo.layers):
                    assert load.layer(index, layer) == right[places[0].begin : places[-1].end]
                found.add(chain.keys[index])
    return found


async def read_all(store: Store, chunk: Chunk) -> bytes:
    """The whole verified file of a chunk, as a reader of the mount gets it. Raises as `Store.read` does."""
    store.lease(chunk)
    try:
        return bytes(await store.read(chunk, 0, chunk.length))
    finally:
        store.release(chunk)


async def hold_one_of_two(
    system: FaultySystem, store: Store, table: ChunkTable, new: Sequence[NewChunk]
) -> threading.Event:
    """Store three chunks, so that the first is written alone and then two in a group, one of which is held.

    The two must not be neighbours on the volume, or too large for one write. Set what is returned to let it go on.
    """
    assert await store.flush()
    first = system.hold_next_write()
    await store_chunk(store, table, new[0])
    await eventually(lambda: system.is_holding)
    for chunk in new[1:3]:  # they wait for a thread, and so become a group
        await store_chunk(store, table, chunk)
    before, held = system.num_written, system.hold_next_write()
    first.set()
    await eventually(lambda: system.num_written == before + 2)  # the first, and one of the two
    return held


# waiting


async def eventually(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Return when the condition holds; raises TimeoutError if it never does."""
    try:
        with trio.fail_after(deadline_s):
            while not condition():  # noqa: ASYNC110 - a condition of other threads and processes
                await trio.sleep(0.002)
    except trio.TooSlowError as error:
        raise TimeoutError(f"it did not come true within {deadline_s:g} s") from error


def wait_until(is_so: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> float:
    """The same outside of an event loop; `what` is for the error. Returns how many seconds it took."""
    begin = time.monotonic()
    while not is_so():
        if time.monotonic() > begin + deadline_s:
            raise TimeoutError(f"not within {deadline_s:g} s: {what}")
        time.sleep(0.005)
    return time.monotonic() - begin


def soon(is_so: Callable[[], object], what: str) -> None:
    """Return when it is so; raises TimeoutError if it is not before the kernel would look again for itself.

    What the kernel has cached of a mount it believes for a second. A moment in which the machine lets this process do
    nothing counts as 10 ms of that, or a busy machine would fail whoever asks.
    """
    left_s = 0.9
    while not is_so():
        if left_s < 0:
            raise TimeoutError(f"not soon: {what}")
        begin = time.monotonic()
        time.sleep(0.002)
        left_s -= min(time.monotonic() - begin, 0.01)


# places


def settings_in(
    directory: Path, *, ram: int = 8 << 20, nvme: int | None = 32 << 20, volumes: int = 1, **others: Any
) -> Settings:
    """Small settings whose every path lies in `directory`, which gets a "mount": see `plain_mount`.

    Each volume has `nvme` bytes; the first is in "nvme", the next in "nvme2".
    """
    places = [directory / ("nvme" if number == 1 else f"nvme{number}") for number in range(1, volumes + 1)]
    return Settings(
        mountpoint=str(plain_mount(directory)), ram_bytes=ram,
        nvme=() if nvme is None else tuple(VolumeSetting(str(place), nvme) for place in places),
        **{"huge_pages": "never", "window_bytes": 4 << 20, "io_threads": 2, **others},
    )  # fmt: skip


def plain_mount(directory: Path) -> Path:
    """A directory that stands in for a mount: its session link leads to ``directory/socket``."""
    link = directory / "mount" / ".kvfs" / "session"
    if not link.is_symlink():
        link.parent.mkdir(parents=True)
        link.symlink_to(socket_path(directory))
    return directory / "mount"


def socket_path(directory: Path) -> str:
    """Where the daemon of a test in this directory listens."""
    return str(directory / "socket")
