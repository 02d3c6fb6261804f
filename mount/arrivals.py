"""Arrivals: what a session waits for while the chunks of a load are read, so that its client hears of many at once.

Concurrency: belongs to the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from kvfs import messages as m
from kvfs.promotion import Promotion

_GATHER_A_CHUNK_S = 0.00001
"""For each chunk of a load, how long arrivals are gathered for one message. Of a few they are told at once: after half a
millisecond the last piece of a chunk of 3 MiB was there before the first had been copied."""
_ENOUGH = 4
"""Pieces of so many parts of all chunks are told of at once: devices end many together, and a timer would add a millisecond
to each layer that an engine waits for."""


class Watch:
    """Waiting for anything to happen to any of some promotions. Close it."""

    def __init__(self, promotions: list[Promotion]) -> None:
        self._promotions = set(promotions)
        self._gather_s = _GATHER_A_CHUNK_S * len(promotions)
        self._open = {promotion for promotion in self._promotions if promotion.num_left}
        self._news, self._enough = trio.Event(), trio.Event()
        self._num_enough = -(-len(self._promotions) // _ENOUGH)
        self._num_ended = 0  # since the last time
        for promotion in self._promotions:
            promotion.watchers.add(self._ended)
        self._news.set()
        self._look()

    def _ended(self, promotion: Promotion) -> None:
        self._num_ended += 1
        if not promotion.num_left:
            self._open.discard(promotion)
        self._news.set()
        self._look()

    def _look(self) -> None:
        if self._num_ended >= self._num_enough or not self._open:
            self._enough.set()

    async def wait(self) -> None:
        """Return a little after something happened since the last time, or when nothing is left to happen."""
        await self._news.wait()
        with trio.move_on_after(self._gather_s):
            await self._enough.wait()
        self._num_ended = 0
        if self._open:
            self._news, self._enough = trio.Event(), trio.Event()

    def close(self) -> None:
        """Stop watching."""
        for promotion in self._promotions:
            promotion.watchers.discard(self._ended)


async def tell_arrivals(
    request: m.Load,
    promotions: list[tuple[int, Promotion]],
    ready: int,
    num_layers: int,
    send: Callable[[m.Reply], Awaitable[None]],
) -> None:
    """Tell the client of layers as they come, until all are there or the deadline has passed.

    `promotions` stand with the index of their chunk in the request; the client knows of layers below `ready`.
    """
    told = {index: ready for index, _ in promotions}
    watch = Watch([promotion for _, promotion in promotions])
    try:
        with trio.move_on_after(request.deadline_ms / 1000):
            while ready < num_layers:
                await watch.wait()
                good = [(index, promotion.layers) for index, promotion in promotions if promotion.error is None]
                now_ready = min((layers for _, layers in good), default=num_layers)
                ahead = tuple([(index, layers) for index, layers in good if layers > max(told[index], now_ready)])
                told.update(ahead)
                failed = tuple(index for index, promotion in promotions if promotion.error is not None)
                if ahead or now_ready > ready:
                    ready = now_ready
                    await send(m.Arrived(request.id, ready, failed, ahead))
            return
    finally:
        watch.close()
    late = tuple(index for index, promotion in promotions if promotion.layers < num_layers)
    await send(m.Arrived(request.id, num_layers, late, ()))
