"""Where a piece of memory lies, for C functions that are called through ctypes.

Such calls give the interpreter up while they last, which copies between memoryviews and short checksums do not.
"""

from __future__ import annotations

import ctypes


class _Buffer(ctypes.Structure):
    """Py_buffer, part of the stable interface since Python 3.11 (Include/pybuffer.h)."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_SIMPLE = 0  # PyBUF_SIMPLE: contiguous bytes, or BufferError
# Functions of our own: the argument types of those of `ctypes.pythonapi` are shared by the whole process.
_get = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
_release = ctypes.PYFUNCTYPE(None, ctypes.POINTER(_Buffer))(("PyBuffer_Release", ctypes.pythonapi))


def address_of(memory: memoryview) -> int:
    """Where the first byte is, of memory that may be read-only; good as long as the caller holds `memory`.

    Raises BufferError if the bytes do not lie one after the other.
    """
    buffer = _Buffer()
    _get(memory, buffer, _SIMPLE)
    try:
        return buffer.buf or 0
    finally:
        _release(buffer)
