"""CUDA's driver through ctypes: memory, copies, streams and events, as far as reading needs them.

Contexts are the devices' primary ones, which torch uses too. Nothing is loaded before `open_driver` is called, and
whoever calls it must not fork any more for a process that is to use CUDA.

Concurrency: all methods may be called by any thread; each makes the context current for as long as it runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator

from kvfs.errors import UnavailableError

LIBRARY = "libcuda.so.1"
_HOST_ALLOC_PORTABLE = 1
_REGISTER_PORTABLE, _REGISTER_READ_ONLY = 1, 8
_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2
_POINTER_DEVICE_ORDINAL = 9
_CAN_REGISTER, _CAN_REGISTER_READ_ONLY = 99, 113  # CU_DEVICE_ATTRIBUTE_…_HOST_REGISTER_SUPPORTED

_pointer, _size, _int, _uint = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint
_device_pointer = ctypes.c_uint64
_SIGNATURES: dict[str, list[type]] = {
    "cuInit": [_uint],
    "cuDriverGetVersion": [_pointer],
    "cuDeviceGetCount": [_pointer],
    "cuDeviceGet": [_pointer, _int],
    "cuDeviceGetName": [_pointer, _int, _int],
    "cuDeviceGetAttribute": [_pointer, _int, _int],
    "cuDevicePrimaryCtxRetain": [_pointer, _int],
    "cuCtxPushCurrent_v2": [_pointer],
    "cuCtxPopCurrent_v2": [_pointer],
    "cuPointerGetAttribute": [_pointer, _int, _device_pointer],
    "cuMemAlloc_v2": [_pointer, _size],
    "cuMemFree_v2": [_device_pointer],
    "cuMemHostAlloc": [_pointer, _size, _uint],
    "cuMemFreeHost": [_pointer],
    "cuMemHostRegister_v2": [_pointer, _size, _uint],
    "cuMemHostUnregister": [_pointer],
    "cuMemcpyHtoDAsync_v2": [_device_pointer, _pointer, _size, _pointer],
    "cuStreamCreate": [_pointer, _uint],
    "cuStreamDestroy_v2": [_pointer],
    "cuStreamSynchronize": [_pointer],
    "cuEventCreate": [_pointer, _uint],
    "cuEventDestroy_v2": [_pointer],
    "cuEventRecord": [_pointer, _pointer],
    "cuEventSynchronize": [_pointer],
    "cuGetErrorName": [_int, _pointer],
}


class Driver:
    """CUDA, with at least one device. Attributes: num_devices; version: of the driver, 13000 for 13.0."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._contexts: dict[int, int] = {}
        self._lock = threading.Lock()
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _int
        self._call("cuInit", 0)
        self.num_devices = self._number("cuDeviceGetCount")
        self.version = self._number("cuDriverGetVersion")
        if not self.num_devices:
            raise UnavailableError("CUDA is there, but no device")

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise UnavailableError(f"{name} failed: {(text.value or str(code).encode()).decode()}")

    def _number(self, name: str, *arguments: object) -> int:
        found = _int()
        self._call(name, ctypes.byref(found), *arguments)
        return found.value

    def _new(self, name: str, *arguments: object) -> int:
        found = ctypes.c_void_p()
        self._call(name, ctypes.byref(found), *arguments)
        return found.value or 0

    # devices

    def name_of(self, device: int) -> str:
        """What the device calls itself."""
        text = ctypes.create_string_buffer(128)
        self._call("cuDeviceGetName", text, len(text), self._number("cuDeviceGet", device))
        return text.value.decode(errors="replace")

    def device_of(self, address: int) -> int:
        """The device that memory lies on; raises UnavailableError if it is none of CUDA's."""
        found = _int()
        self._call("cuPointerGetAttribute", ctypes.byref(found), _POINTER_DEVICE_ORDINAL, address)
        return found.value

    def can_register(self, device: int, *, read_only: bool) -> bool:
        """Whether host memory that somebody else has allocated can be registered, also if this process may only read it."""
        attribute = _CAN_REGISTER_READ_ONLY if read_only else _CAN_REGISTER
        return bool(self._number("cuDeviceGetAttribute", attribute, self._number("cuDeviceGet", device)))

    @contextlib.contextmanager
    def current(self, device: int) -> Iterator[None]:
        """Within it, this thread uses the device."""
        with self._lock:
            if device not in self._contexts:
                handle = self._number("cuDeviceGet", device)
                self._contexts[device] = self._new("cuDevicePrimaryCtxRetain", handle)
        self._call("cuCtxPushCurrent_v2", self._contexts[device])
        try:
            yield
        finally:
            self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    # memory

    def allocate(self, size_bytes: int, device: int) -> int:
        """The address of new device memory, an allocation of its own, for `free`."""
        found = _device_pointer()
        with self.current(device):
            self._call("cuMemAlloc_v2", ctypes.byref(found), size_bytes)
        return found.value

    def free(self, address: int, device: int) -> None:
        """Give device memory back."""
        with self.current(device):
            self._call("cuMemFree_v2", address)

    def allocate_host(self, size_bytes: int, device: int) -> int:
        """The address of new pinned host memory, page-aligned, for `free_host`."""
        with self.current(device):
            return self._new("cuMemHostAlloc", size_bytes, _HOST_ALLOC_PORTABLE)

    def free_host(self, address: int, device: int) -> None:
        """Give pinned memory back."""
        with self.current(device):
            self._call("cuMemFreeHost", address)

    def register(self, address: int, size_bytes: int, device: int, *, read_only: bool) -> None:
        """Pin host memory that is there already, so that the device reads it itself; for `unregister`."""
        with self.current(device):
            flags = _REGISTER_PORTABLE | (_REGISTER_READ_ONLY if read_only else 0)
            self._call("cuMemHostRegister_v2", address, size_bytes, flags)

    def unregister(self, address: int, device: int) -> None:
        """Undo `register`; the memory has to be mapped still."""
        with self.current(device):
            self._call("cuMemHostUnregister", address)

    # what happens on the device

    def create_stream(self, device: int) -> int:
        """A stream that does not wait for the default one."""
        with self.current(device):
            return self._new("cuStreamCreate", _STREAM_NON_BLOCKING)

    def create_event(self, device: int) -> int:
        """An event; one that was never recorded has come about."""
        with self.current(device):
            return self._new("cuEventCreate", _EVENT_DISABLE_TIMING)

    def destroy(self, device: int, streams: list[int], events: list[int]) -> None:
        """Give streams and events back."""
        with self.current(device):
            for event in events:
                self._call("cuEventDestroy_v2", event)
            for stream in streams:
                self._call("cuStreamDestroy_v2", stream)

    def copy_to_device(self, target: int, source: int, size_bytes: int, stream: int, device: int) -> None:
        """Queue a copy from host memory; it goes on after this returns if that memory is pinned."""
        with self.current(device):
            self._call("cuMemcpyHtoDAsync_v2", target, source, size_bytes, stream)

    def record(self, event: int, stream: int, device: int) -> None:
        """The event comes about when the stream has done what it was told so far."""
        with self.current(device):
            self._call("cuEventRecord", event, stream)

    def wait_for_event(self, event: int, device: int) -> None:
        """Return when the event has come about."""
        with self.current(device):
            self._call("cuEventSynchronize", event)

    def wait_for_stream(self, stream: int, device: int) -> None:
        """Return when the stream has done what it was told so far."""
        with self.current(device):
            self._call("cuStreamSynchronize", stream)


_lock = threading.Lock()
_driver: Driver | UnavailableError | None = None
_opened_in: int | None = None


def open_driver() -> Driver:
    """CUDA, looked for once a process. Raises UnavailableError that says why there is none."""
    global _driver, _opened_in  # noqa: PLW0603 - the driver is one for the process, as cuInit is
    with _lock:
        if _driver is None:
            _opened_in = os.getpid()
            try:
                _driver = Driver(ctypes.CDLL(LIBRARY))
            except OSError as error:
                _driver = UnavailableError(f"there is no CUDA driver: {error}")
            except (UnavailableError, AttributeError) as error:
                _driver = UnavailableError(f"CUDA cannot be used: {error}")
        if isinstance(_driver, UnavailableError):
            raise UnavailableError(str(_driver))
        if _opened_in != os.getpid():
            raise UnavailableError("CUDA was used before this process was forked; start it with spawn instead")
        return _driver


def _forget_lock() -> None:
    """A thread of the parent may hold the lock for ever; what CUDA was in the parent stays known."""
    global _lock  # noqa: PLW0603 - a lock cannot be made anew in place
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)
