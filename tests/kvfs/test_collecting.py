"""Python's collector does not look at what chunks need."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import trio

from kvfs.collecting import leave_out, uncollected


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """What a test leaves out is collected again."""
    yield
    gc.unfreeze()


async def test_what_a_growing_cache_needs_is_left_out(autojump_clock: trio.testing.MockClock) -> None:
    """Once it has grown by thousands; not again while chunks only come and go."""
    num_chunks = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(leave_out, lambda: num_chunks)
        await trio.sleep(1)
        gc.unfreeze()
        num_chunks = 8191
        await trio.sleep(1)
        assert gc.get_freeze_count() == 0
        num_chunks = 10_000
        await trio.sleep(1)
        assert gc.get_freeze_count() > 0
        gc.unfreeze()
        for number in (5_000, 15_000, 18_191):
            num_chunks = number
            await trio.sleep(1)
            assert gc.get_freeze_count() == 0
        num_chunks = 18_192
        await trio.sleep(1)
        assert gc.get_freeze_count() > 0
        nursery.cancel_scope.cancel()


def test_nothing_is_collected_while_a_cache_is_loaded() -> None:
    """Also if that fails; where the collector is off already it stays off."""
    seen = []

    def load() -> None:
        with uncollected():
            seen.append(gc.isenabled())
            raise KeyError

    with pytest.raises(KeyError):
        load()
    assert seen == [False]
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
