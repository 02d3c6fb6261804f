"""Stands in for vLLM around the connector's two sides: requests, blocks, steps, and KV that gives every mistake away.

The KV of a token is a function of the rank, the layer and all tokens up to it, so a block that holds anything but its own
prefix is noticed. Steps are made in the order in which vLLM makes its calls, and what its ranks name is put together as
vLLM does it: a request's load or stores are over when every rank has said so, each in a step of its own.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvfs.device.reader import Reader
from kvfs.engine_adapters.direct_read import row_bytes
from kvfs.engine_adapters.vllm_blocks import BlockOrder, HostBlocks, block_view
from kvfs.engine_adapters.vllm_device_blocks import DeviceBlocks
from kvfs.engine_adapters.vllm_direct_loads import DirectLoads
from kvfs.engine_adapters.vllm_namespace import WorkerKv
from kvfs.engine_adapters.vllm_scheduler import SchedulerSide
from kvfs.engine_adapters.vllm_settings import VllmSettings
from kvfs.engine_adapters.vllm_worker import WorkerSide
from kvfs.namespace import Identity, LayerRun, Namespace, TensorSpec
from kvfs.testing import DEADLINE_S
from kvfs.volume import aligned_buffer

LAYERS, HEADS, CONTENT, BLOCK, CHUNK, BLOCKS = 3, 2, 4, 4, 16, 64


def namespace_of(rank: int, num_ranks: int) -> Namespace:
    return Namespace(
        Identity(
            model="tests/vllm", revision="1", kv_dtype="U8", layout="vllm-tokens-first", num_layers=LAYERS,
            num_kv_heads=HEADS, head_size=CONTENT, tokens_per_chunk=CHUNK, tp_size=num_ranks,
        ),
        (LayerRun(LAYERS, (TensorSpec("kv", "U8", (CHUNK, HEADS, CONTENT), 0),)),), rank, num_ranks,
    )  # fmt: skip


def rows_for(namespace: Namespace, num_rows: int) -> torch.Tensor:
    """Memory on the host for chunks that are read directly, a row each, as direct transfers want it."""
    size = row_bytes(namespace, CHUNK)
    return torch.frombuffer(aligned_buffer(num_rows * size), dtype=torch.uint8).view(num_rows, size)


def request_of(tokens: list[int], request_id: str = "r", **changes: Any) -> Any:
    facts = {
        "request_id": request_id, "prompt_token_ids": tokens, "all_token_ids": tokens, "num_tokens": len(tokens),
        "num_prompt_tokens": len(tokens), "num_computed_tokens": 0, "prompt_embeds": None, "resumable": False,
        "lora_request": None, "cache_salt": None, "mm_features": [], "kv_transfer_params": None,
    }  # fmt: skip
    return SimpleNamespace(**{**facts, **changes})


class Agreement:
    """What every rank has named. Attributes: num_named: how many ranks so far, by request that not all have named."""

    def __init__(self, num_ranks: int) -> None:
        self.num_named: Counter[str] = Counter()
        self._num_ranks = num_ranks

    def take(self, request_ids: set[str]) -> set[str]:
        """One rank names requests; those of them that it was the last to name."""
        self.num_named.update(request_ids)
        agreed = {request_id for request_id in request_ids if self.num_named[request_id] == self._num_ranks}
        for request_id in agreed:
            del self.num_named[request_id]
        return agreed


class PausedBlocks(HostBlocks):
    """Blocks that threads do not get to read or write before they may. Attributes: may_go."""

    def __init__(self, views: tuple[torch.Tensor, ...]) -> None:
        super().__init__(views)
        self.may_go = threading.Event()
        self.may_go.set()

    def after(self, fence: Any) -> None:
        """See KvBlocks."""
        self.may_go.wait()


class StandIn:
    """One engine with its ranks.

    Attributes:
        scheduler, workers: what is tested.
        tensors: of each rank and layer.
        sent: requests whose stores every rank has copied; of a rank alone: `sending`.
        received: requests whose load every rank ended with the last step; of a rank alone: `receiving`.
        wait_for_layers: whether the forward pass calls the hook for each layer.
        wrong_at_begin: positions to be loaded inside a step that were wrong when its forward pass began.
        seconds_per_token: how long the forward pass takes at least.
    """

    def __init__(
        self, mount: Path, num_ranks: int = 1, readers: Sequence[Reader] = (), num_rows: int = 8, **settings: Any
    ) -> None:
        """With `readers`, one a rank, the ranks do what they do on a GPU, and read from the volume itself: up to
        `num_rows` chunks at a time. They are closed with this.
        """
        self.settings = VllmSettings(
            str(mount),
            **{"floor_tokens": 1, "break_even": False, "load_async": True, "deadline_s": DEADLINE_S, **settings},
        )
        namespaces = [namespace_of(rank, num_ranks) for rank in range(num_ranks)]
        self.tensors = [
            [torch.zeros(BLOCKS, HEADS, BLOCK, CONTENT, dtype=torch.uint8) for _ in range(LAYERS)] for _ in namespaces
        ]
        self.workers = []
        self._blocks: list[PausedBlocks] = []
        for namespace, tensors in zip(namespaces, self.tensors, strict=True):
            views = tuple(block_view(tensor, BLOCKS, BlockOrder.TOKENS_FIRST) for tensor in tensors)
            numbers = {f"layer {layer}": layer for layer in range(LAYERS)}
            kv = WorkerKv(namespace, views, numbers, BLOCKS * BLOCK, is_storing=True)
            if readers:
                blocks = DeviceBlocks(views)
                direct = DirectLoads(namespace, blocks, readers[namespace.rank], rows_for(namespace, num_rows))
                self.workers.append(WorkerSide(kv, blocks, self.settings, direct))
                continue
            self._blocks.append(PausedBlocks(views))
            self.workers.append(WorkerSide(kv, self._blocks[-1], self.settings))
        self.scheduler = SchedulerSide(
            self.settings, namespaces, BLOCK, lambda path: path, may_load_in_step=True, may_prefetch=not readers
        )
        for side in [*self.workers, self.scheduler]:
            side.open()
        self.block_ids: dict[str, list[int]] = {}
        self.scheduled: dict[str, int] = {}
        self.preempted: set[str] = set()
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.sending, self.receiving = Agreement(num_ranks), Agreement(num_ranks)
        self.failed: set[int] = set()
        self.seconds_per_token = 0.0
        self.wait_for_layers = True
        self.wrong_at_begin: list[int] = []

    def close(self) -> None:
        for side in [*self.workers, self.scheduler]:
            side.close()

    @contextmanager
    def pausing(self, rank: int) -> Iterator[None]:
        """The loads and stores of one rank that begin now go on at the end of this."""
        self._blocks[rank].may_go.clear()
        try:
            yield
        finally:
            self._blocks[rank].may_go.set()

    # what vLLM's scheduler does

    def admit(self, request: Any, block_ids: list[int], num_local: int = 0) -> int:
        """Give a request its blocks; how many tokens are loaded for it."""
        self.block_ids[request.request_id] = block_ids
        found = self.scheduler.loadable_tokens(request, num_local)
        self.scheduler.allocated(request, block_ids, found)
        request.num_computed_tokens = num_local + found
        return found

    def schedule(self, request: Any, num_tokens: int) -> None:
        """Let the next step compute so many tokens of a request."""
        self.scheduled[request.request_id] = num_tokens
        self._computing = getattr(self, "_computing", {})
        self._computing[request.request_id] = request

    def step(self) -> None:
        """One step: orders, loads, the forward pass, stores, results."""
        scheduled, self.scheduled = self.scheduled, {}
        preempted, self.preempted = self.preempted, set()
        step = SimpleNamespace(
            preempted_req_ids=preempted,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
        )
        orders = self.scheduler.orders(step, self.block_ids.__getitem__)
        self.orders = orders
        for worker in self.workers:
            worker.preempted(orders)
        if orders.loads_in_step:
            for worker in self.workers:
                worker.begin_loads(orders)
                if self.wait_for_layers:
                    for layer in range(LAYERS):
                        worker.wait_for_layer(f"layer {layer}")
        for request_id, num_tokens in scheduled.items():
            request = self._computing[request_id]
            if not self.wait_for_layers and not self.failed:
                self.wrong_at_begin += self.wrong_tokens(request, request.num_computed_tokens)
            self.compute(request, request.num_computed_tokens, num_tokens)
            request.num_computed_tokens += num_tokens
        reports = []
        self.received = set()
        for worker in self.workers:
            if not orders.loads_in_step:
                worker.begin_loads(orders)
            worker.begin_stores(orders)
            sent, got = worker.finished()
            self.sent |= self.sending.take(sent)
            self.received |= self.receiving.take(got)
            self.failed |= worker.failed_blocks()
            if (report := worker.report()) is not None:
                reports.append(report)
        merged = reports[0] if reports else None
        for report in reports[1:]:
            merged = merged.merge(report) if merged is not None else report
        self.scheduler.reported(merged, self.received, len(self.failed))

    def settle(self, request: Any) -> None:
        """Steps until a request's load has ended."""
        for _ in range(100_000):
            self.step()
            if request.request_id in self.received:
                return
        raise AssertionError("the load has not ended")

    def run(self, request: Any, block_ids: list[int], num_local: int = 0) -> int:
        """A whole request with one prefill step and one that generates nothing; how many tokens were loaded."""
        self.scheduler.arrived(request)
        found = self.admit(request, block_ids, num_local)
        if found and self.scheduler.is_async(request):
            self.settle(request)
        self.schedule(request, request.num_tokens - request.num_computed_tokens)
        self.step()
        return found

    def finish(self, request: Any) -> None:
        """The request is over; return when its blocks are free."""
        if self.scheduler.finished(request, self.block_ids[request.request_id]):
            for _ in range(100_000):
                self.step()
                if request.request_id in self.sent:
                    return
            raise AssertionError("the blocks are not given back")

    # KV

    def compute(self, request: Any, begin: int, num_tokens: int) -> None:
        """The forward pass: fill the KV of some tokens."""
        time.sleep(num_tokens * self.seconds_per_token)
        block_ids = self.block_ids[request.request_id]
        for rank, tensors in enumerate(self.tensors):
            for position in range(begin, begin + num_tokens):
                for layer, tensor in enumerate(tensors):
                    kv = kv_of(request.all_token_ids[: position + 1], rank, layer)
                    tensor[block_ids[position // BLOCK], :, position % BLOCK] = kv

    def wrong_tokens(self, request: Any, num_tokens: int) -> list[int]:
        """Positions among the first `num_tokens` whose KV is not their own."""
        block_ids = self.block_ids[request.request_id]
        wrong = []
        for position in range(num_tokens):
            for rank, tensors in enumerate(self.tensors):
                for layer, tensor in enumerate(tensors):
                    kv = kv_of(request.all_token_ids[: position + 1], rank, layer)
                    if not torch.equal(tensor[block_ids[position // BLOCK], :, position % BLOCK], kv):
                        wrong.append(position)
        return sorted(set(wrong))


def kv_of(prefix: list[int], rank: int, layer: int) -> torch.Tensor:
    """The KV [heads, content] of the last token of a prefix."""
    raw = hashlib.shake_128(repr((prefix, rank, layer)).encode()).digest(HEADS * CONTENT)
    return torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).copy()).view(HEADS, CONTENT)
