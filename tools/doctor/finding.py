"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What is so. `--json` shows it.

    Attributes:
        name: of what was looked at.
        is_ok: whether it is as kvfs would have it.
        what: what was found, or why it is not so; one line.
        advice: what to do about it, if it is not.
        is_needed: whether kvfs cannot run without it.
        is_fault: whether something that is in use has failed: kvfs runs, but somebody has to do something.
    """

    name: str
    is_ok: bool
    what: str
    advice: str = ""
    is_needed: bool = False
    is_fault: bool = False
