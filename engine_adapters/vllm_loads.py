"""Loading into blocks: one thread that takes loads in the order they came, and helpers where there are cores to spare.

A chunk that does not arrive ends its load there: what follows it would be of no use. The blocks of what did not arrive are
reported, and vLLM computes them.

Concurrency: the thread of the engine begins loads and asks for what has ended; `_run` belongs to the loading thread. A
load's `_done_layers` only grows, under its condition.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from kvfs.chunk import geometry
from kvfs.client import Client, Load
from kvfs.engine_adapters.spare_cores import move_to, num_helpers, spare_cores
from kvfs.engine_adapters.vllm_blocks import KvBlocks, Piece
from kvfs.engine_adapters.vllm_direct_loads import DirectLoads
from kvfs.engine_adapters.vllm_orders import LoadReport, PlacedChunk, Transfer
from kvfs.errors import CorruptChunk, KvfsError, UnavailableError
from kvfs.messages import Tier

log = logging.getLogger(__name__)
SLOWEST_DEVICE_BYTES_PER_S = 256 << 20


class BlockLoad:
    """One load under way.

    Attributes:
        transfer: what is loaded.
        is_async: its request waits between steps; False if the step under way waits.
        num_arrived: chunks from the first on that are there, once it has ended.
        asked_by_tier, tokens_by_tier: tokens that were there, and those that arrived, by where they were.
        seconds: from the order to the end.
    """

    def __init__(self, transfer: Transfer, is_async: bool, fence: Any) -> None:
        self.transfer = transfer
        self.is_async = is_async
        self.fence = fence
        self.num_arrived = len(transfer.chunks)
        self.asked_by_tier: dict[Tier, int] = {}
        self.tokens_by_tier: dict[Tier, int] = {}
        self.seconds = 0.0
        self.begin = time.perf_counter()
        self._events: dict[int, Any] = {}
        self._has_ended = False
        self.future: Future[None]
        self._changed = threading.Condition()

    def layer_is_there(self, layer: int, event: Any) -> None:
        """A layer has been written, as far as it could be."""
        with self._changed:
            self._events[layer] = event
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing more will be written."""
        with self._changed:
            self.seconds = time.perf_counter() - self.begin
            self._has_ended = True
            self._changed.notify_all()

    def wait_for(self, layer: int) -> Any:
        """Wait for a layer; what `KvBlocks.written` said of it."""
        with self._changed:
            self._changed.wait_for(lambda: layer in self._events or self._has_ended)
            return self._events.get(layer)

    def wait_for_end(self) -> None:
        """Wait until it is over."""
        wait([self.future])

    def report(self) -> LoadReport:
        """What the scheduler's side is told."""
        failed = self.num_arrived < len(self.transfer.chunks)
        return LoadReport(self.transfer.request_id, self.asked_by_tier, self.seconds, failed)

    def missing_blocks(self) -> set[int]:
        """Blocks whose KV did not arrive."""
        missing = self.transfer.chunks[self.num_arrived :]
        return set(itertools.chain.from_iterable(placed.loaded_blocks for placed in missing))


