"""Ctrl-C in commands that start daemons and servers of their own, which have to be ended whatever happens."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Ctrl-C and SIGTERM interrupt once, so that nothing disturbs the cleaning up; the function ignores them from now on."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ignore() -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)

    def interrupt(number: int, frame: object) -> None:
        ignore()
        raise KeyboardInterrupt

    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as for jobs in the background of a script
            signal.signal(number, interrupt)
    try:
        yield ignore
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def entered(context: AbstractContextManager[T]) -> Iterator[T]:
    """Like the context itself, which is left even if Ctrl-C comes before it is entered as a whole."""
    with contextlib.ExitStack() as stack:
        stack.push(context)
        yield context.__enter__()
