"""What is worth loading."""

from __future__ import annotations

import pytest

from kvfs.engine_adapters.break_even import RECENT, TRY_AGAIN_S, TRY_SHARE, BreakEven
from kvfs.messages import Tier

RAM, NVME = Tier.RAM, Tier.NVME
SIZE = 100


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def even(clock: Clock) -> BreakEven:
    """Computing takes 1 ms a token, loading from RAM 0.1 ms."""
    even = BreakEven(1, clock=clock)
    even.observe_compute(1000, 1.0)
    even.observe_load({RAM: 1000}, 0.1)
    return even


def slow_nvme(even: BreakEven, seconds: float = 5.0) -> None:
    """From NVMe it takes 5 ms a token."""
    for _ in range(RECENT):
        even.observe_load({NVME: 1000}, seconds)


def test_everything_is_loaded_until_both_sides_are_known() -> None:
    even = BreakEven(32)
    assert even.worth_loading([RAM, NVME], SIZE) == 2 * SIZE
    even.observe_compute(1000, 0.001)
    assert even.worth_loading([RAM, NVME], SIZE) == 2 * SIZE
    even.observe_load({RAM: 1000}, 1.0)
    assert even.worth_loading([NVME, NVME], SIZE) == 2 * SIZE


def test_less_than_the_floor_is_computed() -> None:
    even = BreakEven(150)
    assert even.worth_loading([RAM], SIZE) == 0
    assert even.worth_loading([RAM, RAM], SIZE, 51) == 51
    assert even.worth_loading([RAM, RAM], SIZE, 50) == 2 * SIZE


def test_each_tier_is_judged_for_itself(even: BreakEven) -> None:
    slow_nvme(even)
    assert even.pays(RAM)
    assert not even.pays(NVME)
    assert even.worth_loading([RAM, RAM], SIZE) == 2 * SIZE
    assert even.worth_loading([NVME, NVME], SIZE) == 0
    assert even.worth_loading([NVME, NVME], SIZE, 60) == 60


def test_the_part_that_pays_is_loaded(even: BreakEven) -> None:
    """Up to the first chunk that does not pay, unless what follows it makes up for it."""
    slow_nvme(even)
    assert even.worth_loading([RAM, RAM, NVME, NVME], SIZE) == 2 * SIZE
    assert even.worth_loading([RAM, NVME, RAM], SIZE) == SIZE
    assert even.worth_loading([RAM, NVME, *[RAM] * 5], SIZE) == 7 * SIZE
    assert even.worth_loading([NVME, *[RAM] * 5], SIZE) == 6 * SIZE
    assert even.worth_loading([NVME, *[RAM] * 4], SIZE) == 0
    assert even.worth_loading([NVME, *[RAM] * 4], SIZE, 50) == 5 * SIZE


def test_a_mixed_load_tells_of_the_slower_tier(even: BreakEven) -> None:
    for _ in range(RECENT):
        even.observe_load({RAM: 1000, NVME: 100}, 0.1 + 0.5)
    assert even.pays(RAM)
    assert not even.pays(NVME)


def test_a_load_that_failed_says_something_only_if_it_was_slow(even: BreakEven) -> None:
    for _ in range(RECENT):
        even.observe_load({NVME: 1000}, 0.01, has_failed=True)
    even.observe_load({NVME: 1000}, 5.0)
    assert not even.pays(NVME), "what failed at once was taken for fast"
    other = BreakEven(1)
    other.observe_compute(1000, 1.0)
    other.observe_load({NVME: 1000}, 3.0, has_failed=True)
    assert not other.pays(NVME)


def test_a_tier_that_does_not_pay_is_tried_again_and_believed(even: BreakEven, clock: Clock) -> None:
    slow_nvme(even)
    assert even.worth_loading([NVME], SIZE) == 0
    clock.now += TRY_AGAIN_S - 0.1
    assert even.worth_loading([NVME], SIZE) == 0
    clock.now += 0.1
    assert even.worth_loading([NVME], SIZE) == SIZE
    assert even.worth_loading([NVME], SIZE) == 0, "one try at a time"
    even.observe_load({NVME: SIZE}, 0.02)
    assert even.worth_loading([NVME, NVME], SIZE) == 2 * SIZE


def test_the_more_a_try_has_cost_the_later_is_the_next(even: BreakEven, clock: Clock) -> None:
    slow_nvme(even)
    even.worth_loading([NVME], SIZE)
    clock.now += TRY_AGAIN_S
    assert even.worth_loading([NVME], SIZE) == SIZE
    even.observe_load({NVME: SIZE}, 2.1)  # 2 s more than computing
    clock.now += TRY_SHARE * 2.0 - 0.1
    assert even.worth_loading([NVME], SIZE) == 0
    clock.now += 0.2
    assert even.worth_loading([NVME], SIZE) == SIZE


def test_one_stall_does_not_decide(even: BreakEven) -> None:
    for seconds in (0.1, 9.0, 0.1):
        even.observe_load({RAM: 1000}, seconds)
    assert even.worth_loading([RAM], SIZE) == SIZE


def test_without_measuring_only_the_floor_counts() -> None:
    even = BreakEven(1, is_measuring=False)
    even.observe_compute(1000, 0.1)
    even.observe_load({RAM: 1000}, 1.0)
    assert even.worth_loading([RAM], SIZE) == SIZE
    assert even.pays(RAM)


def test_a_prefill_of_a_few_tokens_is_no_measure() -> None:
    """Its time is overhead; counted by the token it would make loading look cheap for ever."""
    even = BreakEven(32)
    even.observe_compute(1, 0.07)
    even.observe_load({RAM: 1000}, 1.0)
    even.observe_compute(1000, 0.1)
    assert even.worth_loading([RAM], SIZE) == 0
