"""Requests that wait in `kvfs simulate`: what is prefetched meanwhile is in RAM when they run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvfs.policies.named import NAMES
from kvfs.prefetch import IN_FLIGHT_BYTES
from kvfs.tools.simulate.tally import Tally
from kvfs.tools.simulate.timed import Pace, Timed
from kvfs.tools.simulate.traces import Trace

from .simulated import CHUNK_BYTES, chats, kvfs, play, replay_of, trace_of, write_mooncake


def wait(trace: Trace, num_ram: int, num_nvme: int, seconds: float, chunks_a_s: float, policy: str = "lru") -> Tally:
    """What comes of a trace whose requests wait, with a device that gives so many chunks a second."""
    replay = replay_of(trace, policy, num_ram, num_nvme)
    waiting = Timed(replay, Pace(seconds), 1e12, chunks_a_s * CHUNK_BYTES)
    assert sum(1 for _ in waiting.play(trace.requests)) == len(trace.requests)
    return replay.tally


PUSHED_OUT = [["a", "b", "c", "d"], ["p", "q", "r", "s", "t", "u", "v", "w"], ["a", "b", "c", "d"]]


@pytest.mark.parametrize(("seconds", "in_time"), [(0.5, 0), (1.0, 1), (2.5, 2), (4.0, 4), (90.0, 4)])
def test_what_comes_in_time_is_found_in_ram(seconds: float, in_time: int) -> None:
    """A chunk a second; the first of a chain comes first."""
    trace = trace_of(PUSHED_OUT, step_s=1000.0)
    tally = wait(trace, 8, 20, seconds, 1.0)
    assert ([*tally.ram], [*tally.nvme]) == ([0, 0, in_time], [0, 0, 4 - in_time])
    counters = tally.counters
    assert counters.prefetches_begun == counters.prefetches_useful + counters.prefetches_wasted
    assert counters.prefetches_useful >= in_time
    assert counters.prefetches_wasted == 0


def test_no_more_than_half_of_ram_is_prefetched() -> None:
    """The store's own bound: two of four chunks, however long the request waits."""
    trace = trace_of([["a", "b", "c", "d"], ["p", "q", "r", "s"], ["a", "b", "c", "d"]], step_s=1000.0)
    tally = wait(trace, 4, 20, 50.0, 1.0)
    assert (tally.ram[2], tally.nvme[2]) == (2, 2)
    assert (tally.counters.prefetches_begun, tally.counters.prefetches_dropped) == (2, 2)


def test_what_is_on_its_way_counts_as_nvme_and_is_read_once() -> None:
    trace = trace_of(PUSHED_OUT, step_s=1000.0)
    tally = wait(trace, 8, 20, 0.5, 1.0)
    assert CHUNK_BYTES * 4 < IN_FLIGHT_BYTES
    assert (tally.nvme[2], tally.counters.prefetches_begun, tally.num_promoted) == (4, 4, 0)


def test_a_device_brings_one_after_the_other() -> None:
    """Two requests come together: the second one's chunks wait for those of the first, and for what loads ask for."""
    prompts = [["a", "b"], ["c", "d"], [*"pqrstuvw"], ["a", "b"], ["c", "d"]]
    trace = trace_of(prompts, step_s=1000.0)
    together = [request.__class__(3000.0, request.chunks, request.tokens) for request in trace.requests[3:]]
    trace.requests[3:] = together
    tally = wait(trace, 8, 20, 3.0, 1.0)
    assert [*tally.ram][3:] == [2, 1]
    assert [*tally.nvme][3:] == [0, 1]


def in_pieces(ram_chunks_a_s: float, prompts: list[object], chunks_a_load: int = 1) -> Tally:
    """What comes of prompts whose prefixes are loaded in pieces; NVMe gives a chunk a second."""
    trace = trace_of(prompts, step_s=1000.0)
    replay = replay_of(trace, "lru", 16, 40, has_tree=True)
    pace = Pace(chunks_a_load=chunks_a_load)
    assert sum(1 for _ in Timed(replay, pace, ram_chunks_a_s * CHUNK_BYTES, CHUNK_BYTES).play(trace.requests)) == len(
        prompts
    )
    return replay.tally


AGAIN = [[*"abcdefgh"], [*"abcdefgh"], [*"pqrstuvwijklmnoz"], [*"abcdefgh"]]


