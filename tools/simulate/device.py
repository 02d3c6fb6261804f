"""The NVMe of a replay in which time passes: chunks come from it one after the other, at its bandwidth."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvfs.catalog import NOWHERE, Chunk
from kvfs.promotion import Promotion
from kvfs.tools.simulate.cache import Cache

_NO_BYTES = memoryview(b"")


class Device:
    """Brings chunks into RAM; to a `Prefetcher` it is the promoter.

    What a request asks for itself is read at once, and what was ordered before it has to wait for that.

    Attributes: free_at_s: when all that it was given to do is done, of the trace's time.
    Invariant: what is under way is leased and has an extent in RAM.
    """

    def __init__(self, cache: Cache, bytes_s: float) -> None:
        self.free_at_s = 0.0
        self._cache = cache
        self._bytes_s = bytes_s
        self._under_way: dict[Chunk, tuple[float, Promotion]] = {}  # when each will be there, the first first

    @property
    def is_bringing(self) -> bool:
        """Whether anything is under way."""
        return bool(self._under_way)

    def is_under_way(self, chunk: Chunk) -> bool:
        """See `Promoter`."""
        return chunk in self._under_way

    def start(
        self, chunks: Iterable[Chunk], *, is_asked_for: bool = True, spared: Collection[Chunk] = ()
    ) -> list[Promotion | None]:
        """See `Promoter`."""
        begun: list[Promotion | None] = []
        for chunk in chunks:
            chunk.leases += 1
            offsets = self._cache.reserve_cold(chunk.length, 1, spared)
            if not offsets:
                self._cache.counters.promotions_refused += is_asked_for
                chunk.leases -= 1
                begun.append(None)
                continue
            self.read(chunk.length)
            promotion = Promotion(chunk, offsets[0], _NO_BYTES, ())
            self._under_way[chunk] = self.free_at_s, promotion
            begun.append(promotion)
        return begun

    def read(self, num_bytes: int) -> None:
        """Be busy with so many bytes from now on, or from the end of what is under way."""
        self.free_at_s = max(self.free_at_s, self._cache.now_s) + num_bytes / self._bytes_s

    def arrive(self, until_s: float) -> None:
        """What is read by then is in RAM."""
        for chunk, (at_s, promotion) in list(self._under_way.items()):
            if at_s > until_s:
                return
            self._cache.now_s = max(self._cache.now_s, at_s)
            self._place(chunk, promotion)

    def finish(self, chunks: Iterable[Chunk]) -> int:
        """Those of these chunks that are under way are waited for; returns how many they are."""
        late = [chunk for chunk in chunks if chunk.ram == NOWHERE and chunk in self._under_way]
        for chunk in late:
            self._place(chunk, self._under_way[chunk][1])
        return len(late)

    def _place(self, chunk: Chunk, promotion: Promotion) -> None:
        del self._under_way[chunk]
        self._cache.ram.place(chunk, promotion.offset)
        chunk.leases -= 1
