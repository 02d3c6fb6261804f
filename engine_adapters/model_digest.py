"""A digest of a model's weights: the same in every process for the same weights, another one for any other.

All bytes are read: a sample would miss the one row of an embedding that a fine-tuning changed, and the KV of one model
would be served to another. xxh3 runs at memory speed (0.1 s a gigabyte), so this costs far less than loading them did.
It guards against mistakes, not against somebody who crafts weights to collide.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import xxhash

from kvfs.errors import UsageError

THREADS = 4
PIECE_BYTES = 64 << 20

# Facts of a config that say how the engine runs or how text becomes tokens, and nothing about the KV of a token.
_IRRELEVANT = {
    "transformers_version", "use_cache", "output_attentions", "output_hidden_states", "return_dict", "id2label",
    "label2id", "problem_type", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "dtype",
    "torch_dtype", "architectures",
}  # fmt: skip


def digest_weights(model: torch.nn.Module, config: Any) -> str:
    """64 hex digits over names, dtypes, shapes and bytes of all weights, and over the facts of `config`.

    Raises UsageError for weights whose bytes are not in memory.
    """
    weights = sorted(model.state_dict().items())
    with ThreadPoolExecutor(THREADS) as executor:
        parts = list(executor.map(_digest_tensor, weights))
    digest = hashlib.sha256(json.dumps(config_facts(config), sort_keys=True, default=_plain).encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def config_facts(config: Any) -> dict[str, Any]:
    """What a config says that KV may depend on, at every level of it."""
    return {
        key: config_facts(value) if isinstance(value, Mapping) else value
        for key, value in (config if isinstance(config, Mapping) else config.to_dict()).items()
        if key not in _IRRELEVANT and not str(key).startswith("_")  # _name_or_path, _commit_hash, _attn_…
    }


def _plain(value: Any) -> Any:
    """Something for JSON that is the same in every process."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else f"{type(value).__name__} {value}"


def _digest_tensor(named: tuple[str, Any]) -> bytes:
    name, tensor = named
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
        raise UsageError(f"the bytes of weight {name!r} are not in memory: pass revision=, which names these weights")
    head = f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode()
    try:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    except (RuntimeError, NotImplementedError) as error:
        raise UsageError(f"weight {name!r} has no plain bytes: pass revision=, which names these weights") from error
    digest = xxhash.xxh3_128()
    for begin in range(0, flat.numel(), PIECE_BYTES):
        digest.update(flat[begin : begin + PIECE_BYTES].cpu().numpy().data)
    return head + digest.digest()
