"""Admission: what may be written to NVMe. Flash wears, and what nobody asks for a second time need not be written.

Two rules, and a budget of bytes a day on top of either. What is not admitted stays in RAM as in a cache without NVMe: it
is served from there, evicted when room is needed, and admitted later if its next use makes it worth it. What a person
pinned or copied in is always admitted: somebody asked for it.

A pure structure: no clock, no I/O. Days are those of UTC.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

Rule = Literal["always", "second-use"]

_DAY_NS = 86_400 * 1_000_000_000


class Verdict(Enum):
    """What becomes of a chunk that is in RAM only."""

    ADMITTED = "admitted"
    UNUSED = "unused"
    OVER_BUDGET = "over budget"


@dataclass(frozen=True, slots=True)
class Spent:
    """Bytes that were admitted on a day, counted from the epoch. It is kept in the index: a restart refills nothing."""

    day: int
    num_bytes: int


class Admission:
    """One volume's rule and budget.

    Attributes: rule; budget_bytes: a day, None for no bound.
    """

    def __init__(self, rule: Rule = "always", budget_bytes: int | None = None, spent: Spent | None = None) -> None:
        self.rule = rule
        self.budget_bytes = budget_bytes
        self._spent = spent or Spent(0, 0)

    def admit(self, num_bytes: int, now_ns: int, *, is_used: bool, is_asked_for: bool) -> Verdict:
        """Judge a chunk of so many bytes; what is admitted is spent.

        `is_used`: an engine loaded it, or stored it before. `is_asked_for`: a person wants it kept.
        """
        today = self.spent_on(now_ns)
        if not is_asked_for:
            if self.rule == "second-use" and not is_used:
                return Verdict.UNUSED
            if self.budget_bytes is not None and today.num_bytes + num_bytes > self.budget_bytes:
                return Verdict.OVER_BUDGET
        self._spent = Spent(today.day, today.num_bytes + num_bytes)
        return Verdict.ADMITTED

    def spent_on(self, now_ns: int) -> Spent:
        """What was admitted on the day of `now_ns`. A clock that was set back by less than a day ends none."""
        day = now_ns // _DAY_NS
        return self._spent if day in (self._spent.day, self._spent.day - 1) else Spent(day, 0)
