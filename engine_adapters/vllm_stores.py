"""Storing from blocks: one thread that copies what a step has computed, while the engine goes on.

The blocks must not change until they are copied. vLLM keeps those of a running request; those of a finished one are
held until `has_stores` is False; before those of a preempted one are given away, `drain` waits, or has them given up.

Concurrency: the thread of the engine begins stores and asks; `_run` belongs to the storing thread. The number of stores
that are not copied yet, by request, has a lock.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kvfs.chunk import align, geometry
from kvfs.client import Client, Publishing, Reservation
from kvfs.engine_adapters.spare_cores import move_to, spare_cores
from kvfs.engine_adapters.vllm_blocks import KvBlocks
from kvfs.engine_adapters.vllm_orders import ChainHint, PlacedChunk, Transfer
from kvfs.errors import KvfsError
from kvfs.messages import StoreStatus

log = logging.getLogger(__name__)
DRAIN_S = 0.25
"""How long an engine waits for copies before it gives blocks away. 2,000 tokens take some 20 ms."""


class BlockStore:
    """Stores chunks out of a worker's blocks.

    Attributes:
        max_waiting_chunks: more than this do not wait, their blocks would be held; one prompt may be longer.
        num_stored, num_refused, num_dropped: chunks so far, the last not begun for that reason.
    """

    def __init__(self, client: Client, blocks: KvBlocks, max_waiting_chunks: int) -> None:
        self.max_waiting_chunks = max_waiting_chunks
        self.num_stored = 0
        self.num_refused = 0
        self.num_dropped = 0
        self._client = client
        self._blocks = blocks
        self._thread = ThreadPoolExecutor(1, "kvfs-store", move_to, (spare_cores(),))
        self._waiting: Counter[str] = Counter()  # chunks that are not copied yet, by request
        self._given_up: set[str] = set()
        self._copying: str | None = None
        self._changed = threading.Condition()

    def begin(self, transfer: Transfer) -> None:
        """Copy the chunks once what the engine has queued so far is done."""
        with self._changed:
            waiting = self._waiting.total()
            if waiting and waiting + len(transfer.chunks) > self.max_waiting_chunks:
                self.num_dropped += len(transfer.chunks)
                return
            self._waiting[transfer.request_id] += len(transfer.chunks)
        log.debug("request %s: %d chunks are to be stored", transfer.request_id, len(transfer.chunks))
        self._thread.submit(self._run, transfer, self._blocks.fence()).add_done_callback(_log_mistake)

    def hint(self, hint: ChainHint) -> None:
        """Say what is known of a chain, when what was begun before is published."""
        self._thread.submit(self._client.hint, hint.chains, hint.said).add_done_callback(_log_mistake)

    def has_stores(self, request_id: str) -> bool:
        """Whether blocks of this request are still to be copied."""
        with self._changed:
            return self._waiting[request_id] > 0

    def wait_a_moment(self, timeout_s: float) -> None:
        """Wait until blocks of some request have been copied, but not for long."""
        with self._changed:
            self._changed.wait(timeout_s)

    def drain(self, request_ids: Iterable[str]) -> None:
        """Return when nothing reads the blocks of these requests any more.

        They are copied, if that is a matter of moments; what a daemon that does not answer holds up is not stored.
        """
        wanted = frozenset(request_ids)
        with self._changed:
            if self._changed.wait_for(lambda: not wanted & self._waiting.keys(), DRAIN_S):
                return
            self._given_up |= wanted & self._waiting.keys()
            self._changed.wait_for(lambda: self._copying not in wanted)

    def flush(self) -> None:
        """Wait until everything that was begun is published or turned away."""
        self._thread.submit(_nothing).result()

    def close(self) -> None:
        """Do what is waiting, then end the thread."""
        self._thread.shutdown()

    # the storing thread

    def _run(self, transfer: Transfer, fence: Any) -> None:
        left = list(transfer.chunks)
        published: list[Publishing] = []
        try:
            self._blocks.after(fence)
            for batch in self._batches(transfer.chunks, self._client.window_bytes() // 2):
                reservations = self._client.store([placed.chunk for placed in batch])
                if not self._may_copy(transfer.request_id):
                    self._client.abort(reservations)
                    break
                self._copy(batch, reservations)
                del left[: len(batch)]
                self._copied(transfer.request_id, len(batch))
                is_refused = any(reservation.status is StoreStatus.REFUSED for reservation in reservations)
                publishing = self._client.publish_later(reservations)
                whole = not published or self._count(published.pop())  # while the daemon checks these
                published.append(publishing)
                if is_refused or not whole:
                    break  # what follows a chunk that is missing would be unreachable
        except KvfsError as error:
            log.warning("a prefix was not stored: %s", error)
        finally:
            self.num_refused += len(left)
            self._copied(transfer.request_id, len(left))
            for publishing in published:
                self._count(publishing)

    def _copy(self, batch: Sequence[PlacedChunk], reservations: Sequence[Reservation]) -> None:
        """Fill the reservations that have a slot, layer by layer."""
        welcome = [
            (placed.block_ids, reservation, reservation.payload)
            for placed, reservation in zip(batch, reservations, strict=True)
            if reservation.payload is not None
        ]
        for layer in range(self._blocks.num_layers):
            pieces = []
            for block_ids, reservation, payload in welcome:
                tensors = reservation.geometry.layers[layer]
                pieces.append((block_ids, payload[tensors[0].begin : tensors[-1].end]))
            if self._blocks.writes_at_once:
                for piece, (_, reservation, _) in zip(pieces, welcome, strict=True):
                    self._blocks.read(layer, [piece])
                    reservation.seal(layer)  # while the bytes are warm
            else:
                self._blocks.read(layer, pieces)

    def _may_copy(self, request_id: str) -> bool:
        """Begin to read the blocks of a request, unless they were given away."""
        with self._changed:
            if request_id not in self._given_up:
                self._copying = request_id
            return self._copying is not None

    def _copied(self, request_id: str, num_chunks: int) -> None:
        """The blocks of so many chunks are not read any more."""
        with self._changed:
            self._copying = None
            self._waiting[request_id] -= num_chunks
            if not self._waiting[request_id]:
                del self._waiting[request_id]
                self._given_up.discard(request_id)
            self._changed.notify_all()

    def _count(self, publishing: Publishing) -> bool:
        """Wait for a publish and count it; whether all its chunks are there now."""
        statuses = publishing.wait()
        self.num_stored += sum(status is StoreStatus.STORED for status in statuses)
        missing = sum(status not in (StoreStatus.STORED, StoreStatus.EXISTS) for status in statuses)
        self.num_refused += missing
        return not missing

    def _batches(self, chunks: Sequence[PlacedChunk], size_bytes: int) -> list[Sequence[PlacedChunk]]:
        """As many chunks at a time as fit into so many bytes; none if not even one does."""
        namespace = self._client.namespace
        each = max(align(geometry(namespace, placed.chunk.num_tokens).payload_bytes) for placed in chunks)
        at_once = size_bytes // each or (2 * size_bytes) // each
        return [chunks[first : first + at_once] for first in range(0, len(chunks), at_once)] if at_once else []


def _log_mistake(future: Future[None]) -> None:
    """A mistake of ours costs a store, and somebody reads the log."""
    error = future.exception()
    if error is not None:
        log.error("a store failed", exc_info=error)


def _nothing() -> None:
    """Comes after everything else."""
