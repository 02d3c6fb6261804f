"""Which errno a user sees: the one table, used at the FUSE edge and nowhere else.

What is not in the table is a fault of kvfs itself: the user sees EIO, `Faults` counts it and logs it with
its traceback, once for each kind. (A handler that lets anything but FUSEError out ends the daemon for everybody.)
"""

from __future__ import annotations

import errno
import logging

import trio

from kvfs.errors import (
    CapacityError,
    DiskFullError,
    FormatError,
    KvfsError,
    ProtocolError,
    UnavailableError,
    UsageError,
)
from kvfs.metrics import Counters

logger = logging.getLogger(__name__)

TABLE: tuple[tuple[type[Exception], int], ...] = (
    (FormatError, errno.EIO),  # proven bad: the store drops it and says so in an event
    (DiskFullError, errno.ENOSPC),  # beside the volume: it is in force, and not durable yet
    (UnavailableError, errno.EIO),  # a device failed; the bytes may be good, the next read tries again
    (CapacityError, errno.ENOSPC),
    (ProtocolError, errno.EPROTO),
    (UsageError, errno.EINVAL),
    (trio.TooSlowError, errno.ETIMEDOUT),
)
"""The first class that matches counts, so a subclass stands before its base."""


class Refused(KvfsError):
    """The tree does not do what was asked; `errno` says why, as POSIX would.

    Attributes:
        errno: what the system call returns.
    """

    def __init__(self, number: int) -> None:
        super().__init__(errno.errorcode[number])
        self.errno = number


def errno_of(error: Exception) -> int | None:
    """The errno for an error that kvfs raises on purpose, None for one that it should not have raised."""
    if isinstance(error, Refused):
        return error.errno
    for kind, number in TABLE:
        if isinstance(error, kind):
            return number
    return None


class Faults:
    """Counts what went wrong in handlers, as `Counters.mount_errors`, and logs it once for each kind.

    A kind is (handler, class of the error, where it was raised), so there are few.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._seen: set[tuple[str, str, str]] = set()

    def errno_of(self, operation: str, error: Exception) -> int:
        """The errno to answer with. An unexpected error is counted, and logged the first time it is met."""
        number = errno_of(error)
        if number is not None:
            logger.debug("%s: %s", operation, error)
            return number
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else "?"
        kind = (operation, type(error).__name__, place)
        self._counters.mount_errors += 1
        if kind not in self._seen:
            self._seen.add(kind)
            logger.error("%s failed, the caller gets EIO (logged once)", operation, exc_info=error)
        return errno.EIO
