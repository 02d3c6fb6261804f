"""What a run of the demo is, and what it has to show."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence

import msgspec

NEW_TOKENS = 24
REPETITIONS = 3
"""Warm, in memory and restarted are measured so often; the median counts."""

_TIERS = ("engine", "ram", "nvme", "none")  # fastest first


class Run(msgspec.Struct, frozen=True):
    """One line of `result.json`.

    Attributes:
        run: cold, warm, in_memory, restarted or evicted.
        ttft_ms: time to the first token; the model was loaded, and one unrelated prompt had been answered.
        tokens: of the prompt.
        tokens_reused: tokens of the prompt whose KV was not computed.
        tier: where it came from: none, ram, nvme; engine for the engine's own memory.
        output_sha256: of the generated token ids, little-endian u32.
    """

    run: str
    ttft_ms: float
    tokens: int
    tokens_reused: int
    tier: str
    output_sha256: str


class Answer(msgspec.Struct, frozen=True):
    """What a worker reports at its end: its runs, the name of the prompt's first chunk, and the generated text."""

    runs: list[Run]
    prefix: str
    text: str


class Stage(msgspec.Struct, frozen=True):
    """What a worker is doing now."""

    stage: str


def digest(tokens: Sequence[int]) -> str:
    """`output_sha256` of these token ids."""
    return hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in tokens)).hexdigest()


def median(runs: Sequence[Run]) -> Run:
    """One run for several repetitions of it: the median time, the worst of everything else, no digest if they differ."""
    first = runs[0]
    outputs = {run.output_sha256 for run in runs}
    return Run(
        run=first.run,
        ttft_ms=round(statistics.median(run.ttft_ms for run in runs), 1),
        tokens=first.tokens,
        tokens_reused=min(run.tokens_reused for run in runs),
        tier=max((run.tier for run in runs), key=_TIERS.index),
        output_sha256=outputs.pop() if len(outputs) == 1 else "",
    )
