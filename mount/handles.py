"""What is open: directories that are being listed, and files, by the number that the kernel has for each.

Concurrency: belongs to the event loop's thread; nothing waits.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from kvfs.catalog import Chunk
from kvfs.mount.errnos import Refused
from kvfs.mount.listing import Listing
from kvfs.mount.staged_names import StagedFile


@dataclass(slots=True)
class OpenFile:
    """An open file: a leased chunk, one that is being copied in, or the content as it was (None: the events).

    What is there and is opened to be changed is both: `staged` is written, and the other is read. The kernel knows both by
    one inode, and shows whoever maps it the pages that any descriptor has brought.
    """

    chunk: Chunk | None
    content: bytes | None
    staged: StagedFile | None = None


class Handles:
    """The numbers, which are never used again. What does not have the kind that is asked for is EBADF."""

    def __init__(self) -> None:
        self._open: dict[int, OpenFile | Listing] = {}
        self._next = 1

    def add(self, opened: OpenFile | Listing) -> int:
        """A number for what was opened."""
        handle = self._next
        self._next += 1
        self._open[handle] = opened
        return handle

    def directory(self, handle: int) -> Listing:
        """A directory."""
        found = self._open.get(handle)
        if not isinstance(found, Listing):
            raise Refused(errno.EBADF)
        return found

    def file(self, handle: int) -> OpenFile:
        """A file."""
        found = self._open.get(handle)
        if not isinstance(found, OpenFile):
            raise Refused(errno.EBADF)
        return found

    def staged(self, handle: int) -> StagedFile:
        """The file that a handle writes to."""
        staged = self.file(handle).staged
        if staged is None:
            raise Refused(errno.EBADF)
        return staged

    def pop(self, handle: int) -> OpenFile | Listing | None:
        """It was closed."""
        return self._open.pop(handle, None)

    def pop_files(self) -> list[OpenFile]:
        """All was closed; which of it were files."""
        files = [opened for opened in self._open.values() if isinstance(opened, OpenFile)]
        self._open.clear()
        return files
