"""Handlers that cannot end the daemon: what they raise reaches the kernel as an errno.

Every handler is wrapped, when the class is made: KvfsError becomes the errno of the table in `errnos`, anything
unexpected becomes EIO, is counted and logged once; Cancelled passes. Without that, any exception but FUSEError would
end the daemon for everybody (measured).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pyfuse3
from pyfuse3 import FUSEError

from kvfs.mount.errnos import Faults

Handler = Callable[..., Awaitable[Any]]


def guarded(handler: Handler) -> Handler:
    """A handler that lets only FUSEError and Cancelled out."""

    @functools.wraps(handler)
    async def guard(self: GuardedOperations, *args: Any) -> Any:
        try:
            return await handler(self, *args)
        except FUSEError:
            raise
        except Exception as error:
            raise FUSEError(self.faults.errno_of(handler.__name__, error)) from error

    guard.is_guarded = True  # type: ignore[attr-defined]
    return guard


class GuardedOperations(pyfuse3.Operations):
    """Wraps every asynchronous method that a subclass defines, so that none can be forgotten."""

    faults: Faults

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, value in list(vars(cls).items()):
            if not name.startswith("_") and inspect.iscoroutinefunction(value):
                setattr(cls, name, guarded(value))
