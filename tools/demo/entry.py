"""How a demo is started: its one option, and what becomes of errors, Ctrl-C and SIGTERM; and what it leaves."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType

import msgspec
from rich.console import Console

from kvfs.errors import KvfsError


def run_demo(name: str, description: str, out: str, run: Callable[[Console, Path], int]) -> int:
    """Run a demo that leaves its result in a file, `out` unless told otherwise; returns the exit code."""
    parser = argparse.ArgumentParser(prog=name, description=description)
    parser.add_argument("--out", type=Path, default=Path(out), help="where to leave the result")
    place = parser.parse_args().out.absolute()
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console()
    try:
        return run(console, place)
    except KvfsError as error:
        console.print(f"kvfs demo: {error}", style="bold red", highlight=False, markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; nothing of it is left", highlight=False)
        return 130


def write_result(out: Path, runs: Sequence[msgspec.Struct]) -> None:
    """Leave the result; it appears whole."""
    scratch = out.with_name(f".{out.name}.tmp")
    scratch.write_text(json.dumps(msgspec.to_builtins(runs), indent=2) + "\n")
    scratch.replace(out)


def keep_logs(logs: Iterable[Path], kept: Path) -> Path:
    """Copy logs out of a place that is about to go into a directory, and return where that is.

    They are not searched for here: there may be a mount in that place that does not answer.
    """
    kept.mkdir(exist_ok=True)
    for log in logs:
        shutil.copy(log, kept)
    return kept.resolve()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM is taken as Ctrl-C, so that it cleans up as well."""
    raise KeyboardInterrupt
