"""Python's collector, kept from looking at what is no garbage."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

_LOOK_EVERY_S = 0.25
_MANY = 8192


@contextmanager
def uncollected() -> Iterator[None]:
    """While millions of small objects are made, all to stay: the collector would look at them again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


async def leave_out(num_chunks: Callable[[], int]) -> None:
    """For ever: once a cache has thousands of chunks more than ever before, leave what they need out of collections.

    One over what 400,000 chunks need held up everything for 65 ms. What is left out is freed when nobody refers to it, but
    circles in it are not; so it is done as the cache grows, and not as chunks come and go.
    """
    most = num_chunks()
    gc.freeze()
    while True:
        await trio.sleep(_LOOK_EVERY_S)
        if num_chunks() >= most + _MANY:
            most = num_chunks()
            gc.collect(1)
            gc.freeze()
