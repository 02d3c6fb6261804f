"""A real vLLM over a daemon whose device becomes slow: what is not worth loading is computed, what waits is prefetched.

The daemon is one without FUSE, which can be told to be slow; its client finds it through the same link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.testing import plain_mount, settings_in, socket_path
from kvfs.testing.daemon import DaemonProcess

from .conftest import Engine, StartEngine, wait_until

Prompt = Callable[..., list[int]]
pytestmark = [pytest.mark.leaves("a process")]
"""The daemon lives as long as the module."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiers")


@pytest.fixture(scope="module")
def daemon(place: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess.start(
        settings_in(place, ram=128 << 20, nvme=256 << 20, window_bytes=16 << 20), socket_path(place)
    ) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine, daemon: DaemonProcess, place: Path) -> Iterator[Engine]:
    """Its layers compute much for the KV that they have, as those of a large model do: loading pays."""
    settings = {"mount": str(plain_mount(place)), "break_even": True, "deadline_s": 10.0}
    with start_engine(
        settings=settings,
        enable_prefix_caching=False,
        max_num_batched_tokens=2048,
        hf_overrides={"intermediate_size": 16384},
    ) as engine:
        yield engine


def test_what_waits_in_the_queue_is_prefetched(engine: Engine, daemon: DaemonProcess, prompt: Prompt) -> None:
    """Eight requests in an engine for two: when the last have their turn, their chunks have come into RAM."""
    prompts = [prompt(1100, seed=number) for number in range(8)]
    before = engine.stored()
    expected = [engine.tokens(each) for each in prompts]
    engine.wait_for_stores(before + 8 * 4)
    daemon.chill()
    answers = engine.run(*prompts)
    assert [answer["tokens"] for answer in answers] == expected
    assert [answer["cached"] for answer in answers] == [1024] * 8
    found = daemon.statistics()["counters"]
    assert found["prefetches_useful"] > 0
    assert found["prefetches_wasted"] == 0
    assert engine.counts()["vllm:kvfs_hit_tokens{ram}"] > 0


def test_a_slow_tier_is_not_loaded_from_until_it_is_fast_again(
    engine: Engine, daemon: DaemonProcess, prompt: Prompt
) -> None:
    """Four chunks come in two reads, one after the other, of 1.5 s each then; computing them takes less."""
    asked = prompt(1100)
    before = engine.stored()
    expected = engine.tokens(asked)
    engine.wait_for_stores(before + 4)

    def cached() -> int:
        daemon.chill()
        answer = engine.run(asked)[0]
        assert answer["tokens"] == expected
        found: int = answer["cached"]
        return found

    assert cached() == 1024
    daemon.slow(1.5)
    wait_until(lambda: cached() == 0, "the slow tier is declined")
    assert cached() == 0
    assert engine.counts()["vllm:kvfs_not_worth_it"] > 0
    daemon.slow(0.0)
    wait_until(lambda: cached() == 1024, "it was tried, and believed")
    assert cached() == 1024


def test_what_a_request_says_of_its_chain_reaches_the_daemon(
    engine: Engine, daemon: DaemonProcess, prompt: Prompt
) -> None:
    """Behind its stores; of a request that finds all stored too; what is no hint is counted by the engine."""
    asked = prompt(1100, seed=77)

    def counted(name: str) -> int:
        found: int = daemon.statistics()["counters"][name]
        return found

    hints, closed = counted("hints"), counted("hints_closed")
    expected = engine.run(asked, said={"class": 3, "expect_s": 60})[0]["tokens"]
    wait_until(lambda: counted("hints") == hints + 1, "the first hint came")
    assert engine.run(asked, said={"closed": True})[0]["tokens"] == expected
    wait_until(lambda: counted("hints_closed") == closed + 4, "the chain is closed")
    assert counted("hints_expect_met") == 1
    assert engine.run(asked, said={"class": 1000})[0]["tokens"] == expected
    assert counted("hints") == hints + 2
    wait_until(lambda: counted("hints_closed_used") == 4, "it was used once more")
    assert engine.counts()["vllm:kvfs_hints"] == 2
    assert engine.counts()["vllm:kvfs_hints_invalid"] == 1
