"""Replaying a trace through the tiers and policies of the store: the same code, on a clock and bytes that do not exist.

A request matches the longest stored prefix of its chunks, loads it (bringing what is on NVMe only into RAM), and stores
the rest as far as there is room; write-behind follows at once. What is left out is time: everything of a request
happens at the moment at which it came, and nothing fails.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvfs.catalog import NOWHERE, Catalog, Chunk
from kvfs.ghosts import MAX_GHOSTS, Ghost, Ghosts
from kvfs.keys import Key
from kvfs.namespace import Identity, LayerRun, Namespace, TensorSpec
from kvfs.policies import Clock, Policy
from kvfs.residency import BYPASSED, GHOSTS_A_CHUNK
from kvfs.tiers.nvme import NvmeTier
from kvfs.tiers.ram import RamTier
from kvfs.tools.simulate.traces import Request, Trace
from kvfs.volume import SUPERBLOCK_BYTES

MakePolicy = Callable[[Clock], Policy[Chunk]]
_NOBODY = Key(b"\0" * 16)
_GROUP = 64  # chunks that write-behind takes at once


class NoBytes:
    """Memory, or a device, of a size and without bytes."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.capacity = size_bytes + SUPERBLOCK_BYTES
        self.view = memoryview(b"")
        self.is_direct = True

    def read(self, buffer: memoryview, offset: int) -> None:
        """See `Device`."""

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        """See `Device`."""

    def sync(self) -> None:
        """See `Device`."""


@dataclass(slots=True)
class Tally:
    """What came of each request, in order, in chunks: of RAM, of NVMe; and what was moved, in chunks.

    `ram` + `nvme` of a request is the length of the prefix that it found.
    """

    ram: array[int] = field(default_factory=lambda: array("I"))
    nvme: array[int] = field(default_factory=lambda: array("I"))
    num_stored: int = 0
    num_bypassed: int = 0
    num_written: int = 0  # to NVMe
    num_promoted: int = 0

    def cut(self) -> None:
        """Leave out a request that was interrupted between the two."""
        del self.ram[len(self.nvme) :]


