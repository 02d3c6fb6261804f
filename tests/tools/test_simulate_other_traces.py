"""The default policy on traces of kinds that are not among the public ones, beside the best of those that learn nothing."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest

from kvfs.tools.simulate.traces import Trace

from .simulated import play, trace_of

ROOMS = {0.02: 0.02, 0.05: 0.01, 0.1: 0.01, 0.2: 0.01}
"""Shares of the chunks, and how much less of the hit ratio there may be: at 2 % a hundred chunks have to teach it all."""


def documents(seed: str, num_requests: int, num_documents: int, step_s: float) -> Trace:
    """Documents, a few of them popular, each asked for with something of its own behind it."""
    chance = random.Random(seed)
    known = [[(number, place) for place in range(chance.randint(4, 16))] for number in range(num_documents)]
    weights = [1 / (1 + rank) ** 0.9 for rank in range(num_documents)]
    asked = [chance.choices(known, weights)[0] for _ in range(num_requests)]
    return trace_of(
        [
            [*one, *((number, "own", place) for place in range(chance.randint(0, 2)))]
            for number, one in enumerate(asked)
        ],
        step_s,
    )


def turns(seed: str, num_requests: int, pause: int, step_s: float) -> Trace:
    """Chats that go on after about so many requests, or do not."""
    chance = random.Random(seed)
    prompts: list[list[object]] = []
    to_come: list[tuple[float, int, list[object]]] = []
    for number in range(num_requests):
        if to_come and to_come[0][0] <= number:
            prompt = heapq.heappop(to_come)[-1]
        else:
            prompt = [("system", chance.randrange(3)), *((number, place) for place in range(chance.randint(1, 6)))]
        prompts.append(prompt)
        if chance.random() < 0.7:
            answer = [("turn", number, place) for place in range(chance.randint(1, 4))]
            heapq.heappush(to_come, (number + chance.expovariate(1 / pause), number, [*prompt, *answer]))
    return trace_of(prompts, step_s)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: documents("week", 3000, 200, 200.0), id="documents over a week"),
        pytest.param(lambda: documents("static", 4000, 1000, 1.0), id="documents"),
        pytest.param(lambda: documents("fast", 5000, 1000, 0.01), id="a hundred documents a second"),
        pytest.param(lambda: turns("fast", 4000, 60, 0.001), id="a thousand turns a second"),
        pytest.param(lambda: turns("slow", 3000, 40, 200.0), id="turns after hours"),
    ],
)
def test_learned_is_no_worse_than_what_learns_nothing(make: Callable[[], Trace]) -> None:
    trace = make()
    for share, slack in ROOMS.items():
        room = int(share * trace.num_chunks)
        found = {
            name: play(trace, name, room).num_found / trace.num_references
            for name in ("learned", "lru", "arc", "s3fifo")
        }
        assert found["learned"] > max(found.values()) - slack, (share, found)
