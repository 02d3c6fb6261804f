"""One call of `generate()` through the cache: find, load, run, store.

If a layer of a loaded chunk turns out to be bad, or does not arrive in time, the forward pass is abandoned before any
token was chosen and the call is repeated with less: with the chunks before a corrupt one, or, if the cache gave no
answer, with nothing. So a failing cache costs time, never a token.

Concurrency: a `Request` belongs to the thread that called `generate`; `Parts` are shared and thread-safe.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from kvfs.client import Client
from kvfs.engine_adapters.base import LastLoad
from kvfs.engine_adapters.break_even import BreakEven
from kvfs.engine_adapters.counting import Counters
from kvfs.engine_adapters.kv_slab import KvSlab, LayerShape, SlabPool
from kvfs.engine_adapters.prefix_load import LoadFailed, PrefixLoad
from kvfs.engine_adapters.spans import Span, TokenSpans
from kvfs.engine_adapters.storing import BackgroundStore, store_spans
from kvfs.engine_adapters.transformers_calls import CACHE_ARGUMENT, PromptOnceStreamer, new_tokens
from kvfs.engine_adapters.transformers_layers import ShapeMismatch, SlabCache
from kvfs.errors import KvfsError
from kvfs.hints import Said
from kvfs.keys import ChainHash
from kvfs.messages import Tier
from kvfs.namespace import Namespace

MAX_LOADS = 3
"""Loads that one request tries, each shorter than the last, before everything is computed."""

SLOWEST_DEVICE_BYTES_PER_S = 256 << 20


@dataclass(frozen=True)
class Parts:
    """What all requests of a PrefixCache share."""

    model: Any
    namespace: Namespace
    layers: tuple[LayerShape, ...]
    client: Client
    pool: SlabPool
    break_even: BreakEven
    counters: Counters
    executor: ThreadPoolExecutor | None
    background: BackgroundStore | None

    def patience_s(self, num_tokens: int) -> float:
        """How long the bytes of a load are waited for: the client's deadline, and what a slow device needs."""
        size_bytes = num_tokens * sum(layer.token_bytes for layer in self.layers)
        return self.client.deadline_s + size_bytes / SLOWEST_DEVICE_BYTES_PER_S


