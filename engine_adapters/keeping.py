"""A thread that keeps a client attached: as soon as there is a daemon, and again whenever it ended or did not answer.

An engine's own threads never look for a daemon that is away: `is_up` says whether it makes sense to ask.

Concurrency: `is_up` and `lost` are for any thread. Only the thread of `Keeping` attaches, and only it makes `is_up` True.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from kvfs.client import Client
from kvfs.errors import UnavailableError, UsageError

log = logging.getLogger(__name__)
RETRY_S = 0.5
"""How long a daemon may be back before it is noticed. A try costs 50 µs where nobody listens."""


class Keeping:
    """Keeps one client attached. Attributes: is_up: there is a session, and no answer was missed since it began."""

    def __init__(self, client: Client, retry_s: float = RETRY_S, attached: Callable[[], None] = lambda: None) -> None:
        """`attached` is called after each time that the client was attached, in a thread, and may take long."""
        self.is_up = False
        self._attached = attached
        self._client = client
        self._retry_s = retry_s
        self._closing = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvfs-attach-again", daemon=True)

    def open(self) -> str:
        """Attach now, or as soon as there is a daemon; why not now, "" if it is attached.

        Raises UsageError if the daemon refuses this client for good.
        """
        reason = ""
        try:
            self._client.attach()
            self.is_up = True
        except UnavailableError as error:
            reason = str(error)
        self._thread.start()
        return reason

    def lost(self) -> None:
        """The cache did not answer: it is not to be asked before it was attached to anew."""
        self.is_up = False
        self._wake.set()

    def close(self) -> None:
        """End the thread; the client is as it was."""
        self._closing = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        refusal = ""
        if self.is_up:
            self._attached()
        while True:
            self._wake.wait(self._retry_s)
            self._wake.clear()
            if self._closing:
                return
            if self.is_up and self._client.is_attached():
                continue
            self.is_up = False
            try:
                self._client.attach()
            except UnavailableError as error:
                log.debug("the cache does not answer yet: %s", error)
            except UsageError as error:  # perhaps of a daemon that is replaced by another
                if str(error) != refusal:
                    log.error("going on without the cache: %s", error)
                refusal = str(error)
            else:
                refusal = ""
                log.info("the cache at %s answers again", self._client.mount)
                self.is_up = True
                self._attached()


def warn_together(reasons: Iterable[str]) -> None:
    """Say in one sentence that some of what was opened (see `Keeping.open`) has no cache yet; each is for one process."""
    reason = next(filter(None, reasons), "")
    if reason:
        log.warning("kvfs: going on without a cache until there is one: %s", reason)
