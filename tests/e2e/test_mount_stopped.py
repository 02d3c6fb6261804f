"""An engine beside a daemon that is stopped for long."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

from kvfs.connection import find_socket
from kvfs.errors import UnavailableError
from kvfs.testing import DEADLINE_S

from .conftest import Daemon


def num_waiting() -> int:
    return sum(thread.name == "kvfs-attach" for thread in threading.enumerate())


def test_attempts_to_attach_leave_one_thread_behind(mounted: Daemon, wait: Callable[..., None]) -> None:
    """However often an engine asks a mount whose daemon is stopped, one thread waits for it; it ends with the answer."""
    os.kill(mounted.pid, signal.SIGSTOP)
    try:
        for _ in range(8):
            with pytest.raises(UnavailableError, match="did not answer"):
                find_socket(mounted.path, 0.05)
        assert num_waiting() == 1
    finally:
        os.kill(mounted.pid, signal.SIGCONT)
    wait(lambda: not num_waiting(), "the thread has its answer")
    assert find_socket(mounted.path, DEADLINE_S).endswith("session.sock")
