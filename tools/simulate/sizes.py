"""Sizes as people give them to `kvfs simulate`: of a tier, in bytes or as a share of the trace; of a token's KV."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from kvfs.config import parse_size
from kvfs.errors import UsageError

DEFAULT_BYTES_PER_TOKEN = 131_072
"""Of Llama 3 8B in bfloat16: 32 layers, 8 KV heads of 128, keys and values."""

_SHARE = re.compile(r"^\s*(\d{1,3}(?:\.\d{1,9})?)\s*%\s*$", re.ASCII)
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


def tier_bytes(text: str, num_chunks: int, chunk_bytes: int) -> int:
    """The bytes of a tier in "64GiB", or in "5%" of the trace's different chunks, whole ones. Raises UsageError."""
    match = _SHARE.match(text)
    if match is None:
        return parse_size(text)
    share = float(match[1])
    if not 0 < share <= 100:
        raise UsageError(f"{text} is no share of a trace: write more than 0%, and 100% at most")
    return int(num_chunks * share / 100) * chunk_bytes


def bytes_per_token(config: Path) -> int:
    """Of the KV of a model, from its config.json (Hugging Face). Raises UsageError."""
    try:
        found = json.loads(config.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {config}: {getattr(error, 'strerror', None) or error}") from error
    if isinstance(found, dict) and isinstance(found.get("text_config"), dict):
        found = found["text_config"]
    if not isinstance(found, dict):
        raise UsageError(f"{config} is no config.json of a model")
    layers = _whole(found, config, "num_hidden_layers")
    dtype = found.get("dtype") or found.get("torch_dtype") or "bfloat16"
    if dtype not in _DTYPE_BYTES:
        raise UsageError(f"{config} has the dtype {dtype!r}, whose size is not known here: say --bytes-per-token")
    if "kv_lora_rank" in found:  # MLA keeps one latent vector
        return (
            layers
            * (_whole(found, config, "kv_lora_rank") + _whole(found, config, "qk_rope_head_dim"))
            * _DTYPE_BYTES[dtype]
        )
    heads = _whole(found, config, "num_key_value_heads", "num_attention_heads")
    if found.get("head_dim"):
        size = _whole(found, config, "head_dim")
    else:
        size = _whole(found, config, "hidden_size") // _whole(found, config, "num_attention_heads")
    return 2 * layers * heads * size * _DTYPE_BYTES[dtype]


def _whole(found: dict[str, Any], config: Path, *names: str) -> int:
    for name in names:
        value = found.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31:
            return value
    raise UsageError(f"{config} does not say {' or '.join(names)}: say --bytes-per-token")
