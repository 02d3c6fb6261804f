"""What `make demo-vllm` makes of its runs, and what it says where there is no vLLM. The demo itself: tests/engines/vllm."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from kvfs.errors import KvfsError
from kvfs.tools.demo_vllm import finding, report
from kvfs.tools.demo_vllm.runs import Run
from kvfs.tools.demo_vllm.server import serve


def runs(**changes: Run) -> dict[str, Run]:
    made = {
        "computed": Run("computed", 10_000.0, 3363, 0, [1, 2], [10_000.0]),
        "own_cache": Run("own_cache", 200.0, 3363, 3328, [1, 2], [200.0]),
        "same_server": Run("same_server", 220.0, 3363, 3328, [1, 2], [220.0]),
        "new_server": Run("new_server", 260.0, 3363, 3328, [1, 2], [260.0]),
    }
    return {**made, **changes}


def test_times_are_compared_with_the_engine_s_own_cache() -> None:
    same, new = report.verdict(runs())
    assert "45 × faster than computed; 1.10 × own_cache, within the bar" in same
    assert "1.30 × own_cache, [bold]above[/bold]" in new
    assert not report.mistakes(runs(), 256)


def test_what_a_load_took_is_read_from_the_metrics() -> None:
    lines = [
        'vllm:kvfs_load_microseconds_total{engine="0",model_name="m"} 36250.0',
        'vllm:kvfs_load_microseconds_created{engine="0",model_name="m"} 1.7e+09',
        'vllm:kvfs_hit_tokens_total{engine="0",model_name="m",tier="ram"} 3328.0',
    ]
    assert report.load_ms(lines) == 36.25
    assert report.load_ms([]) == 0


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"new_server": Run("new_server", 1.0, 3363, 3328, [1, 3], [1.0])}, "new_server generated other tokens"),
        ({"same_server": Run("same_server", 1.0, 3363, 3072, [1, 2], [1.0])}, "same_server reused 3072 tokens"),
        ({"computed": Run("computed", 1.0, 3363, 256, [1, 2], [1.0])}, "computed reused 256 tokens, not 0"),
    ],
)
def test_other_tokens_and_missing_chunks_are_mistakes(changes: dict[str, Run], complaint: str) -> None:
    (found,) = report.mistakes(runs(**changes), 256)
    assert complaint in found


def test_without_vllm_and_a_script_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVFS_VLLM_PYTHON", "/bin/false")
    monkeypatch.setattr(finding, "SCRIPT", tmp_path / "absent")
    with pytest.raises(KvfsError, match="comes with a checkout"):
        finding.find_vllm()


def test_a_script_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that has no vLLM was named: the script says so, and the demo does not go on."""
    monkeypatch.setenv("KVFS_VLLM_PYTHON", "/bin/false")
    with pytest.raises(KvfsError, match="could not be set up"):
        finding.find_vllm()


def test_temporary_files_of_a_server_go_with_it(tmp_path: Path) -> None:
    """VLLM leaves sockets where temporary files are; they have room for their names there, and go also if it fails."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $TMPDIR > {tmp_path}/where; touch $TMPDIR/left; echo it cannot start; exit 1\n")
    python.chmod(0o755)
    with pytest.raises(KvfsError, match="it cannot start"), serve(str(python), tmp_path, None, tmp_path / "log", []):
        pass
    where = Path((tmp_path / "where").read_text().strip())
    assert not where.exists()
    assert len(f"{where}/{uuid.uuid4()}") < 107, "no socket can have such a long name"
