"""What is dear to compute again, takes little room and is likely to be used again stays: for entries of unequal size.

The chance of reuse is learned as by `learned`; its value is weighed with the prefill that an entry saves, by the byte. A
token costs more the later it stands, since it attends to all before it: at about 32k tokens twice as much (an 8B
model: 16 GFLOP a token, and half a MFLOP more for each token before it). With one namespace and whole chunks only
the position makes a difference.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log2

from kvfs.policies.base import Clock, E, Entry
from kvfs.policies.learned import Learned

_TWICE_AS_DEAR_AT = 32_768  # tokens
_NUM_WEIGHTS = 32  # half powers of two
_TYPICAL_BYTES_A_TOKEN = 1 << 17


def weigh(entry: Entry) -> int:
    """The class of an entry by what it saves and takes; each is worth √2 times the one before it."""
    tokens_before = entry.position * entry.num_tokens
    saved = entry.num_tokens * (1 + tokens_before / _TWICE_AS_DEAR_AT)
    relative = saved * _TYPICAL_BYTES_A_TOKEN / entry.length
    return min(max(round(2 * log2(relative)) + _NUM_WEIGHTS // 2, 0), _NUM_WEIGHTS - 1)


def make(clock: Clock) -> Learned[E]:
    """The policy."""
    weighing: Callable[[E], int] = weigh
    worth = [2.0 ** ((weight - _NUM_WEIGHTS // 2) / 2) for weight in range(_NUM_WEIGHTS)]
    return Learned(clock, weighing, worth, num_classes=1)  # of a hint it heeds all but the class
