"""Hints for a replay, made from what its trace knows of the future: what an engine could have said.

* closed: when a request is over, that the end of its chain is not asked for again, from the first chunk on of which that
  is true.
* expect: that a part of its chain is asked for again within `EXPECT_S`: "a tool is running". It is given where that part
  ends, and says the next power of two seconds, at least twice the time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from kvfs.errors import UsageError
from kvfs.hints import Said
from kvfs.tools.simulate.replay import Replay
from kvfs.tools.simulate.traces import Trace

NAMES = ("closed", "expect")
EXPECT_S = 60.0


def parse(text: str) -> frozenset[str]:
    """Which hints are to be given: names with commas between them. Raises UsageError."""
    names = frozenset(name for part in text.split(",") if (name := part.strip()))
    if not names or not names <= {*NAMES}:
        raise UsageError(f"--hints is {' or '.join(NAMES)}, or both with a comma between them, not {text!r}")
    return names


def give(names: frozenset[str], trace: Trace, replay: Replay, steps: Iterator[None]) -> Iterator[None]:
    """Play on, and say after each request what is known of its chain."""
    ends = _ends(trace) if "closed" in names else None
    uses = _next_uses(trace) if "expect" in names else None
    for index, _ in enumerate(steps):
        chunks = replay.cache.match(trace.requests[index].chunks)
        if ends is not None and (first := ends[index]) < len(chunks):
            replay.cache.hints.say(chunks[first:], Said(is_closed=True))
        if uses is not None and (use := uses[index]) is not None and use[0] <= len(chunks):
            replay.cache.hints.say(chunks[: use[0]], Said(expect_s=use[1]))
        yield


def _ends(trace: Trace) -> array[int]:
    """For each request where the end of its chain begins that nobody asks for again."""
    asked_again = bytearray(trace.num_chunks)
    found = array("Q", bytes(8 * len(trace.requests)))
    for index in range(len(trace.requests) - 1, -1, -1):
        chunks = trace.requests[index].chunks
        first = len(chunks)
        while first and not asked_again[chunks[first - 1]]:
            first -= 1
        found[index] = first
        for chunk in chunks:
            asked_again[chunk] = 1
    return found


def _next_uses(trace: Trace) -> list[tuple[int, float] | None]:
    """For each request how much of its chain is asked for again soon, in chunks, and within how many seconds."""
    next_at_s: dict[int, float] = {}
    found: list[tuple[int, float] | None] = [None] * len(trace.requests)
    for index in range(len(trace.requests) - 1, -1, -1):
        request = trace.requests[index]
        for place in range(len(request.chunks), 0, -1):
            after_s = next_at_s.get(request.chunks[place - 1], request.at_s + 2 * EXPECT_S) - request.at_s
            if after_s <= EXPECT_S:
                found[index] = (place, 2.0 ** (1 + max(0, int(after_s).bit_length())))
                break
        for chunk in request.chunks:
            next_at_s[chunk] = request.at_s
    return found
