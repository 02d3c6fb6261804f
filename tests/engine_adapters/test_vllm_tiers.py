"""The connector's two sides and a daemon whose chunks are on NVMe: what is prefetched, and what is not worth loading."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.engine_adapters.break_even import TRY_AGAIN_S, BreakEven
from kvfs.testing import DEADLINE_S, settings_in, socket_path, wait_until
from kvfs.testing.daemon import DaemonProcess

from .vllm_stand_in import CHUNK, StandIn, request_of

BLOCK_IDS = list(range(10, 28))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess.start(settings_in(tmp_path), socket_path(tmp_path)) as daemon:
        yield daemon


@pytest.fixture
def engine(tmp_path: Path, daemon: DaemonProcess) -> Iterator[StandIn]:
    engine = StandIn(tmp_path / "mount", deadline_s=DEADLINE_S)
    yield engine
    engine.close()


def tokens_of(seed: int) -> list[int]:
    """Four chunks and six tokens."""
    return [(7 * index + seed) % 90 + 3 + 100 * seed for index in range(4 * CHUNK + 6)]


def fill(engine: StandIn, seed: int) -> None:
    """Compute and store a prompt."""
    request = request_of(tokens_of(seed), f"fill {seed}")
    engine.run(request, BLOCK_IDS)
    engine.finish(request)
    for worker in engine.workers:
        worker.flush()


def counts(daemon: DaemonProcess) -> dict[str, int]:
    found: dict[str, int] = daemon.statistics()["counters"]
    return found


def test_what_is_on_nvme_is_brought_while_a_request_waits(engine: StandIn, daemon: DaemonProcess) -> None:
    """When its turn comes it is loaded from RAM, and right."""
    fill(engine, 0)
    daemon.chill()
    request = request_of(tokens_of(0))
    engine.scheduler.arrived(request)
    wait_until(lambda: daemon.statistics()["ram"]["num_chunks"] == 4, "all of it is in RAM")
    assert counts(daemon)["loads_nvme"] == 0
    assert engine.admit(request, BLOCK_IDS) == 4 * CHUNK
    engine.settle(request)
    assert not engine.wrong_tokens(request, 4 * CHUNK)
    wait_until(lambda: counts(daemon)["prefetches_useful"] == 4, "the load is counted")
    assert counts(daemon)["loads_ram"] == 4
    assert engine.workers[0].take_counts()["hit_tokens_ram"] == 4 * CHUNK


def test_a_request_that_ends_in_the_queue_takes_its_prefetch_with_it(engine: StandIn, daemon: DaemonProcess) -> None:
    """What was not begun is given up, and nothing stays leased."""
    for seed in range(4):
        fill(engine, seed)
    daemon.chill()
    requests = [request_of(tokens_of(seed), f"r{seed}") for seed in range(4)]
    with daemon.reads_held():
        for request in requests:
            engine.scheduler.arrived(request)
        for request in requests:
            engine.scheduler.finished(request, [])
        wait_until(lambda: counts(daemon)["prefetches_dropped"] >= 12, "what was not begun is given up")
    wait_until(lambda: daemon.statistics()["num_leases"] == 0, "nothing is leased")
    found = counts(daemon)
    assert found["prefetches_begun"] + found["prefetches_dropped"] == 16
    assert found["prefetches_useful"] == 0


def test_the_end_of_a_session_ends_its_prefetches(engine: StandIn, daemon: DaemonProcess) -> None:
    for seed in range(4):
        fill(engine, seed)
    daemon.chill()
    with daemon.reads_held():
        for seed in range(4):
            engine.scheduler.arrived(request_of(tokens_of(seed), f"r{seed}"))
        engine.close()
        wait_until(lambda: counts(daemon)["prefetches_dropped"] >= 12, "what was not begun is given up")
    wait_until(lambda: daemon.statistics()["num_leases"] == 0, "nothing is leased")


def test_a_tier_that_became_slow_is_declined_and_tried_again(
    tmp_path: Path, engine: StandIn, daemon: DaemonProcess
) -> None:
    """Computing takes 6 ms a token here, 0.4 s. Chunks on a slow device are computed, those in RAM loaded; then it recovers."""
    now = 1000.0
    even = engine.scheduler.break_even = BreakEven(CHUNK, clock=lambda: now)
    engine.seconds_per_token = 0.006
    number = 0

    def run(seed: int) -> int:
        nonlocal number
        number += 1
        request = request_of(tokens_of(seed), f"r{number}")
        found = engine.run(request, BLOCK_IDS)
        assert not engine.wrong_tokens(request, len(tokens_of(seed)))
        engine.finish(request)
        return found

    for seed in range(3):
        fill(engine, seed)
        assert run(seed) == 4 * CHUNK
    daemon.chill()
    assert [run(seed) for seed in range(3)] == [4 * CHUNK] * 3, "the device is fast"
    daemon.slow(0.6)
    found = []
    for _ in range(6):
        daemon.chill()
        found.append(run(0))
    assert found[-2:] == [0, 0], found
    assert engine.scheduler.take_counts()["not_worth_it"] >= 2
    daemon.slow(0.0)
    assert run(0) == 0, "nobody has looked yet"
    now += TRY_AGAIN_S
    assert run(0) == 4 * CHUNK, "it is tried"
    daemon.chill()
    assert run(1) == 4 * CHUNK, "and believed"
    assert even.worth_loading([1], CHUNK) == CHUNK
