"""Durations and points in time as people write them. Sizes are in `kvfs.config`."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from kvfs.errors import UsageError

_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?(s|min|m|h|d)", re.ASCII)
_SECONDS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400}
NS = 1_000_000_000


def parse_duration(text: str, what: str) -> float:
    """Seconds in "90s", "15min" (or "15m"), "12h", "3d"; raises UsageError, which says `what` it was given for."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{what}: {text!r} is not a duration: write 90s, 15min, 12h or 3d")
    return float(match[1]) * _SECONDS[match[2]]


def exact_duration(duration_ns: int) -> str:
    """A duration that `parse_duration` reads back, in its largest whole unit: "3d", "90s"; parts of a second count up."""
    seconds = -(-duration_ns // NS)
    unit = next(unit for unit in ("d", "h", "min", "s") if seconds % _SECONDS[unit] == 0)
    return f"{seconds // _SECONDS[unit]}{unit}"


def rfc3339(time_ns: int) -> str:
    """A time in nanoseconds since the epoch as "2026-11-29T22:05:19Z"."""
    return datetime.fromtimestamp(time_ns // NS, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
