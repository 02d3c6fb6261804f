"""The default policy on traces of kinds that are not among the public ones, beside the best of those that learn nothing."""

from __future__ import annotations

import random

import pytest

from .simulated import play, trace_of

SLACK = 0.005  # of the hit ratio


@pytest.mark.heavy
@pytest.mark.parametrize("share", [0.05, 0.1, 0.2])
def test_popular_documents_that_are_asked_for_over_a_week(share: float) -> None:
    """A request every three minutes: what is used again is used again after hours, or days."""
    chance = random.Random("slow_week")
    documents = [[(number, place) for place in range(chance.randint(4, 16))] for number in range(200)]
    weights = [1 / (1 + rank) ** 0.9 for rank in range(len(documents))]
    prompts: list[list[object]] = []
    for number in range(3000):
        document = chance.choices(documents, weights)[0]
        prompts.append([*document, *((number, "own", place) for place in range(chance.randint(0, 2)))])
    trace = trace_of(prompts, step_s=200.0)
    room = int(share * trace.num_chunks)
    found = {
        name: play(trace, name, room).num_found / trace.num_references for name in ("learned", "lru", "arc", "s3fifo")
    }
    assert found["learned"] > max(found.values()) - SLACK, found
