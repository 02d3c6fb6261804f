"""Ghosts against an ordered dictionary: what is remembered, what makes room, and that none takes more than it may."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from kvfs.ghosts import Ghost, Ghosts, Refusal, Refusals


@pytest.mark.parametrize("limit", [1, 7, 48])
def test_few_ghosts_go_in_the_order_in_which_they_came(limit: int) -> None:
    chance, ghosts, model = random.Random(limit), Ghosts(limit), OrderedDict[tuple[str, bytes], Ghost]()
    for step in range(3000):
        place = (
            chance.choice(("a", "b")),
            chance.randrange(80).to_bytes(16, "little") if step % 2 else chance.randbytes(16),
        )
        what = chance.randrange(4)
        if what < 2:
            ghost = Ghost(step, chance.choice(("evict", "rm", "corrupt", "expire", "bypass")), step % 9, step % 5)
            ghosts.add(*place, ghost)
            model[place] = ghost
            model.move_to_end(place)
            if len(model) > limit:
                model.popitem(last=False)
        elif what == 2:
            assert ghosts.pop(*place) == model.pop(place, None)
        else:
            assert ghosts.get(*place) == model.get(place)
        assert len(ghosts) == len(model)
    for place, ghost in model.items():
        assert ghosts.get(*place) == ghost


def test_many_ghosts_are_all_found_while_there_is_room() -> None:
    """They are spread over ever more buckets; none is lost when one is split."""
    chance, ghosts = random.Random(0), Ghosts(limit=30_000)
    keys = [chance.randbytes(16) for _ in range(30_000)]
    for number, key in enumerate(keys):
        ghosts.add("ns", key, Ghost(number, "evict", number % 70_000, number % 300))
    assert len(ghosts) == 30_000
    for number, key in enumerate(keys):
        assert ghosts.pop("ns", key) == Ghost(number, "evict", min(number, 65_535), min(number % 300, 255))
    assert len(ghosts) == 0


def test_above_the_limit_old_ghosts_make_room_for_new_ones() -> None:
    chance, ghosts = random.Random(1), Ghosts(limit=10_000)
    keys = [chance.randbytes(16) for _ in range(40_000)]
    for number, key in enumerate(keys):
        ghosts.add("ns", key, Ghost(number, "evict", 0))
        assert len(ghosts) <= 10_000
    assert len(ghosts) > 9_990
    known = [number for number, key in enumerate(keys) if ghosts.get("ns", key)]
    assert min(known) > 20_000, "one was kept far too long"
    assert sum(number >= 32_000 for number in known) > 7_500, "too many new ones went"


def test_what_is_forgotten_says_since_when_the_rest_is_whole() -> None:
    """Cause and pressure come back as they were, nearly; out of bounds they are cut."""
    ghosts = Ghosts(limit=3)
    for number in range(5):
        assert ghosts.forgotten_ns == (number > 3)
        ghosts.add("ns", bytes([number]) * 16, Ghost(number + 1, "evict", 2, 1, "quota", 12.5, 99))
    assert ghosts.forgotten_ns == 2
    assert ghosts.get("ns", bytes([4]) * 16) == Ghost(5, "evict", 2, 1, "quota", 12.5, 99)
    ghosts.add("ns", b"x" * 16, Ghost(9, "bypass", 0, 0, "no_room", 1e9, 1000))
    assert ghosts.get("ns", b"x" * 16) == Ghost(9, "bypass", 0, 0, "no_room", 65_504.0, 255)


def test_refusals_are_counted_and_the_oldest_go() -> None:
    refusals = Refusals(limit=2)
    for time_ns, key, why in [(1, b"a", "quota"), (2, b"b", "pressure"), (3, b"a", "quota"), (4, b"a", "declined")]:
        refusals.add("ns", key, time_ns, why)
    assert refusals.get("ns", b"a") == Refusal(4, "declined", 1)
    refusals.add("ns", b"a", 5, "declined")
    assert refusals.get("ns", b"a") == Refusal(5, "declined", 2)
    assert refusals.forgotten_ns == 0
    refusals.add("ns", b"c", 6, "quota")
    assert (refusals.get("ns", b"b"), refusals.forgotten_ns, len(refusals)) == (None, 2, 2)
    assert refusals.get("other", b"a") is None
