"""A replay in which time passes: NVMe takes its time, and what will be loaded is prefetched meanwhile, by the store's own
`Prefetcher` and `Streams`.

By request: a request comes, is matched, and what of its prefix is on NVMe only is ordered. It runs `queue_time_s` later:
what is in RAM by then it finds there, wherever it was when it came. What is still on its way counts as NVMe.

By chain: an engine that loads so many chunks at a time has what its chain is known to go on with read ahead, while it
waits for what it asked for and takes that out of RAM. All requests are of one session.

What a request computes takes no time: what it stores is there when it ran.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvfs.catalog import NOWHERE, Chunk
from kvfs.prefetch import BY_CHAIN_PRIORITY, Order, Prefetcher, Reason
from kvfs.read_ahead import Streams
from kvfs.system import System
from kvfs.tools.simulate.cache import Cache
from kvfs.tools.simulate.device import Device
from kvfs.tools.simulate.replay import Replay
from kvfs.tools.simulate.traces import Request

# As kvfs.client, kvfs.store, the scheduler of the vLLM adapter and kvfs.mount.session have them.
_DEADLINE_S = 60.0
_READ_AHEAD_S = 2.0
_MAX_LEASED = 64  # requests whose prefix is leased while they wait
_MAX_AHEAD = 16


@dataclass(frozen=True, slots=True)
class Pace:
    """How an engine asks.

    Attributes:
        queue_time_s: that a request waits before it runs; chunks_a_load: that are loaded at a time, 0 loads all at once.
    """

    queue_time_s: float = 0.0
    chunks_a_load: int = 0

    @property
    def prefetches(self) -> bool:
        """Whether there is anything to prefetch."""
        return bool(self.queue_time_s or self.chunks_a_load)


AT_ONCE = Pace()
"""A request runs when it comes, and loads all it finds."""


class _TraceTime(System):
    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def monotonic(self) -> float:
        return self._cache.now_s


class _Waiting(NamedTuple):
    request: Request
    order: Order
    leased: list[Chunk]


class Timed:
    """Plays requests to a replay, at a pace. The bandwidths are what the tiers give."""

    def __init__(self, replay: Replay, pace: Pace, ram_bytes_s: float, nvme_bytes_s: float) -> None:
        self._replay = replay
        self._cache = replay.cache
        self._pace = pace
        self._ram_bytes_s = ram_bytes_s
        self._device = Device(self._cache, nvme_bytes_s)
        self._prefetcher = Prefetcher(self._cache, self._device, _TraceTime(self._cache))
        self._streams = Streams()
        self._ahead: deque[Order] = deque()
        self._waiting: deque[_Waiting] = deque()
        self._num_leased = 0

    def play(self, requests: Iterable[Request]) -> Iterator[None]:
        """Play all; yields when one has run, in the order in which they came."""
        for request in requests:
            while self._waiting and self._waiting[0].request.at_s + self._pace.queue_time_s <= request.at_s:
                self._run(self._waiting.popleft())
                yield
            self._arrive(request)
        while self._waiting:
            self._run(self._waiting.popleft())
            yield

    def _arrive(self, request: Request) -> None:
        self._pass_time(request.at_s)
        found = self._cache.match(request.chunks)
        leased = found if found and self._num_leased < _MAX_LEASED else []
        self._num_leased += bool(leased)
        self._cache.lease_all(leased)
        order = self._prefetcher.order(found if self._pace.queue_time_s else (), 0, _DEADLINE_S)
        self._waiting.append(_Waiting(request, order, leased))
        self._pass_time(request.at_s)

    def _run(self, waiting: _Waiting) -> None:
        request, order, leased = waiting
        self._pass_time(request.at_s + self._pace.queue_time_s)
        order.cancel()
        found = self._cache.match(request.chunks)
        self._cache.lease_all(found)
        self._cache.release_all(leased)
        self._num_leased -= bool(leased)
        size = self._pace.chunks_a_load or len(found) or 1
        num_cold = sum(self._load(found[begin : begin + size]) for begin in range(0, len(found), size))
        self._cache.release_all(found)
        self._replay.tally.ram.append(len(found) - num_cold)
        self._replay.tally.nvme.append(num_cold)
        if len(found) < len(request.chunks):
            self._replay.store(found, request.chunks)

    def _load(self, part: list[Chunk]) -> int:
        """Load some chunks of a chain; returns how many of them were not in RAM."""
        num_late = self._device.finish(part)
        cold = self._replay.bring(part)
        self._device.read(sum(chunk.length for chunk in cold))
        self._prefetcher.loaded(part)
        if self._pace.chunks_a_load:
            ahead = self._streams.next(part)
            if any(chunk.ram == NOWHERE for chunk in ahead):
                if len(self._ahead) >= _MAX_AHEAD:
                    self._ahead.popleft().cancel()
                order = self._prefetcher.order(ahead, BY_CHAIN_PRIORITY, _READ_AHEAD_S, Reason.CHAIN)
                self._ahead.append(order)
            begin_s = max(self._cache.now_s, self._device.free_at_s) if cold or num_late else self._cache.now_s
            self._pass_time(begin_s + sum(chunk.length for chunk in part) / self._ram_bytes_s)
        return num_late + len(cold)

    def _pass_time(self, until_s: float) -> None:
        """Carry out orders until then: the next chunks of one when those before have come, as `Prefetcher.run` does."""
        cache, device, prefetcher = self._cache, self._device, self._prefetcher
        while True:
            device.arrive(until_s)
            begin_s = max(device.free_at_s, cache.now_s)
            if device.is_bringing or begin_s > until_s:
                break
            cache.now_s = begin_s
            order = prefetcher.first()
            if order is None or not (prefetcher.begin(order) or order.is_over):
                break  # nothing is wanted, or there is no room
        cache.now_s = max(cache.now_s, until_s)
