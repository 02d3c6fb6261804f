"""Documents of namespaces: whole or told of, never believed when damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfs import namespace as namespaces
from kvfs.documents import Document, Documents, Found, decode, encode
from kvfs.errors import FormatError, UsageError
from kvfs.testing import tiny_namespace

NS = tiny_namespace()
NAME = f"{NS.directory}.json"
DOCUMENT = Document(NS, 1_700_000_000_000_000_000)


@pytest.fixture
def documents(tmp_path: Path) -> Documents:
    documents = Documents(tmp_path)
    documents.write(DOCUMENT)
    return documents


def test_what_was_written_is_read(documents: Documents) -> None:
    assert documents.read() == Found({NS.directory: DOCUMENT}, {})


def test_they_are_private(documents: Documents) -> None:
    assert documents.path.stat().st_mode & 0o777 == 0o700
    assert (documents.path / NAME).stat().st_mode & 0o777 == 0o600


def test_one_that_is_there_is_left_alone(documents: Documents) -> None:
    before = (documents.path / NAME).stat()
    documents.write(DOCUMENT)
    after = (documents.path / NAME).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    documents.write(Document(NS, 5))
    assert documents.read().by_directory == {NS.directory: Document(NS, 5)}


def test_none_at_all(tmp_path: Path) -> None:
    """A volume of an earlier version has no such directory."""
    assert Documents(tmp_path).read() == Found()
    Documents(tmp_path).remove(NS.directory)


def test_what_is_left_of_a_write_that_was_cut_short(documents: Documents) -> None:
    (documents.path / (NAME + ".unfinished")).write_bytes(b"{")
    assert documents.read() == Found({NS.directory: DOCUMENT}, {})
    documents.destroy()
    assert not documents.path.exists()


def test_removal(documents: Documents) -> None:
    documents.remove(NS.directory)
    assert documents.read() == Found()


def test_a_namespace_json_of_the_mount_is_taken(documents: Documents) -> None:
    """An operator may copy one here, to have chunks back whose namespace nobody knows."""
    path = documents.path / NAME
    path.write_bytes(namespaces.encode(NS))
    assert documents.read() == Found({NS.directory: Document(NS, path.stat().st_mtime_ns, is_covered=False)}, {})


def test_every_changed_letter_of_a_value_is_noticed() -> None:
    """What it says of a layout is not covered by the fingerprint; the checksum of the document covers it."""
    raw = encode(DOCUMENT)
    for position, letter in enumerate(raw):
        if not chr(letter).isalnum():
            continue
        changed = raw[:position] + (b"7" if letter != ord("7") else b"8") + raw[position + 1 :]
        with pytest.raises((FormatError, UsageError)):
            decode(changed, 0)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is no document of a namespace"),
        (b"[]", "it is no document of a namespace"),
        (b"\xff", "it is no document of a namespace"),
        (b'{"format":"kvfs-document/2"}', "this kvfs reads 'kvfs-document/1'"),
        (b'{"format":"kvfs-document/1"}', "not a namespace.json"),
        (encode(Document(tiny_namespace("tests/other"), 1)), "it is of the namespace other-"),
        (b" " * (1 << 20), "it is too large"),
    ],
)
def test_what_is_no_document_is_told_of(documents: Documents, content: bytes, reason: str) -> None:
    (documents.path / NAME).write_bytes(content)
    found = documents.read()
    assert found.by_directory == {}
    assert reason in found.bad[NAME]
