"""Results of the benchmark: what was measured, beside what it is compared with."""

from __future__ import annotations

import statistics

import msgspec


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One result.

    Attributes:
        name, limit_name: what was measured, beside what; chunk_bytes: 0 where it does not matter.
        gb_s, ms, bytes or share: the median, in 1e9 bytes a second, milliseconds, bytes or parts of 1; limit: in the
            same unit.
        ratio: of speeds or shares (more is better), of times or bytes (less is better).
    """

    name: str
    chunk_bytes: int
    limit_name: str
    limit: float
    ratio: float
    gb_s: float | None = None
    ms: float | None = None
    bytes: float | None = None
    share: float | None = None


class Pairs:
    """Times of paths and limits, by name, taken in rounds."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        """One measurement."""
        self._times.setdefault(name, []).append(seconds)

    def median(self, name: str) -> float:
        """The median of one name, in seconds."""
        return statistics.median(self._times[name])

    def speed(self, name: str, limit_name: str, num_bytes: int, chunk_bytes: int) -> Row:
        """A row of speeds."""
        mine, limit = self.median(name), self.median(limit_name)
        return Row(
            name, chunk_bytes, limit_name, round(num_bytes / limit / 1e9, 3), round(limit / mine, 3),
            gb_s=round(num_bytes / mine / 1e9, 3),
        )  # fmt: skip

    def duration(self, name: str, limit_name: str, limit_s: float) -> Row:
        """A row of times, against a limit that may be a sum of others."""
        mine = self.median(name)
        return Row(name, 0, limit_name, round(limit_s * 1e3, 4), round(mine / limit_s, 3), ms=round(mine * 1e3, 4))
