"""What was measured: answers, the passes they belong to, and how passes compare."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

from kvfs.tools.bench_vllm.counts import Counts


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """One request, as its client saw it.

    Attributes:
        number: its place in the order of arrival; group: whose system prompt it had.
        ttft_ms: from sending it to the first piece of the answer; latency_ms: to the last.
        input_tokens, output_tokens: as the server counted them.
    """

    number: int
    group: int
    ttft_ms: float
    latency_ms: float
    input_tokens: int
    output_tokens: int


class PassOver(msgspec.Struct, frozen=True, tag="pass"):
    """All requests of a pass are answered. Attributes: seconds: from the first arrival on; counts: the server's, of it."""

    seconds: float
    counts: Counts


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """What the asking process does now."""

    stage: str


Line = Answer | PassOver | Stage


class Spread(msgspec.Struct, frozen=True):
    """Times of many requests, in milliseconds."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        found = (statistics.fmean(values), percentile(values, 0.5), percentile(values, 0.99))
        return cls(*(round(value, 1) for value in found))


class Pass(msgspec.Struct, frozen=True):
    """All requests once, at one server.

    Attributes:
        run: which run; number: 1 for the first time that this server saw them, 2 for the second.
        seconds: from the first arrival to the last answer.
        input_tokens_s: of prompts, in a second of it, whether they were computed or not.
        counts: where the prompts' tokens came from, and what the connector did.
        daemon: the counters of kvfs that changed, by how much: what was read from NVMe while a request waited for its
            turn is in RAM when it is loaded, and counts as that above.
    """

    run: str
    number: int
    seconds: float
    input_tokens: int
    output_tokens: int
    input_tokens_s: float
    ttft_ms: Spread
    latency_ms: Spread
    counts: Counts
    daemon: dict[str, int]
    answers: list[Answer]

    @classmethod
    def of(cls, run: str, number: int, answers: Sequence[Answer], over: PassOver, daemon: dict[str, int]) -> Pass:
        """What the answers of a pass come to."""
        input_tokens = sum(answer.input_tokens for answer in answers)
        return cls(
            run=run,
            number=number,
            seconds=round(over.seconds, 3),
            input_tokens=input_tokens,
            output_tokens=sum(answer.output_tokens for answer in answers),
            input_tokens_s=round(input_tokens / over.seconds, 1),
            ttft_ms=Spread.of([answer.ttft_ms for answer in answers]),
            latency_ms=Spread.of([answer.latency_ms for answer in answers]),
            counts=over.counts,
            daemon=daemon,
            answers=sorted(answers, key=lambda answer: answer.number),
        )


class Ratio(msgspec.Struct, frozen=True):
    """A pass beside the pass of the same number of another run: mean TTFT (less is better), input tokens a second (more is)."""

    run: str
    number: int
    beside: str
    ttft: float
    input_tokens_s: float


def ratios(passes: Sequence[Pass], beside: str) -> list[Ratio]:
    """All other passes beside those of the run `beside`; none if it was not made."""
    others = {each.number: each for each in passes if each.run == beside}
    return [
        Ratio(
            each.run,
            each.number,
            beside,
            round(each.ttft_ms.mean / others[each.number].ttft_ms.mean, 3),
            round(each.input_tokens_s / others[each.number].input_tokens_s, 3),
        )
        for each in passes
        if each.run != beside and each.number in others
    ]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values are, with straight lines between them."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
