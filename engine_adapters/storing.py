"""Storing what a request computed: from the slab into the window, then published.

Inline, in the thread of the request, or in the background by one thread with a short queue. A job holds the slab, so
its memory is not reused before it has been copied. A queue that is full drops the store (counted): an engine does not
wait for its cache.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

import msgspec

from kvfs.chunk import align, geometry
from kvfs.client import Client, Reservation
from kvfs.engine_adapters.kv_slab import KvSlab
from kvfs.engine_adapters.spans import Span
from kvfs.errors import KvfsError
from kvfs.messages import StoreStatus
from kvfs.namespace import Namespace

log = logging.getLogger(__name__)
MAX_WAITING = 2


class Stored(msgspec.Struct, frozen=True):
    """How many chunks were published, and how many were turned away."""

    num_stored: int
    num_refused: int


def store_spans(client: Client, namespace: Namespace, slab: KvSlab, spans: Sequence[Span]) -> Stored:
    """Copy `spans` out of `slab` and publish them, parents first, as many at a time as the window holds."""
    stored = refused = 0
    if not spans:
        return Stored(0, 0)
    largest = max(align(geometry(namespace, span.num_tokens).payload_bytes) for span in spans)
    at_once = client.window_bytes() // largest
    if not at_once:
        return Stored(0, len(spans))
    for first in range(0, len(spans), at_once):
        batch = spans[first : first + at_once]
        reservations = client.store([span.new_chunk() for span in batch])
        for reservation, span in zip(reservations, batch, strict=True):
            if reservation.payload is not None:
                _copy_out(slab, span, reservation)
        welcome = [reservation for reservation in reservations if reservation.payload is not None]
        statuses = list(client.publish(welcome)) if welcome else []
        present = sum(status in (StoreStatus.STORED, StoreStatus.EXISTS) for status in statuses)
        existed = sum(reservation.status is StoreStatus.EXISTS for reservation in reservations)
        stored += sum(status is StoreStatus.STORED for status in statuses)
        refused += len(batch) - present - existed
        if present + existed < len(batch):
            # What follows a chunk that is missing would be unreachable.
            refused += len(spans) - first - len(batch)
            break
    return Stored(stored, refused)


def _copy_out(slab: KvSlab, span: Span, reservation: Reservation) -> None:
    geo, payload = reservation.geometry, reservation.payload
    assert payload is not None
    for layer, tensors in enumerate(geo.layers):
        slab.read(layer, span.begin, payload[tensors[0].begin : tensors[-1].end], span.num_tokens)
        reservation.seal(layer)  # while the bytes are warm


class BackgroundStore:
    """One thread that does the stores handed to it, in order.

    Attributes:
        max_waiting: stores that may wait; their slabs are memory that is not free for requests.
    """

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self.max_waiting = max_waiting
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(max_waiting)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, job: Callable[[], None]) -> bool:
        """Do `job` soon; False if too many are waiting."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvfs-store", daemon=True)
                self._thread.start()
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def flush(self) -> None:
        """Wait until everything handed over is done."""
        self._jobs.join()

    def close(self) -> None:
        """Do what is waiting, then end the thread."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                if job is None:
                    return
                job()
            except KvfsError as error:
                log.warning("a prefix was not stored: %s", error)
            finally:
                del job  # the slab is free before `flush` returns
                self._jobs.task_done()
