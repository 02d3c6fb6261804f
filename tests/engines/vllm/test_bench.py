"""`kvfs bench vllm` from end to end, small: real servers, a real model, every run; and what Ctrl-C leaves of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.tools.demo import model as demo_model

from ...e2e.conftest import wait_until  # noqa: TID252 - tests are no package with a name

SMALL = [
    "--num-groups=2", "--prompts-per-group=2", "--system-prompt-len=512", "--question-len=32", "--output-len=2",
    "--engine-prefixes=1", "--max-concurrency=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def command(vllm_python: str) -> list[str]:
    """The benchmark, with a model that has been prepared."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("there is no /dev/fuse")
    demo_model.prepare(print)
    return [
        "nice", "-n", "19", sys.executable, "-m", "kvfs.tools.cli", "bench", "vllm", *SMALL, f"--python={vllm_python}",
    ]  # fmt: skip


def test_every_run_reuses_what_it_should(command: list[str], tmp_path: Path) -> None:
    """All prompt tokens are accounted for, run by run: who computed, what came from the engine's cache and from kvfs."""
    done = subprocess.run(
        [*command, f"--dir={tmp_path}", "--json"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    passes = {(each["run"], each["number"]): each for each in found["passes"]}
    assert len(passes) == 5 * 2
    assert "vllm: starting vLLM" in done.stderr.splitlines()[:3]  # it says what it does before anything is there
    for each in passes.values():
        counted = each["counts"]
        assert each["input_tokens"] == 4 * 544 == sum(counted[name] for name in ("computed", "engine", "ram", "nvme"))
        assert [answer["number"] for answer in each["answers"]] == [0, 1, 2, 3]
        assert all(0 < answer["ttft_ms"] <= answer["latency_ms"] for answer in each["answers"])
    computed = {key: each["counts"]["computed"] for key, each in passes.items()}
    questions, prefixes = 4 * 32, 2 * 512
    assert computed["ceiling", 1] == computed["ram", 1] == computed["ram_nvme", 1] == questions + prefixes
    assert computed["vllm", 1] + computed["vllm", 2] > 2 * (questions + prefixes)
    assert all(computed[run, 2] == questions for run in ("ceiling", "ram", "ram_nvme", "restarted"))
    assert computed["restarted", 1] == questions
    assert passes["ram", 2]["counts"]["ram"] > 0
    restarted = passes["restarted", 1]
    assert restarted["counts"]["ram"] + restarted["counts"]["nvme"] >= 1024
    assert restarted["daemon"]["promotions"] >= 4  # both prefixes came from NVMe, the RAM tier was empty
    assert [bar["what"].partition(":")[0] for bar in found["bars"]] == [
        "ram",
        "ram",
        "ram_nvme",
        "ram_nvme",
        "restarted",
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["the server starts", "it is asked"])
def test_ctrl_c_leaves_nothing(command: list[str], tmp_path: Path, moment: str) -> None:
    """No mount, no process, no shared memory (see tests/conftest.py), and no file."""
    process = subprocess.Popen(
        [*command, "--runs=ram", "--passes=50", f"--dir={tmp_path}"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        if moment == "the server starts":

            def is_reached() -> bool:
                logs = list(tmp_path.glob("*/server-ram.log"))
                return bool(logs) and "Worker" in logs[0].read_text()

            wait_until(is_reached, "the server has a worker", deadline_s=300.0)
        else:
            assert process.stderr is not None
            assert any("pass 1" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=120)
    finally:
        process.terminate()  # if the test failed before; it cleans up then, too
        process.wait(120)
    assert (process.returncode, output) == (130, "")
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
