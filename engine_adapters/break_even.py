"""Break-even: is it cheaper to load KV or to compute it?

Both sides are measured in this process and forgotten with it: the tokens a second that the engine computes in a
prefill, and those that the cache delivers, as the request felt it. Until both are known, loading is taken to pay.
"""

from __future__ import annotations

import statistics
from collections import deque

RECENT = 8
"""Measurements that count: the median of the latest few is neither the first, cold one nor one stall."""

RETRY_EVERY = 16
"""Every 16th load that would not pay is done all the same: the rate may have changed."""


class BreakEven:
    """Decides whether a load pays.

    Attributes:
        floor_tokens: fewer tokens are never worth a load.
        is_measuring: False loads everything from the floor on.
    """

    def __init__(self, floor_tokens: int, *, is_measuring: bool = True) -> None:
        self.floor_tokens = floor_tokens
        self.is_measuring = is_measuring
        self._compute_s: deque[float] = deque(maxlen=RECENT)  # seconds a token
        self._load_s: deque[float] = deque(maxlen=RECENT)
        self._declined = 0

    def observe_compute(self, num_tokens: int, seconds: float) -> None:
        """A prefill of `num_tokens` took so long. One of less than a block says more about overhead than about tokens."""
        if num_tokens >= self.floor_tokens:
            self._compute_s.append(seconds / num_tokens)

    def observe_load(self, num_tokens: int, seconds: float) -> None:
        """Loading `num_tokens` held the request up for so long."""
        if num_tokens > 0:
            self._load_s.append(seconds / num_tokens)

    def is_load_cheaper(self, num_tokens: int) -> bool:
        """Whether to load `num_tokens` tokens."""
        if num_tokens < self.floor_tokens:
            return False
        if not self.is_measuring or not self._compute_s or not self._load_s:
            return True
        if statistics.median(self._load_s) <= statistics.median(self._compute_s):
            return True
        self._declined += 1
        return self._declined % RETRY_EVERY == 0
