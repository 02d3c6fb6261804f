"""Replaying a trace through the tiers and policies of the store: the same code, on a clock and bytes that do not exist.

A request matches the longest stored prefix of its chunks, loads it (bringing what is on NVMe only into RAM), and stores
the rest as far as there is room; write-behind follows at once. What is left out is time: everything of a request
happens at the moment at which it came (for one that waits first see `waiting`), and nothing fails.
"""

from __future__ import annotations

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
    ) -> None:
        self.tally = tally
        self.cache = Cache(
            trace, make_policy, bytes_per_token, ram_bytes, nvme_bytes, tally, has_ghosts=has_ghosts, admission=admission
        )  # fmt: skip

    def request(self, request: Request) -> None:
        """Play one, at the time at which it came."""
        self.cache.now_s = request.at_s
        numbers = request.chunks
        found = self.cache.match(numbers)
        self.load(found)
        if len(found) < len(numbers):
            self.store(found, numbers)

    def load(self, found: list[Chunk]) -> list[Chunk]:
        """Load a prefix that is stored; returns what of it was on NVMe only."""
        cache = self.cache
        cold = [chunk for chunk in found if chunk.ram == NOWHERE]
        self.tally.ram.append(len(found) - len(cold))
        self.tally.nvme.append(len(cold))
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
            if chunk.hint is not None:
                cache.hints.used([chunk])
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
