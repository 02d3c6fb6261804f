"""Loading a prefix into a slab, layer by layer, while the model computes.

The model calls `PrefixLoad.arrive(layer)` when it reaches a layer; it returns when that layer of every chunk has
been verified and copied. The daemon reads ahead meanwhile. On machines with cores to spare a few threads copy ahead
as well; with one or two cores the model's own thread copies, which was as fast (86 ms to the first token against 90
with a thread of its own, 71 with nothing to copy) and needs no hand-over.

Concurrency: `arrive` is called by the model's thread. Worker threads touch the slab and the load only inside `_fill`;
`close` returns after the last of them, so the slab may be reused and the lease ended then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from kvfs.engine_adapters.kv_slab import KvSlab
from kvfs.engine_adapters.spans import Span
from kvfs.errors import CorruptChunk, KvfsError, UnavailableError
from kvfs.loading import Load
from kvfs.messages import Tier

MAX_THREADS = 4


class LoadFailed(KvfsError):
    """A chunk could not be loaded. `index` says which of the load's spans; those before it arrived."""

    def __init__(self, index: int, cause: KvfsError) -> None:
        super().__init__(f"chunk {index} of a load: {cause}")
        self.index = index
        self.is_corrupt = isinstance(cause, CorruptChunk)


def spare_threads() -> int:
    """Threads that copy ahead: what the model's computation leaves of this process's cores, at most `MAX_THREADS`."""
    return max(0, min(MAX_THREADS, len(os.sched_getaffinity(0)) - 2))


class PrefixLoad:
    """The chunks of one request on their way into its slab.

    Attributes:
        spans: what is loaded, in order, from token 0 on.
        num_tokens: tokens wanted; the last chunk may hold more.
        tier: the slowest tier that a chunk comes from.
        waited_s: how long the model has waited in `arrive`.
    """

    def __init__(
        self,
        load: Load,
        indices: Sequence[int],
        spans: Sequence[Span],
        num_tokens: int,
        executor: ThreadPoolExecutor | None,
    ) -> None:
        """`indices` say which chunks of `load` the `spans` are."""
        self.spans = tuple(spans)
        self.num_tokens = num_tokens
        self.tier = max((load.sources[index] for index in indices), default=Tier.NONE)
        self.waited_s = 0.0
        self._load = load
        self._indices = tuple(indices)
        self._executor = executor
        self._slab: KvSlab | None = None
        self._futures: list[Future[None]] = []

    def start(self, slab: KvSlab) -> None:
        """Begin to fill `slab`."""
        self._slab = slab
        if self._executor is not None:
            self._futures = [self._executor.submit(self._fill, layer) for layer in range(len(slab.layers))]

    def arrive(self, layer: int) -> None:
        """Return when `layer` is in the slab; raises LoadFailed."""
        begin = time.perf_counter()
        try:
            if self._futures:
                self._futures[layer].result()
            else:
                self._fill(layer)
        finally:
            self.waited_s += time.perf_counter() - begin

    def close(self) -> None:
        """Stop copying and end the lease."""
        for future in self._futures:
            future.cancel()
        wait(self._futures)
        self._slab = None
        self._load.close()

    def _fill(self, layer: int) -> None:
        assert self._slab is not None
        for number, (index, span) in enumerate(zip(self._indices, self.spans, strict=True)):
            try:
                raw = self._load.layer(index, layer)
            except (CorruptChunk, UnavailableError) as error:
                raise LoadFailed(number, error) from error
            wanted = min(span.num_tokens, self.num_tokens - span.begin)
            self._slab.write(layer, span.begin, raw, span.num_tokens, wanted)
