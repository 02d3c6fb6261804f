"""KV blocks in GPU memory: gathered and scattered through one staging slab, on a stream of our own.

A layer of a whole load is one copy from pinned memory to the slab and one scatter; a layer of a store one gather and
one copy back. Two slabs take turns, so that the host fills one while the other is on its way. What lies in an arena that is
registered with CUDA is copied from there, a copy a chunk, and not gathered in pinned memory before.

The code is the same for tensors on the host (stream and events are absent then), which is how its gather and scatter are
tested where there is no GPU; streams and pinned memory are tested where there is one (mark `gpu`).

Concurrency: reading and writing may be done at the same time; each has its own slabs and stream. Of several threads that
write (loads that a step waits for, and those that it does not) one fills a slab and queues its copy before the next does.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from kvfs.engine_adapters.pinned_arena import Arena
from kvfs.engine_adapters.vllm_blocks import Piece
from kvfs.errors import UnavailableError

log = logging.getLogger(__name__)
_WIDTHS = (torch.int64, torch.int32, torch.int16, torch.uint8)
NUM_SLABS = 2


class DeviceBlocks:
    """The KV memory of a worker on a GPU; see `vllm_blocks.KvBlocks`. Attributes: device; bytes_by_way: written from the host so far."""

    writes_at_once = False

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        """`views` are those of `block_view`."""
        self._views = [_widened(view) for view in views]
        self.device = views[0].device
        self.bytes_by_way = Counter(arena=0, staged=0)
        self._arena: Arena | None = None
        self._loading = _Lane(self.device)
        self._storing = _Lane(self.device)

    @property
    def num_layers(self) -> int:
        """See KvBlocks."""
        return len(self._views)

    def block_bytes(self, layer: int) -> int:
        """See KvBlocks."""
        view = self._views[layer]
        return math.prod(view.shape[1:]) * view.dtype.itemsize

    def fence(self) -> Any:
        """See KvBlocks."""
        return _recorded(torch.cuda.current_stream(self.device)) if self.device.type == "cuda" else None

    def after(self, fence: Any) -> None:
        """See KvBlocks."""
        if fence is not None:
            for lane in (self._loading, self._storing):
                lane.stream.wait_event(fence)

    def write(self, layer: int, pieces: Sequence[Piece]) -> None:
        """See KvBlocks. It is queued, not done, when this returns: see `written` and `flush`."""
        view, lane = self._views[layer], self._loading
        if not pieces:
            return
        size = sum(len(raw) for _, raw in pieces)
        with lane.lock:
            slab = lane.next_slab(size)
            is_there = self._copy_from_arena(slab, pieces)
            self.bytes_by_way["arena" if is_there else "staged"] += size
            if not is_there:
                offset = 0
                for _, raw in pieces:
                    slab.host_bytes[offset : offset + len(raw)] = np.frombuffer(raw, dtype=np.uint8)
                    offset += len(raw)
            with lane.current():
                if not is_there:
                    slab.device[:size].copy_(slab.host[:size], non_blocking=True)
                blocks = slab.device[:size].view(view.dtype).view(-1, *view.shape[1:])
                view.index_copy_(0, self._ids(_all_ids(pieces)), blocks)
                slab.used(lane.stream)

    def beside(self) -> contextlib.AbstractContextManager[Any]:
        """Within it, this thread's own work on the device is queued where loads are, not behind the engine's."""
        return self._loading.current()

    def use_arena(self, arena: Arena | None) -> None:
        """Copy what lies in `arena` from there; what was copied out of the one before has arrived, and it is closed."""
        with self._loading.lock:
            before, self._arena = self._arena, arena
            self.flush()
            if before is not None:
                before.close()

    def _copy_from_arena(self, slab: _Slab, pieces: Sequence[Piece]) -> bool:
        """Queue copies of all pieces to the slab on the device, if that is where they lie; with the lane's lock."""
        arena = self._arena
        if arena is None or not all(arena.holds(raw) for _, raw in pieces):
            return False
        stream = self._loading.stream
        address = slab.device.data_ptr()
        try:
            for _, raw in pieces:
                arena.copy(raw, address, stream.cuda_stream if stream is not None else 0)
                address += len(raw)
        except UnavailableError as error:
            log.warning("what is in RAM goes to the GPU through pinned buffers from now on: %s", error)
            self._arena = None
            self.flush()
            with contextlib.suppress(UnavailableError):
                arena.close()
            return False
        return True

    def write_payload(
        self, payload: torch.Tensor, bounds: Sequence[int], block_ids: Sequence[int], num_kept: int
    ) -> None:
        """Put all layers of a chunk into blocks, from bytes on the device, on a boundary of 8; queued as by `write`.

        `bounds` is where each layer of `payload` begins, and its end; the first `num_kept` blocks of each are left out.
        """
        lane = self._loading
        with lane.lock, lane.current():
            ids = self._ids(block_ids)
            for layer, view in enumerate(self._views):
                part = payload[bounds[layer] + num_kept * self.block_bytes(layer) : bounds[layer + 1]]
                view.index_copy_(0, ids, part.view(view.dtype).view(-1, *view.shape[1:]))

    def read(self, layer: int, pieces: Sequence[Piece]) -> None:
        """See KvBlocks."""
        view, lane = self._views[layer], self._storing
        if not pieces:
            return
        size = sum(len(raw) for _, raw in pieces)
        with lane.lock:
            slab = lane.next_slab(size)
            with lane.current():
                blocks = slab.device[:size].view(view.dtype).view(-1, *view.shape[1:])
                torch.index_select(view, 0, self._ids(_all_ids(pieces)), out=blocks)
                slab.host[:size].copy_(slab.device[:size], non_blocking=True)
                slab.used(lane.stream)
            slab.wait()
            offset = 0
            for _, raw in pieces:
                np.frombuffer(raw, dtype=np.uint8)[...] = slab.host_bytes[offset : offset + len(raw)]
                offset += len(raw)

    def written(self, layer: int) -> Any:
        """See KvBlocks."""
        return _recorded(self._loading.stream) if self.device.type == "cuda" else None

    def wait(self, event: Any) -> None:
        """See KvBlocks."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def flush(self) -> None:
        """See KvBlocks."""
        if self._loading.stream is not None:
            self._loading.stream.synchronize()

    def _ids(self, block_ids: Iterable[int]) -> torch.Tensor:
        ids = torch.tensor(list(block_ids), dtype=torch.int64)
        return ids if self.device.type == "cpu" else ids.pin_memory().to(self.device, non_blocking=True)


class _Slab:
    """Pinned host memory and as much on the device. Attributes: host, host_bytes (the same as numpy), device."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self.host_bytes = self.host.numpy()
        self.device = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self._event: Any = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def used(self, stream: Any) -> None:
        """What the stream has been told so far uses this slab."""
        if self._event is not None:
            self._event.record(stream)

    def wait(self) -> None:
        """Return when nothing uses this slab."""
        if self._event is not None:
            self._event.synchronize()


