"""Reading a file into host memory: past the page cache where the descriptor is direct, whatever the alignment.

Direct I/O wants offset, length and address to be multiples of 4096. What is not goes through aligned memory and is
copied; of an aligned destination that is the tail alone.
"""

from __future__ import annotations

import fcntl
import os

from kvfs.addresses import address_of
from kvfs.chunk import ALIGNMENT, align
from kvfs.system import System
from kvfs.volume import align_down, aligned_buffer

BOUNCE_BYTES = 1 << 20
_MAX_TRANSFER = 64 << 20


def is_direct(fd: int) -> bool:
    """Whether reads of this descriptor pass the page cache by."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def read_fully(fd: int, offset: int, view: memoryview, system: System) -> None:
    """Fill `view` from `offset` of a file. Raises OSError, or EOFError if the file ends before."""
    if not is_direct(fd):
        _read(fd, offset, view, system, step=1)
        return
    in_place = 0
    if offset % ALIGNMENT == 0 and address_of(view) % ALIGNMENT == 0:
        in_place = align_down(len(view))
        _read(fd, offset, view[:in_place], system, step=ALIGNMENT)
    if in_place < len(view):
        _read_bounced(fd, offset + in_place, view[in_place:], system)


def _read_bounced(fd: int, offset: int, view: memoryview, system: System) -> None:
    done = 0
    bounce = aligned_buffer(min(BOUNCE_BYTES, align(len(view) + offset % ALIGNMENT)))
    while done < len(view):
        begin = align_down(offset + done)
        skipped = offset + done - begin
        count = system.preadv(fd, [bounce], begin) - skipped
        if count <= 0:
            raise EOFError(f"the file ends at {begin + skipped + count}, {len(view) - done} bytes too early")
        count = min(count, len(view) - done)
        view[done : done + count] = bounce[skipped : skipped + count]
        done += count


def _read(fd: int, offset: int, view: memoryview, system: System, step: int) -> None:
    done = 0
    while done < len(view):
        count = system.preadv(fd, [view[done : done + _MAX_TRANSFER]], offset + done)
        done += max(count, 0)
        if count <= 0 or done % step:  # a direct read that is cut in the middle of a block was cut by the file's end
            raise EOFError(f"the file ends at {offset + done}, {len(view) - done} bytes too early")
