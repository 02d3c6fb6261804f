"""The arena as a GPU copies out of it by itself: registered with CUDA, where the device and the client's access allow that."""

from __future__ import annotations

import logging
from typing import Protocol

from kvfs.device.driver import open_driver
from kvfs.device.pinning import PinnedMemory
from kvfs.errors import UnavailableError

log = logging.getLogger(__name__)


class Arena(Protocol):
    """Memory that a device copies from by itself; see `kvfs.device.pinning.PinnedMemory`."""

    def holds(self, view: memoryview) -> bool:
        """Whether all of a view lies in this memory."""

    def copy(self, source: memoryview, target_address: int, stream: int) -> None:
        """Queue a copy to the device on a stream. Raises UnavailableError."""

    def close(self) -> None:
        """Give it back; nothing is being copied out of it."""


def register(arena: memoryview, device: int) -> PinnedMemory | None:
    """Register an arena, which may take seconds; None, and a line in the log, where that cannot be."""
    if not arena.nbytes:  # the session has ended already
        return None
    try:
        pinned = PinnedMemory.register(open_driver(), arena, device)
    except UnavailableError as error:
        log.info("what is in RAM goes to the GPU through pinned buffers: %s", error)
        return None
    log.info("what is in RAM goes to the GPU out of the arena itself")
    return pinned
