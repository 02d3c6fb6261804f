"""What admission keeps back from NVMe, for now: chunks that are in RAM only and may go from there, unless they are held.

Concurrency: belongs to the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable

from kvfs.catalog import Chunk


class KeptBack:
    """The chunks that are kept back. Attributes: size_bytes: of them; on_held: told of one that is held from now on."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.on_held: Callable[[Chunk], None] = lambda _: None
        self._chunks: set[Chunk] = set()

    def __contains__(self, chunk: Chunk) -> bool:
        """Whether it may be evicted from RAM though it is nowhere else."""
        return chunk in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def add(self, chunk: Chunk) -> None:
        """A chunk that is in RAM only is not to be written to NVMe, for now."""
        self._chunks.add(chunk)
        self.size_bytes += chunk.length

    def discard(self, chunk: Chunk) -> None:
        """It will be written, or it is gone; one that was not kept back is no error."""
        if chunk in self._chunks:
            self._chunks.remove(chunk)
            self.size_bytes -= chunk.length
