"""What was compared: a row for each path and chunk size, with every time that was taken."""

from __future__ import annotations

import statistics

import msgspec

OURS = "kvfs"


class Row(msgspec.Struct, frozen=True):
    """One thing that all of them do.

    Attributes:
        name; chunk_bytes: 0 where it does not matter; num_bytes: moved each time, 0 for a lookup.
        against: the peer that counts, its fastest here for all of them; seconds: by who did it, round by round.
        ratio: ours ÷ that peer's speed, or time for a lookup, of medians; bar: the least, or the most, it is to be.
    """

    name: str
    chunk_bytes: int
    num_bytes: int
    against: str
    ratio: float
    bar: float
    is_met: bool
    seconds: dict[str, list[float]]

    def value(self, who: str) -> str:
        """The median, for people."""
        median_s = statistics.median(self.seconds[who])
        return f"{self.num_bytes / median_s / 1e9:.2f}" if self.num_bytes else f"{median_s * 1e3:.2f}ms"


class Aside(msgspec.Struct, frozen=True):
    """What was measured on the way and is no row: medians, in seconds."""

    name: str
    chunk_bytes: int
    seconds: float


class Comparison(msgspec.Struct, frozen=True):
    """All of it."""

    kvfs: str
    lmcache: str
    torch: str
    python: str
    kernel: str
    cpus: int
    rounds: int
    rows: list[Row]
    asides: list[Aside]


def speed_row(
    name: str, chunk_bytes: int, num_bytes: int, seconds: dict[str, list[float]], bar: float, against: str = ""
) -> Row:
    """A row of speeds, against one peer or the fastest of them."""
    medians = {who: statistics.median(times) for who, times in seconds.items()}
    best = against or min((who for who in medians if who != OURS), key=medians.__getitem__)
    ratio = round(medians[best] / medians[OURS], 3)
    return Row(name, chunk_bytes, num_bytes, best, ratio, bar, ratio >= bar, seconds)


def time_row(name: str, seconds: dict[str, list[float]], bar: float) -> Row:
    """A row of times, of two."""
    (best,) = seconds.keys() - {OURS}
    ratio = round(statistics.median(seconds[OURS]) / statistics.median(seconds[best]), 3)
    return Row(name, 0, 0, best, ratio, bar, ratio <= bar, seconds)
