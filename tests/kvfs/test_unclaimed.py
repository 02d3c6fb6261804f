"""What is unclaimed is used last, from its end, and counts as room that can be had."""

from __future__ import annotations

import random

import pytest

from kvfs import unclaimed
from kvfs.unclaimed import PatientAllocator

PAGE = 4096


@pytest.fixture
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unclaimed, "PIECE_BYTES", 2 * PAGE)


@pytest.mark.usefixtures("_small_pieces")
def test_free_room_goes_first_and_the_end_before_the_begin() -> None:
    extents = PatientAllocator(10 * PAGE, PAGE, [(PAGE, PAGE)], [(2 * PAGE, 5 * PAGE)])
    assert extents.used_bytes == PAGE
    given = [extents.allocate(PAGE) for _ in range(4)]
    assert {offset // PAGE for offset in given if offset is not None} == {7, 8, 9, 10}
    assert extents.unclaimed == [(2 * PAGE, 5 * PAGE)]
    assert extents.allocate(PAGE) in (5 * PAGE, 6 * PAGE)
    assert extents.unclaimed == [(2 * PAGE, 3 * PAGE)]
    assert extents.used_bytes == 6 * PAGE


@pytest.mark.usefixtures("_small_pieces")
def test_a_long_extent_takes_as_much_as_it_needs() -> None:
    extents = PatientAllocator(10 * PAGE, 0, [], [(0, 10 * PAGE)])
    assert extents.largest_free == 10 * PAGE
    assert extents.allocate(7 * PAGE) is not None
    assert extents.allocate(4 * PAGE) is None
    assert extents.unclaimed == []
    assert extents.allocate(3 * PAGE) is not None


def test_what_is_used_is_not_unclaimed() -> None:
    """Against a bitmap, for extents in any place, overlapping ones and ones outside among them."""
    rng = random.Random(1)
    for _ in range(300):
        pages = set(range(3, 40))
        used, at = [], 3
        while (at := at + rng.randrange(5)) < 38:
            length = min(rng.randrange(1, 6), 40 - at)
            used.append((at * PAGE, length * PAGE))
            pages -= set(range(at, at + length))
            at += length
        claims = [(rng.randrange(50), rng.randrange(1, 12)) for _ in range(rng.randrange(6))]
        expected = {page for start, length in claims for page in range(start, start + length)} & pages
        extents = PatientAllocator(37 * PAGE, 3 * PAGE, used, [(a * PAGE, b * PAGE) for a, b in claims])
        found = [page // PAGE for a, b in extents.unclaimed for page in range(a, a + b, PAGE)]
        assert (sorted(found), set(found)) == (found, expected)
        assert len(found) == len(expected)
        assert extents.used_bytes == sum(length for _, length in used)
