"""A crowd: how long a listing of 100,000 chunks takes, and what memory the daemon needs for each."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvfs.chunk import geometry
from kvfs.tools.bench import rig
from kvfs.tools.bench.results import Row

NUM_CHUNKS = 100_000
_CHUNKS_A_PROMPT = 250
_LIST_BAR_MS = 2_000.0
_MEMORY_BAR_BYTES = 600.0


def crowd(directory: Path, progress: Callable[[str], None]) -> Iterator[Row]:
    """list_100k_chunks: `ls -f` of their directory; memory_a_chunk: growth of the daemon's RssAnon, divided.

    The limits are bars: there is no hardware to compare with. A twelfth of the chunks fits into the RAM tier; a chunk
    that is in both tiers takes a quarter more.
    """
    shape = rig.Shape(4 << 10, 1, model="crowd")
    namespace = shape.namespace
    file_bytes = geometry(namespace, rig.TOKENS_PER_CHUNK).file_bytes
    source = rig.noise(_CHUNKS_A_PROMPT * shape.chunk_bytes)
    settings = rig.settings(directory, "c", 64 << 20, (NUM_CHUNKS + 1000) * file_bytes, "trusted")
    with rig.Daemon(settings) as daemon, rig.client(daemon, namespace) as client:
        rig.store(client, rig.Prompt.random(namespace, _CHUNKS_A_PROMPT, 0), source)
        daemon.wait_until_clean()
        before = anonymous_bytes(daemon.pid)
        for number in range(NUM_CHUNKS // _CHUNKS_A_PROMPT):
            progress(f"a crowd: {number * _CHUNKS_A_PROMPT:,} of {NUM_CHUNKS:,} chunks")
            rig.store(client, rig.Prompt.random(namespace, _CHUNKS_A_PROMPT, 1 + number), source)
        daemon.wait_until_clean()
        grown = (anonymous_bytes(daemon.pid) - before) / NUM_CHUNKS
        took_ms = list_all(Path(daemon.mount, namespace.directory, "chunks"), NUM_CHUNKS) * 1e3
    yield Row("list_100k_chunks", 0, "bar", _LIST_BAR_MS, round(took_ms / _LIST_BAR_MS, 3), ms=round(took_ms, 1))
    yield Row("memory_a_chunk", 0, "bar", _MEMORY_BAR_BYTES, round(grown / _MEMORY_BAR_BYTES, 3), bytes=round(grown, 1))


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process: its own memory, without the arena and files."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel tells no RssAnon")


def list_all(directory: Path, num_chunks: int) -> float:
    """Seconds that `ls -f` takes; so many chunks have to be in it."""
    started = time.perf_counter()
    listing = subprocess.run(["ls", "-f", os.fspath(directory)], check=True, stdout=subprocess.PIPE).stdout
    took_s = time.perf_counter() - started
    if listing.count(b".safetensors\n") < num_chunks:
        raise AssertionError(f"{listing.count(b'.safetensors')} chunks were listed")
    return took_s
