"""What bytes may be read into: host memory or CUDA memory, told apart by what the object says of itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from kvfs.addresses import address_of
from kvfs.errors import UsageError

_AS_BYTES = "hand over its bytes, such as tensor.view(torch.uint8)"


@dataclass(frozen=True, eq=False)
class Destination:
    """Contiguous memory that may be written.

    Attributes:
        address, size_bytes: of it; is_cuda: whether it lies on a GPU.
        view: the memory itself, on the host; empty on a GPU.
        owner: what keeps the memory.
    """

    address: int
    size_bytes: int
    is_cuda: bool
    view: memoryview = field(default_factory=lambda: memoryview(b""), repr=False)
    owner: object = field(default=None, repr=False)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The memory as bytes, for kvikio and torch."""
        if not self.is_cuda:
            raise AttributeError("this memory is on the host")
        data = (self.address, False)
        return {"shape": (self.size_bytes,), "typestr": "|u1", "data": data, "version": 3, "strides": None}

    def part(self, begin: int, end: int) -> Destination:
        """Bytes `begin` to before `end` of it."""
        if not 0 <= begin <= end <= self.size_bytes:
            raise UsageError(f"bytes {begin} to {end} do not lie within {self.size_bytes}")
        return Destination(self.address + begin, end - begin, self.is_cuda, self.view[begin:end], self.owner)


def destination_of(target: object) -> Destination:
    """The memory of an object with a buffer, a host tensor, or an object with ``__cuda_array_interface__``.

    Raises UsageError for what is read-only (kvikio would write to it all the same), not contiguous, or unknown.
    """
    if isinstance(target, Destination):
        return target
    try:
        # getattr's default covers host tensors; torch raises others for what the interface cannot say.
        interface = getattr(target, "__cuda_array_interface__", None)
    except (KeyError, TypeError, RuntimeError) as error:
        raise UsageError(f"this CUDA memory does not say what it is ({error!r}); {_AS_BYTES}") from error
    return _on_host(target) if interface is None else _on_gpu(target, interface)


def _on_gpu(target: object, interface: dict[str, Any]) -> Destination:
    address, is_read_only = interface["data"]
    shape, item_bytes = tuple(interface["shape"]), int(str(interface["typestr"])[2:])
    size_bytes = math.prod(shape) * item_bytes
    if is_read_only:
        raise UsageError("this CUDA memory is read-only")
    strides = interface.get("strides")
    if strides is not None and size_bytes:
        expected = item_bytes
        for extent, stride in zip(reversed(shape), reversed(tuple(strides)), strict=True):
            if extent != 1 and stride != expected:
                raise UsageError("this CUDA memory is not contiguous")
            expected *= extent
    return Destination(int(address or 0), size_bytes, True, owner=target)


def _on_host(target: object) -> Destination:
    try:
        view = memoryview(target)  # type: ignore[arg-type]
    except TypeError as error:
        as_array = getattr(target, "numpy", None)
        if as_array is None:
            raise UsageError(f"{type(target).__name__} is no memory to read into; {_AS_BYTES}") from error
        try:
            view = memoryview(as_array())
        except (TypeError, RuntimeError) as unfit:  # a dtype that numpy lacks, a tensor of another device
            raise UsageError(f"this tensor has no buffer on the host ({unfit}); {_AS_BYTES}") from unfit
    if view.readonly:
        raise UsageError("this memory is read-only")
    if not view.c_contiguous:
        raise UsageError("this memory is not contiguous")
    # An empty view of several dimensions cannot be cast.
    view = view.cast("B") if view.nbytes else memoryview(bytearray())
    return Destination(address_of(view), view.nbytes, False, view, target)
