"""What a user is told when an engine starts: that there is no cache yet, and what is wrong with the settings."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from .conftest import ROOT, StartEngine

CONFIGURE = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
EngineArgs(**json.loads(sys.argv[1])).create_engine_config()
"""


def test_an_engine_without_a_mount_says_so_in_its_log(start_engine: StartEngine, tmp_path: Path) -> None:
    """Once in each process that would use the cache, in vLLM's own format."""
    with start_engine(settings={"mount": str(tmp_path / "nowhere")}) as engine:
        found = re.findall(
            r"\((\w+) pid=\d+\) WARNING .* kvfs: going on without a cache until there is one: (.*)", engine.log
        )
    assert [role for role, _ in found] == ["Worker", "EngineCore"]
    assert {why for _, why in found} == {f"no kvfs is mounted at {tmp_path}/nowhere (No such file or directory)"}


def test_wrong_settings_are_found_before_anything_is_loaded(vllm_python: str, directory: Path) -> None:
    """When vLLM makes its configuration, with eager execution on a CPU as well; the last word is the sentence."""
    transfer = {
        "kv_connector": "KvfsConnector", "kv_connector_module_path": "kvfs.engine_adapters.vllm_connector",
        "kv_role": "kv_both", "kv_connector_extra_config": {"mont": "/mnt/kvfs"},
    }  # fmt: skip
    arguments = {
        "model": str(directory / "tiny"), "load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True,
        "kv_transfer_config": transfer,
    }  # fmt: skip
    done = subprocess.run(
        [vllm_python, "-c", CONFIGURE, json.dumps(arguments)], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False, env={"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin", "HOME": str(directory)},
    )  # fmt: skip
    assert done.returncode == 1
    assert "kv_connector_extra_config: Object contains unknown field `mont`" in done.stderr.splitlines()[-1]