class Replay:
    """A cache that a trace is played to, request by request.

    `nvme_bytes` of 0 makes it a RAM cache. Without `has_ghosts` no uses are remembered of what went, which is right for
    policies that do not look at them, and faster.
    """

    def __init__(
        self,
        trace: Trace,
        make_policy: MakePolicy,
        bytes_per_token: int,
        ram_bytes: int,
        nvme_bytes: int,
        tally: Tally,
        *,
        has_ghosts: bool = True,
    ) -> None:
        self.tally = tally
        self._trace = trace
        self._now = 0.0
        self._keys = [_key(number) for number in range(trace.num_chunks)]
        self._ram = RamTier(NoBytes(ram_bytes), make_policy(self._clock))
        self._nvme = NvmeTier(NoBytes(nvme_bytes), 1, make_policy(self._clock)) if nvme_bytes else None
        self._lowest = self._nvme or self._ram
        self._ghosts = Ghosts()
        self._has_ghosts = has_ghosts
        self._chunks: list[Chunk | None] = [None] * trace.num_chunks  # those that were ever stored
        self._below: list[list[int]] = [[] for _ in range(trace.num_chunks)]
        for number, above in enumerate(trace.parents):
            if above >= 0:
                self._below[above].append(number)
        self._num_below = array("I", bytes(4 * trace.num_chunks))  # that are stored
        catalog = Catalog()
        self._tables = [
            catalog.table(namespace_of(source, trace.tokens_per_chunk, bytes_per_token), 0)
            for source in range(max(trace.sources) + 1)
        ]

    def _clock(self) -> float:
        return self._now

    def request(self, request: Request) -> None:
        """Play one."""
        self._now = request.at_s
        numbers = request.chunks
        found: list[Chunk] = []
        for number in numbers:
            chunk = self._chunks[number]
            if chunk is None or chunk.is_removed:
                break
            found.append(chunk)
        self._load(found)
        if len(found) < len(numbers):
            self._ghosts.limit = max(MAX_GHOSTS, GHOSTS_A_CHUNK * len(self._lowest.policy))
            self._store(found, numbers)

    def close(self, number: int) -> None:
        """Nobody asks for a chunk again, nor for what is built on it: they go before all others, the last one first."""
        chunk = self._chunks[number]
        if chunk is not None and not chunk.is_removed:
            self._demote(chunk)
            self._demote_below(chunk)

    def _load(self, found: list[Chunk]) -> None:
        cold = [chunk for chunk in found if chunk.ram == NOWHERE]
        self.tally.ram.append(len(found) - len(cold))
        self.tally.nvme.append(len(cold))
        for chunk in found:
            chunk.leases += 1
        for chunk in cold:
            offset = self._ram.reserve(chunk.length, self._may_leave_ram, self._evict_from_ram)
            if offset is not None:
                self._ram.place(chunk, offset)
                self.tally.num_promoted += 1
        for chunk in found:
            chunk.leases -= 1
            chunk.hits += 1
        self._ram.policy.touch(found)
        if self._nvme is not None:
            self._nvme.policy.touch(found)

    def _store(self, prefix: list[Chunk], numbers: Sequence[int]) -> None:
        """Store what is missing behind a prefix, from its head on."""
        new: list[Chunk] = []
        num_stored = 0
        above = prefix[-1] if prefix else None
        is_ram_cache = self._nvme is None
        for place, number in enumerate(numbers[len(prefix) :], len(prefix)):
            chunk = self._chunks[number]
            if chunk is not None and not chunk.is_removed:  # what it is built on went, and comes back
                prefix.append(chunk)
                above = chunk
                continue
            chunk = self._recalled(number, above)
            offset = self._ram.reserve(
                chunk.length, self._may_leave_ram, self._evict_from_ram, above if is_ram_cache else None
            )
            if offset is None:
                self._bypass(chunk, numbers[place + 1 :])
                break
            chunk.is_removed = False
            chunk.table.chunks[chunk.key] = chunk
            if chunk.position:
                self._num_below[self._trace.parents[number]] += 1
            self._ram.place(chunk, offset)
            prefix.append(chunk)
            new.append(chunk)
            num_stored += 1
            above = chunk
            if self._nvme is not None and len(new) == _GROUP:
                self._write(self._nvme, new, prefix)
                new.clear()
        self.tally.num_stored += num_stored
        self._ram.policy.built_on(prefix)
        if self._nvme is not None:
            self._write(self._nvme, new, prefix)
            self._nvme.policy.built_on(prefix)

    def _recalled(self, number: int, above: Chunk | None) -> Chunk:
        """A chunk that is about to be stored, with the uses that its ghost has."""
        chunk = self._chunks[number]
        if chunk is None:
            trace = self._trace
            table = self._tables[trace.sources[number]]
            parent = _NOBODY if above is None else above.key
            position = trace.positions[number]
            chunk = Chunk.new(table, self._keys[number], parent, position, trace.tokens_per_chunk, 0, number)
            chunk.is_removed = True
            self._chunks[number] = chunk
        ghost = self._ghosts.pop(chunk.table.directory, chunk.key) if self._has_ghosts else None
        if ghost is None:
            chunk.hits = chunk.returns = 0
        else:
            chunk.hits = ghost.hits
            chunk.returns = ghost.returns + 1
        return chunk

    def _bypass(self, chunk: Chunk, behind: Sequence[int]) -> None:
        """A chunk is not worth its place, or there is none; nor are those behind it."""
        above = chunk
        self._remember_bypassed(chunk)
        for number in behind:
            known = self._chunks[number]
            if known is None or known.is_removed:
                above = self._recalled(number, above)
                self._remember_bypassed(above)
            else:
                above = known

    def _remember_bypassed(self, chunk: Chunk) -> None:
        self.tally.num_bypassed += 1
        if self._nvme is None:
            self._ram.policy.bypassed(chunk)
            if self._has_ghosts:
                self._ghosts.add(chunk.table.directory, chunk.key, Ghost(0, BYPASSED, chunk.hits, chunk.returns))

    def _write(self, nvme: NvmeTier, new: list[Chunk], prefix: list[Chunk]) -> None:
        """Write-behind; what there is no room for goes, and what is built on it."""
        kept = frozenset(prefix)
        for place, chunk in enumerate(new):
            while (offset := nvme.extents.allocate(chunk.length)) is None:
                victims = nvme.least_worthy(chunk.length, lambda victim: victim not in kept)
                if not victims:
                    for lost in reversed(new[place:]):
                        self._evict(lost)
                    return
                for victim in victims:
                    self._evict(victim)
            self.tally.num_written += 1
            nvme.place(chunk, offset)

    def _may_leave_ram(self, chunk: Chunk) -> bool:
        return not chunk.leases and (self._nvme is None or chunk.nvme != NOWHERE)

    def _evict_from_ram(self, chunk: Chunk) -> None:
        if chunk.nvme != NOWHERE:
            self._ram.drop(chunk)
        else:
            self._evict(chunk)

    def _evict(self, chunk: Chunk) -> None:
        del chunk.table.chunks[chunk.key]
        chunk.is_removed = True
        if chunk.position:
            self._num_below[self._trace.parents[chunk.inode]] -= 1
        if self._num_below[chunk.inode]:
            self._demote_below(chunk)
        self._ram.drop(chunk)
        if self._nvme is not None:
            extent = self._nvme.forget(chunk)
            if extent is not None:
                self._nvme.extents.free(*extent)
        if self._has_ghosts:
            self._ghosts.add(chunk.table.directory, chunk.key, Ghost(0, "evict", chunk.hits, chunk.returns))

    def _demote_below(self, chunk: Chunk) -> None:
        """What is built on a chunk that went cannot be reached any more."""
        numbers = self._below[chunk.inode].copy()
        while numbers:
            number = numbers.pop()
            orphan = chunk.table.chunks.get(self._keys[number])
            if orphan is not None:
                self._demote(orphan)
                numbers += self._below[number]

    def _demote(self, chunk: Chunk) -> None:
        self._ram.policy.demote(chunk)
        if self._nvme is not None:
            self._nvme.policy.demote(chunk)


def ends(trace: Trace) -> array[int]:
    """For each request the first of its chunks that nobody asks for again (nor what is behind it), or -1."""
    asked_again = bytearray(trace.num_chunks)
    found = array("q", [-1]) * len(trace.requests)
    for index in range(len(trace.requests) - 1, -1, -1):
        for chunk in reversed(trace.requests[index].chunks):
            if asked_again[chunk]:
                break
            found[index] = chunk
        for chunk in trace.requests[index].chunks:
            asked_again[chunk] = 1
    return found


def _key(number: int) -> Key:
    return Key(hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest())


def namespace_of(source: int, tokens_per_chunk: int, bytes_per_token: int) -> Namespace:
    """One whose chunks have so many tokens and bytes."""
    identity = Identity(
        model=f"trace-{source}", revision="", kv_dtype="U8", layout="none", num_layers=1, num_kv_heads=1, head_size=1,
        tokens_per_chunk=tokens_per_chunk,
    )  # fmt: skip
    return Namespace(identity, (LayerRun(1, (TensorSpec("kv", "U8", (tokens_per_chunk, bytes_per_token), 0),)),))
