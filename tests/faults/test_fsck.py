"""Checking volumes that somebody or something damaged: all of it is found, and nothing is changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvfs.chunk import geometry
from kvfs.documents import DIRECTORY as DOCUMENTS
from kvfs.errors import UsageError
from kvfs.index import FILE_NAME as INDEX
from kvfs.index import SET_ASIDE
from kvfs.keys import KeyChain
from kvfs.testing import (
    FaultySystem,
    open_table,
)
from kvfs.volume import FILE_NAME as VOLUME

from .volumes import (
    MIB,
    NS,
    checked,
    edit_index,
    flip,
    kinds,
    rebuilt,
    rows,
)


@pytest.mark.parametrize("payload", [False, True])
async def test_a_good_volume(tmp_path: Path, chains: list[KeyChain], payload: bool) -> None:
    report = checked(tmp_path, payload=payload)
    assert (kinds(report), report.num_chunks, report.num_namespaces) == ({}, 9, 2)
    assert report.num_unclaimed == (0 if payload else None)


async def test_checking_changes_nothing(tmp_path: Path, chains: list[KeyChain]) -> None:
    before = {path: path.read_bytes() for path in (tmp_path / "nvme").rglob("*") if path.is_file()}
    checked(tmp_path, payload=True)
    assert {path: path.read_bytes() for path in (tmp_path / "nvme").rglob("*") if path.is_file()} == before


async def test_a_volume_in_use_is_refused(tmp_path: Path) -> None:
    async with open_table(tmp_path, MIB):
        for work in (checked, rebuilt):
            with pytest.raises(UsageError, match=f"{tmp_path}/nvme is in use by another kvfs"):
                work(tmp_path)


async def test_no_volume(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no kvfs volume in"):
        checked(tmp_path)


@pytest.mark.parametrize("place", ["header", "end of header", "first layer", "last layer", "pad"])
async def test_a_flipped_bit_is_found(tmp_path: Path, chains: list[KeyChain], place: str) -> None:
    """Of a header without reading more, of the rest with --payload."""
    _, offset, length = rows(tmp_path)[-1]  # of NS, which has padding
    geo = geometry(NS, 16)
    assert geo.pad_bytes
    at = {
        "header": 100,
        "end of header": geo.header_bytes - 1,
        "first layer": geo.header_bytes,
        "last layer": geo.header_bytes + geo.payload_bytes - 1,
        "pad": length - 1,
    }[place]
    flip(tmp_path, offset + at)
    assert kinds(checked(tmp_path)) == ({"chunk": 1} if "header" in place else {})
    report = checked(tmp_path, payload=True)
    assert (kinds(report), report.num_chunks) == ({"chunk": 1}, 8)


async def test_rows_that_are_not_true(tmp_path: Path, chains: list[KeyChain]) -> None:
    """One that cannot be, two that claim the same bytes, one that names bytes of another, one of no namespace."""
    (_, second, _), (third, _, _), (fourth, _, _) = rows(tmp_path)[1:4]
    last = rows(tmp_path)[-1][0]
    edit_index(
        tmp_path,
        f"UPDATE chunks SET offset = {second} WHERE key = x'{third.hex()}'",
        f"UPDATE chunks SET length = 4096 WHERE key = x'{fourth.hex()}'",
        f"UPDATE chunks SET namespace = 9 WHERE key = x'{last.hex()}'",
    )
    for payload in (False, True):
        assert kinds(checked(tmp_path, payload=payload)) == {"row": 2, "overlap": 1, "chunk": 1}


async def test_a_damaged_index(tmp_path: Path, chains: list[KeyChain]) -> None:
    (tmp_path / "nvme" / INDEX).write_bytes(b"x" * 8192)
    report = checked(tmp_path)
    assert kinds(report) == {"index": 1}
    assert "cannot be used" in report.findings[0].what
    assert report.findings[0].remedy == "rebuild"
    assert not (tmp_path / "nvme" / SET_ASIDE).exists()


async def test_a_missing_index(tmp_path: Path, chains: list[KeyChain]) -> None:
    (tmp_path / "nvme" / INDEX).unlink()
    report = checked(tmp_path, payload=True)
    assert kinds(report) == {"index": 1}
    assert report.num_unclaimed == 9


async def test_damaged_namespaces(tmp_path: Path, chains: list[KeyChain]) -> None:
    """In the index, in the document, in both."""
    path = tmp_path / "nvme" / DOCUMENTS / f"{MIB.directory}.json"
    path.write_bytes(b"{}")
    assert kinds(checked(tmp_path)) == {"document": 1}
    edit_index(tmp_path, f"UPDATE namespaces SET document = x'00' WHERE directory = '{NS.directory}'")
    report = checked(tmp_path)
    assert (kinds(report), report.num_chunks) == ({"document": 1, "namespace": 1}, 9)
    edit_index(tmp_path, "UPDATE namespaces SET document = x'00'")
    assert kinds(checked(tmp_path)) == {"document": 1, "namespace": 2, "row": 6}


async def test_a_truncated_volume(tmp_path: Path, chains: list[KeyChain]) -> None:
    _, offset, length = max(rows(tmp_path), key=lambda row: row[1])
    os.truncate(tmp_path / "nvme" / VOLUME, offset + length - 1)
    report = checked(tmp_path, payload=True)
    assert kinds(report) == {"length": 1, "chunk": 1}


async def test_what_cannot_be_read_is_not_called_bad(tmp_path: Path, chains: list[KeyChain]) -> None:
    system = FaultySystem()
    system.bad_reads = {rows(tmp_path)[2][1]}
    assert kinds(checked(tmp_path, system=system)) == {"unreadable": 1}
