"""What is asked of a server, and what it answers."""

from __future__ import annotations

import msgspec

NUM_TOKENS = 3363
"""13 chunks of 256 tokens, and 35 that are always computed."""

NEW_TOKENS = 16
REPETITIONS = 3


class Run(msgspec.Struct, frozen=True):
    """One line of the result.

    Attributes:
        run: computed, own_cache, same_server or new_server.
        ttft_ms: time to the first token, as the client sees it; the median if there are several.
        tokens: of the prompt.
        tokens_reused: whose KV was not computed, as the server says.
        answer: generated token ids.
        all_ttft_ms: the times that the median is of.
    """

    run: str
    ttft_ms: float
    tokens: int
    tokens_reused: int
    answer: list[int]
    all_ttft_ms: list[float]


class Task(msgspec.Struct, frozen=True):
    """What the asking process does at one server: an unrelated prompt first, then these runs."""

    url: str
    model: str
    model_directory: str
    runs: list[str]
