"""Requests that wait before they run, while what they will load is prefetched: by the store's own `Prefetcher`, in the
time of the trace.

A request comes, is matched, and what of its prefix is on NVMe only is ordered. It runs `queue_time_s` later: what is in
RAM by then it finds there, wherever it was when it came. What is still on its way counts as NVMe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvfs.catalog import Chunk
from kvfs.prefetch import Order, Prefetcher
from kvfs.system import System
from kvfs.tools.simulate.cache import Cache
from kvfs.tools.simulate.device import Device
from kvfs.tools.simulate.replay import Replay
from kvfs.tools.simulate.traces import Request

_DEADLINE_S = 60.0  # of an order, as `kvfs.client` has it
_MAX_LEASED = 64  # requests whose prefix is leased while they wait, as the scheduler of the vLLM adapter has it


class _TraceTime(System):
    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def monotonic(self) -> float:
        return self._cache.now_s


class _Waiting(NamedTuple):
    request: Request
    order: Order
    leased: list[Chunk]


class Waiting:
    """A replay whose requests wait. `nvme_bytes_s` is what its device gives."""

    def __init__(self, replay: Replay, queue_time_s: float, nvme_bytes_s: float) -> None:
        self._replay = replay
        self._cache = replay.cache
        self._queue_time_s = queue_time_s
        self._device = Device(self._cache, nvme_bytes_s)
        self._prefetcher = Prefetcher(self._cache, self._device, _TraceTime(self._cache))
        self._waiting: deque[_Waiting] = deque()
        self._num_leased = 0

    def play(self, requests: Iterable[Request]) -> Iterator[None]:
        """Play all; yields when one has run, in the order in which they came."""
        for request in requests:
            while self._waiting and self._waiting[0].request.at_s + self._queue_time_s <= request.at_s:
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
        order = self._prefetcher.order(found, 0, _DEADLINE_S)
        self._waiting.append(_Waiting(request, order, leased))
        self._pass_time(request.at_s)

    def _run(self, waiting: _Waiting) -> None:
        request, order, leased = waiting
        self._pass_time(request.at_s + self._queue_time_s)
        order.cancel()
        self._cache.release_all(leased)
        self._num_leased -= bool(leased)
        found = self._cache.match(request.chunks)
        num_late = self._device.finish(found)
        cold = self._replay.load(found)
        tally = self._replay.tally
        tally.ram[-1] -= num_late
        tally.nvme[-1] += num_late
        self._device.read(sum(chunk.length for chunk in cold))
        self._prefetcher.loaded(found)
        if len(found) < len(request.chunks):
            self._replay.store(found, request.chunks)

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
        cache.now_s = until_s
