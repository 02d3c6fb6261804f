"""Host memory of somebody else, registered with CUDA: the device copies out of it without a stop in between.

The arena is what this is for. Memory that a client may only read (access "isolated") can be registered on devices that
support it, which many do not; else what lies there goes through a ring of pinned buffers, one copy more.
"""

from __future__ import annotations

from kvfs.addresses import address_of
from kvfs.device.driver import Driver
from kvfs.errors import UnavailableError


class PinnedMemory:
    """Registered memory, which stays mapped until `close`. Attributes: view: the memory; device."""

    def __init__(self, driver: Driver, view: memoryview, device: int) -> None:
        self.view = memoryview(view)  # a view of our own: whoever unmaps the memory has to wait for it
        self.device = device
        self._driver = driver
        self._begin = address_of(view)
        self._end = self._begin + view.nbytes

    @classmethod
    def register(cls, driver: Driver, view: memoryview, device: int) -> PinnedMemory:
        """Register memory, all of it. Raises UnavailableError that says why it cannot be."""
        if not driver.can_register(device, read_only=view.readonly):
            only = "that may only be read (kvfs mount --access trusted lets engines write)" if view.readonly else ""
            raise UnavailableError(f"{driver.name_of(device)} cannot register host memory {only}".rstrip())
        pinned = cls(driver, view, device)
        driver.register(pinned._begin, view.nbytes, device, read_only=view.readonly)
        return pinned

    def holds(self, view: memoryview) -> bool:
        """Whether all of a view lies in this memory."""
        begin = address_of(view)
        return self._begin <= begin and begin + view.nbytes <= self._end

    def copy(self, source: memoryview, target_address: int, stream: int) -> None:
        """Queue a copy to the device on a stream. The bytes must neither change nor go before it is done."""
        self._driver.copy_to_device(target_address, address_of(source), source.nbytes, stream, self.device)

    def close(self) -> None:
        """Give it back; nothing is being copied out of it."""
        try:
            self._driver.unregister(self._begin, self.device)
        finally:
            self.view.release()
