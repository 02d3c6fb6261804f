"""Pages of memory that are made ready: they are there, and hold what they held."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from kvfs.engine_adapters.populating import PIECE_BYTES, Populating


def resident_pages(address: int, size: int) -> int:
    """How many of these pages are in memory, mincore(2)."""
    pages = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0, ctypes.get_errno()
    return sum(page & 1 for page in pages)


def test_pages_are_there_and_hold_what_they_held() -> None:
    size = PIECE_BYTES + 8 * mmap.PAGESIZE
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_NOHUGEPAGE)
    memory = np.frombuffer(region, dtype=np.uint8)
    memory[PIECE_BYTES - 1] = 7
    address = memory.ctypes.data
    populating = Populating([(address, size)])
    populating.start()
    populating.wait()
    assert resident_pages(address, size) == size // mmap.PAGESIZE
    assert memory[PIECE_BYTES - 1] == 7
    assert not memory[:100].any()
    populating.close()
