"""Ghosts as bytes: all of few come back, of many the youngest, and of what is damaged none."""

from __future__ import annotations

import random

import pytest

from kvfs.errors import UsageError
from kvfs.ghosts import CAUSES, Ghost, Ghosts
from kvfs.packed_ghosts import MAX_PACKED, pack, unpack


def filled(number: int, limit: int = 1 << 20, seed: int = 0) -> tuple[Ghosts, list[bytes]]:
    """Ghosts that went one a nanosecond from 1 on, and their keys."""
    chance, ghosts = random.Random(seed), Ghosts(limit, forgotten_ns=1)
    keys = [chance.randbytes(16) for _ in range(number)]
    for index, key in enumerate(keys):
        ghosts.add(
            "ns", key, Ghost(index + 1, "evict", index % 7, index % 3, CAUSES[index % 6], index % 90, index % 101)
        )
    return ghosts, keys


def packed(ghosts: Ghosts, most: int = MAX_PACKED, written_ns: int = 9) -> bytes:
    *steps, raw = pack(ghosts, written_ns, most)
    assert set(steps) <= {None}
    assert raw is not None
    return raw


def restored(raw: bytes) -> Ghosts:
    found = unpack(raw)
    ghosts = Ghosts(1 << 20, found.forgotten_ns)
    ghosts.restore(found.buckets)
    return ghosts


@pytest.mark.parametrize("number", [0, 1, 47, 49, 97, 150, 20_000])
def test_all_of_few_come_back_and_go_on(number: int) -> None:
    """Found, forgotten and split like those that never were bytes."""
    ghosts, keys = filled(number)
    again = restored(packed(ghosts))
    assert len(again) == len(ghosts) == number
    assert again.forgotten_ns == 1
    assert unpack(packed(ghosts, written_ns=77)).written_ns == 77
    for key in keys:
        assert again.get("ns", key) == ghosts.get("ns", key) is not None
    more = [random.Random(2).randbytes(16) for _ in range(number + 200)]
    for index, key in enumerate(more):
        again.add("ns", key, Ghost(10**6 + index, "rm", 3))
    for key in keys:
        assert again.pop("ns", key) == ghosts.pop("ns", key)


def test_of_many_the_youngest_come_back_and_it_is_known_since_when_that_is_all() -> None:
    ghosts, keys = filled(30_000)
    raw = packed(ghosts, 10_000)
    assert len(raw) < 10_000 * 23 + 2000
    again = restored(raw)
    assert 7_000 < len(again) <= 10_000
    known = [index for index, key in enumerate(keys) if again.get("ns", key)]
    assert sum(index >= 20_000 for index in known) > 6_000
    since = again.forgotten_ns  # a ghost of this index + 1 went then
    assert all(again.get("ns", key) for key in keys[since:])
    assert again.get("ns", keys[since - 1]) is None


def test_ghosts_that_come_and_go_while_they_are_packed() -> None:
    """Buckets are split meanwhile: what was there all the time is there, once, and nothing is made up."""
    ghosts, keys = filled(40_000)
    steps = pack(ghosts, 1)
    raw, number = None, 0
    chance = random.Random(3)
    for step in steps:
        raw = step
        for _ in range(200):
            ghosts.add("ns", chance.randbytes(16), Ghost(10**6 + number, "evict", 1))
            number += 1
    assert raw is not None
    again = restored(raw)
    assert number >= 400
    for key in keys:
        assert again.pop("ns", key) == ghosts.get("ns", key)
    assert len(again) <= number + len(keys)


@pytest.mark.parametrize("size", [0, 1, 35, 36, 40, -1, -23])
def test_what_was_cut_off_is_not_believed(size: int) -> None:
    with pytest.raises(UsageError):
        unpack(packed(filled(300)[0])[:size])


def test_no_damage_is_an_error_later() -> None:
    """Every flipped byte is refused, or gives ghosts that can be read."""
    ghosts, keys = filled(120)
    raw = packed(ghosts)
    num_refused = 0
    for place in range(len(raw)):
        bad = bytearray(raw)
        bad[place] ^= 0xFF
        try:
            ghosts = restored(bytes(bad))
        except UsageError:
            num_refused += 1
            continue
        for key in keys:
            ghost = ghosts.get("ns", key)
            assert ghost is None or (ghost.why and ghost.unused_min >= 0)
    assert num_refused > 36