@pytest.mark.parametrize(("ram_chunks_a_s", "most_cold", "fewest_cold"), [(1e-3, 2, 2), (1e9, 8, 6)])
def test_a_chain_that_is_loaded_in_pieces_is_read_ahead(
    ram_chunks_a_s: float, most_cold: int, fewest_cold: int
) -> None:
    """The second piece shows that it is one. What an engine takes its time to copy, NVMe has time to bring."""
    tally = in_pieces(ram_chunks_a_s, [*AGAIN])
    assert [ram + nvme for ram, nvme in zip(tally.ram, tally.nvme, strict=True)] == [0, 8, 0, 8]
    assert fewest_cold <= tally.nvme[3] <= most_cold
    counters = tally.counters
    assert counters.prefetches_begun == 0 < counters.read_aheads_begun
    assert counters.read_aheads_useful == counters.read_aheads_begun
    assert counters.read_aheads_wasted == 0


def test_what_was_loaded_at_once_is_no_chain() -> None:
    tally = in_pieces(1e-3, [*AGAIN], chunks_a_load=8)
    assert (tally.ram[3], tally.nvme[3], tally.counters.read_aheads_begun) == (0, 8, 0)


def test_what_is_read_ahead_and_left_is_counted_as_wasted() -> None:
    """The prompt that comes again ends before what went on behind it."""
    scans = [[*(f"{number}{place}" for place in range(16))] for number in range(4)]
    tally = in_pieces(1e-3, [*AGAIN[:3], [*"abcd"], *scans])
    assert tally.nvme[3] == 2
    assert tally.counters.read_aheads_wasted > 0
    assert tally.counters.read_aheads_begun == tally.counters.read_aheads_useful + tally.counters.read_aheads_wasted


@pytest.mark.parametrize("policy", NAMES)
def test_waiting_moves_hits_from_nvme_into_ram(policy: str) -> None:
    """With every policy: about as much is found, more of it in RAM; all that was begun is counted once."""
    trace = chats(2, 400, num_open=60)
    plain = play(trace, policy, 30, 90)
    waited = wait(trace, 30, 90, 0.9, 1e6, policy)
    assert sum(waited.nvme) < 0.5 * sum(plain.nvme)
    assert 0.8 * plain.num_found < waited.num_found < 1.2 * plain.num_found
    counters = waited.counters
    assert counters.prefetches_begun >= counters.prefetches_useful + counters.prefetches_wasted
    assert counters.prefetches_useful > 0.5 * sum(plain.nvme)


def test_nothing_is_left_leased() -> None:
    """All that was held while requests waited may go again."""
    trace = chats(3, 300)
    replay = replay_of(trace, "lru", 30, 60)
    for _ in Timed(replay, Pace(7.5), 1e12, 3.0 * CHUNK_BYTES).play(trace.requests):
        pass
    for number in range(trace.num_chunks):
        chunk = replay.cache.get(number)
        assert chunk is None or chunk.leases == 0 or chunk.ram < 0


@pytest.mark.heavy
def test_the_command_counts_them_apart(tmp_path: Path) -> None:
    """The time to the first token is shorter by what was read while a request waited; a RAM cache has nothing to prefetch."""
    file = tmp_path / "trace.jsonl"
    write_mooncake(chats(5, 600, num_open=100), file)
    sizes = ["--ram", "4%", "--nvme", "30%", "--policy", "lru,opt"]
    done = kvfs("simulate", file, *sizes, "--queue-time", "2s", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    waited, best = json.loads(done.stdout)
    plain, _ = json.loads(kvfs("simulate", file, *sizes, "--json").stdout)
    assert waited["prefetches_useful"] > 0
    assert plain["prefetches_useful"] is best["prefetches_useful"] is None
    assert waited["nvme_token_hit_rate"] < plain["nvme_token_hit_rate"]
    assert waited["ttft_s"]["mean"] < plain["ttft_s"]["mean"]
    assert waited["input_tokens_s"] > plain["input_tokens_s"]
    assert waited["read_aheads_begun"] == 0
    shown = kvfs("simulate", file, *sizes, "--queue-time", "2s").stdout
    assert f"{waited['prefetches_useful']:,}" in shown[shown.index("chunks prefetched while requests waited") :].split()
    small = ["--load-chunks", "2", "--bytes-per-token", "16", "--ram-bandwidth", "1MiB"]
    pieces, _ = json.loads(kvfs("simulate", file, *sizes, *small, "--json").stdout)
    assert pieces["prefetches_begun"] == 0 < pieces["read_aheads_useful"]
    assert pieces["nvme_token_hit_rate"] < plain["nvme_token_hit_rate"]
