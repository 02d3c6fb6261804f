"""The five runs: what each server is given. Only the size of the engine's cache and kvfs differ between them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from kvfs.errors import UsageError
from kvfs.tools.bench_vllm.workload import Workload

BLOCK_TOKENS = 128
"""vLLM's block on the CPU, unless told otherwise; kernels for GPUs take it as well."""

CHUNK_TOKENS = 256
HEADER_BYTES = 32 << 10
"""More than the header of a chunk takes."""

SPARE_BYTES = 64 << 20
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MEANING = {
    "vllm": "vLLM alone, its cache too small for the working set",
    "ram": "the same with kvfs, RAM for the working set",
    "ram_nvme": "the same with kvfs, RAM for a third of it, NVMe for all",
    "restarted": "the run before, after a restart of daemon and server",
    "ceiling": "vLLM alone, its cache large enough for everything",
}
"""The runs in the order in which they are made."""


class Plan(msgspec.Struct, frozen=True):
    """What is measured, and with what.

    Attributes:
        runs: names from `MEANING`, in its order.
        num_passes: how often each server is asked everything.
        engine_prefixes: system prompts that the engine's cache has room for, where it is too small.
        python: has vLLM; model: its directory; dtype: a name from `ITEM_BYTES`.
    """

    workload: Workload
    runs: list[str]
    num_passes: int
    engine_prefixes: int
    python: str
    model: str
    dtype: str

    @property
    def num_answers(self) -> int:
        """Requests of all runs."""
        return len(self.runs) * self.num_passes * self.workload.num_prompts

    def engine_blocks(self, run: str) -> int:
        """Blocks of the engine's cache. Its first one is never used.

        The small one has room for some system prompts and what the requests under way have behind theirs; the large one
        for all that all passes ever write, so that nothing has to go.
        """
        work = self.workload
        shared = work.system_prompt_len // BLOCK_TOKENS
        whole = -(-work.request_tokens // BLOCK_TOKENS)
        own = whole - shared
        if run == "ceiling":
            warm_up = 2 * whole
            return (
                1
                + warm_up
                + work.num_groups * shared
                + self.num_passes * work.num_prompts * own
                + work.max_concurrency * whole
            )
        return 1 + max(whole, self.engine_prefixes * shared + work.max_concurrency * own)

    def server_flags(self, run: str) -> list[str]:
        """What the API server is started with."""
        longest = -(-self.workload.request_tokens // BLOCK_TOKENS) * BLOCK_TOKENS
        return [
            "--dtype", self.dtype, "--max-model-len", str(longest), "--block-size", str(BLOCK_TOKENS),
            "--num-gpu-blocks-override", str(self.engine_blocks(run)),
        ]  # fmt: skip

    @property
    def working_set_bytes(self) -> int:
        """What kvfs holds once everything was asked: each system prompt once, and full chunks behind it."""
        work = self.workload
        shared = work.system_prompt_len // CHUNK_TOKENS
        own = (work.request_tokens - 1) // CHUNK_TOKENS - shared
        return (work.num_groups * shared + work.num_prompts * own) * self.chunk_bytes

    @property
    def chunk_bytes(self) -> int:
        """A chunk file."""
        return CHUNK_TOKENS * token_bytes(Path(self.model), self.dtype) + HEADER_BYTES

    def mount_sizes(self, run: str) -> tuple[str, str | None] | None:
        """RAM and NVMe of kvfs; None where there is none of it. The volume has room for everything, the warm-ups too."""
        warm_up = 4 * -(-self.workload.request_tokens // CHUNK_TOKENS) * self.chunk_bytes
        everything = self.working_set_bytes + warm_up + SPARE_BYTES
        if run == "ram":
            return _size(everything), None
        if run in ("ram_nvme", "restarted"):
            return _size(max(self.working_set_bytes // 3, 2 * self.chunk_bytes)), _size(everything)
        return None


def token_bytes(model: Path, dtype: str) -> int:
    """Bytes of a token's KV, from the model's configuration; raises UsageError if it does not say."""
    try:
        config = json.loads((model / "config.json").read_text())
        heads = config["num_attention_heads"]
        size = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        return int(2 * config["num_hidden_layers"] * kv_heads * size * ITEM_BYTES[dtype])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{model} is no model whose KV cache has a known size: {error}") from error


def _size(num_bytes: int) -> str:
    return f"{-(-num_bytes // (1 << 20))}MiB"
