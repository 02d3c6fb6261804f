"""Movement between tiers beside other work: a cold load under compute, a prefetch before its load, hits under writes."""

from __future__ import annotations

import contextlib
import hashlib
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from kvfs.chunk import geometry
from kvfs.client import Client, Tier
from kvfs.config import Access
from kvfs.errors import UnavailableError
from kvfs.tools import mounted
from kvfs.tools.bench import limits, rig
from kvfs.tools.bench.results import Pairs, Row
from kvfs.tools.bench.rows import IO_THREADS, NUM_KEYS, RING_BYTES, Progress

_HIDDEN_BAR = 0.8
_HIT_BAR = 3.0
_COMPUTE_PIECE_BYTES = 256 << 10
_QUEUE_TIMES = 2.0  # a request waits so many times as long as its cold load takes
_NUM_HITS = 200
_HITS_A_LOOK = 20
_HIT_CHUNKS = 4
_NUM_DIRTY = 768


def movement(shape: rig.Shape, directory: Path, rounds: int, access: Access, progress: Progress) -> Iterator[Row]:
    """overlap_hidden, overlap_hidden_plain and prefetched_load for chunks of one shape.

    overlap_hidden is the share of the smaller of a cold load and a computation that a layer-wise load hides;
    overlap_hidden_plain is what reads of a file hide beside the same, without kvfs, a copy or a checksum. RAM holds one prompt: loading one makes the others cold, and half of one may be prefetched.
    """
    namespace = shape.namespace
    payload = NUM_KEYS * shape.chunk_bytes
    whole = NUM_KEYS * geometry(namespace, rig.TOKENS_PER_CHUNK).file_bytes
    ring, source = rig.anonymous(min(RING_BYTES, payload)), rig.noise(payload)
    first, second, third = (rig.Prompt.random(namespace, NUM_KEYS, seed) for seed in (1, 2, 3))
    prefetched = third.chains[: NUM_KEYS // 2]
    pairs = Pairs()
    raw = limits.RawFile(directory / "raw", payload, IO_THREADS)
    raw.write(source, shape.chunk_bytes)
    settings = rig.settings(directory, f"m{shape.chunk_bytes}", whole, 4 * whole + (8 << 20), access, "lru")
    with contextlib.closing(raw), rig.Daemon(settings) as daemon, rig.client(daemon, namespace) as client:
        client.attach()
        client.window_bytes()
        for prompt in (first, second, third):
            rig.store(client, prompt, source)
            daemon.wait_until_clean()
        compute = _Compute(shape.num_layers)
        cold_s = statistics.median(
            rig.load(client, prompt.chains, ring, Tier.NVME) for prompt in (first, second, first, second)
        )
        compute.calibrate(cold_s)

        def read_plain() -> Iterator[int]:
            return raw.layers(ring, shape.chunk_bytes, shape.num_layers, NUM_KEYS)

        for number in range(rounds):
            progress(f"chunks of {shape.chunk_bytes >> 20} MiB: overlap and prefetch, round {number + 1} of {rounds}")
            pairs.add("alone", alone := rig.load(client, first.chains, ring, Tier.NVME))
            pairs.add("computed", computed := compute.run(lambda _: None))
            pairs.add("overlapped", overlapped := _overlapped(client, second, ring, compute))
            pairs.add("hidden", (alone + computed - overlapped) / min(alone, computed))
            pairs.add("plain", plain := _seconds(read_plain))
            pairs.add("hidden_plain", (plain + computed - compute.beside(read_plain)) / min(plain, computed))
            client.prefetch(prefetched)
            time.sleep(_QUEUE_TIMES * cold_s)
            pairs.add("prefetched_load", rig.load(client, prefetched, ring, Tier.RAM))
            time.sleep(_QUEUE_TIMES * cold_s)  # the same pause: to wake up takes the daemon 0.4 ms
            pairs.add("ram_hit", rig.load(client, prefetched, ring, Tier.RAM))
    for name in ("hidden", "hidden_plain"):
        share = pairs.median(name)
        ratio = round(share / _HIDDEN_BAR, 3)
        yield Row(f"overlap_{name}", shape.chunk_bytes, "bar", _HIDDEN_BAR, ratio, share=round(share, 3))
    yield pairs.speed("prefetched_load", "ram_hit", payload // 2, shape.chunk_bytes)


def _seconds(load: Callable[[], Iterator[int]]) -> float:
    started = time.perf_counter()
    deque(load(), maxlen=0)
    return time.perf_counter() - started


class _Compute:
    """Layers of work that leaves memory and the interpreter's lock alone, as a model's kernels do: SHA-256 of one piece."""

    def __init__(self, num_layers: int) -> None:
        self._piece = bytes(_COMPUTE_PIECE_BYTES)
        self._num_layers = num_layers
        self._pieces_a_layer = 1

    def calibrate(self, wanted_s: float) -> None:
        """Take about so long altogether."""
        started = time.perf_counter()
        for _ in range(16):
            hashlib.sha256(self._piece)
        piece_s = (time.perf_counter() - started) / 16
        self._pieces_a_layer = max(1, round(wanted_s / piece_s / self._num_layers))

    def run(self, before: Callable[[int], None]) -> float:
        """Seconds for all layers; `before` each of them its number is told."""
        started = time.perf_counter()
        for layer in range(self._num_layers):
            before(layer)
            for _ in range(self._pieces_a_layer):
                hashlib.sha256(self._piece)
        return time.perf_counter() - started

    def beside(self, load: Callable[[], Iterator[int]]) -> float:
        """Seconds for all layers, each once it is there, and for the load, which says how many there are, in a thread."""
        there = threading.Condition()
        num_there = 0
        failures: list[BaseException] = []

        def run() -> None:
            nonlocal num_there
            try:
                for num_layers in load():
                    with there:
                        num_there = num_layers
                        there.notify()
            except BaseException as error:  # noqa: BLE001 - it is raised again below, in the thread that computes
                failures.append(error)
                with there:
                    num_there = self._num_layers
                    there.notify()

        def wait_for(layer: int) -> None:
            with there:
                there.wait_for(lambda: num_there > layer)

        started = time.perf_counter()
        thread = threading.Thread(target=run, name="kvfs-bench-load")
        thread.start()
        self.run(wait_for)
        thread.join()
        if failures:
            raise failures[0]
        return time.perf_counter() - started


def _overlapped(client: Client, prompt: rig.Prompt, ring: memoryview, compute: _Compute) -> float:
    """Seconds until all layers of a cold prompt were loaded by a thread, and each computed once it was there."""
    place = rig.in_turn(client.namespace, ring)

    def load() -> Iterator[int]:
        loading = client.load(prompt.chains, deadline_s=60.0, stream=True)
        if loading is None or any(found is not Tier.NVME for found in loading.sources):
            raise UnavailableError("the chunks were not all on NVME")
        with loading:
            yield from loading.layers(place)

    return compute.beside(load)


def hits_under_writes(directory: Path, rounds: int, access: Access, progress: Progress) -> Iterator[Row]:
    """hit_under_writes_p99: a RAM hit of some MiB while the write-behind has its hands full, beside its idle p99."""
    shape = rig.Shape(1 << 20, 16)
    namespace = shape.namespace
    whole = _NUM_DIRTY * geometry(namespace, rig.TOKENS_PER_CHUNK).file_bytes
    source, ring = rig.noise(_NUM_DIRTY * shape.chunk_bytes), rig.anonymous(_HIT_CHUNKS * shape.chunk_bytes)
    hot = rig.Prompt.random(namespace, _HIT_CHUNKS, 1)
    settings = rig.settings(directory, "w", whole + whole // 4, (rounds + 2) * whole, access)
    idle: list[float] = []
    busy: list[float] = []
    with rig.Daemon(settings) as daemon, rig.client(daemon, namespace) as client:
        rig.store(client, hot, source)
        daemon.wait_until_clean()
        for number in range(rounds):
            progress(f"hits under writes, round {number + 1} of {rounds}")
            idle += [rig.load(client, hot.chains, ring, Tier.RAM) for _ in range(_NUM_HITS)]
            rig.store(client, rig.Prompt.random(namespace, _NUM_DIRTY, 100 + number), source)
            while mounted.read_status(daemon.mount)["num_dirty"]:
                busy += [rig.load(client, hot.chains, ring, Tier.RAM) for _ in range(_HITS_A_LOOK)]
    idle_ms, busy_ms = _p99(idle) * 1e3, _p99(busy) * 1e3
    limit = _HIT_BAR * idle_ms
    yield Row(
        "hit_under_writes_p99", shape.chunk_bytes, "3 × idle p99", round(limit, 3), round(busy_ms / limit, 3),
        ms=round(busy_ms, 3),
    )  # fmt: skip


def _p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100)[98]
