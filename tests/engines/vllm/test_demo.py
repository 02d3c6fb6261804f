"""`make demo-vllm` from end to end: API servers, the OpenAI client, a real model, another process after the first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest


def test_the_demo_reuses_the_prefix_in_both_servers(vllm_python: str, tmp_path: Path) -> None:
    """Every run gives the tokens that were computed first; after the first, all 13 chunks are loaded."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("there is no /dev/fuse")
    out = tmp_path / "vllm.json"
    with tempfile.TemporaryDirectory() as temporary:
        done = subprocess.run(
            ["nice", "-n", "19", sys.executable, "-m", "kvfs.tools.demo_vllm", "--out", str(out)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=1200,
            env={**os.environ, "KVFS_VLLM_PYTHON": vllm_python, "TMPDIR": temporary},
        )  # fmt: skip
        left = os.listdir(temporary)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads(out.read_text())
    assert [run["run"] for run in runs] == ["computed", "own_cache", "same_server", "new_server"]
    assert [run["tokens_reused"] for run in runs] == [0, 3328, 3328, 3328]
    assert len({tuple(run["answer"]) for run in runs}) == 1
    assert runs[-1]["ttft_ms"] * 5 < runs[0]["ttft_ms"]
    assert 'tier="ram"} 3328.0' in done.stdout  # no other hit than the new server's
    assert left == []
