"""Numbers, times and the words of others as people read them. Sizes are in `kvfs.config`, what is read from people in `kvfs.durations`."""

from __future__ import annotations

_STEPS = ((60, "s"), (60, "min"), (24, "h"), (0, "d"))


def printable(text: str) -> str:
    """Text of somebody else as a terminal may have it: control characters and undecodable bytes are escaped."""
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in text)


def _escaped(letter: str) -> str:
    code = ord(letter)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a name that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return letter.encode("unicode_escape", "surrogatepass").decode()


def format_duration(seconds: float) -> str:
    """A duration in its largest whole unit: "7 s", "12 min", "3 h", "40 d"."""
    value = max(0.0, seconds)
    for step, unit in _STEPS:
        if not step or value < step:
            return f"{int(value)} {unit}"
        value /= step
    raise AssertionError("the last unit has no end")


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
