"""The KV tensors of a vLLM worker as bytes of chunks, in every layout that vLLM knows.

vLLM hands over one tensor a layer, [blocks, heads, tokens, content], whose strides are those of the layout: blocks or
layers outermost, heads before tokens or after. A chunk holds, for each layer, its blocks one after the other, and each block
in one of two orders:

    TOKENS_FIRST  [tokens, heads, content]: the same bytes whatever the engine's block size is
    HEADS_FIRST   [heads, tokens, content] a block: what a layout that has heads before tokens copies without a shuffle

(The CPU backend packs keys and values inside a block in an order of its own; to us that is HEADS_FIRST, opaque.) A block of the
scheduler may be several blocks of the attention kernel, which then are the blocks above.

*Where the bytes go is decided here.* `HostBlocks` copies with numpy, which holds no GIL and knows no dtype. For a GPU see
`vllm_device_blocks`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from kvfs.errors import UsageError

Piece = tuple[Sequence[int], memoryview]
"""Block ids, and their bytes one block after the other."""


class BlockOrder(enum.Enum):
    """How the elements of one block are ordered in a chunk."""

    TOKENS_FIRST = "tokens-first"
    HEADS_FIRST = "heads-first"


LAYOUT_ORDERS = {
    "LBHNC": BlockOrder.HEADS_FIRST,
    "LBNHC": BlockOrder.TOKENS_FIRST,
    "LHBNC": BlockOrder.HEADS_FIRST,
    "BLHNC": BlockOrder.HEADS_FIRST,
    "BLNHC": BlockOrder.TOKENS_FIRST,
    "BHLNC": BlockOrder.HEADS_FIRST,
}
"""The order that needs no shuffling, by the name of vLLM's layout."""


def order_of(layout: str, num_heads: int) -> BlockOrder:
    """In which order blocks of a layout are stored; raises UsageError for a layout that is not known.

    With one head (MLA's latent vectors) both orders are the same bytes.
    """
    known = LAYOUT_ORDERS.get(layout)
    if known is None:
        raise UsageError(f"vLLM's KV cache layout {layout!r} is none of {', '.join(LAYOUT_ORDERS)}")
    return BlockOrder.TOKENS_FIRST if num_heads == 1 else known


def block_view(tensor: torch.Tensor, num_blocks: int, order: BlockOrder) -> torch.Tensor:
    """A layer's tensor as [num_blocks, kernel blocks in a block, …], each block in the order of the chunk."""
    if tensor.ndim != 4 or tensor.shape[0] % num_blocks or tensor.stride(3) != 1:
        raise UsageError(
            f"a KV tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
            f"[{num_blocks} blocks, heads, tokens, content]"
        )
    view: torch.Tensor = tensor.unflatten(0, (num_blocks, -1))  # type: ignore[no-untyped-call]
    return view.transpose(2, 3) if order is BlockOrder.TOKENS_FIRST else view


class KvBlocks(Protocol):
    """The KV memory of a worker, all layers.

    Layers are numbered in the order of the chunk. `fence` is called by the thread of the engine and marks what it has
    queued so far; `read` and `write` are called by threads of ours and come after that.
    """

    writes_at_once: bool
    """`write` is done when it returns, and several threads may write different blocks at the same time."""

    @property
    def num_layers(self) -> int:
        """Layers of this worker."""

    def block_bytes(self, layer: int) -> int:
        """Bytes of one block of one layer."""

    def fence(self) -> Any:
        """Everything that the engine has queued until now."""

    def after(self, fence: Any) -> None:
        """What this thread asks for from now on happens after `fence`."""

    def write(self, layer: int, pieces: Sequence[Piece]) -> None:
        """Put bytes into blocks of a layer."""

    def read(self, layer: int, pieces: Sequence[Piece]) -> None:
        """Fill the memory of `pieces` from blocks of a layer; it is full when this returns."""

    def written(self, layer: int) -> Any:
        """What the engine has to wait for (see `wait`) before it looks at a layer that was written."""

    def wait(self, event: Any) -> None:
        """The engine's next work happens after `event`; called by the thread of the engine."""

    def flush(self) -> None:
        """Return when everything that this thread wrote is there."""


class HostBlocks:
    """KV in host memory: each call does its work at once, so there is nothing to wait for."""

    writes_at_once = True

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        """`views` are those of `block_view`."""
        self._rows = [_bytes_of(view) for view in views]

    @property
    def num_layers(self) -> int:
        """See KvBlocks."""
        return len(self._rows)

    def block_bytes(self, layer: int) -> int:
        """See KvBlocks."""
        return math.prod(self._rows[layer].shape[1:])

    def fence(self) -> None:
        """See KvBlocks."""

    def after(self, fence: Any) -> None:
        """See KvBlocks."""

    def write(self, layer: int, pieces: Sequence[Piece]) -> None:
        """See KvBlocks."""
        rows = self._rows[layer]
        for block_ids, raw in pieces:
            blocks = np.frombuffer(raw, dtype=np.uint8).reshape(len(block_ids), *rows.shape[1:])
            for block_id, block in zip(block_ids, blocks, strict=True):
                rows[block_id] = block

    def read(self, layer: int, pieces: Sequence[Piece]) -> None:
        """See KvBlocks."""
        rows = self._rows[layer]
        for block_ids, raw in pieces:
            blocks = np.frombuffer(raw, dtype=np.uint8).reshape(len(block_ids), *rows.shape[1:])
            for block_id, block in zip(block_ids, blocks, strict=True):
                block[...] = rows[block_id]

    def written(self, layer: int) -> None:
        """See KvBlocks."""

    def wait(self, event: Any) -> None:
        """See KvBlocks."""

    def flush(self) -> None:
        """See KvBlocks."""


def _bytes_of(view: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    found: np.ndarray[Any, np.dtype[np.uint8]] = view.view(torch.uint8).numpy()
    return found
