"""A prefix cache for `generate()` of transformers.

    cache = PrefixCache("/mnt/kvfs", model, tokenizer)
    output = cache.generate(input_ids, max_new_tokens=100)

The KV of the prompt's longest stored prefix is loaded instead of computed; what was computed is stored for whoever asks
next: in this process or another, before or after a restart. The output is that of `model.generate(input_ids, …)`.

Any decoder whose layers keep keys and values of every token is held; others are refused with one sentence (see
`transformers_model`). Calls that the cache cannot serve run without it (see `transformers_calls`). A cache that fails
is a miss: counted, logged once, and computed.

Concurrency: a `PrefixCache` may be used by several threads if the model may. What one request works on is its own; the
counters have a lock, so have the pool and the client.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from kvfs import keys
from kvfs.client import Client
from kvfs.engine_adapters.base import AdapterStatistics
from kvfs.engine_adapters.break_even import BreakEven
from kvfs.engine_adapters.counting import Counters
from kvfs.engine_adapters.kv_slab import KvSlab, SlabPool
from kvfs.engine_adapters.prefix_load import spare_threads
from kvfs.engine_adapters.spans import TokenSpans
from kvfs.engine_adapters.storing import BackgroundStore
from kvfs.engine_adapters.transformers_calls import add_tokenizer, pop_prompt, why_bypass
from kvfs.engine_adapters.transformers_model import describe, uses_adapters
from kvfs.engine_adapters.transformers_request import Parts, Request
from kvfs.errors import UnavailableError
from kvfs.hints import Said

log = logging.getLogger(__name__)

TOKENS_PER_BLOCK = 16
RESERVE_TOKENS = 4096
MAX_RESERVE_BYTES = 1 << 30
MAX_FREE_BYTES = 2 << 30


class PrefixCache:
    """See the module.

    Making one inspects the model (one token is computed, the weights are read once to know them again), and touches the
    memory of one slab; a mount that is not there yet is asked again later. The weights must stay as they are: after a change that can be
    noticed, everything is computed and a message says so.

    What it takes:
        mount: where kvfs is mounted.
        model: a transformers model that can generate; UsageError if its KV cannot be held.
        tokenizer: passed on to `generate`, which needs it for `stop_strings`.
        model_id: names the model in the mount; by default what it was loaded from.
        revision: names the weights, for weights too large to be read; by default a digest of them.
        tokens_per_chunk: tokens in a chunk.
        floor_tokens: less than this is computed, never loaded.
        break_even: load only if that was measured to be cheaper than computing.
        background_store: store after `generate` has returned, in a thread (`flush` waits for it), instead of before.
        reserve_tokens: tokens of the slab made ready now; no request pays for its memory up to this length.
        deadline_s: how long a request waits for an answer of the cache before it goes on without; for bytes that it
            was promised, somewhat longer.

    Its `namespace` is what the model's chunks are filed under.
    """

    def __init__(
        self,
        mount: str | Path,
        model: Any,
        tokenizer: Any = None,
        *,
        model_id: str | None = None,
        revision: str | None = None,
        tokens_per_chunk: int = 256,
        floor_tokens: int = 32,
        break_even: bool = True,
        background_store: bool = False,
        reserve_tokens: int = RESERVE_TOKENS,
        deadline_s: float = 1.0,
    ) -> None:
        described = describe(model, tokens_per_chunk=tokens_per_chunk, model_id=model_id, revision=revision)
        self.namespace = described.namespace
        self._fingerprint = self.namespace.identity.fingerprint()
        self._tokenizer = tokenizer
        self._weights = list(model.parameters())
        self._weights_version = self._count_writes()
        threads = spare_threads()
        self._parts = Parts(
            model=model,
            namespace=self.namespace,
            layers=described.layers,
            client=Client(mount, self.namespace, deadline_s=deadline_s, name="transformers"),
            pool=SlabPool(MAX_FREE_BYTES),
            break_even=BreakEven(floor_tokens, is_measuring=break_even),
            counters=Counters(log),
            executor=ThreadPoolExecutor(threads, "kvfs-load") if threads else None,
            background=BackgroundStore() if background_store else None,
        )
        self._attach()
        reserve_bytes = KvSlab.host_bytes(described.layers, reserve_tokens)
        if 0 < reserve_bytes <= MAX_RESERVE_BYTES:
            self._parts.pool.reserve(reserve_bytes)

    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        cache_salt: str | None = None,
        extra_keys: Sequence[str] = (),
        class_: int | None = None,
        expect_s: float | None = None,
        closed: bool | None = None,
        **arguments: Any,
    ) -> Any:
        """`model.generate(input_ids, …)` with the prompt's stored prefix loaded; takes and returns the same.

        Requests with another `cache_salt` do not share KV with this one. `extra_keys` name whatever else the KV
        depends on, such as the active adapters of a model that has several.

        What is known of the conversation after this call helps to keep the right KV, see `kvfs.hints`: `closed`, it is
        over; `expect_s`, it goes on within so many seconds, as when a tool runs; `class_`, what kind it is, 0 to 255.

        Raises UsageError for a call that brings a cache of its own, or a hint that is none, and whatever
        `model.generate` raises.
        """
        parts = self._parts
        said = Said(class_, expect_s, closed) if (class_, expect_s, closed) != Said() else None
        if said is not None:
            said.check()
        prompt = pop_prompt(input_ids, arguments)
        add_tokenizer(parts.model, self._tokenizer, arguments)
        parts.counters.add(requests=1)
        reason = self._why_bypass(prompt, arguments, extra_keys)
        if reason is not None:
            parts.counters.add_bypass(reason)
            return parts.model.generate(prompt, **arguments)
        salts = [f"extra:{extra}" for extra in extra_keys] + ([f"salt:{cache_salt}"] if cache_salt is not None else [])
        tokens_per_chunk = self.namespace.identity.tokens_per_chunk
        spans = TokenSpans(
            keys.root(self._fingerprint, salts),
            prompt[0].cpu(),
            tokens_per_chunk=tokens_per_chunk,
            tokens_per_block=min(TOKENS_PER_BLOCK, tokens_per_chunk),
        )
        return Request(parts, prompt, spans, arguments, said).run()

    def statistics(self) -> AdapterStatistics:
        """What was done so far."""
        return self._parts.counters.statistics()

    def flush(self) -> None:
        """Wait until everything computed so far has been handed to the cache."""
        if self._parts.background is not None:
            self._parts.background.flush()

    def close(self) -> None:
        """Finish background stores and end the session."""
        if self._parts.background is not None:
            self._parts.background.close()
        if self._parts.executor is not None:
            self._parts.executor.shutdown()
        self._parts.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _attach(self) -> None:
        """Map the cache's memory now, so that no request pays for it; a mount that is not there yet is no error."""
        try:
            self._parts.client.attach()
        except UnavailableError as error:
            log.warning("going on without a cache until there is one: %s", error)

    def _why_bypass(self, prompt: Any, arguments: dict[str, Any], extra_keys: Sequence[str]) -> str | None:
        if self._count_writes() != self._weights_version:
            return "the model's weights were changed after the PrefixCache was made: make another"
        if uses_adapters(self._parts.model) and not extra_keys:
            return "the model has adapters, and extra_keys does not name the active ones"
        return why_bypass(self._parts.model, prompt, arguments)

    def _count_writes(self) -> int:
        """Grows when torch writes to a weight in place; costs microseconds."""
        return sum(weight._version for weight in self._weights)
