"""The counters of one adapter, and the log lines that are written once.

Concurrency: every method takes the lock; requests of several threads may share the counters.
"""

from __future__ import annotations

import logging
import threading

import msgspec

from kvfs.engine_adapters.base import AdapterStatistics, LastLoad
from kvfs.engine_adapters.storing import Stored


class Counters:
    """What becomes an `AdapterStatistics`, and what was logged already."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._now = AdapterStatistics()
        self._logged: set[str] = set()

    def statistics(self) -> AdapterStatistics:
        """A frozen copy."""
        with self._lock:
            return msgspec.structs.replace(self._now, tokens_reused=dict(self._now.tokens_reused))

    def add(self, **counts: int) -> None:
        """Add to the counters of these names."""
        with self._lock:
            for name, count in counts.items():
                self._now = msgspec.structs.replace(self._now, **{name: getattr(self._now, name) + count})

    def add_request(self, prompt_tokens: int, load: LastLoad) -> None:
        """One request is done; `load` says what the cache gave to it."""
        with self._lock:
            now = self._now
            reused = dict(now.tokens_reused)
            if load.tokens_reused:
                reused[load.tier] = reused.get(load.tier, 0) + load.tokens_reused
            self._now = msgspec.structs.replace(
                now,
                hits=now.hits + bool(load.tokens_reused),
                misses=now.misses + (not load.tokens_reused),
                prompt_tokens=now.prompt_tokens + prompt_tokens,
                tokens_reused=reused,
                last_load=load,
            )

    def add_bypass(self, reason: str) -> None:
        """One request ran without the cache; a reason is logged the first time."""
        self.add(bypasses=1)
        self.log_once(f"the cache does not serve calls like this one: {reason}", logging.INFO)

    def add_stored(self, stored: Stored) -> None:
        """A store is done."""
        self.add(chunks_stored=stored.num_stored, chunks_refused=stored.num_refused)

    def log_once(self, message: str, level: int = logging.WARNING) -> None:
        """Log a message unless it has been logged."""
        with self._lock:
            if message in self._logged:
                return
            self._logged.add(message)
        self._log.log(level, "%s", message)
