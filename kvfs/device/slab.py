"""Device memory to read into: an allocation of its own, on a 4 KiB boundary, registered with cuFile.

cuFile registers whole allocations, and those of torch's allocator are shared with whoever asks, and freed without its
knowing, at which the driver may deadlock. So this memory does not come from there; torch looks at it through
``torch.as_tensor(slab.memory, device=…)``, and drops that before `close`.
"""

from __future__ import annotations

from kvfs.chunk import ALIGNMENT, align
from kvfs.device.destination import Destination
from kvfs.device.driver import Driver
from kvfs.device.kvikio_files import KvikioFiles


class Slab:
    """Memory of one device.

    Attributes:
        memory: all of it, for `Destination.part`; address and size are multiples of 4096.
        is_registered: whether cuFile knows it. (Where kvikio copies by itself it says yes, and it means nothing.)
    """

    def __init__(
        self, driver: Driver, files: KvikioFiles | None, allocation: int, size_bytes: int, device: int
    ) -> None:
        self.memory = Destination(align(allocation), size_bytes, is_cuda=True)
        self._driver = driver
        self._files = files
        self._allocation = allocation
        self._device = device
        self.is_registered = files is not None and files.register(self.memory)

    @classmethod
    def allocate(cls, driver: Driver, files: KvikioFiles | None, size_bytes: int, device: int) -> Slab:
        """Allocate and register. Raises UnavailableError."""
        size_bytes = align(size_bytes)
        allocation = driver.allocate(size_bytes + ALIGNMENT, device)
        return cls(driver, files, allocation, size_bytes, device)

    def close(self) -> None:
        """Give it back; nobody looks at it any more."""
        if self.is_registered and self._files is not None:
            self._files.deregister(self.memory)
        self._driver.free(self._allocation, self._device)
