"""Whether a load pays."""

from __future__ import annotations

from kvfs.engine_adapters.break_even import RETRY_EVERY, BreakEven


def test_everything_is_loaded_until_both_sides_are_known() -> None:
    even = BreakEven(32)
    assert even.is_load_cheaper(32)
    even.observe_compute(1000, 0.001)
    assert even.is_load_cheaper(32)


def test_less_than_the_floor_is_computed() -> None:
    assert not BreakEven(32).is_load_cheaper(31)


def test_the_cheaper_side_wins() -> None:
    even = BreakEven(1)
    even.observe_compute(1000, 1.0)
    even.observe_load(1000, 0.1)
    assert even.is_load_cheaper(500)
    slow = BreakEven(1)
    slow.observe_compute(1000, 0.1)
    slow.observe_load(1000, 1.0)
    assert not slow.is_load_cheaper(500)


def test_a_load_that_does_not_pay_is_tried_again_now_and_then() -> None:
    even = BreakEven(1)
    even.observe_compute(1000, 0.1)
    even.observe_load(1000, 1.0)
    decisions = [even.is_load_cheaper(500) for _ in range(2 * RETRY_EVERY)]
    assert decisions.count(True) == 2


def test_one_stall_does_not_decide() -> None:
    even = BreakEven(1)
    even.observe_compute(1000, 1.0)
    for seconds in (0.1, 9.0, 0.1):
        even.observe_load(1000, seconds)
    assert even.is_load_cheaper(500)


def test_without_measuring_only_the_floor_counts() -> None:
    even = BreakEven(1, is_measuring=False)
    even.observe_compute(1000, 0.1)
    even.observe_load(1000, 1.0)
    assert even.is_load_cheaper(500)


def test_a_prefill_of_a_few_tokens_is_no_measure() -> None:
    """Its time is overhead; counted by the token it would make loading look cheap for ever."""
    even = BreakEven(32)
    even.observe_compute(1, 0.07)
    even.observe_load(1000, 1.0)
    even.observe_compute(1000, 0.1)
    assert not even.is_load_cheaper(500)
