"""xxh3_64 of many pieces of memory, without holding the interpreter.

xxhash gives the interpreter up for inputs of 100 KB and more only. Layers are often shorter, and a thread that takes
checksums of a thousand of them makes the event loop wait at every system call (0.05 to 0.2 ms each). The function that
xxhash is built on is called through ctypes instead, which always gives it up; where it cannot be found xxhash itself is called.

There are two of that function: one that is compiled for every processor of its kind, and on x86 one that takes what this
one has (64 KiB in the core's cache, with AVX2: 20 GB/s beside 12), which is what xxhash itself calls.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence
from itertools import pairwise

import xxhash

from kvfs.addresses import address_of

_NAMES = ("XXH3_64bits_dispatch", "XXH3_64bits")
_MIN_LENGTH = 16 << 10  # on the average; a call through ctypes takes up to 0.7 us longer, beside 4 us for 64 KiB
_PROBE = bytes(range(256)) * 16


def _find() -> Callable[[int, int], int] | None:
    """XXH3_64bits, the faster one, of the library that the module xxhash holds or is linked to."""
    try:
        library = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
        function = library[next(name for name in _NAMES if hasattr(library, name))]
    except (ImportError, StopIteration, OSError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    function.restype = ctypes.c_uint64
    probe = ctypes.create_string_buffer(_PROBE, len(_PROBE))
    if function(ctypes.addressof(probe), len(_PROBE)) != xxhash.xxh3_64_intdigest(_PROBE):
        return None
    return function


_function = _find()


def checksums(memory: memoryview, bounds: Sequence[int]) -> tuple[int, ...]:
    """xxh3_64 of each piece of `memory` between two neighbours of `bounds`, which ascend and lie within it."""
    if _function is None or bounds[-1] - bounds[0] < _MIN_LENGTH * (len(bounds) - 1):
        take = xxhash.xxh3_64_intdigest
        return tuple([take(memory[begin:end]) for begin, end in pairwise(bounds)])
    if bounds[0] < 0 or bounds[-1] > len(memory):
        raise ValueError(f"pieces up to {bounds[-1]} do not lie within {len(memory)} bytes")
    base = address_of(memory)
    return tuple([_function(base + begin, end - begin) for begin, end in pairwise(bounds)])
