"""Long work on a volume that is not mounted: a bar on a terminal while it lasts. Ctrl-C is an exception to the work."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


class Bar:
    """A context; a `kvfs.scanning.Track`. What is done in other threads is shown too."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("", total=None, visible=False)

    def begin(self, what: str, total_bytes: int) -> None:
        """Work on so many bytes begins."""
        self._progress.reset(self._task, description=what, total=total_bytes, visible=True)

    def advance(self, num_bytes: int) -> None:
        """So many more are done."""
        self._progress.advance(self._task, num_bytes)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
