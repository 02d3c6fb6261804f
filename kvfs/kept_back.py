"""What admission keeps back from NVMe, for now: chunks that are in RAM only and may go from there, unless they are held.

Concurrency: belongs to the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvfs.admission import Admission, Verdict
from kvfs.catalog import Chunk
from kvfs.metrics import Counters


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
        """A chunk that is in RAM only is not to be written to NVMe, for now; one that is kept back already is no error."""
        if chunk not in self._chunks:
            self._chunks.add(chunk)
            self.size_bytes += chunk.length

    def discard(self, chunk: Chunk) -> None:
        """It will be written, or it is gone; one that was not kept back is no error."""
        if chunk in self._chunks:
            self._chunks.remove(chunk)
            self.size_bytes -= chunk.length


class Judge:
    """Judges chunks that are in RAM only by `admission`; what that turns away is kept back, and counted."""

    def __init__(self, admission: Admission, kept_back: KeptBack, counters: Counters) -> None:
        self.admission = admission
        self._kept_back = kept_back
        self._counters = counters

    def admits(self, chunk: Chunk, now_ns: int, *, is_used: bool, is_asked_for: bool) -> bool:
        """Whether a chunk is to be written; else it is kept back, until it is judged again. See `Admission.admit`."""
        verdict = self.admission.admit(chunk.length, now_ns, is_used=is_used, is_asked_for=is_asked_for)
        if verdict is Verdict.ADMITTED:
            self._kept_back.discard(chunk)
            return True
        self._counters.not_admitted_unused += verdict is Verdict.UNUSED
        self._counters.not_admitted_budget += verdict is Verdict.OVER_BUDGET
        self._kept_back.add(chunk)
        return False

    def again(self, used: Iterable[Chunk]) -> list[Chunk]:
        """Those of chunks that an engine loaded that are kept back, and so to be judged again."""
        return [chunk for chunk in used if chunk in self._kept_back] if self._kept_back else []
