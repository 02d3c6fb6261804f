"""Break-even: is it cheaper to load KV or to compute it? Each tier is judged for itself.

All is measured in this process and forgotten with it: the tokens a second that the engine computes in a prefill, and those
that each tier delivers, as the request felt it. Until both sides are known, loading is taken to pay. A tier that does not
pay is tried again from time to time, the more seldom the more the last try has cost; one good try is believed.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from kvfs.messages import Tier

RECENT = 5
"""Measurements that count: the median of the latest few is neither the first, cold one nor one stall."""

TRY_AGAIN_S = 10.0
"""A tier that does not pay is tried again after so long at the earliest, …"""

TRY_SHARE = 20
"""… after so many times what the last try lost (tries cost 5 % of the time at most), …"""

TRY_AGAIN_AT_MOST_S = 300.0
"""… and after so long at the latest."""


class _Loads:
    """What is known of one tier. Attributes: seconds: a token, recent; is_declined; try_at: when to try it again."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=RECENT)
        self.is_declined = False
        self.try_at = 0.0

    @property
    def rate(self) -> float:
        """Seconds a token; 0 while nothing is known."""
        return statistics.median(self.seconds) if self.seconds else 0.0


class BreakEven:
    """Decides what is loaded.

    Attributes:
        floor_tokens: fewer tokens are never worth a load.
        is_measuring: False loads everything from the floor on.
    """

    def __init__(
        self, floor_tokens: int, *, is_measuring: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.floor_tokens = floor_tokens
        self.is_measuring = is_measuring
        self._clock = clock
        self._compute_s: deque[float] = deque(maxlen=RECENT)  # seconds a token
        self._loads: dict[Tier, _Loads] = {tier: _Loads() for tier in Tier if tier is not Tier.NONE}

    def observe_compute(self, num_tokens: int, seconds: float) -> None:
        """A prefill of `num_tokens` took so long. One of less than a block says more about overhead than about tokens."""
        if num_tokens >= self.floor_tokens:
            self._compute_s.append(seconds / num_tokens)

    def observe_load(self, tokens_by_tier: Mapping[Tier, int], seconds: float, *, has_failed: bool = False) -> None:
        """Loading so many tokens of each tier held a request up for so long.

        What the faster tiers are known to take is taken off; the rest is the slowest one's. A load that failed says
        something only if it had taken longer than computing by then.
        """
        asked = {tier: tokens for tier, tokens in tokens_by_tier.items() if tokens > 0 and tier is not Tier.NONE}
        if not asked:
            return
        slowest = max(asked)
        others_s = sum(tokens * self._loads[tier].rate for tier, tokens in asked.items() if tier is not slowest)
        rate = max(0.0, seconds - others_s) / asked[slowest]
        compute_s = self._compute_rate()
        if has_failed and rate <= compute_s:
            return
        loads = self._loads[slowest]
        if loads.is_declined and compute_s:
            lost_s = (rate - compute_s) * asked[slowest]
            if lost_s <= 0:
                loads.is_declined = False
                loads.seconds.clear()
            loads.try_at = self._clock() + min(max(TRY_AGAIN_S, TRY_SHARE * lost_s), TRY_AGAIN_AT_MOST_S)
        loads.seconds.append(rate)

    def pays(self, tier: Tier) -> bool:
        """Whether loading from this tier is cheaper than computing, as far as is known."""
        compute_s = self._compute_rate()
        return not self.is_measuring or not compute_s or self._loads[tier].rate <= compute_s

    def worth_loading(self, tiers: Sequence[int], tokens_per_chunk: int, num_computed: int = 0) -> int:
        """Up to which token to load, of chunks in these tiers; `num_computed`, which are there already, if nothing pays.

        A chunk that does not pay is loaded all the same if what follows it makes up for that.
        """
        whole = len(tiers) * tokens_per_chunk
        if whole - num_computed < self.floor_tokens:
            return num_computed
        compute_s = self._compute_rate()
        if not self.is_measuring or not compute_s:
            return whole
        rates = {int(tier): loads.rate for tier, loads in self._loads.items()}
        saved_s = best_s = 0.0
        best = num_computed
        for position in range(num_computed // tokens_per_chunk, len(tiers)):
            end = (position + 1) * tokens_per_chunk
            saved_s += (end - max(num_computed, position * tokens_per_chunk)) * (compute_s - rates[tiers[position]])
            if saved_s >= best_s:
                best_s, best = saved_s, end
        if best < whole and self._is_time_to_try(tiers[best // tokens_per_chunk :]):
            return whole
        return best if best - num_computed >= self.floor_tokens else num_computed

    def _is_time_to_try(self, tiers: Sequence[int]) -> bool:
        """Note that these tiers were declined; whether one of them is to be tried again."""
        now, is_due = self._clock(), False
        for tier in {Tier(tier) for tier in tiers}:
            loads = self._loads[tier]
            if self.pays(tier):
                continue
            if not loads.is_declined:
                loads.is_declined, loads.try_at = True, now + TRY_AGAIN_S
            elif now >= loads.try_at:
                loads.try_at = now + TRY_AGAIN_S  # if it brings no measurement
                is_due = True
        return is_due

    def _compute_rate(self) -> float:
        """Seconds a token; 0 while nothing is known."""
        return statistics.median(self._compute_s) if self._compute_s else 0.0
