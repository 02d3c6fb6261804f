"""Write-behind: dirty chunks go from RAM to NVMe in the background, in the order in which they came.

Clean means durable: write, then sync the volume, then commit the index; only then is a chunk reported clean and may
leave RAM. Each volume has a writer of its own (`volume_writer`). If a device fails its volume is degraded, alone: its
chunks stay dirty in RAM, may be evicted from there like those of a RAM cache, and the writes are tried again.

What `Admission` turns away is kept back, in RAM only, and judged again when it is used or held.

Concurrency: belongs to the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import trio

from kvfs.admission import Admission
from kvfs.catalog import Chunk
from kvfs.kept_back import Judge
from kvfs.residency import Residency
from kvfs.statistics import Fault
from kvfs.stripes import Stripe, Stripes
from kvfs.volume_writer import Progress, VolumeWriter


class WriteBehind:
    """What is dirty, on its way to its volume.

    Attributes: admission.
    """

    def __init__(self, residency: Residency, nvme: Stripes, admission: Admission, now_ns: Callable[[], int]) -> None:
        self.admission = admission
        self._now_ns = now_ns  # since the epoch
        self._residency = residency
        self._judge = Judge(admission, residency.kept_back, residency.counters)
        self._progress = Progress()
        self._writers = [VolumeWriter(residency, stripe, self._progress) for stripe in nvme]
        residency.kept_back.on_held = self._judge_again

    def add(self, chunk: Chunk, *, is_used: bool, is_asked_for: bool) -> None:
        """A chunk was published and is in RAM only. For the rest see `Admission.admit`."""
        now_ns = self._now_ns()
        if self._judge.admits(chunk, now_ns, is_used=is_used, is_asked_for=is_asked_for):
            writer = self._writers[chunk.volume]
            if self.admission.budget_bytes is not None:
                writer.stripe.commits.spent(self.admission.spent_on(now_ns))
            writer.append(chunk)

    def used(self, chunks: Iterable[Chunk]) -> None:
        """An engine loaded these chunks."""
        for chunk in self._judge.again(chunks):
            self._judge_again(chunk)

    def _judge_again(self, chunk: Chunk) -> None:
        self.add(chunk, is_used=True, is_asked_for=self._residency.pins.is_held(chunk))

    @property
    def num_dirty(self) -> int:
        """Chunks that wait or are being written."""
        return sum(writer.num_dirty for writer in self._writers)

    @property
    def dirty_bytes(self) -> int:
        """The same in bytes."""
        return sum(writer.dirty_bytes for writer in self._writers)

    def dirty_bytes_of(self, stripe: Stripe) -> int:
        """The same of one volume."""
        return self._writers[stripe.number].dirty_bytes

    def fault_of(self, stripe: Stripe) -> Fault:
        """Why nothing can be written to one volume, if so."""
        return self._writers[stripe.number].fault

    @property
    def failure(self) -> str:
        """Why what is dirty is not written; "" if no volume fails."""
        return "; ".join(
            f"{writer.failure} (the volume in {writer.stripe.directory})" for writer in self._writers if writer.failure
        )

    async def drain(self) -> None:
        """Wait until nothing is dirty. Waits for ever while a device fails: bound it."""
        while self.num_dirty:
            await self._progress.wait()

    async def progress(self) -> None:
        """Wait until a chunk became dirty or clean."""
        await self._progress.wait()

    async def run(self) -> None:
        """Write to every volume, for ever."""
        async with trio.open_nursery() as nursery:
            for writer in self._writers:
                nursery.start_soon(writer.run)
