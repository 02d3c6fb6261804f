"""The exact optimum: what a cache of `capacity` chunks could have given that knows all requests to come.

The value of a request is the length of the prefix that it finds, chunks are of equal size, and each request may replace
what is kept by any part of it and of its own chunks. Block by block, keeping what is used again soonest (Belady, with
bypass) is then optimal for prefixes too, if of equals the one nearer to the head stays: what a chunk is built on is
used again no later than the chunk itself, so what is kept is whole chains. A test compares it with all ways there are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush

from kvfs.tools.simulate.traces import Request, Trace

_NEVER = (1 << 32) - 1
_CHUNK_BITS, _POSITION_BITS = 40, 24


def next_uses(requests: Sequence[Request], num_chunks: int) -> list[array[int]]:
    """For each chunk of each request, the number of the next request that has it, or `_NEVER`."""
    following = array("I", [_NEVER]) * num_chunks
    found: list[array[int]] = []
    for index in range(len(requests) - 1, -1, -1):
        found.append(array("I", [following[chunk] for chunk in requests[index].chunks]))
        for chunk in requests[index].chunks:
            following[chunk] = index
    found.reverse()
    return found


def hits(trace: Trace, capacity: int) -> Iterator[int]:
    """The length of the prefix that each request finds, in order."""
    kept: dict[int, int] = {}
    order: list[int] = []  # the last use of all comes first
    uses: Iterable[array[int]] = next_uses(trace.requests, trace.num_chunks)
    for request, following in zip(trace.requests, uses, strict=True):
        chunks = request.chunks
        num_found = len(chunks)
        for position, chunk in enumerate(chunks):
            if chunk not in kept:
                num_found = position
                break
        yield num_found
        for position, (chunk, next_use) in enumerate(zip(chunks, following, strict=True)):
            if next_use == _NEVER:
                kept.pop(chunk, None)
            else:
                code = (next_use << _POSITION_BITS | position) << _CHUNK_BITS | chunk
                kept[chunk] = code
                heappush(order, -code)
        while len(kept) > capacity:
            code = -heappop(order)
            chunk = code & ((1 << _CHUNK_BITS) - 1)
            if kept.get(chunk) == code:
                del kept[chunk]
