"""How a daemon ends that could not write everything: it says so, to whoever unmounts; and it does end.

How far it is stands in a file beside the socket as long as it writes, for `kvfs status`. What was not written stands in
another, which `kvfs umount` reads and removes, and the next daemon there removes. A thread that hangs in the kernel cannot be ended, and an end in order waits for it; so after `LAST_S` the
process ends as it is. An arena that outlives its daemon then has what is dirty.

Concurrency: a thread of its own, which looks at the store only where the event loop may be stuck.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from kvfs.mount.last_words import FILE_NAME, PROGRESS_NAME, Left, put
from kvfs.statistics import Unwritten
from kvfs.store import Store

logger = logging.getLogger(__name__)

LAST_S = 120.0
"""Writing what is dirty has 60 s, durability of removals 25, what the policies learned some; the rest takes none."""
_LOOK_EVERY_S = 0.5
EXIT_FAILURE = 1


class Ending:
    """The end of the daemon of `mountpoint`, whose socket lies at `socket_path`. `leave` gives names and mount back,
    whatever is stuck.
    """

    def __init__(self, mountpoint: str, socket_path: str, leave: Callable[[], None]) -> None:
        self._mountpoint = mountpoint
        self._file = Path(socket_path).with_name(FILE_NAME)
        self._progress = Path(socket_path).with_name(PROGRESS_NAME)
        self._socket_path = socket_path
        self._leave = leave
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self.store: Store | None = None
        for before in (self._file, self._progress):
            before.unlink(missing_ok=True)

    def begin(self) -> None:
        """From now on it does not last longer than it may, and `kvfs status` can say how far it is."""
        self._say_what_is_left()
        self._thread = threading.Thread(target=self._watch, name="kvfs-ending", daemon=True)
        self._thread.start()

    def is_over(self) -> None:
        """The store has ended: say what it could not write."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        self._progress.unlink(missing_ok=True)
        if self.store is not None and self.store.unwritten is not None:
            self._tell(self.store.unwritten)

    def _tell(self, unwritten: Unwritten) -> None:
        try:
            put(self._file, unwritten)
        except OSError as error:
            logger.error("cannot say in %s what was not written: %s", self._file, error)

    def _say_what_is_left(self) -> None:
        if self.store is None:
            return
        dirty = self.store.what_is_unwritten(is_kept=False)
        with contextlib.suppress(OSError):  # nobody waits for it
            put(self._progress, Left(self._mountpoint, os.getpid(), dirty.num_chunks, dirty.size_bytes))

    def _watch(self) -> None:
        left_s = LAST_S
        while not self._is_over.wait(_LOOK_EVERY_S):
            self._say_what_is_left()
            if self.store is None or self.store.is_taking_over:
                continue
            left_s -= _LOOK_EVERY_S
            if left_s <= 0:
                self._give_up(self.store)

    def _give_up(self, store: Store) -> None:
        unwritten = store.what_is_unwritten(is_kept=store.arena.kept is not None)
        logger.error("a device does not answer, so this process ends as it is")
        if unwritten.num_chunks:
            logger.error("%s", unwritten.sentence)
            self._tell(unwritten)
        for path in (self._socket_path, self._progress):
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._leave()
        logging.shutdown()
        os._exit(EXIT_FAILURE)
