"""What a replay has instead of an arena, a volume and a model: sizes without bytes, and names that are made up."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvfs.keys import Key
from kvfs.namespace import Identity, LayerRun, Namespace, TensorSpec
from kvfs.volume import SUPERBLOCK_BYTES


class NoBytes:
    """Memory, or a device, of a size and without bytes."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.capacity = size_bytes + SUPERBLOCK_BYTES
        self.view = memoryview(b"")
        self.is_direct = True

    def read(self, buffer: memoryview, offset: int) -> None:
        """See `Device`."""

    def kernel_reads(self, max_under_way: int) -> None:
        """See `Device`."""

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        """See `Device`."""

    def sync(self) -> None:
        """See `Device`."""

    def is_in_place(self) -> bool:
        """See `Device`."""
        return True


def keys(count: int) -> list[Key]:
    """The keys of the first chunks of a trace."""
    drawn = hashlib.shake_128(b"kvfs simulate").digest(16 * count)
    return [Key(drawn[at : at + 16]) for at in range(0, len(drawn), 16)]


def namespace_of(source: int, tokens_per_chunk: int, bytes_per_token: int) -> Namespace:
    """One whose chunks have so many tokens and bytes."""
    identity = Identity(
        model=f"trace-{source}", revision="", kv_dtype="U8", layout="none", num_layers=1, num_kv_heads=1, head_size=1,
        tokens_per_chunk=tokens_per_chunk,
    )  # fmt: skip
    return Namespace(identity, (LayerRun(1, (TensorSpec("kv", "U8", (tokens_per_chunk, bytes_per_token), 0),)),))
