"""A KvfsConnector that notes how long each of its hooks takes, for the tests: a line a call in HOOK_TIMES/<process>."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvfs.engine_adapters.vllm_connector import KvfsConnector

SHORT_TOKENS = 256
"""A new request with fewer has no chunk that the cache could have, and is not noted."""

HOOKS = (
    "handle_preemptions", "start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save", "get_finished",
    "get_block_ids_with_load_errors", "build_connector_worker_meta", "get_kv_connector_stats", "on_new_request",
    "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "update_connector_output",
    "request_finished",
)  # fmt: skip


def _timed(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def timed(self: Any, *arguments: Any, **keywords: Any) -> Any:
        begin = time.perf_counter()
        result = hook(self, *arguments, **keywords)
        seconds = time.perf_counter() - begin
        if name != "on_new_request" or arguments[0].num_prompt_tokens >= SHORT_TOKENS:
            with Path(os.environ["HOOK_TIMES"], str(os.getpid())).open("a") as file:
                file.write(f"{name} {seconds}\n")
        return result

    return timed


class TimedConnector(KvfsConnector):
    """The same, timed."""


for _name in HOOKS:
    setattr(TimedConnector, _name, _timed(_name, getattr(KvfsConnector, _name)))
