"""What this process reads into GPU memory with: kvikio where it works, pinned buffers otherwise.

kvikio is given up for good when it fails where the pinned buffers do not: said once, in the log. What fails both ways
is the fault of the file or its device, and says nothing about kvikio.

Concurrency: any thread; a lock guards the rings, one a device, which are made when they are first needed.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Sequence
from typing import Protocol

from kvfs.device.destination import Destination
from kvfs.device.driver import Driver, open_driver
from kvfs.device.kvikio_files import KvikioFiles
from kvfs.device.pinning import PinnedMemory
from kvfs.device.ring import PinnedRing
from kvfs.device.slab import Slab
from kvfs.errors import UnavailableError
from kvfs.system import System

log = logging.getLogger(__name__)


class Way(enum.Enum):
    """How bytes got to where they were wanted; see `kvfs.device`."""

    HOST = "host"
    KVIKIO = "kvikio"
    RING = "ring"
    PINNED = "pinned"


class Carrier(Protocol):
    """What a `Reader` asks for CUDA memory. All destinations of one call lie on one device."""

    def read(self, fd: int, parts: Sequence[tuple[int, Destination]]) -> Way:
        """Fill the destinations, each from its offset of a file; they are full when this returns."""

    def copy(self, source: memoryview, target: Destination) -> Way:
        """Fill a destination from host memory of the same size; it is full when this returns."""

    def slab(self, size_bytes: int, device: int) -> Slab:
        """Device memory of a multiple of 4096 bytes to read into, as kvikio wants it; closed before this is."""

    def carried(self) -> dict[str, int]:
        """Bytes that kvikio carried, by backend and in its own words."""

    @property
    def num_failures(self) -> int:
        """How often kvikio failed where pinned buffers did not."""

    def close(self) -> None:
        """Give everything back."""


class Gpu:
    """A `Carrier` for the GPUs of this process. Attributes: driver; files: None without kvikio; num_failures."""

    def __init__(self, driver: Driver, files: KvikioFiles | None, system: System) -> None:
        self.driver = driver
        self.files = files
        self.num_failures = 0
        self._is_trusting = files is not None
        self._system = system
        self._rings: dict[int, PinnedRing] = {}
        self._pinned: list[PinnedMemory] = []
        self._lock = threading.Lock()

    @classmethod
    def open(cls, system: System, *, use_kvikio: bool = True) -> Gpu:
        """Look for CUDA, and for kvikio only if it is there. Raises UnavailableError without CUDA."""
        driver = open_driver()
        files = None
        if use_kvikio:
            try:
                files = KvikioFiles.open()
            except UnavailableError as error:
                log.info("files are read into GPU memory through pinned buffers: %s", error)
        return cls(driver, files, system)

    def read(self, fd: int, parts: Sequence[tuple[int, Destination]]) -> Way:
        """See `Carrier`. Raises OSError, EOFError or UnavailableError."""
        failure = None
        if self.files is not None and self._is_trusting:
            try:
                self.files.read(fd, parts)
            except UnavailableError as error:
                failure = error
            else:
                return Way.KVIKIO
        self._ring_for(parts[0][1]).read(fd, parts)
        if failure is not None:
            self._give_up_kvikio(failure)
        return Way.RING

    def copy(self, source: memoryview, target: Destination) -> Way:
        """See `Carrier`. Raises UnavailableError."""
        ring = self._ring_for(target)
        with self._lock:
            is_pinned = any(pinned.holds(source) for pinned in self._pinned)
        if is_pinned:
            ring.copy_pinned(source, target)
            return Way.PINNED
        ring.copy(source, target)
        return Way.RING

    def pin(self, view: memoryview, device: int) -> PinnedMemory:
        """Register host memory, so that `copy` takes it from there; for `unpin`. Raises UnavailableError."""
        pinned = PinnedMemory.register(self.driver, view, device)
        with self._lock:
            self._pinned.append(pinned)
        return pinned

    def unpin(self, pinned: PinnedMemory) -> None:
        """Undo `pin`; nobody copies out of it."""
        with self._lock:
            self._pinned.remove(pinned)
        pinned.close()

    def slab(self, size_bytes: int, device: int) -> Slab:
        """See `Carrier`. Raises UnavailableError."""
        return Slab.allocate(self.driver, self.files, size_bytes, device)

    def carried(self) -> dict[str, int]:
        """See `Carrier`."""
        return {} if self.files is None else self.files.carried()

    def _ring_for(self, target: Destination) -> PinnedRing:
        device = self.driver.device_of(target.address)
        with self._lock:
            if device not in self._rings:
                self._rings[device] = PinnedRing.open(self.driver, device, self._system)
            return self._rings[device]

    def _give_up_kvikio(self, why: UnavailableError) -> None:
        with self._lock:
            is_first = self._is_trusting
            self._is_trusting = False
            self.num_failures += 1
        if is_first:
            log.warning("files are read into GPU memory through pinned buffers from now on: %s", why)

    def close(self) -> None:
        """Give everything back; slabs are closed before."""
        for pinned in list(self._pinned):
            self.unpin(pinned)
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()
        if self.files is not None:
            self.files.close()
