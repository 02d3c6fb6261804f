"""Replaying a trace through the tiers and policies of the store: the same code, on a clock and bytes that do not exist.

A request matches the longest stored prefix of its chunks, loads it (bringing what is on NVMe only into RAM), and stores
the rest as far as there is room; write-behind follows at once. What is left out is time: everything of a request
happens at the moment at which it came (see `timed` for more), and nothing fails.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvfs.admission import Admission
from kvfs.catalog import NOWHERE, Chunk
from kvfs.tools.simulate.cache import Cache, MakePolicy
from kvfs.tools.simulate.tally import Tally
from kvfs.tools.simulate.traces import Request, Trace

_GROUP = 64  # chunks that write-behind takes at once


class Replay:
    """A cache that a trace is played to, request by request. For what it is made of see `Cache`."""

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
        admission: Admission | None = None,
        has_tree: bool = False,
    ) -> None:
        self.tally = tally
        self.cache = Cache(
            trace, make_policy, bytes_per_token, ram_bytes, nvme_bytes, tally, has_ghosts=has_ghosts, admission=admission,
            has_tree=has_tree,
        )  # fmt: skip

    def request(self, request: Request) -> None:
        """Play one, at the time at which it came."""
        self.cache.now_s = request.at_s
        numbers = request.chunks
        found = self.cache.match(numbers)
        self.load(found)
        if len(found) < len(numbers):
            self.store(found, numbers)

    def close(self, number: int) -> None:
        """Nobody asks for a chunk again, nor for what is built on it: they go before all others, the last one first."""
        chunk = self.cache.get(number)
        if chunk is not None:
            self.cache.demote(chunk)
            self.cache.demote_below(chunk)

    def load(self, found: list[Chunk]) -> None:
        """Load a prefix that is stored."""
        num_cold = len(self.bring(found))
        self.tally.ram.append(len(found) - num_cold)
        self.tally.nvme.append(num_cold)

    def bring(self, found: list[Chunk]) -> list[Chunk]:
        """The chunks of a chain are loaded; returns those that were on NVMe only."""
        cache = self.cache
        cold = [chunk for chunk in found if chunk.ram == NOWHERE]
        if cold:
            cache.lease_all(found)
            for chunk in cold:
                offset = cache.reserve(chunk.length)
                if offset is not None:
                    cache.ram.place(chunk, offset)
                    self.tally.num_promoted += 1
            cache.release_all(found)
        for chunk in found:
            chunk.hits += 1
        cache.ram.policy.touch(found)
        if cache.nvme is not None:
            cache.nvme.policy.touch(found)
            cache.used(found)
        return cold

    def store(self, prefix: list[Chunk], numbers: Sequence[int]) -> None:
        """Store what is missing behind a prefix, from its head on."""
        cache = self.cache
        cache.trim_ghosts()
        nvme, get, recalled, reserve, put = cache.nvme, cache.get, cache.recalled, cache.reserve, cache.place
        new: list[Chunk] = []  # to be written
        kept: list[Chunk] = []  # not to be written; leased, since what is new does not go for what follows it
        num_stored = 0
        above = prefix[-1] if prefix else None
        for place, number in enumerate(numbers[len(prefix) :], len(prefix)):
            chunk = get(number)
            if chunk is not None:  # what it is built on went, and comes back
                prefix.append(chunk)
                above = chunk
                continue
            chunk, has_been_here = recalled(number, above)
            offset = reserve(chunk.length, above)
            if offset is None:
                cache.bypass(chunk, numbers[place + 1 :])
                break
            put(chunk, offset)
            prefix.append(chunk)
            num_stored += 1
            above = chunk
            if nvme is not None:
                if cache.is_admitted(chunk, is_used=has_been_here):
                    new.append(chunk)
                    if len(new) == _GROUP:
                        cache.write(new, prefix)
                        new.clear()
                else:
                    chunk.leases += 1
                    kept.append(chunk)
        self.tally.num_stored += num_stored
        cache.ram.policy.built_on(prefix)
        if nvme is not None:
            cache.write(new, prefix)
            nvme.policy.built_on(prefix)
            cache.release_all(kept)


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
