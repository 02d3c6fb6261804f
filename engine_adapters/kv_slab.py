"""The memory that a request's KV lies in: one slab, written in place, in huge pages, reused by the next request.

`DynamicCache` of transformers copies the whole KV of a layer at every step (`torch.cat`) into fresh memory: 93 ms to
the first token at 3,200 tokens of SmolLM2-135M in float32, against 77 ms with a slab. A slab keeps, for each layer,
keys and values of shape [1, heads, capacity, head size], and the bytes of a chunk are copied straight to their place.

*Where the bytes go is decided here and nowhere else.* KV on the host lies in the slab's own memory, and chunks are
copied by numpy, which holds no GIL and knows no dtype. For a layer on another device its tensors are torch's, and each
chunk is staged through a host copy: right, but not yet fast.

Concurrency: different layers may be written by different threads; one layer by one thread at a time. `grow` must not
run beside anything else.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

HUGE_PAGE_BYTES = 2 << 20
ROUND_TOKENS = 256
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class LayerShape:
    """One layer's KV: keys [1, num_heads, tokens, key_size], values [1, num_heads, tokens, value_size]."""

    num_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def row_sizes(self) -> tuple[int, int]:
        """Bytes of one token of one head: of the keys, of the values."""
        return self.key_size * self.dtype.itemsize, self.value_size * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all heads, keys and values."""
        return self.num_heads * sum(self.row_sizes)

    @property
    def is_on_host(self) -> bool:
        """Whether the KV lies in host memory."""
        return self.device.type == "cpu"


class SlabPool:
    """Host memory for slabs, given back when the last tensor that lies in it is gone.

    Attributes:
        max_free_bytes: free memory beyond it goes back to the system.
    """

    def __init__(self, max_free_bytes: int) -> None:
        self.max_free_bytes = max_free_bytes
        self._free: list[Bytes] = []
        # Re-entrant: a finalizer may run, and give memory back, in the very thread that is taking some.
        self._lock = threading.RLock()

    def take(self, size_bytes: int) -> Bytes:
        """At least `size_bytes` of memory, of any content. Whoever holds the array, or a torch tensor over it, keeps it.

        (A numpy view of the array does not: numpy lets a view refer to the memory below.)
        """
        memory = self._take_free(size_bytes)
        if memory is None:
            memory = _allocate(size_bytes)
        handle = memory.view()
        weakref.finalize(handle, self._give_back, memory).atexit = False
        return handle

    def reserve(self, size_bytes: int) -> None:
        """Have `size_bytes` ready, its pages touched, so that no request pays for that."""
        memory = _allocate(size_bytes)
        memory[:: mmap.PAGESIZE] = 0
        self._give_back(memory)

    def _take_free(self, size_bytes: int) -> Bytes | None:
        with self._lock:
            fitting = [memory for memory in self._free if memory.nbytes >= size_bytes]
            if not fitting:
                return None
            best = min(fitting, key=lambda memory: memory.nbytes)
            self._free = [memory for memory in self._free if memory is not best]
            return best

    def _give_back(self, memory: Bytes) -> None:
        with self._lock:
            free_bytes = sum(kept.nbytes for kept in self._free)
            while self._free and free_bytes + memory.nbytes > self.max_free_bytes:
                free_bytes -= self._free.pop(0).nbytes
            if memory.nbytes <= self.max_free_bytes:
                self._free.append(memory)


def _allocate(size_bytes: int) -> Bytes:
    rounded = -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    region = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            region.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without transparent huge pages: slower, just as right
            pass
    return np.frombuffer(region, dtype=np.uint8)


class KvSlab:
    """Keys and values of one sequence, all layers.

    Attributes:
        layers: their shapes.
        capacity: tokens that fit without growing.
        keys, values: for each layer a tensor [1, heads, capacity, size].
    """

    def __init__(self, layers: tuple[LayerShape, ...], capacity: int, pool: SlabPool) -> None:
        self.layers = layers
        self._pool = pool
        self.capacity = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._rows: list[
            tuple[Bytes, Bytes] | None
        ] = []  # the same memory as bytes [heads, capacity, row], on the host
        self._memory: Bytes | None = None
        self._allocate(capacity)

    @staticmethod
    def host_bytes(layers: tuple[LayerShape, ...], capacity: int) -> int:
        """Host memory that a slab of this capacity takes."""
        return sum(layer.token_bytes for layer in layers if layer.is_on_host) * capacity

    def grow(self, num_tokens: int, used_tokens: int) -> None:
        """Make room for `num_tokens`, at least half as many again; keep the first `used_tokens` of every layer."""
        keys, values = self.keys, self.values
        self._allocate(max(num_tokens, self.capacity * 3 // 2))
        for old, new in zip(keys + values, self.keys + self.values, strict=True):
            new[:, :, :used_tokens].copy_(old[:, :, :used_tokens])

    def write(self, layer: int, begin: int, raw: memoryview, num_tokens: int, wanted_tokens: int) -> None:
        """Put the first `wanted_tokens` of a chunk's layer, `raw`, which holds `num_tokens`, at token `begin`."""
        for source, rows, tensor in self._places(layer, raw, num_tokens):
            if rows is not None:
                rows[:, begin : begin + wanted_tokens] = source[:, :wanted_tokens]
            else:
                staged = torch.from_numpy(source[:, :wanted_tokens].copy()).view(tensor.dtype)
                tensor[0, :, begin : begin + wanted_tokens].copy_(staged)

    def read(self, layer: int, begin: int, raw: memoryview, num_tokens: int) -> None:
        """Fill `raw`, a chunk's layer of `num_tokens`, from token `begin` on."""
        for target, rows, tensor in self._places(layer, raw, num_tokens):
            if rows is not None:
                target[...] = rows[:, begin : begin + num_tokens]
            else:
                staged = tensor[0, :, begin : begin + num_tokens].contiguous().cpu()
                target[...] = staged.view(torch.uint8).numpy()

    def _places(self, layer: int, raw: memoryview, num_tokens: int) -> list[tuple[Bytes, Bytes | None, torch.Tensor]]:
        """For keys and values: their part of `raw` as [heads, tokens, row], the slab's rows on the host, the tensor."""
        shape = self.layers[layer]
        key_row, value_row = shape.row_sizes
        flat = np.frombuffer(raw, dtype=np.uint8)
        cut = shape.num_heads * num_tokens * key_row
        rows = self._rows[layer] or (None, None)
        return [
            (flat[:cut].reshape(shape.num_heads, num_tokens, key_row), rows[0], self.keys[layer]),
            (flat[cut:].reshape(shape.num_heads, num_tokens, value_row), rows[1], self.values[layer]),
        ]

    def _allocate(self, capacity: int) -> None:
        self.capacity = -(-capacity // ROUND_TOKENS) * ROUND_TOKENS
        self._memory = self._pool.take(self.host_bytes(self.layers, self.capacity))
        self.keys, self.values, self._rows = [], [], []
        offset = 0
        # Ordinary tensors even inside `torch.inference_mode()`: they are written in place, maybe outside of it.
        with torch.inference_mode(False):
            whole = torch.from_numpy(self._memory)
            for layer in self.layers:
                tensors: list[torch.Tensor] = []
                rows: list[Any] = []
                for size, row in zip((layer.key_size, layer.value_size), layer.row_sizes, strict=True):
                    shape = (1, layer.num_heads, self.capacity, size)
                    if not layer.is_on_host:
                        tensors.append(torch.empty(shape, dtype=layer.dtype, device=layer.device))
                        continue
                    end = offset + layer.num_heads * self.capacity * row
                    tensors.append(whole[offset:end].view(layer.dtype).view(shape))
                    rows.append(self._memory[offset:end].reshape(layer.num_heads, self.capacity, row))
                    offset = end
                self.keys.append(tensors[0])
                self.values.append(tensors[1])
                self._rows.append((rows[0], rows[1]) if rows else None)
