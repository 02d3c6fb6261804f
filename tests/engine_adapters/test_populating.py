"""Pages of memory that are made ready: they are there, and hold what they held."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from kvfs.engine_adapters.populating import PIECE_BYTES, Populating


def resident_pages(address: int) -> int:
    """Anonymous kilobytes of the mapping at this address, in pages."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            break
    return next(int(line.split()[1]) for line in lines if line.startswith("Rss:")) * 1024 // mmap.PAGESIZE


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
    assert resident_pages(address) == size // mmap.PAGESIZE
    assert memory[PIECE_BYTES - 1] == 7
    assert not memory[:100].any()
    populating.close()
