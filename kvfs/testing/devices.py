"""A fake GPU for tests of what decides by the destination: its memory is the host's. It proves nothing about CUDA.

(What calls CUDA and kvikio is tested against a fake libcuda in tests/fake_cuda, and where there is a GPU.)
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

from kvfs.addresses import address_of
from kvfs.device.destination import Destination
from kvfs.device.gpu import Way
from kvfs.device.host import read_fully
from kvfs.device.slab import Slab
from kvfs.errors import UnavailableError
from kvfs.system import System


class FakeDeviceMemory:
    """Memory that says it lies on a GPU. Attributes: host: its bytes, for the test to look at."""

    def __init__(self, size_bytes: int, *, is_read_only: bool = False, strides: tuple[int, ...] | None = None) -> None:
        self.host = memoryview(mmap.mmap(-1, max(1, size_bytes)))[:size_bytes]
        self._is_read_only = is_read_only
        self._strides = strides

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """See CUDA Array Interface, version 3."""
        data = (address_of(self.host), self._is_read_only)
        return {"shape": (len(self.host),), "typestr": "|u1", "data": data, "version": 3, "strides": self._strides}


class FakeGpu:
    """A `kvfs.device.gpu.Carrier` that fills `FakeDeviceMemory` and remembers what it was asked for.

    Attributes: reads: (offset, size) of each part; copies: size of each; is_closed; error: raised by what comes next.
    """

    def __init__(self) -> None:
        self.reads: list[tuple[int, int]] = []
        self.copies: list[int] = []
        self.is_closed = False
        self.num_failures = 0
        self.error: Exception | None = None

    def read(self, fd: int, parts: Sequence[tuple[int, Destination]]) -> Way:
        """See Carrier."""
        self._raise()
        for offset, target in parts:
            self.reads.append((offset, target.size_bytes))
            read_fully(fd, offset, _host_of(target), System())
        return Way.KVIKIO

    def copy(self, source: memoryview, target: Destination) -> Way:
        """See Carrier."""
        self._raise()
        self.copies.append(target.size_bytes)
        _host_of(target)[:] = source
        return Way.RING

    def slab(self, size_bytes: int, device: int) -> Slab:
        """See Carrier."""
        raise UnavailableError("the memory of a fake GPU is made by FakeDeviceMemory")

    def carried(self) -> dict[str, int]:
        """See Carrier."""
        return {"FAKE": sum(size for _, size in self.reads)}

    def close(self) -> None:
        """See Carrier."""
        self.is_closed = True

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error


def _host_of(target: Destination) -> memoryview:
    owner = target.owner
    assert isinstance(owner, FakeDeviceMemory)
    begin = target.address - address_of(owner.host)
    return owner.host[begin : begin + target.size_bytes]
