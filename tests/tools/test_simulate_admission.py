"""Admission in `kvfs simulate`: what is written to NVMe, what that saves, and what it costs in hits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvfs.admission import Admission
from kvfs.policies.named import NAMES

from .simulated import CHUNK_BYTES, chats, kvfs, play, replay_of, trace_of, write_mooncake


def test_what_is_used_again_is_written() -> None:
    """First it is in RAM only; a load of it brings it to NVMe, as far as the load went."""
    trace = trace_of([["a", "b", "c"], ["a", "b", "x"], ["a", "b", "c"], ["q"]])
    replay = replay_of(trace, "lru", 10, 10, admission=Admission("second-use"))
    written = []
    for request in trace.requests:
        replay.request(request)
        written.append(replay.tally.num_written)
    assert written == [0, 2, 3, 3]
    assert [*replay.tally.ram] == [0, 2, 3, 0]
    assert replay.tally.counters.not_admitted_unused == 5


def test_what_comes_back_was_used_before() -> None:
    """It went from RAM without ever being on NVMe, is remembered, and is written when it is stored again."""
    trace = trace_of([["a", "b"], ["p", "q"], ["a", "b"], ["r", "s"], ["a", "b"]])
    tally = play(trace, "lru", 2, 10, has_ghosts=False, admission=Admission("second-use"))
    assert ([*tally.ram], [*tally.nvme]) == ([0, 0, 0, 0, 0], [0, 0, 0, 0, 2])
    assert (tally.num_written, tally.counters.not_admitted_unused) == (2, 6)


def test_a_prompt_longer_than_ram_keeps_its_beginning() -> None:
    """What is kept back may leave RAM, but not for what is built on it."""
    trace = trace_of([range(10), range(10), range(10)])
    tally = play(trace, "lru", 4, 20, admission=Admission("second-use"))
    assert ([*tally.ram], [*tally.nvme]) == ([0, 4, 4], [0, 0, 4])
    assert (tally.num_written, tally.num_bypassed) == (8, 6 + 2)


def test_a_budget_is_of_a_day() -> None:
    """Half of what a day has is over it, and stays in RAM; a chunk that is used on the next day is judged again."""
    trace = trace_of([["a"], ["b"], ["c"], ["d"], ["c"], ["d"]], step_s=21_600.0)  # four a day
    replay = replay_of(trace, "lru", 10, 10, admission=Admission("always", 2 * CHUNK_BYTES))
    written = []
    for request in trace.requests:
        replay.request(request)
        written.append(replay.tally.num_written)
    assert written == [1, 2, 2, 2, 3, 4]
    assert replay.tally.counters.not_admitted_budget == 2


@pytest.mark.parametrize("policy", NAMES)
def test_every_policy_is_replayed_with_admission(policy: str) -> None:
    """Less is written, little more is found than without, and it all adds up."""
    trace = chats(2, 400)
    always = play(trace, policy, 30, 90)
    second = play(trace, policy, 30, 90, admission=Admission("second-use"))
    assert second.num_written < 0.7 * always.num_written
    assert 0.3 * always.num_found < second.num_found < 1.1 * always.num_found
    nothing = play(trace, policy, 30, 90, admission=Admission("always", CHUNK_BYTES - 1))
    assert nothing.num_written == sum(nothing.nvme) == 0
    assert nothing.num_found > 0
    free = play(trace, policy, 30, 90, admission=Admission())
    assert (free.ram, free.nvme, free.num_written) == (always.ram, always.nvme, always.num_written)


def test_the_report_has_the_price(tmp_path: Path) -> None:
    """Beside each policy what it would find, and write, if everything were admitted; the optimum has no such thing."""
    file = tmp_path / "trace.jsonl"
    write_mooncake(chats(5, 600), file)
    sizes = ["--ram", "2%", "--nvme", "20%", "--policy", "lru,opt"]
    done = kvfs("simulate", file, *sizes, "--admission", "second-use", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found, best = json.loads(done.stdout)
    plain, _ = json.loads(kvfs("simulate", file, *sizes, "--json").stdout)
    assert plain["always_admitted"] is plain["not_admitted_unused"] is best["always_admitted"] is None
    without = found["always_admitted"]
    for name in ("hit_rate", "token_hit_rate", "written_bytes", "written_bytes_a_day", "ttft_s", "input_tokens_s"):
        assert without[name] == plain[name]
    assert found["written_bytes"] < 0.7 * without["written_bytes"]
    assert found["token_hit_rate"] < without["token_hit_rate"]
    assert found["ttft_s"]["mean"] > without["ttft_s"]["mean"]
    assert found["not_admitted_unused"] > 0 == found["not_admitted_budget"]
    shown = kvfs("simulate", file, *sizes, "--admission", "second-use").stdout
    lines = shown[shown.index("admission: what it saves NVMe") :].splitlines()
    price = 100 * (without["token_hit_rate"] - found["token_hit_rate"])
    assert f"{price:.2f}" in lines[2].split()
    budgeted, _ = json.loads(kvfs("simulate", file, *sizes, "--write-budget", "2GiB", "--json").stdout)
    assert 0 < budgeted["written_bytes"] <= 2 << 30
    assert budgeted["not_admitted_budget"] > 0 == budgeted["not_admitted_unused"]
