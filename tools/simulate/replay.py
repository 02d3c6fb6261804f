"""Replaying a trace through the tiers and policies of the store: the same code, on a clock and bytes that do not exist.

A request matches the longest stored prefix of its chunks, loads it (bringing what is on NVMe only into RAM), and stores
the rest as far as there is room; write-behind follows at once. What is left out is time: everything of a request
happens at the moment at which it came (see `timed` for more), and nothing fails.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvfs.catalog import NOWHERE, Chunk
from kvfs.tools.simulate.cache import Cache
from kvfs.tools.simulate.traces import Request

_GROUP = 64  # chunks that an engine stores at once


class Replay:
    """A cache that a trace is played to, request by request. For what it is made of see `Cache`."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.tally = cache.tally

    def request(self, request: Request) -> None:
        """Play one, at the time at which it came."""
        self.cache.now_s = request.at_s
        numbers = request.chunks
        found = self.cache.match(numbers)
        self.load(found)
        if len(found) < len(numbers):
            self.store(found, numbers)

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
            offsets = cache.reserve_cold(cold[0].length, len(cold))
            for chunk, offset in zip(cold, offsets, strict=False):
                cache.ram.place(chunk, offset)
            self.tally.num_promoted += len(offsets)
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
        """Store what is missing behind a prefix, from its head on, a group at a time.

        As in the store, a group has room for all of it before any of it is visible, so none of it goes for the rest.
        """
        cache = self.cache
        cache.trim_ghosts()
        nvme = cache.nvme
        kept: list[Chunk] = []  # not to be written; leased, since what is new does not go for what follows it
        for begin in range(len(prefix), len(numbers), _GROUP):
            reserved, refused = self._reserve(prefix, numbers[begin : begin + _GROUP])
            new: list[Chunk] = []  # to be written
            for chunk, offset in reserved:
                if offset >= 0:
                    has_been_here = cache.recall(chunk)
                    cache.place(chunk, offset)
                    self.tally.num_stored += 1
                    if nvme is not None:
                        if cache.is_admitted(chunk, is_used=has_been_here):
                            new.append(chunk)
                        else:
                            chunk.leases += 1
                            kept.append(chunk)
                prefix.append(chunk)
            cache.ram.policy.built_on(prefix)
            if nvme is not None:
                cache.write(new, prefix)
                nvme.policy.built_on(prefix)
            if refused is not None:
                cache.bypass(refused, numbers[len(prefix) + 1 :])
                break
        cache.release_all(kept)

    def _reserve(self, prefix: Sequence[Chunk], numbers: Sequence[int]) -> tuple[list[tuple[Chunk, int]], Chunk | None]:
        """The chunks of a group, each with its extent in RAM, or -1 if it is there; and the first that there is no room for."""
        cache = self.cache
        reserved: list[tuple[Chunk, int]] = []
        above = visible = prefix[-1] if prefix else None
        place = 0
        while place < len(numbers):
            chunk = cache.get(numbers[place])
            if chunk is not None:  # what it is built on went, and comes back
                reserved.append((chunk, -1))
                above = visible = chunk
                place += 1
                continue
            new: list[Chunk] = []
            while place < len(numbers) and cache.get(numbers[place]) is None:
                above = cache.new_chunk(numbers[place], above)
                new.append(above)
                place += 1
            offsets = cache.reserve(new[0].length, len(new), visible)
            reserved += zip(new, offsets, strict=False)
            if len(offsets) < len(new):
                return reserved, new[len(offsets)]
        return reserved, None
