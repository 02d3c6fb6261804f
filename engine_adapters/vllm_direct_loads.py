"""Chunks that are on NVMe only, loaded by a GPU worker from the volume itself: past RAM, the daemon's and its own.

They go to a slab in GPU memory by `direct_read`, and from there to vLLM's blocks. The slab is an allocation of its own, which
cuFile knows (see `kvfs.device.slab`). What fails here is read on the host instead, and with the first failure that is ours or
the device's the worker goes back to having chunks brought into RAM, for good: that is said once, and counted.

Concurrency: loads that a step waits for and others take turns with the slab; each of them holds the lock for one slab full.
The thread of the engine asks for `totals` alone.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

from kvfs.chunk import geometry
from kvfs.device.gpu import Way
from kvfs.device.reader import Reader
from kvfs.engine_adapters.direct_read import Wanted, read_chunks, row_bytes
from kvfs.engine_adapters.vllm_device_blocks import DeviceBlocks
from kvfs.engine_adapters.vllm_orders import PlacedChunk
from kvfs.errors import CorruptChunk, UnavailableError
from kvfs.keys import ChainHash
from kvfs.loading import Load
from kvfs.namespace import Namespace

log = logging.getLogger(__name__)
SLAB_BYTES = 64 << 20
"""Chunks that are read at once; one at least."""


class DirectLoads:
    """Reads chunks from volumes into a worker's blocks.

    Attributes: is_working: False once it failed; num_failures.
    """

    def __init__(
        self,
        namespace: Namespace,
        blocks: DeviceBlocks,
        reader: Reader,
        rows: torch.Tensor,
        give_back: Callable[[], None] = lambda: None,
    ) -> None:
        """`rows`, uint8 [chunks, bytes] on the blocks' device, is the slab; `give_back` frees it and is called once."""
        self.is_working = True
        self.num_failures = 0
        self._namespace = namespace
        self._num_tokens = namespace.identity.tokens_per_chunk
        self._bounds = geometry(namespace, self._num_tokens).bounds
        self._blocks = blocks
        self._reader = reader
        self._rows: torch.Tensor | None = rows
        self._give_back = give_back
        self._bytes = Counter(dict.fromkeys(Way, 0))
        self._told: dict[Way, int] = {}
        self._gds = 0
        self._lock = threading.Lock()

    @classmethod
    def open(cls, namespace: Namespace, blocks: DeviceBlocks) -> DirectLoads | None:
        """Allocate the slab; None, and a line in the log, where that cannot be."""
        size = row_bytes(namespace, namespace.identity.tokens_per_chunk)
        num_rows = max(1, SLAB_BYTES // size)
        reader = Reader()
        try:
            slab = reader.slab(num_rows * size, blocks.device.index or 0)
        except UnavailableError as error:
            reader.close()
            log.warning("chunks on NVMe come through RAM: %s", error)
            return None
        rows = torch.as_tensor(slab.memory, device=blocks.device)
        log.info("chunks on NVMe are read into GPU memory, %d at once", num_rows)
        return cls(namespace, blocks, reader, rows[: num_rows * size].view(num_rows, size), slab.close)

    def load(self, found: Load, placed: Sequence[PlacedChunk]) -> dict[int, CorruptChunk | None]:
        """Read those of `placed` that lie on a volume; what is wrong with each that was read, None for one that is there.

        What is missing in the answer could not be read in this way.
        """
        done: dict[int, CorruptChunk | None] = {}
        for batch in self._batches(found, placed):
            with self._lock:
                if self._rows is None or not self.is_working:
                    return done
                try:
                    with self._blocks.beside():
                        way, errors = read_chunks(
                            self._reader, self._namespace, self._num_tokens, [wanted for _, wanted in batch], self._rows
                        )
                except (OSError, EOFError, UnavailableError) as error:
                    self._failed(error)
                    return done
                if not found.is_held():  # the next daemon may have used these places: of proven ones nobody looks
                    return done
                for (index, _), row, wrong in zip(batch, self._rows, errors, strict=False):
                    done[index] = wrong
                    if wrong is None:
                        self._blocks.write_payload(
                            row, self._bounds, placed[index].loaded_blocks, placed[index].num_kept
                        )
                        self._bytes[way] += self._bounds[-1]
                    else:
                        found.suspect(index)
                self._blocks.flush()  # the next slab full is read into the same memory
        return done

    def totals(self) -> dict[str, int]:
        """Bytes so far by the way they took, and failures, by the names of the metrics. It waits for no load.

        What kvikio carried it calls GDS where it went through cuFile; the rest went through its own buffers.
        """
        by_way = dict(self._bytes)
        if by_way != self._told:  # asking kvikio costs something, and this is asked in every step
            self._told = by_way
            self._gds = self._reader.statistics().kvikio_bytes.get("GDS", 0)
        kvikio = by_way.pop(Way.KVIKIO)
        gds = min(kvikio, self._gds)
        named = {f"gpu_bytes_{way.value}": size for way, size in by_way.items()}
        return {**named, "gpu_bytes_gds": gds, "gpu_bytes_kvikio": kvikio - gds, "direct_failures": self.num_failures}

    def close(self) -> None:
        """Give the slab back; nothing is being loaded."""
        with self._lock:
            if self._rows is not None:
                self._rows = None
                self._give_back()
                self._reader.close()

    def _batches(self, found: Load, placed: Sequence[PlacedChunk]) -> Iterator[list[tuple[int, Wanted]]]:
        """As many chunks as fit into the slab at a time."""
        batch: list[tuple[int, Wanted]] = []
        num_rows = len(self._rows) if self._rows is not None else 0
        for index, each in enumerate(placed):
            extent = found.extent(index)
            if extent is None or each.chunk.num_tokens != self._num_tokens:
                continue
            batch.append((index, Wanted(extent, ChainHash(each.chunk.chain))))
            if len(batch) == num_rows:
                yield batch
                batch = []
        if batch:
            yield batch

    def _failed(self, why: Exception) -> None:
        self.is_working = False
        self.num_failures += 1
        log.warning("chunks on NVMe come through RAM from now on: %s", why)
