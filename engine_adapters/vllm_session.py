"""A client that never makes the engine's loop wait twice for a cache that does not answer.

The client itself asks a stopped daemon again after a second, and waits a deadline for it each time. In the scheduler's
loop that would hold up every request, so here a thread attaches anew (see `keeping`), and until it has, the answer is
"nothing there". Leases are ended by a thread as well: their end has to be acknowledged, and nobody waits for it.

Concurrency: all methods are for one thread, the scheduler's.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from kvfs.client import Client, Lease, Prefetching
from kvfs.engine_adapters.keeping import RETRY_S, Keeping
from kvfs.hints import Said
from kvfs.keys import ChainHash


class PatientSession:
    """Matches prefixes through a client. Attributes: client, of which nobody else makes use."""

    def __init__(self, client: Client, retry_s: float = RETRY_S) -> None:
        self.client = client
        self._keeping = Keeping(client, retry_s)
        self._ended: queue.SimpleQueue[Lease | Prefetching | None] = queue.SimpleQueue()
        self._releasing = threading.Thread(target=self._release_all, name="kvfs-release", daemon=True)

    def open(self) -> str:
        """See `Keeping.open`."""
        reason = self._keeping.open()
        self._releasing.start()
        return reason

    def match(self, chains: Sequence[ChainHash], *, is_again: bool = False) -> Lease:
        """How long a prefix of `chains` is stored, leased; nothing while there is no answer."""
        if not self._keeping.is_up:
            return Lease(0)
        failures = self.client.statistics.failures
        lease = self.client.match(chains, is_again=is_again)
        if self.client.statistics.failures != failures:
            self._keeping.lost()
        return lease

    def prefetch(self, chains: Sequence[ChainHash]) -> Prefetching:
        """Have chunks brought into RAM, the first first; nothing while there is no answer."""
        return self.client.prefetch(chains) if self._keeping.is_up else Prefetching()

    def declined(self, chains: Sequence[ChainHash]) -> None:
        """What could be loaded of these is computed."""
        if self._keeping.is_up:
            self.client.declined(chains)

    def hint(self, chains: Sequence[ChainHash], said: Said) -> None:
        """What is known of a chain."""
        if self._keeping.is_up:
            self.client.hint(chains, said)

    def release(self, lease: Lease) -> None:
        """End a lease soon."""
        if lease.count:
            self._ended.put(lease)

    def cancel(self, prefetching: Prefetching) -> None:
        """Give up what a prefetch has not begun, soon."""
        self._ended.put(prefetching)

    def close(self) -> None:
        """End the session."""
        self._keeping.close()
        self._ended.put(None)
        if self._releasing.ident is not None:
            self._releasing.join()
        self.client.close()

    def _release_all(self) -> None:
        while (ended := self._ended.get()) is not None:
            if isinstance(ended, Lease):
                ended.release()
            else:
                ended.cancel()