class _Lane:
    """A stream with slabs that take turns.

    Attributes:
        stream: None where there is no GPU.
        lock: held from `next_slab` until what is done with the slab is queued.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.lock = threading.Lock()
        self.stream: Any = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._slabs: list[_Slab] = []

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Within it, work is queued on this stream."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def next_slab(self, size_bytes: int) -> _Slab:
        """A slab of at least this size that nothing uses."""
        slab = None
        if len(self._slabs) == NUM_SLABS:
            slab = self._slabs.pop(0)
            slab.wait()
        if slab is None or slab.host.numel() < size_bytes:
            with self.current():  # whose memory was used by other streams is not given out to this one
                slab = _Slab(size_bytes, self._device)
        self._slabs.append(slab)
        return slab


def _all_ids(pieces: Sequence[Piece]) -> Iterable[int]:
    return itertools.chain.from_iterable(block_ids for block_ids, _ in pieces)


def _recorded(stream: Any) -> Any:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _widened(view: torch.Tensor) -> torch.Tensor:
    """The same memory in the widest integers that fit: no float format is in the way, and copies move more at once."""
    plain = view.view(torch.uint8)
    for dtype in _WIDTHS:
        width = dtype.itemsize
        fits = plain.shape[-1] % width == 0 and plain.storage_offset() % width == 0
        if fits and all(stride % width == 0 for stride in plain.stride()[:-1]):
            return plain.view(dtype)
    return plain
