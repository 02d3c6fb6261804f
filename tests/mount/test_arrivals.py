"""When clients hear of what has arrived: at once where many pieces have, else of a few together."""

from __future__ import annotations

import itertools

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from kvfs.catalog import Chunk, ChunkTable
from kvfs.keys import Key
from kvfs.mount.arrivals import Watch
from kvfs.promotion import Promotion
from kvfs.testing import tiny_namespace
from kvfs.tiers.nvme import Slice

NUM_CHUNKS = 8


def promotions() -> list[Promotion]:
    """Of chunks in three pieces."""
    table = ChunkTable(tiny_namespace(), 0, itertools.count())
    pieces = [Slice(4096 * number, 4096 * (number + 1), number, number + 1) for number in range(3)]
    keys = [Key(bytes([number]) * 16) for number in range(NUM_CHUNKS)]
    chunks = [Chunk.new(table, key, Key(bytes(16)), 0, 16, 0, number) for number, key in enumerate(keys)]
    return [Promotion(chunk, 0, memoryview(bytes(3 * 4096)), pieces) for chunk in chunks]


def end(promotion: Promotion, number: int) -> None:
    promotion.arrived(number)
    promotion.num_left -= 1
    promotion.notify()


async def test_many_are_told_of_at_once(mock_clock: MockClock) -> None:
    """No time passes: a timer would add a millisecond to each layer that an engine waits for."""
    all_ = promotions()
    watch = Watch(all_)
    for number in range(3):
        for promotion in all_:
            end(promotion, number)
        await watch.wait()
    assert [promotion.layers for promotion in all_] == [3] * NUM_CHUNKS
    await watch.wait()  # nothing is left to happen
    watch.close()
    assert not any(promotion.watchers for promotion in all_)


async def test_one_is_told_of_a_little_later(mock_clock: MockClock) -> None:
    """With what comes meanwhile; nothing at all is not told of."""
    all_ = promotions()
    watch = Watch(all_)
    told = 0

    async def listen() -> None:
        nonlocal told
        while True:
            await watch.wait()
            told += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        await wait_all_tasks_blocked()
        mock_clock.jump(1)
        await wait_all_tasks_blocked()
        before = told
        end(all_[0], 0)
        await wait_all_tasks_blocked()
        assert told == before
        mock_clock.jump(1)
        await wait_all_tasks_blocked()
        assert told == before + 1
        mock_clock.jump(1)
        await wait_all_tasks_blocked()
        assert told == before + 1
        nursery.cancel_scope.cancel()
    watch.close()
