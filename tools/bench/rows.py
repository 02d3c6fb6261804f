"""The rows of the benchmark: each a path of kvfs and its limit, measured in turns, so that both see the same machine."""

from __future__ import annotations

import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

from kvfs import keys
from kvfs.chunk import geometry
from kvfs.client import Tier
from kvfs.config import Access
from kvfs.tools.bench import limits, rig
from kvfs.tools.bench.empty_mount import empty_mount
from kvfs.tools.bench.results import Pairs, Row

NUM_KEYS = 64
RING_BYTES = 256 << 20
IO_THREADS = 4
_NUM_PROMPT_TOKENS = 100_000
_NUM_STATS = 500
NUM_THREADS = min(2, len(os.sched_getaffinity(0)))
RAM_LOADS = [("ram_load", "memcpy", 1), ("ram_load_2_threads", "memcpy_2_threads", 2)][:NUM_THREADS]
"""Each beside copies by as many threads; a client takes two by itself where it has the cores."""

Progress = Callable[[str], None]


def transfers(
    shape: rig.Shape,
    directory: Path,
    num_sets: int,
    rounds: int,
    fresh_rounds: int,
    access: Access,
    progress: Progress,
) -> Iterator[Row]:
    """ram_load, nvme_load_cold, store, store_clean and store_clean_fresh for chunks of one shape.

    A set is `NUM_KEYS` chunks; what is measured at once is `num_sets` of them, each loaded by itself.
    """
    namespace = shape.namespace
    num_chunks = NUM_KEYS * num_sets
    file_bytes = geometry(namespace, rig.TOKENS_PER_CHUNK).file_bytes
    payload = num_chunks * shape.chunk_bytes
    whole = num_chunks * file_bytes
    ring, source = rig.anonymous(min(RING_BYTES, payload)), rig.noise(payload)
    first, second = (rig.Prompt.random(namespace, num_chunks, seed) for seed in (1, 2))
    pairs = Pairs()
    raw = limits.RawFile(directory / "raw", payload, IO_THREADS)
    raw.write(source, shape.chunk_bytes)
    settings = rig.settings(directory, f"{shape.chunk_bytes}", whole, 3 * whole + (8 << 20), access, "lru")
    try:
        with rig.Daemon(settings) as daemon, rig.client(daemon, namespace) as client:
            client.attach()
            client.window_bytes()
            for prompt in (first, second):
                rig.store(client, prompt, source)
                daemon.wait_until_clean()

            def load(prompt: rig.Prompt, tier: Tier, num_threads: int = NUM_THREADS) -> float:
                # The last part first: what goes on where a load ended would be read ahead.
                parts = [prompt.chains[i : i + NUM_KEYS] for i in reversed(range(0, num_chunks, NUM_KEYS))]
                return sum(rig.load(client, part, ring, tier, num_threads) for part in parts)

            for number in range(rounds):
                progress(f"chunks of {shape.chunk_bytes >> 20} MiB: loads, round {number + 1} of {rounds}")
                pairs.add("nvme_load_cold", load(first if number % 2 == 0 else second, Tier.NVME))
                pairs.add("raw_odirect_read", raw.read(source, shape.chunk_bytes))
                prompt = first if number % 2 == 0 else second
                for name, limit, num_threads in RAM_LOADS:
                    pairs.add(name, load(prompt, Tier.RAM, num_threads))
                    pairs.add(limit, limits.memcpy(source, ring, shape.chunk_bytes, num_threads))
            for number in range(rounds):
                progress(f"chunks of {shape.chunk_bytes >> 20} MiB: stores, round {number + 1} of {rounds}")
                prompt = rig.Prompt.random(namespace, num_chunks, 100 + number)
                started = time.perf_counter()
                pairs.add("store", rig.store(client, prompt, source))
                daemon.wait_until_clean()
                pairs.add("store_clean", time.perf_counter() - started)
                pairs.add("memcpy_store", limits.memcpy(source, ring, shape.chunk_bytes))
                pairs.add("raw_odirect_write", raw.write(source, shape.chunk_bytes))
                _remove(daemon, namespace.directory, prompt)
    finally:
        raw.close()
    for number in range(fresh_rounds):
        progress(f"chunks of {shape.chunk_bytes >> 20} MiB: a fresh volume, round {number + 1} of {fresh_rounds}")
        _store_fresh(shape, directory / f"fresh-{number}", whole, source, access, pairs)
    for name, limit, _ in RAM_LOADS:
        yield pairs.speed(name, limit, payload, shape.chunk_bytes)
    yield pairs.speed("nvme_load_cold", "raw_odirect_read", payload, shape.chunk_bytes)
    yield pairs.speed("store", "memcpy_store", payload, shape.chunk_bytes)
    yield pairs.speed("store_clean", "raw_odirect_write", payload, shape.chunk_bytes)
    if fresh_rounds:
        yield pairs.speed("store_clean_fresh", "raw_odirect_write_fresh", payload, shape.chunk_bytes)


def _remove(daemon: rig.Daemon, directory: str, prompt: rig.Prompt) -> None:
    """Remove a prompt, so that the next takes extents that were written before."""
    for chain in prompt.chains:
        os.unlink(Path(daemon.mount, directory, "chunks", f"{chain[:16].hex()}.safetensors"))


