"""What the demo counts as wrong, and what it makes of repetitions."""

from __future__ import annotations

import msgspec
import pytest

from kvfs.tools.demo import report
from kvfs.tools.demo.prompt import NUM_TOKENS, text
from kvfs.tools.demo.runs import Run, digest, median

GOOD = {
    name: Run(name, ttft_ms, NUM_TOKENS, reused, tier, "d")
    for name, ttft_ms, reused, tier in (
        ("cold", 8000.0, 0, "none"),
        ("warm", 90.0, NUM_TOKENS - 1, "ram"),
        ("in_memory", 80.0, NUM_TOKENS - 1, "engine"),
        ("restarted", 110.0, NUM_TOKENS - 1, "nvme"),
        ("evicted", 8000.0, 0, "none"),
    )
}


def test_the_prompt_has_a_short_last_chunk() -> None:
    assert NUM_TOKENS >= 3000
    assert NUM_TOKENS % 256 == 128
    assert len(text()) > 4 * NUM_TOKENS  # SmolLM2 makes a token of four to five letters


def test_good_runs_have_no_mistakes() -> None:
    assert report.mistakes(GOOD, 256) == []


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("warm", {"output_sha256": "e"}, "other tokens"),
        ("evicted", {"output_sha256": "e"}, "other tokens"),
        ("warm", {"tokens_reused": 3071}, "not every full chunk"),
        ("restarted", {"tokens_reused": 0}, "not every full chunk"),
        ("restarted", {"tier": "ram"}, "from ram, not from nvme"),
        ("evicted", {"tokens_reused": 256}, "nothing should have been there"),
        ("cold", {"tokens_reused": 256}, "nothing should have been there"),
    ],
)
def test_a_wrong_run_is_a_mistake(name: str, changes: dict[str, object], words: str) -> None:
    runs = {**GOOD, name: msgspec.structs.replace(GOOD[name], **changes)}
    (mistake,) = report.mistakes(runs, 256)
    assert words in mistake
    assert name in mistake


def test_repetitions_give_the_median_time_and_the_worst_of_the_rest() -> None:
    runs = [Run("restarted", ttft_ms, 10, reused, tier, "d") for ttft_ms, reused, tier in (
        (3.0, 9, "nvme"), (1.0, 9, "ram"), (2.0, 8, "nvme"),
    )]  # fmt: skip
    assert median(runs) == Run("restarted", 2.0, 10, 8, "nvme", "d")


def test_repetitions_that_differ_have_no_digest() -> None:
    runs = [Run("warm", 1.0, 10, 9, "ram", output) for output in "aab"]
    assert median(runs).output_sha256 == ""


def test_the_digest_is_over_little_endian_ids() -> None:
    assert digest([1]) == digest((1,)) != digest([256])
    assert len(digest([])) == 64


def test_the_verdict_names_a_bar_that_was_missed() -> None:
    slow = {**GOOD, "restarted": msgspec.structs.replace(GOOD["restarted"], ttft_ms=200.0)}
    assert any("above" in line for line in report.verdict(slow))
    assert not any("above" in line for line in report.verdict(GOOD))
