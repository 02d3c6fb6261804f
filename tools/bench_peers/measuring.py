"""The rounds: each of them does everything once, the order of who comes first changing with the round.

A round stores a set of chunks of its own everywhere, loads it cold in a batch and one by one, and removes it; what was
stored is compared by these loads, byte for byte. The first round is for warming up and counts nowhere.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from kvfs.client import Tier
from kvfs.tools.bench import rig
from kvfs.tools.bench_peers.lmcache import Task, Worker
from kvfs.tools.bench_peers.ours import Lookup, Ours, lookup, ours
from kvfs.tools.bench_peers.results import OURS, Aside, Row, speed_row, time_row
from kvfs.tools.interrupting import entered

NUM_TOKENS = 100_000
LOOKUPS_A_ROUND = 20
STEPS_A_ROUND = 11
DISK_PATHS = ("LocalDisk", "fs_native")
SPEED_BAR, DEFAULT_BAR, LOOKUP_BAR = 0.95, 2.0, 0.5
Say = Callable[[str], None]


class Model(msgspec.Struct, frozen=True):
    """Whose chunks are moved: layers, KV heads and their size, in bfloat16; how many of them make a set."""

    name: str
    num_layers: int
    num_heads: int
    head_size: int
    num_chunks: int

    @property
    def chunk_bytes(self) -> int:
        """Of a chunk's payload."""
        return self.num_layers * 2 * rig.TOKENS_PER_CHUNK * self.num_heads * self.head_size * 2

    @property
    def set_bytes(self) -> int:
        """Of a set's payload."""
        return self.chunk_bytes * self.num_chunks

    @property
    def disk_bytes(self) -> int:
        """That have to be free: three sets of ours, one in each path of LMCache, and some."""
        return 6 * self.set_bytes + (64 << 20)

    @property
    def memory_bytes(self) -> int:
        """At once: what is stored, two pools and a target there, a tier and a target here."""
        return 6 * self.set_bytes + (1 << 30)


MODELS = (Model("Qwen2.5-0.5B", 24, 2, 64, 128), Model("Llama-3-8B", 32, 8, 128, 32))


class Times:
    """Seconds, by what was done and who did it; those of the first round are dropped."""

    def __init__(self) -> None:
        self.by_step: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.asides: dict[str, list[float]] = defaultdict(list)
        self.are_kept = False

    def add(self, step: str, who: str, seconds: float) -> None:
        """One measurement."""
        if self.are_kept:
            self.by_step[step][who].append(seconds)

    def add_aside(self, name: str, seconds: float) -> None:
        """One that is no row."""
        if self.are_kept:
            self.asides[name].append(seconds)


class Measured(msgspec.Struct):
    """Of one model. Attributes: rows, asides; versions: of LMCache and its torch."""

    rows: list[Row]
    asides: list[Aside]
    versions: tuple[str, str]


def measure(python: str, model: Model, rounds: int, directory: Path, say: Say, *, with_lookup: bool) -> Measured:
    """Compare chunks of one model; `say` is told each step, STEPS_A_ROUND for each of `rounds` + 1, one more for lookups."""
    shape = rig.Shape(model.chunk_bytes, model.num_layers, model=f"peers-{model.name}")
    tokens = [number * 2_654_435_761 % 50_000 for number in range(NUM_TOKENS)]
    files = directory / "lmcache"
    files.mkdir()
    times = Times()
    with contextlib.ExitStack() as stack:
        fd, source = stack.enter_context(_shared(model.set_bytes))
        task = Task(
            fd, model.chunk_bytes, model.num_chunks, model.num_layers, model.num_heads, model.head_size, NUM_TOKENS,
            os.fspath(files),
        )  # fmt: skip
        worker = stack.enter_context(entered(Worker(python, task, directory / "lmcache.log")))
        mine = stack.enter_context(ours(shape, model.num_chunks, source, directory))
        mine.store(-1)
        for number in range(rounds + 1):
            times.are_kept = number > 0
            _round(
                number, model, mine, worker, times, lambda what: say(f"{model.chunk_bytes >> 10} KiB chunks: {what}")
            )
        if with_lookup:
            say("lookups")
            finding = stack.enter_context(lookup(tokens, directory))
            _lookups(rounds, finding, worker, times)
        versions = (worker.version, worker.torch_version)
    asides = [Aside(name, model.chunk_bytes, statistics.median(found)) for name, found in times.asides.items()]
    return Measured(list(_rows(model, times)), asides, versions)


