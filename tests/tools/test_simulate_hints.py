"""`kvfs simulate --hints`: what a trace knows of the future, told to the policies."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfs.errors import UsageError
from kvfs.tools.simulate import optimum
from kvfs.tools.simulate.hints import EXPECT_S, _ends, _next_uses, give, parse
from kvfs.tools.simulate.tally import Tally
from kvfs.tools.simulate.traces import Trace

from .simulated import chats, kvfs, replay_of, trace_of, write_mooncake


def hits(trace: Trace, policy: str, names: str | None, num_ram: int, num_nvme: int = 0) -> tuple[int, Tally]:
    replay = replay_of(trace, policy, num_ram, num_nvme)
    steps = map(replay.request, trace.requests)
    for _ in steps if names is None else give(parse(names), trace, replay, steps):
        pass
    tally = replay.tally
    return sum(tally.ram) + sum(tally.nvme), tally


def test_what_is_known_of_a_trace() -> None:
    trace = trace_of([["a", "b", "c"], ["a", "b", "x"], ["a", "q"]], step_s=10.0)
    assert list(_ends(trace)) == [2, 1, 0]
    assert _next_uses(trace) == [(2, 32.0), (1, 32.0), None]
    trace = trace_of([["a", "b"], ["a", "b"]], step_s=EXPECT_S + 1)
    assert _next_uses(trace) == [None, None]


@pytest.mark.parametrize("policy", ["lru", "learned", "arc", "s3fifo"])
@pytest.mark.parametrize("num_nvme", [0, 60])
def test_what_is_over_goes_first(policy: str, num_nvme: int) -> None:
    """It closes most of the gap to the optimum under every policy, and no closed chunk is used again."""
    trace = chats(7, 800)
    without, _ = hits(trace, policy, None, 60 if not num_nvme else 20, num_nvme)
    told, tally = hits(trace, policy, "closed", 60 if not num_nvme else 20, num_nvme)
    best = sum(optimum.hits(trace, 60))
    assert without < told <= best
    assert told - without > 0.7 * (best - without), (without, told, best)
    assert tally.counters.hints_closed > 0
    assert tally.counters.hints_closed_used == 0


def test_what_is_needed_soon_stays() -> None:
    """Agents that wait for their tools, in a cache that is too small for all, among much that is asked for once."""
    prompts: list[list[object]] = []
    for turn in range(60):
        prompts.append([f"agent {turn % 3}", *range(4)])
        prompts += [[f"once {turn} {number}", 1, 2] for number in range(4)]
    trace = trace_of(prompts, step_s=1.0)
    without, _ = hits(trace, "lru", None, 40)
    told, tally = hits(trace, "learned", "expect", 40)
    assert told > 1.2 * without
    assert tally.counters.hints_expect_met > 50
    assert hits(trace, "lru", "expect", 40)[0] == without, "which does not heed it"


def test_hints_that_there_are_not() -> None:
    assert parse(" closed, expect,") == {"closed", "expect"}
    for text in ("", ",", "close", "closed;expect"):
        with pytest.raises(UsageError, match="--hints is closed or expect, or both"):
            parse(text)


def test_the_table_marks_who_heeds_them(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_mooncake(chats(3, 60), path)
    told = kvfs("simulate", path, "--ram", "20%", "--policy", "lru,learned,opt", "--hints", "closed,expect")
    assert told.returncode == 0, told.stderr
    assert "closed and expect" in told.stdout
    names = [line.split("  ")[0] for line in told.stdout.splitlines()]
    assert names[-3:] == ["lru +closed", "learned +closed +expect", "opt"]
    plain = kvfs("simulate", path, "--ram", "20%", "--policy", "lru,opt")
    assert "+" not in plain.stdout
    assert "hints" not in plain.stdout