class BlockLoader:
    """Loads chunks into a worker's blocks."""

    def __init__(self, client: Client, blocks: KvBlocks, direct: DirectLoads | None = None) -> None:
        self._client = client
        self._blocks = blocks
        self._direct = direct
        cores = spare_cores()
        threads = num_helpers(cores)
        self._thread = ThreadPoolExecutor(1, "kvfs-load", move_to, (cores,))
        self._helpers = ThreadPoolExecutor(threads, "kvfs-copy", move_to, (cores,)) if threads else None
        self._running: list[BlockLoad] = []
        self._has_complained = False

    def open(self) -> None:
        """Have the threads and what is derived from the namespace ready before the first load."""
        namespace = self._client.namespace
        self._thread.submit(geometry, namespace, namespace.identity.tokens_per_chunk)
        if self._helpers is not None:
            self._helpers.submit(int)

    def begin(self, transfer: Transfer, *, is_async: bool) -> BlockLoad:
        """Begin a load; what the engine has queued so far comes before its first write."""
        load = BlockLoad(transfer, is_async, self._blocks.fence())
        load.future = self._thread.submit(self._run, load)
        self._running.append(load)
        return load

    def ended(self) -> list[BlockLoad]:
        """Loads that have ended since the last call."""
        over = [load for load in self._running if load.future.done()]
        for load in over:
            self._running.remove(load)
            error = load.future.exception()
            if error is not None:  # a mistake of ours: the engine computes, and somebody reads the log
                log.error("a load of request %s failed", load.transfer.request_id, exc_info=error)
                load.num_arrived = 0
                load.tokens_by_tier = {}
        return over

    def wait_a_moment(self, timeout_s: float) -> bool:
        """Wait until one of the loads has ended, but not for long; False if there is none."""
        if self._running:
            wait([load.future for load in self._running], timeout_s, FIRST_COMPLETED)
        return bool(self._running)

    def close(self) -> None:
        """Wait for what is running."""
        self._thread.shutdown()
        if self._helpers is not None:
            self._helpers.shutdown()

    # the loading thread

    def _run(self, load: BlockLoad) -> None:
        try:
            self._blocks.after(load.fence)
            placed = load.transfer.chunks
            namespace = self._client.namespace
            size_bytes = sum(geometry(namespace, chunk.chunk.num_tokens).payload_bytes for chunk in placed)
            found = self._client.load(
                [chunk.chunk.chain for chunk in placed],  # type: ignore[misc]
                deadline_s=self._client.deadline_s + size_bytes / SLOWEST_DEVICE_BYTES_PER_S,
                stream=True,
                stay_on_volume=self._direct is not None and self._direct.is_working,
            )
            if found is None:
                load.num_arrived = 0
                return
            load.asked_by_tier = _by_tier(placed, found.sources)
            with found:
                try:
                    self._copy(load, found)
                finally:
                    self._blocks.flush()  # before the lease ends: a GPU may be copying out of the arena
            if load.num_arrived == len(placed):
                self._has_complained = False
            load.tokens_by_tier = _by_tier(placed[: load.num_arrived], found.sources)
        finally:
            load.end()

    def _copy(self, load: BlockLoad, found: Load) -> None:
        placed = load.transfer.chunks
        arrived = list(itertools.takewhile(lambda index: found.sources[index] is not Tier.NONE, range(len(placed))))
        load.num_arrived = len(arrived)
        direct = self._direct.load(found, placed[: load.num_arrived]) if self._direct is not None else {}
        each = map if self._helpers is None else self._helpers.map
        for layer in range(self._blocks.num_layers):
            take = functools.partial(self._take, found, load.transfer.chunks, direct, layer)
            taken = list(each(take, range(load.num_arrived)))
            wrong = next((index for index, one in enumerate(taken) if isinstance(one, KvfsError)), None)
            if wrong is not None:
                self._complain(taken[wrong])
                load.num_arrived = wrong
            if not self._blocks.writes_at_once:
                self._blocks.write(layer, [piece for piece in taken[: load.num_arrived] if isinstance(piece, tuple)])
            load.layer_is_there(layer, self._blocks.written(layer))

    def _complain(self, why: object) -> None:
        """Say why a prefix is computed instead of loaded, once until a load succeeds."""
        if not self._has_complained:
            log.warning("a prefix is computed instead of loaded: %s", why)
        self._has_complained = True

    def _take(
        self,
        found: Load,
        placed: Sequence[PlacedChunk],
        direct: Mapping[int, CorruptChunk | None],
        layer: int,
        index: int,
    ) -> Piece | CorruptChunk | UnavailableError | None:
        """One verified layer of one chunk, or why it did not arrive; None for one that was read directly.

        On the host it is copied while it is warm.
        """
        if index in direct:
            return direct[index]
        chunk = placed[index]
        try:
            raw = found.layer(index, layer)
        except (CorruptChunk, UnavailableError) as error:
            return error
        piece = (chunk.loaded_blocks, raw[chunk.num_kept * self._blocks.block_bytes(layer) :])
        if self._blocks.writes_at_once:
            self._blocks.write(layer, [piece])
        return piece


def _by_tier(placed: Sequence[PlacedChunk], sources: Sequence[Tier]) -> dict[Tier, int]:
    found: dict[Tier, int] = {}
    for chunk, source in zip(placed, sources, strict=False):
        if source is not Tier.NONE:
            found[source] = found.get(source, 0) + _wanted_tokens(chunk)
    return found


def _wanted_tokens(placed: PlacedChunk) -> int:
    tokens_per_block = placed.chunk.num_tokens // len(placed.block_ids)
    return len(placed.loaded_blocks) * tokens_per_block
