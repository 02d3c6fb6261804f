"""Numbers and times as people read them. Sizes are in `kvfs.config`."""

from __future__ import annotations

import re

from kvfs.errors import UsageError

_STEPS = ((60, "s"), (60, "min"), (24, "h"), (0, "d"))
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?(s|min|m|h|d)")
_SECONDS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400}


def format_duration(seconds: float) -> str:
    """A duration in its largest whole unit: "7 s", "12 min", "3 h", "40 d"."""
    value = max(0.0, seconds)
    for step, unit in _STEPS:
        if not step or value < step:
            return f"{int(value)} {unit}"
        value /= step
    raise AssertionError("the last unit has no end")


def parse_duration(text: str, what: str) -> float:
    """Seconds in "90s", "15min" (or "15m"), "12h", "3d"; raises UsageError, which says `what` it was given for."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{what}: {text!r} is not a duration: write 90s, 15min, 12h or 3d")
    return float(match[1]) * _SECONDS[match[2]]


def format_count(number: int, noun: str) -> str:
    """A number of things: "1 chunk", "2,000 chunks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_share(part: int, whole: int) -> str:
    """A share in percent: "42 %"; a trace of something is not "0 %"."""
    if not whole:
        return "–"
    if 0 < part * 100 < whole:
        return "< 1 %"
    return f"{part * 100 // whole} %"
