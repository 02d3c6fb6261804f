"""What `make demo-vllm` makes of its runs, and what it says where there is no vLLM. The demo itself: tests/engines/vllm."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from kvfs.errors import KvfsError
from kvfs.testing import processes, wait_until
from kvfs.tools.bench.scratch import scratch_below
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


def test_a_server_ends_with_whoever_started_it(tmp_path: Path) -> None:
    """Also where that is killed: the server, and who asks it; the next one clears away what they left."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    script = """
import sys
from pathlib import Path
from kvfs.tools.demo_vllm.server import Server
here = Path(sys.argv[1])
server = Server(str(here / "python"), here, None, here / "log", [])
answers = server.ask("none", "", here / "asking")
next(answers, None)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], env={**os.environ, "TMPDIR": f"{tmp_path}/tmp"}
    ) as parent:
        try:

            def started() -> list[int]:
                return [pid for pid in processes.children(parent.pid) if "sleep" in processes.command_line(pid)]

            wait_until(lambda: len(started()) == 2, "server and asker have become their commands")
            pids = started()
        finally:
            parent.kill()
    wait_until(lambda: not any(map(processes.is_alive, pids)), "they have ended, too")
    with scratch_below(tmp_path / "tmp") as mine:
        assert list((tmp_path / "tmp").iterdir()) == [mine]
