"""How a daemon ends that could not write everything: it says so, to whoever unmounts; and it does end.

What was not written stands in a file beside the socket, which `kvfs umount` reads and removes, and the next daemon there
removes. A thread that hangs in the kernel cannot be ended, and an end in order waits for it; so after `LAST_S` the
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

import msgspec

from kvfs.statistics import Unwritten
from kvfs.store import Store

logger = logging.getLogger(__name__)

FILE_NAME = "unwritten.json"
LAST_S = 120.0
"""Writing what is dirty has 60 s, durability of removals 25, what the policies learned some; the rest takes none."""
_LOOK_EVERY_S = 0.5
EXIT_FAILURE = 1


class Ending:
    """The end of one daemon, whose socket lies at `socket_path`. `leave` gives names and mount back, whatever is stuck."""

    def __init__(self, socket_path: str, leave: Callable[[], None]) -> None:
        self._file = Path(socket_path).with_name(FILE_NAME)
        self._socket_path = socket_path
        self._leave = leave
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self.store: Store | None = None
        with contextlib.suppress(FileNotFoundError):
            self._file.unlink()

    def begin(self) -> None:
        """From now on it does not last longer than it may."""
        self._thread = threading.Thread(target=self._watch, name="kvfs-ending", daemon=True)
        self._thread.start()

    def is_over(self) -> None:
        """The store has ended: say what it could not write."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        if self.store is not None and self.store.unwritten is not None:
            self._tell(self.store.unwritten)

    def _tell(self, unwritten: Unwritten) -> None:
        try:
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(msgspec.json.encode(unwritten))
        except OSError as error:
            logger.error("cannot say in %s what was not written: %s", self._file, error)

    def _watch(self) -> None:
        left_s = LAST_S
        while not self._is_over.wait(_LOOK_EVERY_S):
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
        with contextlib.suppress(OSError):
            os.unlink(self._socket_path)
        self._leave()
        logging.shutdown()
        os._exit(EXIT_FAILURE)


def said(directory: Path) -> Unwritten | None:
    """What the last daemon whose socket lay there could not write; None if it wrote everything."""
    try:
        return msgspec.json.decode((directory / FILE_NAME).read_bytes(), type=Unwritten)
    except (OSError, msgspec.MsgspecError):
        return None


def take(socket_path: str) -> Unwritten | None:
    """The same; it is said once, but where an arena was kept that has it."""
    directory = Path(socket_path).parent
    found = said(directory)
    if found is not None and not found.is_kept:
        with contextlib.suppress(OSError):
            (directory / FILE_NAME).unlink()
            directory.rmdir()
    return found


def has_said(socket_path: str) -> bool:
    """Whether a daemon has said that it ends without having written everything."""
    return Path(socket_path).with_name(FILE_NAME).exists()
