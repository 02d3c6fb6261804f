"""A client that never makes the engine's loop wait twice for a cache that does not answer.

The client itself asks a stopped daemon again after a second, and waits a deadline for it each time. In the scheduler's
loop that would hold up every request, so here a thread attaches anew, and until it has, the answer is "nothing there".
Leases are ended by a thread as well: their end has to be acknowledged, and nobody waits for it.

Concurrency: `match`, `release` and `close` are for one thread, the scheduler's. The thread that attaches uses the client
only while `_is_up` is False, which only it makes True.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence

from kvfs.client import Client, Lease
from kvfs.errors import UnavailableError, UsageError
from kvfs.keys import ChainHash

log = logging.getLogger(__name__)
RETRY_S = 0.5


class PatientSession:
    """Matches prefixes through a client. Attributes: client, of which nobody else makes use."""

    def __init__(self, client: Client, retry_s: float = RETRY_S) -> None:
        self.client = client
        self._retry_s = retry_s
        self._is_up = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._ended: queue.SimpleQueue[Lease | None] = queue.SimpleQueue()
        self._releasing = threading.Thread(target=self._release_all, name="kvfs-release", daemon=True)

    def open(self) -> None:
        """Attach now, or as soon as there is a daemon. Raises UsageError if it refuses this client for good."""
        self._releasing.start()
        try:
            self.client.attach()
        except UnavailableError as error:
            log.warning("going on without a cache until there is one: %s", error)
            self._attach_later()
        else:
            self._is_up = True

    def match(self, chains: Sequence[ChainHash]) -> Lease:
        """How long a prefix of `chains` is stored, leased; nothing while there is no answer."""
        if not self._is_up:
            return Lease(0)
        failures = self.client.statistics.failures
        lease = self.client.match(chains)
        if self.client.statistics.failures != failures:
            self._is_up = False
            self._attach_later()
        return lease

    def release(self, lease: Lease) -> None:
        """End a lease soon."""
        if lease.count:
            self._ended.put(lease)

    def close(self) -> None:
        """End the session."""
        self._closing.set()
        self._ended.put(None)
        if self._releasing.ident is not None:
            self._releasing.join()
        if self._thread is not None:
            self._thread.join()
        self.client.close()

    def _release_all(self) -> None:
        while (lease := self._ended.get()) is not None:
            lease.release()

    def _attach_later(self) -> None:
        self._thread = threading.Thread(target=self._keep_trying, name="kvfs-attach-again", daemon=True)
        self._thread.start()

    def _keep_trying(self) -> None:
        refusal = ""
        while not self._closing.wait(self._retry_s):
            self.client.close()  # a broken connection would count as attached
            try:
                self.client.attach()
            except UnavailableError as error:
                log.debug("the cache does not answer yet: %s", error)
                continue
            except UsageError as error:  # perhaps of a daemon that is replaced by another
                if str(error) != refusal:
                    log.error("going on without the cache: %s", error)
                refusal = str(error)
                continue
            log.info("the cache at %s answers again", self.client.mount)
            self._is_up = True
            return
