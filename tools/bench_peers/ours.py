"""kvfs as engines use it: a daemon with a mount, and a client in this process.

A set of chunks fills the RAM tier, so that storing or loading one set leaves the one before on NVMe alone; loads raise
if a chunk comes from elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

from kvfs import keys
from kvfs.chunk import geometry
from kvfs.client import Client, Tier
from kvfs.errors import KvfsError
from kvfs.tools.bench import rig
from kvfs.tools.interrupting import entered

_STEP = 1 << 20


class Ours:
    """Sets of chunks, by number; every set has the same payloads, and keys of its own."""

    def __init__(
        self, shape: rig.Shape, num_chunks: int, daemon: rig.Daemon, client: Client, source: memoryview
    ) -> None:
        self._shape, self._num_chunks = shape, num_chunks
        self._daemon, self._client, self._source = daemon, client, source
        self._target = rig.anonymous(len(source))
        self._nothing = bytes(_STEP)

    def _prompt(self, number: int) -> rig.Prompt:
        return rig.Prompt.random(self._shape.namespace, self._num_chunks, 1000 + number)

    def store(self, number: int) -> tuple[float, float]:
        """Seconds to store a set: until nothing of it is dirty, and until all of it is visible."""
        prompt = self._prompt(number)
        started = time.perf_counter()
        visible_s = rig.store(self._client, prompt, self._source)
        self._daemon.wait_until_clean()
        return time.perf_counter() - started, visible_s

    def load(self, number: int, tier: Tier, *, batch: bool) -> float:
        """Seconds to load a set, verified, into memory of ours; then every byte is compared.

        One by one the last is loaded first: what goes on where an earlier load ended is read ahead, and would be in RAM.
        """
        for start in range(0, len(self._target), _STEP):
            piece = self._target[start : start + _STEP]
            piece[:] = self._nothing[: len(piece)]
        chains, size = self._prompt(number).chains, self._shape.chunk_bytes
        if batch:
            took_s = self._load(chains, self._target, tier)
        else:
            took_s = sum(
                self._load([chain], self._target[index * size : (index + 1) * size], tier)
                for index, chain in reversed([*enumerate(chains)])
            )
        self._check()
        return took_s

    def _load(self, chains: list[keys.ChainHash], target: memoryview, tier: Tier) -> float:
        """As `rig.load`, but each chunk goes to its place, whatever comes first."""
        size, bounds = self._shape.chunk_bytes, geometry(self._shape.namespace, rig.TOKENS_PER_CHUNK).bounds

        def place(index: int, first: int, stop: int) -> memoryview:
            return target[index * size + bounds[first] : index * size + bounds[stop]]

        started = time.perf_counter()
        loading = self._client.load(chains, deadline_s=60.0, stream=True)
        if loading is None:
            raise KvfsError("kvfs: a load failed")
        with loading:
            if any(found is not tier for found in loading.sources):
                raise KvfsError(f"kvfs: the chunks were not all on {tier.name}: {set(loading.sources)}")
            for error in loading.copy_all(place).values():
                raise error
        return time.perf_counter() - started

    def _check(self) -> None:
        for start in range(0, len(self._target), _STEP):
            if bytes(self._target[start : start + _STEP]) != bytes(self._source[start : start + _STEP]):
                raise KvfsError(f"kvfs: there are other bytes than were stored behind byte {start}")

    def remove(self, number: int) -> None:
        """Remove a set."""
        chunks = Path(self._daemon.mount, self._shape.namespace.directory, "chunks")
        for chain in self._prompt(number).chains:
            os.unlink(chunks / f"{chain[:16].hex()}.safetensors")


@contextlib.contextmanager
def ours(shape: rig.Shape, num_chunks: int, source: memoryview, directory: Path) -> Iterator[Ours]:
    """A daemon for sets of so many chunks of one shape, three of which fit on its volume."""
    whole = num_chunks * geometry(shape.namespace, rig.TOKENS_PER_CHUNK).file_bytes
    settings = rig.settings(directory, "peers", whole, 3 * whole + (8 << 20), "trusted", "lru")
    with entered(rig.Daemon(settings)) as daemon, rig.client(daemon, shape.namespace) as client:
        client.attach()
        client.window_bytes()
        yield Ours(shape, num_chunks, daemon, client, source)


class Lookup:
    """A prompt all of whose chunks are stored: from token ids to a lease on all of them."""

    def __init__(self, client: Client, tokens: list[int]) -> None:
        self._client, self._tokens = client, tokens
        self._root = keys.root(client.namespace.identity.fingerprint())

    def run(self) -> tuple[float, float]:
        """Seconds of it all, and of the hashing in it."""
        started = time.perf_counter()
        chain = keys.KeyChain(self._root, rig.TOKENS_PER_CHUNK, self._tokens)
        hashed_s = time.perf_counter() - started
        lease = self._client.match(chain.chains)
        took_s = time.perf_counter() - started
        lease.release()
        if lease.count != len(chain.chains):
            raise KvfsError(f"kvfs found {lease.count} of {len(chain.chains)} chunks")
        return took_s, hashed_s


@contextlib.contextmanager
def lookup(tokens: list[int], directory: Path) -> Iterator[Lookup]:
    """A daemon that has the chunks of these tokens."""
    shape = rig.Shape(64 << 10, 4)
    settings = rig.settings(directory, "lookup", 64 << 20, 64 << 20)
    root = keys.root(shape.namespace.identity.fingerprint())
    prompt = rig.Prompt(keys.KeyChain(root, rig.TOKENS_PER_CHUNK, array("I", tokens)))
    with entered(rig.Daemon(settings)) as daemon, rig.client(daemon, shape.namespace) as client:
        client.attach()
        rig.store(client, prompt, rig.noise(len(prompt.chains) * shape.chunk_bytes))
        yield Lookup(client, tokens)
