"""Hints: what somebody outside knows of chunks and no policy could find out. They change who is evicted, nothing else.

* *class*: an opaque number, 0 to 255, for all chunks of a chain. A policy that learns does so for each class apart.
* *expect*: the chain's last stored chunk is used within so many seconds. Until then another chunk of its namespace goes
  where it would have gone, if there is one; when the time is over the hint counts for nothing.
* *closed*: the chain is not used again. Those of its chunks that nothing else is built on go before all others; what
  it has in common with a chain that is not closed stays.

A use, or a chain that goes on, ends *expect* and *closed*: they were met, or wrong. *closed* works under every policy,
the others where the policy says so (`kvfs.policies.base.Heeder`): class and expect under ``learned``, expect under ``cost``.

A hint can be wrong or hostile. It concerns chunks of one namespace, and costs that namespace alone: what is closed goes
instead of others, what is expected stays at the expense of its own (see `kvfs.policies.expected`), and so it is only for
4,096 chunks of a namespace at a time, and classes beyond the first seven of a namespace are as class 0.
"""

from __future__ import annotations

from typing import NamedTuple

from kvfs.errors import UsageError

MAX_CLASS = 255
MAX_EXPECT_S = 86_400.0


class Said(NamedTuple):
    """What a hint says; None: nothing, so that it stays as it was.

    Attributes: class_; expect_s: 0 ends what was said; is_closed: False likewise.
    """

    class_: int | None = None
    expect_s: float | None = None
    is_closed: bool | None = None

    def check(self) -> None:
        """Raise UsageError for what is out of bounds, or says nothing."""
        if self == Said():
            raise UsageError("a hint says a class, or when a use is expected, or that a chain is closed")
        if self.class_ is not None and not 0 <= self.class_ <= MAX_CLASS:
            raise UsageError(f"a class is a number from 0 to {MAX_CLASS}, not {self.class_}")
        if self.expect_s is not None and not 0 <= self.expect_s <= MAX_EXPECT_S:
            raise UsageError(f"a use is expected within 0 to {MAX_EXPECT_S:g} s, not {self.expect_s}")
        if self.is_closed and self.expect_s:
            raise UsageError("what is closed is not expected to be used: say one of them")


CLEAR = Said(0, 0.0, False)
"""Takes back all that was said."""


def parse(value: object) -> Said:
    """A hint as an engine's request has it: {"class": 3, "expect_s": 60, "closed": true}, some of them. Raises UsageError."""
    if not isinstance(value, dict):
        raise UsageError(f"a hint is an object with class, expect_s or closed, not a {type(value).__name__}")
    unknown = [str(name)[:40] for name in value if name not in ("class", "expect_s", "closed")]
    if unknown:
        raise UsageError(f"a hint has class, expect_s and closed, and no {', '.join(unknown[:3])}")
    class_, expect_s, closed = value.get("class"), value.get("expect_s"), value.get("closed")
    if class_ is not None and type(class_) is not int:
        raise UsageError(f"a hint's class is a whole number, not a {type(class_).__name__}")
    if expect_s is not None and type(expect_s) not in (int, float):
        raise UsageError(f"a hint's expect_s is a number of seconds, not a {type(expect_s).__name__}")
    if closed is not None and type(closed) is not bool:
        raise UsageError(f"a hint's closed is true or false, not a {type(closed).__name__}")
    said = Said(class_, expect_s, closed)
    said.check()
    return said
