"""What the benchmark runs on: a daemon and a mount of its own, models that exist in name only, memory to copy between."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import subprocess
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvfs import keys
from kvfs.arena import MADV_POPULATE_WRITE
from kvfs.chunk import align, geometry
from kvfs.client import Client, NewChunk, Publishing, StoreStatus, Tier, fill_all, new_chunk
from kvfs.config import Access, Settings, VolumeSetting
from kvfs.errors import UnavailableError
from kvfs.mount import mountpoint
from kvfs.namespace import Identity, LayerRun, Namespace, TensorSpec
from kvfs.tools import background, mounted
from kvfs.tools.bench.scratch import lock_above

WINDOW_BYTES = 128 << 20
TOKENS_PER_CHUNK = 256
_QUIET_S = 60.0
_MOST_THREADS = 2  # that a client takes by itself


@dataclass(frozen=True)
class Shape:
    """Chunks of one size: `num_layers` layers of two equal tensors."""

    chunk_bytes: int
    num_layers: int
    model: str = "bench"

    @property
    def namespace(self) -> Namespace:
        """A namespace whose chunks have this payload."""
        half = self.chunk_bytes // self.num_layers // 2
        tensor = (TOKENS_PER_CHUNK, half // TOKENS_PER_CHUNK)
        specs = tuple(TensorSpec(name, "U8", tensor, 0) for name in ("k", "v"))
        identity = Identity(
            model=f"{self.model}-{self.chunk_bytes >> 10}KiB", revision="1", kv_dtype="U8", layout="bench",
            num_layers=self.num_layers, num_kv_heads=1, head_size=half // TOKENS_PER_CHUNK,
            tokens_per_chunk=TOKENS_PER_CHUNK,
        )  # fmt: skip
        return Namespace(identity, (LayerRun(self.num_layers, specs),))


@dataclass(frozen=True)
class Prompt:
    """A chain of full chunks."""

    chain: keys.KeyChain

    @classmethod
    def random(cls, namespace: Namespace, num_chunks: int, seed: int) -> Prompt:
        """The chain of a random prompt, the same for the same seed."""
        tokens = array("I", random.Random(seed).choices(range(50_000), k=num_chunks * TOKENS_PER_CHUNK))
        return cls(keys.KeyChain(keys.root(namespace.identity.fingerprint()), TOKENS_PER_CHUNK, tokens))

    @property
    def chains(self) -> list[keys.ChainHash]:
        """The chain values."""
        return self.chain.chains

    def new_chunks(self, start: int, stop: int) -> list[NewChunk]:
        """What `Client.store` takes for some of the chunks."""
        return [new_chunk(self.chains[i], self.chain.parent_of(i), i, TOKENS_PER_CHUNK) for i in range(start, stop)]


def anonymous(size_bytes: int) -> memoryview:
    """Touched anonymous memory, in huge pages where the system gives them."""
    mapped = mmap.mmap(-1, size_bytes)
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    mapped.madvise(MADV_POPULATE_WRITE)
    return memoryview(mapped)


def noise(size_bytes: int) -> memoryview:
    """Memory full of bytes that do not compress, every 4 KiB different."""
    memory = anonymous(size_bytes)
    block = os.urandom(1 << 20)
    for start in range(0, size_bytes, len(block)):
        stop = min(start + len(block), size_bytes)
        memory[start:stop] = block[: stop - start]
        for os_page in range(start, stop, 4096):
            memory[os_page : os_page + 8] = os_page.to_bytes(8, "little")
    return memory


class Daemon:
    """A daemon in a process of its own, with its mount. Attributes: mount, volume_directory."""

    def __init__(self, settings: Settings) -> None:
        self.mount = settings.mountpoint
        self.volume_directory = Path(settings.nvme[0].directory if settings.nvme else "/")
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._process = background.start_tied(self._settings, lock_above(self.mount))
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_QUIET_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            mountpoint.unmount(self.mount, lazy=True)

    def wait_until_clean(self) -> None:
        """Return when nothing is dirty. Raises UnavailableError after a minute."""
        give_up = time.monotonic() + _QUIET_S
        while mounted.read_status(self.mount)["num_dirty"]:
            if time.monotonic() > give_up:
                raise UnavailableError("chunks stay dirty: is the disk full?")
            time.sleep(0.002)

    @property
    def pid(self) -> int:
        """Of the daemon's process."""
        assert self._process is not None
        return self._process.pid

    @property
    def arena_kind(self) -> str:
        """Which form the arena has."""
        return str(mounted.read_status(self.mount)["ram"]["kind"])