@contextlib.contextmanager
def _shared(size_bytes: int) -> Iterator[tuple[int, memoryview]]:
    """Memory full of bytes that do not compress, without a name: it goes with the last process that has it."""
    fd = os.memfd_create("kvfs-bench-peers")
    try:
        os.ftruncate(fd, size_bytes)
        memory = memoryview(mmap.mmap(fd, size_bytes))
        noise = rig.noise(size_bytes)
        memory[:] = noise
        del noise
        yield fd, memory
    finally:
        os.close(fd)


def _round(number: int, model: Model, mine: Ours, worker: Worker, times: Times, say: Say) -> None:
    first = (number + 1) * model.num_chunks

    def our_store() -> None:
        clean_s, visible_s = mine.store(number)
        times.add("store", OURS, clean_s)
        times.add_aside("kvfs: store, until visible", visible_s)

    def our_load(step: str, set_number: int, tier: Tier, *, batch: bool) -> None:
        times.add(step, OURS, mine.load(set_number, tier, batch=batch))

    def their_store(path: str) -> None:
        answer = worker.ask("store", path=path, first=first)
        times.add("store", path, answer["seconds"])
        times.add_aside(f"{path}: fdatasync after a store", answer["sync"])

    def their_load(step: str, path: str, *, batch: bool) -> None:
        answer = worker.ask("load_batch" if batch else "load", path=path, first=0 if path == "LocalCPU" else first)
        times.add(step, path, answer["seconds"])
        times.add_aside(f"{path}: {step}, not copied", answer["in_pool"])

    steps: list[tuple[str, list[Callable[[], None]]]] = [
        ("stores", [our_store, *(lambda path=path: their_store(path) for path in DISK_PATHS)]),
        (
            "RAM loads",
            [
                lambda: our_load("ram_load", number, Tier.RAM, batch=True),
                lambda: their_load("ram_load", "LocalCPU", batch=True),
            ],
        ),
        (
            "cold loads in a batch",
            [
                lambda: our_load("cold_batch", number - 1, Tier.NVME, batch=True),
                *(lambda path=path: their_load("cold_batch", path, batch=True) for path in DISK_PATHS),
            ],
        ),
        (
            "cold loads one by one",
            [
                lambda: our_load("cold_one_by_one", number, Tier.NVME, batch=False),
                *(lambda path=path: their_load("cold_one_by_one", path, batch=False) for path in DISK_PATHS),
            ],
        ),
    ]
    for what, doing in steps:
        turn = number % len(doing)
        for do in doing[turn:] + doing[:turn]:
            say(what)
            do()
    mine.remove(number - 1)
    for path in DISK_PATHS:
        worker.ask("remove", path=path, first=first)


def _lookups(rounds: int, finding: Lookup, worker: Worker, times: Times) -> None:
    for _ in range(rounds * LOOKUPS_A_ROUND):
        took_s, hashed_s = finding.run()
        answer = worker.ask("lookup")
        times.add("lookup", OURS, took_s)
        times.add_aside("kvfs: hashing in a lookup", hashed_s)
        times.add("lookup", "MP", answer["seconds"])
        times.add_aside("MP: hashing in a lookup", answer["hashing"])


def _rows(model: Model, times: Times) -> Iterator[Row]:
    for step in ("store", "cold_one_by_one", "cold_batch", "ram_load"):
        yield speed_row(step, model.chunk_bytes, model.set_bytes, dict(times.by_step[step]), SPEED_BAR)
    store = {who: found for who, found in times.by_step["store"].items() if who in (OURS, "LocalDisk")}
    yield speed_row("store_default", model.chunk_bytes, model.set_bytes, store, DEFAULT_BAR, "LocalDisk")
    if "lookup" in times.by_step:
        yield time_row("lookup", dict(times.by_step["lookup"]), LOOKUP_BAR)
