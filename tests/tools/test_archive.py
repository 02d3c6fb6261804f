"""`kvfs.tools.archive` against archives that lie, and ones of every kind that is honest."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import tarfile
import threading
from collections.abc import Callable

import pytest

from kvfs.tools.archive import Archive, ArchiveError
from kvfs.tools.copying import StoppedError
from kvfs.tools.progress import Track
from kvfs.tools.words import printable

CONTENTS = {"a/short": b"x" * 700, "b/" + "long/" * 60 + "name": b"y" * 512, "ümlaut\udcff": b"", "z": bytes(5_000_000)}


def track(stopping: threading.Event | None = None) -> Track:
    return Track(lambda: None, stopping or threading.Event(), lambda _: None)


def packed(contents: dict[str, bytes], form: int = tarfile.PAX_FORMAT, **headers: str) -> bytes:
    """An archive; the pax headers are those of its first member."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.pax_headers, headers = {key.replace("__", "."): value for key, value in headers.items()}, {}
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def unpacked(raw: bytes) -> dict[str, bytes]:
    archive = Archive(io.BytesIO(raw), track())
    return {member.name: bytes(archive.read()) for member in archive}


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("packing", [bytes, gzip.compress, bz2.compress, lzma.compress, None])
def test_honest_archives(form: int, packing: Callable[[bytes], bytes] | None) -> None:
    """Both formats, long names and odd ones, plain or packed, also in several streams; read as well as passed over."""
    raw = packed(CONTENTS, form)
    whole = packing(raw) if packing else bz2.compress(raw[:1000]) + bz2.compress(raw[1000:])
    assert unpacked(whole) == CONTENTS
    assert [member.name for member in Archive(io.BytesIO(whole), track())] == list(CONTENTS)


def test_every_cut_is_noticed() -> None:
    """Wherever an archive is cut before its end marker is whole, also exactly between two members."""
    raw = packed({"a": b"1" * 600, "b": b"2", "c" * 120: b"3"})
    end = len(raw.rstrip(b"\0"))
    end = -(-end // 512) * 512 + 1024
    for size in range(0, end, 128):
        with pytest.raises(ArchiveError):
            unpacked(raw[:size])
    with pytest.raises(ArchiveError, match="without an end marker, as one that was cut"):
        unpacked(raw[:1536])
    assert len(unpacked(raw[:end])) == 3
    for pack in (gzip.compress, bz2.compress, lzma.compress):
        whole = pack(raw)
        for size in range(1, len(whole) - 1, 7):
            with pytest.raises(ArchiveError):
                unpacked(whole[:size])


def test_damage_is_noticed() -> None:
    """A flipped byte in any header, not only the first."""
    raw = packed({"a": b"1", "b": b"2"})
    for offset in (3, 130, 150, 1024 + 3, 1024 + 130):
        with pytest.raises(ArchiveError, match=r"begin as one|damaged"):
            unpacked(raw[:offset] + bytes([raw[offset] ^ 0x15]) + raw[offset + 1 :])


@pytest.mark.parametrize("size", ["99999999999999999999999", "9" * 5000, "-1", "x", "1_0", "٣"])
def test_impossible_sizes(size: str) -> None:
    with pytest.raises(ArchiveError, match="impossible size"):
        unpacked(packed({"a": b"1"}, size=size))


def test_a_size_beyond_the_end() -> None:
    """It costs what is there, not what is claimed."""
    archive = Archive(io.BytesIO(packed({"a": b"1"}, size=str((1 << 63) - 1))), track())
    with pytest.raises(ArchiveError, match="in the middle"):
        list(archive)


@pytest.mark.parametrize(
    "headers",
    [
        {"GNU__sparse__map": "a,b"},
        {"GNU__sparse__size": "x"},
        {"GNU__sparse__major": "1", "GNU__sparse__minor": "0", "GNU__sparse__name": "real"},
    ],
)
def test_sparse_members_are_named_only(headers: dict[str, str]) -> None:
    """Whatever their maps say; what follows is found."""
    found = list(Archive(io.BytesIO(packed({"a": b"no map", "b": b"2"}, **headers)), track()))
    assert [(member.name, member.is_sparse) for member in found] == [
        ("real" if "GNU__sparse__name" in headers else "a", True),
        ("b", False),
    ]


def test_headers_have_a_limit() -> None:
    """A name of 2 MiB is refused before it is read."""
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        with pytest.raises(ArchiveError, match="a header in it is too large"):
            unpacked(packed({"a" * (2 << 20): b""}, form))


@pytest.mark.parametrize("record", [b"0 path=x\n", b"5 path=x\n", b"99 path=x\n", b"path=x\n", b"9" * 4000])
def test_damaged_pax_headers(record: bytes) -> None:
    raw = bytearray(packed({"a": b"1"}, path="x"))
    raw[512:1024] = record[:512].ljust(512, b"\0")
    with pytest.raises(ArchiveError, match="pax header"):
        unpacked(bytes(raw))


def test_stopping() -> None:
    """Ctrl-C is seen between two pieces of one member."""
    stopping = threading.Event()

    class Endless:
        def __init__(self) -> None:
            self.head = io.BytesIO(packed({"a": b""}, size=str(1 << 60))[:1536])
            self.num_reads = 0

        def read(self, size: int, /) -> bytes:
            self.num_reads += 1
            if self.num_reads == 20:
                stopping.set()
            assert self.num_reads < 30
            return self.head.read(size) or bytes(size)

    with pytest.raises(StoppedError):
        list(Archive(Endless(), track(stopping)))


def test_noise() -> None:
    """Nothing but ArchiveError, whatever the bytes are; the seed is fixed."""
    dice = random.Random(7)
    whole = packed({"a" * 120: b"1" * 600, "b": b"2"}, path="q")
    for _ in range(2000):
        raw = bytearray(whole)
        for _ in range(dice.randrange(1, 4)):
            raw[dice.randrange(4096)] = dice.randrange(256)
        for at in range(0, 4096, 512):  # so that the damage is believed
            raw[at + 148 : at + 156] = b"%06o\0 " % (sum(raw[at : at + 148]) + sum(raw[at + 156 : at + 512]) + 256)
        try:
            for member in Archive(io.BytesIO(bytes(raw)), track()):
                assert 0 <= member.size < 1 << 63
        except ArchiveError:
            pass


def test_names_for_a_terminal() -> None:
    assert printable("plain ümlaut 中.tar") == "plain ümlaut 中.tar"
    assert printable("\x1b]0;x\x07\x9b\udcff\u202e\n") == r"\x1b]0;x\x07\x9b\xff\u202e\n"
