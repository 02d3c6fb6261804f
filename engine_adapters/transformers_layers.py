"""A cache for `generate()` of transformers whose layers lie in a slab and are loaded when the model reaches them.

`SlabCache` is a `DynamicCache`; its layers write new keys and values in place instead of concatenating. Before a layer
is used for the first time it calls `arrive`, which returns when the stored KV of that layer is in the slab, or raises:
then the forward pass is abandoned before any token was chosen.

What the user may do with the cache of a `generate(return_dict_in_generate=True)` works as with a DynamicCache: go on
generating, crop, deep-copy. Reordering and the like leave the slab: the layer then behaves as an ordinary one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvfs.engine_adapters.kv_slab import KvSlab, LayerShape
from kvfs.errors import KvfsError


class ShapeMismatch(KvfsError):
    """The model produced KV of another shape or dtype than at the start (autocast, a changed model)."""


class ForwardClock:
    """When the model began its first and its second forward pass, in `time.perf_counter` seconds.

    The second begins after the first token was chosen, which waits for the device: so the difference is what the
    prefill took, on a GPU too.
    """

    def __init__(self) -> None:
        self.starts: list[float] = []

    def tick(self) -> None:
        """A forward pass reaches its first layer."""
        if len(self.starts) < 2:
            self.starts.append(time.perf_counter())

    def first_pass_s(self, end: float) -> float:
        """What the first pass took; `end` is when generating ended, in case there was no second."""
        return (self.starts[1] if len(self.starts) > 1 else end) - self.starts[0]


class SlabLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer in a slab.

    `keys` and `values` are always slices of the slab's tensors, as long as the tokens held; after something that
    cannot be expressed so, `slab` is None and the layer is a DynamicLayer.
    """

    def __init__(self, slab: KvSlab, index: int, num_tokens: int, arrive: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.slab: KvSlab | None = slab
        self.index = index
        self.clock: ForwardClock | None = None
        self._arrive: Callable[[int], None] | None = arrive
        shape = slab.layers[index]
        self.shape: LayerShape = shape
        self.dtype, self.device = shape.dtype, shape.device
        self.keys: Any = slab.keys[index][:, :, :num_tokens]
        self.values: Any = slab.values[index][:, :, :num_tokens]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values behind those held; return all of them."""
        if self.clock is not None:
            self.clock.tick()
        if self._arrive is not None:
            arrive, self._arrive = self._arrive, None
            arrive(self.index)
        slab = self.slab
        if slab is None:
            keys, values = super().update(key_states, value_states, *args, **kwargs)
            return keys, values
        self._check(key_states, value_states)
        begin = self.keys.shape[-2]
        end = begin + key_states.shape[-2]
        if end > slab.capacity:
            slab.grow(end, used_tokens=slab.capacity)
        index = self.index
        slab.keys[index][:, :, begin:end] = key_states
        slab.values[index][:, :, begin:end] = value_states
        self.keys = slab.keys[index][:, :, :end]
        self.values = slab.values[index][:, :, :end]
        return self.keys, self.values

    def _check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        shape = self.shape
        for states, size in ((key_states, shape.key_size), (value_states, shape.value_size)):
            if (
                states.ndim != 4
                or (*states.shape[:2], states.shape[3]) != (1, shape.num_heads, size)
                or states.dtype != shape.dtype
                or states.device != shape.device
            ):
                raise ShapeMismatch(
                    f"layer {self.index} made KV {tuple(states.shape)} {states.dtype} on {states.device}, not {shape}"
                )

    def _leave_slab(self) -> None:
        self.slab = None

    def offload(self) -> None:
        """As of DynamicLayer."""
        self._leave_slab()
        super().offload()  # type: ignore[no-untyped-call]

    def reset(self) -> None:
        """As of DynamicLayer."""
        self._leave_slab()
        super().reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """As of DynamicLayer."""
        self._leave_slab()
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """As of DynamicLayer."""
        self._leave_slab()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """As of DynamicLayer."""
        self._leave_slab()
        super().batch_select_indices(indices)


class SlabCache(DynamicCache):
    """A DynamicCache of `SlabLayer`s that begins with `num_tokens` tokens, which `arrive` brings layer by layer.

    Attributes:
        slab: where the KV lies.
        clock: of the forward passes.
    """

    def __init__(self, slab: KvSlab, num_tokens: int, arrive: Callable[[int], None]) -> None:
        super().__init__()
        self.layer_class_to_replicate = None
        self.slab = slab
        self.clock = ForwardClock()
        self.layers: Any = [SlabLayer(slab, index, num_tokens, arrive) for index in range(len(slab.layers))]
        self.layers[0].clock = self.clock

    @property
    def num_tokens_in_slab(self) -> int:
        """Tokens whose KV lies in the slab in every layer; 0 if a layer has left it."""
        if any(layer.slab is None for layer in self.layers):
            return 0
        return min(int(layer.keys.shape[-2]) for layer in self.layers)

    def __deepcopy__(self, memo: dict[int, Any]) -> DynamicCache:
        """An ordinary DynamicCache with a copy of every layer."""
        copied = DynamicCache()
        for index, layer in enumerate(self.layers):
            if layer.is_initialized:
                copied.update(layer.keys.clone(), layer.values.clone(), index)
        return copied
