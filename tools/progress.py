"""Long work on a mount: a bar on a terminal while it lasts, and an end in order when Ctrl-C is pressed.

Concurrency: the work runs in the thread of `mounted.ask`; the bar and Ctrl-C belong to the thread that called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kvfs.tools import mounted
from kvfs.tools.mounted import Beat

PATIENCE_S = 1.0
STEP_DEADLINE_S = 35.0  # for one request: the daemon itself gives a slow device 30 s, kvfs.mount.tier_work
T = TypeVar("T")
STOP_DEADLINE_S = 5.0  # after Ctrl-C, for the step that is under way


def step_bar(console: Console) -> Progress:
    """A bar over so many steps, with the time that they took; nothing where nobody sees it."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


class Track:
    """What the work says of itself, and what it is told."""

    def __init__(self, beat: Beat, stopping: threading.Event, advance: Callable[[int], None]) -> None:
        self._beat = beat
        self._stopping = stopping
        self._advance = advance

    @property
    def is_stopping(self) -> bool:
        """Whether the work is to end before its next step."""
        return self._stopping.is_set()

    def advance(self, amount: int) -> None:
        """Say that the mount answers and that so much more is done; 0 is fine."""
        self._beat()
        self._advance(amount)


def ask(path: str, look: Callable[[Beat], T], what: str) -> T:
    """What `mounted.ask` returns; on a terminal it says `what` is being done once that has lasted a while."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return mounted.ask(path, look)
    status = console.status(f"{what} …")
    lock, is_over = threading.Lock(), threading.Event()

    def show() -> None:
        with lock:
            if not is_over.is_set():
                status.start()

    timer = threading.Timer(PATIENCE_S, show)
    timer.daemon = True
    timer.start()
    try:
        return mounted.ask(path, look)
    finally:
        timer.cancel()
        with lock:
            is_over.set()
            status.stop()


def run(path: str, work: Callable[[Track], None], what: str, total: int, *, is_bytes: bool = False) -> bool:
    """Whether `work` on the mount at `path` came to its end; False if Ctrl-C ended it, after the step it was at.

    `total` and what `Track.advance` is given are bytes, or a number of chunks. Raises what `mounted.ask` raises.
    """
    stopping, ended = threading.Event(), threading.Event()
    console = Console(stderr=True)
    amounts: list[ProgressColumn] = (
        [DownloadColumn(binary_units=True), TransferSpeedColumn()] if is_bytes else [MofNCompleteColumn()]
    )
    columns = (TextColumn("{task.description}"), BarColumn(), *amounts, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)

        def look(beat: Beat) -> None:
            try:
                work(Track(beat, stopping, lambda amount: bar.advance(task, amount)))
            finally:
                ended.set()

        try:
            mounted.ask(path, look, STEP_DEADLINE_S)
        except KeyboardInterrupt:
            stopping.set()
            ended.wait(STOP_DEADLINE_S)
            return False
    return True
