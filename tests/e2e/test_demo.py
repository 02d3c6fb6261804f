"""The demo with a tiny model in place of the real one: everything else is as it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvfs.testing import wait_until
from kvfs.tools.demo import model as demo_model
from kvfs.tools.demo.prompt import NUM_TOKENS

LIMIT_S = 240.0


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables under which the demo finds a converted model: two layers, and a tokenizer with a token for each byte."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("there is no /dev/fuse")
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        directory = demo_model.directory()
    directory.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = "{% for message in messages %}<{{ message.content }}>{% endfor %}:"
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    (directory / demo_model.RECORD).write_text("{}")
    return {**os.environ, "XDG_CACHE_HOME": str(cache), "COLUMNS": "120", "OMP_NUM_THREADS": "1"}  # the model is tiny


def command(out: Path) -> list[str]:
    return [sys.executable, "-m", "kvfs.tools.demo", "--out", str(out)]


@pytest.mark.slow  # a minute; CI runs the demo itself
def test_the_demo(environment: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "demo" / "result.json"
    done = subprocess.run(
        command(out), env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    runs: dict[str, dict[str, Any]] = {run["run"]: run for run in json.loads(out.read_text())}
    assert list(runs) == ["cold", "warm", "in_memory", "restarted", "evicted"]
    assert all(
        set(run) == {"run", "ttft_ms", "tokens", "tokens_reused", "tier", "output_sha256"} for run in runs.values()
    )
    assert {run["tokens"] for run in runs.values()} == {NUM_TOKENS}
    assert len({run["output_sha256"] for run in runs.values()}) == 1
    assert {name: (run["tokens_reused"], run["tier"]) for name, run in runs.items()} == {
        "cold": (0, "none"),
        "warm": (NUM_TOKENS - 1, "ram"),
        "in_memory": (NUM_TOKENS - 1, "engine"),
        "restarted": (NUM_TOKENS - 1, "nvme"),
        "evicted": (0, "none"),
    }
    for shown in ("Time to first token", "$ ls -l", "user.kvfs.tier", "$ df -h", "rm -rf"):
        assert shown in done.stdout
    assert sorted(path.name for path in out.parent.iterdir()) == [".lock", "result.json"]


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(
    environment: dict[str, str], tmp_path: Path, number: signal.Signals, reap: Callable[..., Any]
) -> None:
    out = tmp_path / "demo" / "result.json"
    with (tmp_path / "said").open("wb") as said:
        process = reap(subprocess.Popen(command(out), env=environment, stdout=said, stderr=said, cwd=tmp_path))
    wait_until(lambda: any(out.parent.glob("run-*/mnt/README.txt")), "kvfs is mounted", LIMIT_S)
    process.send_signal(number)
    assert process.wait(LIMIT_S) == 130, (tmp_path / "said").read_text()
    assert [path.name for path in out.parent.iterdir()] == [".lock"]


@pytest.mark.heavy
def test_a_second_demo_in_the_same_place_is_refused(
    environment: dict[str, str], tmp_path: Path, reap: Callable[..., Any]
) -> None:
    out = tmp_path / "demo" / "result.json"
    first = reap(
        subprocess.Popen(
            command(out), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path
        )
    )
    wait_until(lambda: any(out.parent.glob("run-*/mnt/README.txt")), "kvfs is mounted", LIMIT_S)
    second = subprocess.run(command(out), env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert second.returncode == 1
    assert "another demo is running" in second.stdout
    first.send_signal(signal.SIGINT)
    assert first.wait(LIMIT_S) == 130
