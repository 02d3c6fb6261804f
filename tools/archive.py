"""Tar archives as a stream of members, of whoever made them: ustar, GNU and pax headers; plain, gzip, bzip2 or xz.

Nothing is believed before it is bounded, and a cut is never taken for an end. The standard library's tarfile reads and
skips as much as a header says, has no limit for the headers themselves, and ends in silence where a stream was cut
between two members or a header is damaged. Sparse members are named, not unfolded.

Concurrency: reads in pieces, and looks for Ctrl-C before each; whoever reads says meanwhile that it is alive.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from kvfs.tools.copying import StoppedError
from kvfs.tools.progress import Track

_BLOCK_BYTES = 512
_PIECE_BYTES = 1 << 20
_MAX_EXTENSION_BYTES = 1 << 20  # of a long name, or of pax headers; a path has 4 KiB, an attribute 64 KiB
_MAX_SIZE = (1 << 63) - 1
_XZ_MEMORY_BYTES = 256 << 20  # xz -9 needs 65 MiB

_WITHOUT_CONTENT = b"123456"  # links, devices, directories, FIFOs
_EXTENSIONS = b"xXgLK"
_PAX_LENGTH = re.compile(rb"([0-9]{1,9}) ")
_OCTAL = re.compile(rb"[0-7]*")
_DIGITS = re.compile(r"[0-9]{1,19}")
_CUT = "it ends in the middle of a file"


class ArchiveError(Exception):
    """What is wrong with an archive, in half a sentence."""


class Readable(Protocol):
    """What bytes come from; fewer than asked for only at the end."""

    def read(self, size: int, /) -> bytes:  # noqa: D102 - as files have it
        ...


@dataclass(frozen=True)
class Member:
    """A member of an archive.

    Attributes:
        name: as it stands there; undecodable bytes are surrogates.
        size: of its content in the archive, in bytes; at most 2^63 - 1, whatever the archive really has.
        is_file, is_sparse: whether it is a regular file; whether its content has holes that are left out.
    """

    name: str
    size: int
    is_file: bool
    is_sparse: bool


class Archive:
    """The members one after the other; `read` gives the content of the one that was given last.

    Both raise ArchiveError, StoppedError after Ctrl-C, and OSError.
    """

    def __init__(self, file: Readable, track: Track) -> None:
        self._file = file
        self._track = track
        self._is_begun = False
        self._size = 0  # of the content of the member at hand
        self._left = 0  # of it and its padding

    def __iter__(self) -> Iterator[Member]:
        head = self._file.read(len(_XZ))
        self._file = _unpacked(_Begun(head, self._file))
        always: dict[str, str] = {}
        once: dict[str, str] = {}
        while (block := self._header()) is not None:
            kind = block[156:157]
            size = _number(block[124:136])
            if kind in _EXTENSIONS:
                if size > _MAX_EXTENSION_BYTES:
                    raise ArchiveError("a header in it is too large")
                self._begin(size)
                raw = bytes(self.read())
                self._skip()
                if kind == b"L":
                    once["path"] = _text(raw)
                elif kind != b"K":
                    (always if kind == b"g" else once).update(_pax(raw))
                continue
            member = _member(block, kind, size, always | once)
            once = {}
            more = kind == b"S" and block[482]
            while more:
                more = self._whole(_BLOCK_BYTES)[504]
            self._begin(member.size)
            yield member
            self._skip()
        if once:
            raise ArchiveError("its last header belongs to no file")
        while self._take(_PIECE_BYTES):
            pass  # whoever writes into a pipe is not to be cut off

    def read(self) -> memoryview:
        """The whole content of the member at hand, once; look at its size first."""
        raw = memoryview(bytearray(self._size))
        done = 0
        while done < self._size:
            piece = self._take(min(self._size - done, _PIECE_BYTES))
            if not piece:
                raise ArchiveError(_CUT)
            raw[done : done + len(piece)] = piece
            done += len(piece)
        self._left -= self._size
        self._size = 0
        return raw

    def _begin(self, size: int) -> None:
        self._size = size
        self._left = -(-size // _BLOCK_BYTES) * _BLOCK_BYTES

    def _skip(self) -> None:
        while self._left:
            piece = self._take(min(self._left, _PIECE_BYTES))
            if not piece:
                raise ArchiveError(_CUT)
            self._left -= len(piece)

    def _header(self) -> bytes | None:
        """The next block, a good header; None at the end, which two blocks of zeros mark."""
        is_first, self._is_begun = not self._is_begun, True
        block = self._take(_BLOCK_BYTES)
        if not block:
            raise ArchiveError("it is empty" if is_first else "it ends without an end marker, as one that was cut")
        if len(block) < _BLOCK_BYTES:
            raise ArchiveError("it does not begin as one" if is_first else _CUT)
        if not any(block):
            if not (second := self._take(_BLOCK_BYTES)):
                raise ArchiveError("it ends with half an end marker, as one that was cut")
            if len(second) < _BLOCK_BYTES or any(second):
                raise ArchiveError("a header in it is damaged")
            return None
        rest = block[:148] + b" " * 8 + block[156:]
        sums = (sum(rest), sum(byte - 256 if byte > 127 else byte for byte in rest))
        if _number(block[148:156], "it does not begin as one" if is_first else "a header in it is damaged") not in sums:
            raise ArchiveError("it does not begin as one" if is_first else "a header in it is damaged")
        return block

    def _whole(self, size: int) -> bytes:
        raw = self._take(size)
        if len(raw) < size:
            raise ArchiveError(_CUT)
        return raw

    def _take(self, size: int) -> bytes:
        """Up to `size` bytes, at most a piece; fewer only at the end."""
        if self._track.is_stopping:
            raise StoppedError
        try:
            raw = self._file.read(size)
        except (EOFError, zlib.error, lzma.LZMAError) as error:
            raise ArchiveError(f"its compression is damaged: {error}") from error
        except OSError as error:
            if error.errno is None:  # gzip and bz2 say so what is wrong with their input
                raise ArchiveError(f"its compression is damaged: {error}") from error
            raise
        self._track.advance(len(raw))
        return raw


class _Begun:
    """A file whose first bytes have been read."""

    def __init__(self, head: bytes, file: Readable) -> None:
        self.head = head
        self._file = file

    def read(self, size: int, /) -> bytes:
        if not self.head:
            return self._file.read(size)
        piece, self.head = self.head[:size], self.head[size:]
        return piece + self._file.read(size - len(piece))


class _Unpacked:
    """What is in one or more bzip2 or xz streams."""

    def __init__(self, file: Readable, begin: bytes, new: Callable[[], bz2.BZ2Decompressor]) -> None:
        self._file = file
        self._begin = begin
        self._new = new
        self._now = new()

    def read(self, size: int, /) -> bytes:
        pieces = []
        while size:
            if self._now.eof:
                rest = self._now.unused_data or self._file.read(_PIECE_BYTES)
                if len(rest) < len(self._begin):
                    rest += self._file.read(_PIECE_BYTES)
                if not rest.startswith(self._begin):
                    break
                self._now = self._new()
            else:
                rest = self._file.read(_PIECE_BYTES) if self._now.needs_input else b""
                if self._now.needs_input and not rest:
                    raise EOFError("it ends in the middle")
            piece = self._now.decompress(rest, size)
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)


_GZIP, _BZIP2, _XZ = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0"


def _unpacked(file: _Begun) -> Readable:
    if file.head.startswith(_GZIP):
        return gzip.GzipFile(fileobj=file, mode="rb")  # type: ignore[call-overload, no-any-return]
    if file.head.startswith(_BZIP2):
        return _Unpacked(file, _BZIP2, bz2.BZ2Decompressor)
    if file.head.startswith(_XZ):
        return _Unpacked(file, _XZ, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, _XZ_MEMORY_BYTES))  # type: ignore[return-value, arg-type]
    return file


def _member(block: bytes, kind: bytes, size: int, facts: dict[str, str]) -> Member:
    name = _text(block[:100])
    if block[257:263] == b"ustar\0" and block[345]:
        name = f"{_text(block[345:500])}/{name}"
    name = facts.get("GNU.sparse.name") or facts.get("path") or name
    if kind in (b"\0", b"0") and name.endswith("/"):
        kind = b"5"
    if kind in _WITHOUT_CONTENT:
        return Member(name, 0, False, False)
    if "size" in facts:
        size = int(facts["size"]) if _DIGITS.fullmatch(facts["size"]) else _MAX_SIZE + 1
    if size > _MAX_SIZE:
        raise ArchiveError(f"it gives {name} an impossible size")
    return Member(name, size, kind in (b"\0", b"0", b"7", b"S"), kind == b"S" or "GNU.sparse." in facts)


def _pax(raw: bytes) -> dict[str, str]:
    """Those of the records `LENGTH KEYWORD=VALUE` that matter here."""
    found = {}
    at = 0
    while at < len(raw) and raw[at]:
        match = _PAX_LENGTH.match(raw, at)
        end = at + int(match[1]) if match else 0
        if match is None or not match.end() < end <= len(raw) or raw[end - 1] != ord("\n"):
            raise ArchiveError("a pax header in it is damaged")
        keyword, _, value = raw[match.end() : end - 1].partition(b"=")
        if keyword.startswith(b"GNU.sparse."):
            found["GNU.sparse."] = ""
        if keyword in (b"path", b"size", b"GNU.sparse.name"):
            found[keyword.decode()] = _text(value)
        at = end
    return found


def _number(field: bytes, otherwise: str = "a header in it is damaged") -> int:
    """A number, octal or, where the first bit is set, binary. Raises ArchiveError."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:])
    digits = field.split(b"\0", 1)[0].strip(b" ")
    if not _OCTAL.fullmatch(digits):
        raise ArchiveError(otherwise)
    return int(digits or b"0", 8)


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")
