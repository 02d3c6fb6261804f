"""The file that `kvfs record` writes: whole up to the last flush, whatever becomes of the disk.

Where the file system is full a line may be cut, and a gzip stream lacks its end. So when a write fails the file is cut
back to what was flushed before, and a gzip stream is ended there: each flush leaves it at a byte boundary (RFC 1951, 3.2.4:
an empty stored block), behind which one empty last block, the checksum and the length make it whole (RFC 1952, 2.3.1).
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from pathlib import Path
from types import TracebackType
from typing import Self

from kvfs.errors import UnavailableError, UsageError

_GZIP_HEADER = struct.pack("<BBBBIBB", 0x1F, 0x8B, 8, 0, 0, 0, 255)  # no name, no time, no system
_EMPTY_LAST_BLOCK = b"\x03\x00"


class TraceFile:
    """A new file, readable by its owner only, compressed if its name ends in .gz.

    Attributes: has_failed: a write did, and nothing can be added.

    Raises UsageError if it cannot be made; `write` and `flush` raise UnavailableError, after which the file is whole.
    """

    def __init__(self, path: str, *, may_replace: bool) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if may_replace else os.O_EXCL)
        try:
            self._raw = os.fdopen(os.open(Path(path), flags, 0o600), "wb", buffering=0)
        except FileExistsError as error:
            raise UsageError(f"{path} is there already; --force writes over it") from error
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from error
        self._path = path
        self._deflate = zlib.compressobj(wbits=-zlib.MAX_WBITS) if path.endswith(".gz") else None
        self._waiting = bytearray(_GZIP_HEADER if self._deflate else b"")
        self._crc = self._size = 0
        self._marks = [(0, 0, 0)]  # the last two places to which it can be cut: (offset, crc, size)
        self.has_failed = False

    @property
    def num_bytes(self) -> int:
        """What stands in the file."""
        return self._marks[-1][0]

    def write(self, raw: bytes) -> None:
        """Append; in the file with the next flush."""
        if self._deflate is None:
            self._waiting += raw
            return
        self._waiting += self._deflate.compress(raw)
        self._crc, self._size = zlib.crc32(raw, self._crc), self._size + len(raw)

    def flush(self) -> None:
        """What was written so far is in the file, whatever becomes of this process."""
        if self._deflate is not None:
            self._waiting += self._deflate.flush(zlib.Z_SYNC_FLUSH)
        self._put()
        self._marks = [self._marks[-1], (self._raw.tell(), self._crc, self._size)]

    def _put(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: self._raw.write(self._waiting)]
        except OSError as error:
            self.has_failed = True
            self._cut_back()
            raise UnavailableError(f"cannot write {self._path}: {error.strerror}") from error

    def _cut_back(self) -> None:
        """To the last mark at which its end has room."""
        for offset, crc, size in reversed(self._marks):
            with contextlib.suppress(OSError):
                os.ftruncate(self._raw.fileno(), offset)
                if self._deflate is not None and offset:
                    os.pwrite(self._raw.fileno(), _end(crc, size), offset)
                return

    def close(self) -> None:
        """End it; nothing to do if a write failed."""
        try:
            if not self.has_failed:
                if self._deflate is not None:
                    self._waiting += self._deflate.flush(zlib.Z_FINISH) + struct.pack(
                        "<LL", self._crc, self._size & 0xFFFFFFFF
                    )
                self._put()
        finally:
            self._raw.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _end(crc: int, size: int) -> bytes:
    return _EMPTY_LAST_BLOCK + struct.pack("<LL", crc, size & 0xFFFFFFFF)