def _store_fresh(
    shape: rig.Shape, directory: Path, whole: int, source: memoryview, access: Access, pairs: Pairs
) -> None:
    directory.mkdir()
    settings = rig.settings(directory, "f", whole, whole + (8 << 20), access)
    prompt = rig.Prompt.random(shape.namespace, len(source) // shape.chunk_bytes, 7)
    with rig.Daemon(settings) as daemon, rig.client(daemon, shape.namespace) as client:
        client.attach()
        client.window_bytes()
        started = time.perf_counter()
        rig.store(client, prompt, source)
        daemon.wait_until_clean()
        pairs.add("store_clean_fresh", time.perf_counter() - started)
    raw = limits.RawFile(directory / "raw", len(source), IO_THREADS)
    try:
        pairs.add("raw_odirect_write_fresh", raw.write(source, shape.chunk_bytes))
    finally:
        raw.close()
        shutil.rmtree(directory)


def prompts(directory: Path, rounds: int, progress: Progress) -> Iterator[Row]:
    """hash_100k_tokens and match_100k_tokens: a long prompt all of whose chunks are stored."""
    shape = rig.Shape(64 << 10, 4)
    namespace = shape.namespace
    num_chunks = _NUM_PROMPT_TOKENS // rig.TOKENS_PER_CHUNK
    tokens = array("I", (number * 2_654_435_761 % 50_000 for number in range(_NUM_PROMPT_TOKENS)))
    root = keys.root(namespace.identity.fingerprint())
    stored = keys.KeyChain(root, rig.TOKENS_PER_CHUNK, tokens)
    pairs = Pairs()
    settings = rig.settings(directory, "prompts", 256 << 20, 256 << 20)
    echo = limits.Echo(num_chunks * keys.KEY_BYTES)
    try:
        with rig.Daemon(settings) as daemon, rig.client(daemon, namespace) as client:
            client.attach()
            rig.store(client, rig.Prompt(stored), rig.noise(num_chunks * shape.chunk_bytes))
            progress(f"a prompt of {_NUM_PROMPT_TOKENS} tokens")
            for _ in range(rounds * 20):
                started = time.perf_counter()
                chain = keys.KeyChain(root, rig.TOKENS_PER_CHUNK, tokens)
                hashed = time.perf_counter()
                lease = client.match(chain.chains)
                pairs.add("match_100k_tokens", time.perf_counter() - started)
                pairs.add("hash_100k_tokens", hashed - started)
                if lease.count != num_chunks:
                    raise AssertionError(f"{lease.count} of {num_chunks} chunks were found")
                lease.release()
                pairs.add("sha256_chain", limits.sha256_chain(memoryview(tokens).cast("B"), rig.TOKENS_PER_CHUNK))
                pairs.add("socket_round_trip", echo.round_trip())
    finally:
        echo.close()
    chain_s = pairs.median("sha256_chain")
    yield pairs.duration("hash_100k_tokens", "sha256_chain", chain_s)
    yield pairs.duration(
        "match_100k_tokens", "sha256_chain+socket_round_trip", chain_s + pairs.median("socket_round_trip")
    )


def files(directory: Path, rounds: int, progress: Progress) -> Iterator[Row]:
    """mount_read, mount_stat_missing and open_close: what goes through FUSE."""
    shape = rig.Shape(32 << 20, 32)
    namespace = shape.namespace
    prompt = rig.Prompt.random(namespace, 8, 5)
    source = rig.noise(8 * shape.chunk_bytes)
    pairs = Pairs()
    settings = rig.settings(directory, "files", 512 << 20, 512 << 20)
    tmpfs_file = Path("/dev/shm") / f"kvfs-bench-{os.getpid()}"
    with (
        rig.Daemon(settings) as daemon,
        rig.client(daemon, namespace) as client,
        empty_mount(directory / "empty") as empty,
    ):
        client.attach()
        rig.store(client, prompt, source)
        daemon.wait_until_clean()
        chunks = Path(daemon.mount, namespace.directory, "chunks")
        paths = [chunks / f"{chain[:16].hex()}.safetensors" for chain in prompt.chains]
        try:
            tmpfs_file.write_bytes(source[: shape.chunk_bytes])
            for number in range(rounds):
                progress(f"files through the mount, round {number + 1} of {rounds}")
                for path in paths:
                    pairs.add("mount_read", limits.read_file(path))
                    pairs.add("tmpfs_read", limits.read_file(tmpfs_file))
                names = [f"{number:08x}{i:024x}.safetensors" for i in range(_NUM_STATS)]
                pairs.add("mount_stat_missing", limits.stat_missing(chunks, names))
                pairs.add("empty_fuse_stat", limits.stat_missing(empty, names))
                for path in paths:
                    started = time.perf_counter()
                    os.close(os.open(path, os.O_RDONLY))
                    pairs.add("open_close", time.perf_counter() - started)
        finally:
            tmpfs_file.unlink(missing_ok=True)
    yield pairs.speed("mount_read", "tmpfs_read", shape.chunk_bytes, shape.chunk_bytes)
    empty_s = pairs.median("empty_fuse_stat")
    yield pairs.duration("mount_stat_missing", "empty_fuse_stat", empty_s)
    yield pairs.duration("open_close", "empty_fuse_stat", empty_s)