class Request:
    """One prompt, [1, tokens], on its way through the model.

    Attributes:
        spans: the prompt's chunks, later also those of what was generated.
        num_stored: full chunks, from the first on, that the cache has.

    `said` is what is known of the chain when this is over, None: nothing.
    """

    def __init__(
        self, parts: Parts, prompt: torch.Tensor, spans: TokenSpans, arguments: dict[str, Any], said: Said | None
    ) -> None:
        self.spans = spans
        self._said = said
        self.num_stored = 0
        self._parts = parts
        self._prompt = prompt
        self._num_prompt = int(prompt.shape[1])
        self._short = spans.short_last()
        self._max_full = spans.num_full
        self._may_load_short = True
        self._loads_left = MAX_LOADS
        self._arguments = dict(arguments)
        self._streamer: PromptOnceStreamer | None = None
        if self._arguments.get("streamer") is not None:
            self._streamer = PromptOnceStreamer(self._arguments["streamer"])
            self._arguments["streamer"] = self._streamer

    def run(self) -> Any:
        """The output of `model.generate`."""
        while True:
            begin = time.perf_counter()
            load, slab = self._find(), self._new_slab()
            asked_s = time.perf_counter() - begin
            try:
                cache = SlabCache(slab, load.num_tokens if load else 0, load.arrive if load else _nothing_to_load)
                if load is not None:
                    load.start(slab)
                output = self._generate(cache)
            except LoadFailed as error:
                self._give_up(error)
                continue
            except ShapeMismatch as error:
                self._parts.counters.add_bypass(str(error))
                self._begin_again()
                return self._parts.model.generate(self._prompt, **self._arguments)
            finally:
                if load is not None:
                    load.close()
            self._account(cache, load, asked_s, time.perf_counter())
            self._store(cache, load, output)
            return output

    # finding

    def _find(self) -> PrefixLoad | None:
        """The longest stored prefix, on its way; None if there is none, or none that pays."""
        parts, spans = self._parts, self.spans
        if self._loads_left <= 0:
            return None
        self._loads_left -= 1
        full = [spans.full(position) for position in range(self._max_full)]
        with parts.client.match([span.chain for span in full]) as lease:
            full = full[: lease.count]
            self.num_stored = len(full)
            short = spans.short_candidates(len(full)) if self._may_load_short else []
            asked = full + short
            at_most = max((span.end for span in asked), default=0)
            if not asked or at_most < parts.break_even.floor_tokens:
                return None
            worth = parts.break_even.worth_loading(lease.tiers, spans.tokens_per_chunk) // spans.tokens_per_chunk
            if worth < len(full) and full[-1].end >= parts.break_even.floor_tokens:
                parts.counters.add(not_worth_it=1)
                parts.client.declined([span.chain for span in full[worth:]])
                if not worth:
                    return None
                full, short = full[:worth], []
                asked, at_most = full, full[-1].end
            load = parts.client.load([span.chain for span in asked], deadline_s=parts.patience_s(at_most), stream=True)
        if load is None:
            return None
        indices = _usable(load.sources, len(full))
        wanted = [asked[index] for index in indices]
        num_tokens = min(wanted[-1].end if wanted else 0, self._num_prompt - 1)
        if num_tokens < parts.break_even.floor_tokens:
            load.close()
            return None
        return PrefixLoad(load, indices, wanted, num_tokens, parts.executor)

    def _give_up(self, error: LoadFailed) -> None:
        """A load failed half-way: prepare to run again with less."""
        self._parts.counters.add(failures=1)
        self._parts.counters.log_once(f"a prefix was computed instead of loaded: {error}")
        self._may_load_short = False
        self._max_full = min(self._max_full, error.index)
        if not error.is_corrupt:
            self._loads_left = 0
        self._begin_again()

    def _begin_again(self) -> None:
        if self._streamer is not None:
            self._streamer.begin_again()

    # running

    def _new_slab(self) -> KvSlab:
        capacity = self._num_prompt + new_tokens(self._parts.model, self._num_prompt, self._arguments)
        return KvSlab(self._parts.layers, capacity, self._parts.pool)

    def _generate(self, cache: SlabCache) -> Any:
        return self._parts.model.generate(self._prompt, **{CACHE_ARGUMENT: cache}, **self._arguments)

    def _account(self, cache: SlabCache, load: PrefixLoad | None, asked_s: float, end: float) -> None:
        """Count the request and measure what loading and computing took."""
        parts = self._parts
        reused = load.num_tokens if load else 0
        waited_s = load.waited_s if load else 0.0
        load_s = asked_s + waited_s if load else 0.0
        parts.counters.add_request(self._num_prompt, LastLoad(reused, load.tier if load else Tier.NONE, load_s))
        parts.break_even.observe_load({load.tier if load else Tier.NONE: reused}, load_s)
        if cache.clock.starts:
            computed_s = cache.clock.first_pass_s(end) - waited_s
            parts.break_even.observe_compute(self._num_prompt - reused, computed_s)

    # storing

    def _store(self, cache: SlabCache, load: PrefixLoad | None, output: Any) -> None:
        """Store the full chunks that the cache does not have, and the short one at the prompt's end."""
        held = cache.num_tokens_in_slab
        sequence = output if isinstance(output, torch.Tensor) else output.sequences
        if held < self._num_prompt or not torch.equal(sequence[:, : self._num_prompt].cpu(), self._prompt.cpu()):
            return
        self.spans.extend(sequence[0, self._num_prompt : held].cpu())
        new = [self.spans.full(position) for position in range(self.num_stored, self.spans.num_full)]
        if self._short is not None and not (load and self._short in load.spans):
            new.append(self._short)
        chains = [self.spans.full(position).chain for position in range(self.spans.num_full)] if self._said else []
        if not new and not chains:
            return
        parts, slab, said = self._parts, cache.slab, self._said
        # A cache that the caller gets back may be changed by the caller: it is copied before.
        if parts.background is None or not isinstance(output, torch.Tensor):
            _store_now(parts, slab, new, chains, said)
        elif not parts.background.submit(lambda: _store_now(parts, slab, new, chains, said)):
            parts.counters.add(stores_dropped=1)


def _store_now(parts: Parts, slab: KvSlab, spans: list[Span], chains: list[ChainHash], said: Said | None) -> None:
    """Store spans, then say what is known of a chain."""
    try:
        parts.counters.add_stored(store_spans(parts.client, parts.namespace, slab, spans))
    except KvfsError as error:
        parts.counters.add(chunks_refused=len(spans))
        parts.counters.log_once(f"a prefix was not stored: {error}")
    if said is not None:
        parts.client.hint(chains, said)


def _usable(sources: Sequence[Tier], num_full: int) -> list[int]:
    """Which of the chunks asked for are used: the full ones up to a miss; if there is none, the longest short one."""
    usable = list(itertools.takewhile(lambda index: sources[index] is not Tier.NONE, range(num_full)))
    if len(usable) == num_full:
        usable += [index for index in range(num_full, len(sources)) if sources[index] is not Tier.NONE][:1]
    return usable


def _nothing_to_load(layer: int) -> None:
    """What `SlabCache` asks for when there is no load."""
