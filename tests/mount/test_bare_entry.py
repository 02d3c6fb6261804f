"""Entries that name an inode and tell nothing of it, in the memory of pyfuse3's own."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, cast

import pyfuse3
from pyfuse3 import EntryAttributes

from kvfs.mount.bare_entry import BareEntry, Named


def words(entry: object) -> list[int]:
    """Its memory, in words of 64 bits."""
    return list(memoryview(ctypes.string_at(id(entry), type(entry).__basicsize__)).cast("Q"))


def test_only_the_directory_has_the_inode() -> None:
    """What pyfuse3 shows of the entry is the number that FUSE calls nodeid, and 0 says that it is not told of."""
    bare = BareEntry.of(EntryAttributes())
    assert bare is not None
    for inode in (1 << 40, 7 << 50):
        entry = bare.naming(inode)
        assert entry.st_ino == 0
        assert words(entry).count(inode) == 1
        assert entry is bare.entry


def test_the_rest_of_the_entry_stays() -> None:
    plain, other = EntryAttributes(), EntryAttributes()
    for entry in (plain, other):
        entry.st_mode = pyfuse3.ModeT(0o040750)
        entry.st_size = 12345
    bare = BareEntry.of(other)
    assert bare is not None
    plain.st_ino = pyfuse3.InodeT(1 << 40)
    known, found = words(plain), words(bare.naming(1 << 40))
    own = {index for index, word in enumerate(known) if id(plain) <= word < id(plain) + 8 * len(known)}
    differ = {index for index, (one, two) in enumerate(zip(known, found, strict=True)) if one != two} - own - {0}
    assert len(differ) == 1
    assert found[differ.pop()] == 0


def test_an_entry_of_another_layout_is_left_alone() -> None:
    """One that has no such words, or so many that there is no telling which is which."""

    class Once(ctypes.Structure):
        _fields_ = (("st_ino", ctypes.c_uint64),)

    for entry in (SimpleNamespace(st_ino=1), Once()):
        assert BareEntry.of(cast(Named, entry)) is None
        assert cast(Any, entry).st_ino == 0
