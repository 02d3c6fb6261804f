"""How a demo is started: its one option, and what becomes of errors, Ctrl-C and SIGTERM."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

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


def _interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM is taken as Ctrl-C, so that it cleans up as well."""
    raise KeyboardInterrupt
