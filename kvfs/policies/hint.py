"""What somebody outside knows of an entry, as a policy sees it. What hints are, and how they end, is in `kvfs.hints`."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

HEEDED_BY_ALL = frozenset({"closed"})
"""What works under every policy, see `kvfs.policies.Holding`."""


class Hint(NamedTuple):
    """All that was said of one entry.

    Attributes:
        class_: what it is of, a number whose meaning a policy may learn; 0 is what nothing was said of.
        until_s: by the clock of the policies: it is likely used before; -inf: nothing was said.
        is_closed: it is not used again.
    """

    class_: int = 0
    until_s: float = -inf
    is_closed: bool = False


NOTHING = Hint()