def settings(
    directory: Path, name: str, ram_bytes: int, nvme_bytes: int, access: Access = "isolated", policy: str = "learned"
) -> Settings:
    """Settings of a daemon whose files all lie below `directory`.

    `lru` for whoever says himself which tier a prompt is in: the default keeps what it thinks will come again.
    """
    return Settings(
        mountpoint=str(directory / f"mount-{name}"), ram_bytes=ram_bytes,
        nvme=(VolumeSetting(str(directory / f"volume-{name}"), nvme_bytes),), window_bytes=WINDOW_BYTES, access=access, policy=policy,
        log_level="warning",
    )  # fmt: skip


def client(daemon: Daemon, namespace: Namespace) -> Client:
    """A client of the daemon, with a window as large as the daemon gives."""
    return Client(daemon.mount, namespace, deadline_s=30.0, window_bytes=WINDOW_BYTES)


def store(client: Client, prompt: Prompt, source: memoryview) -> float:
    """Store a prompt whose payloads lie one after the other in `source`; returns seconds as the engine sees them."""
    geo = geometry(client.namespace, TOKENS_PER_CHUNK)
    size = geo.payload_bytes
    group = max(1, WINDOW_BYTES // 4 // geo.file_bytes)
    most = (
        WINDOW_BYTES // (group * align(size)) - 2
    )  # that may be on their way to be visible; one is filled, one reserved
    groups = [prompt.new_chunks(i, min(i + group, len(prompt.chains))) for i in range(0, len(prompt.chains), group)]
    started = time.perf_counter()
    publishing: deque[Publishing] = deque()
    reserving = client.store_later(groups[0])
    index = 0
    for number in range(len(groups)):
        reservations = reserving.wait()
        reserving = client.store_later(groups[number + 1] if number + 1 < len(groups) else [])
        for reservation in reservations:
            if reservation.payload is None:
                raise UnavailableError(f"a store was refused: {reservation.status.name}")
        fill_all(reservations, [source[i * size : (i + 1) * size] for i in range(index, index + len(reservations))])
        index += len(reservations)
        publishing.append(client.publish_later(reservations))
        if len(publishing) > most:
            _check(publishing.popleft())
    for last in publishing:
        _check(last)
    return time.perf_counter() - started


def _check(publishing: Publishing) -> None:
    if any(status is not StoreStatus.STORED for status in publishing.wait()):
        raise UnavailableError("a chunk could not be published")


def in_turn(namespace: Namespace, ring: memoryview) -> Callable[[int, int, int], memoryview]:
    """Where layers of a chunk are copied to: one behind the other."""
    bounds = geometry(namespace, TOKENS_PER_CHUNK).bounds
    position = 0

    def place(_: int, first: int, stop: int) -> memoryview:
        nonlocal position
        size = bounds[stop] - bounds[first]
        begin = position if position + size <= len(ring) else 0
        position = begin + size
        return ring[begin:position]

    return place


def load(
    client: Client, chains: Sequence[keys.ChainHash], target: memoryview, source: Tier, num_threads: int | None = None
) -> float:
    """Load chunks, verified, into `target`; returns seconds. All must come from the tier `source`.

    They are copied by so many threads, or by as many as a client takes by itself. Each uses a part of `target` of its own as
    a ring: what one that stands still is copying to must not be written by the other meanwhile.
    """
    started = time.perf_counter()
    ring_bytes = len(target) // (num_threads or _MOST_THREADS)
    places: dict[int, Callable[[int, int, int], memoryview]] = {}

    def place(index: int, first: int, stop: int) -> memoryview:
        thread = threading.get_ident()
        if thread not in places:
            places[thread] = in_turn(client.namespace, target[len(places) * ring_bytes :][:ring_bytes])
        return places[thread](index, first, stop)

    loading = client.load(chains, deadline_s=60.0, stream=True)
    if loading is None:
        raise UnavailableError("the load failed")
    with loading:
        if any(found is not source for found in loading.sources):
            raise UnavailableError(f"the chunks were not all on {source.name}: {set(loading.sources)}")
        for error in loading.copy_all(place, num_helpers=None if num_threads is None else num_threads - 1).values():
            raise error
    return time.perf_counter() - started
