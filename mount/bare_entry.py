"""A directory entry that names an inode and its kind, and tells nothing else of it.

pyfuse3 answers READDIRPLUS alone, whose entries carry attributes; to each the kernel makes an inode, and it counts as
looked up. FUSE allows an entry without them: its `nodeid` is 0 while the number in the directory stands ("it only means the
userspace did not want to return attributes for this entry", fs/fuse/readdir.c). pyfuse3 3.4 and 3.5 set both at once, in
`EntryAttributes.st_ino`. They are two words of that object, libfuse's `struct fuse_entry_param`: here they are found by a
number that is in it twice, and set apart. Where they cannot be found there is no bare entry, and nothing is lost but time.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Generic, Protocol, TypeVar

_WORD = struct.Struct("=Q")
_SIGN = 0x9E3779B97F4A7C15  # a number that nothing else in such an object is


class Named(Protocol):
    """What of pyfuse3.EntryAttributes says which inode an entry is."""

    st_ino: int


E = TypeVar("E", bound=Named)


class BareEntry(Generic[E]):
    """An entry whose inode can be set without the kernel being told of it; its mode, set before, gives the kind.

    Attributes: entry: to be handed to the kernel. It is all of the memory that is written to, so it lives as long as this.
    """

    def __init__(self, entry: E, inode_at: int) -> None:
        self.entry = entry
        self._inode = ctypes.c_uint64.from_address(id(entry) + inode_at)

    @classmethod
    def of(cls, entry: E) -> BareEntry[E] | None:
        """Make an entry bare; None if it is not laid out as it should be, or there is no telling how it is."""
        entry.st_ino = _SIGN
        found = _words(entry, _SIGN)
        if len(found) != 2:
            entry.st_ino = 0
            return None
        nodeid_at, inode_at = found  # the order of struct fuse_entry_param
        ctypes.c_uint64.from_address(id(entry) + nodeid_at).value = 0
        if entry.st_ino != 0 or _words(entry, _SIGN) != [inode_at]:
            return None
        return cls(entry, inode_at)

    def naming(self, inode: int) -> E:
        """The entry, with this inode."""
        self._inode.value = inode
        return self.entry


def _words(entry: object, value: int) -> list[int]:
    """Where in the memory of an object of C's a word has this value, in bytes from its start."""
    memory = ctypes.string_at(id(entry), type(entry).__basicsize__)
    return [
        at for at in range(0, len(memory) - _WORD.size + 1, _WORD.size) if memory[at:].startswith(_WORD.pack(value))
    ]
