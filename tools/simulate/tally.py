"""What came of a replay, request by request, and what was moved for it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvfs.metrics import Counters


@dataclass(slots=True)
class Tally:
    """In chunks. `ram` + `nvme` of a request, in the order in which they ran, is the length of the prefix that it found.

    Attributes:
        ram, nvme: of what a request found, how much was in RAM when it ran, and how much on NVMe only.
        num_written, written_bytes: to NVMe; num_promoted: from there into RAM, for a request that ran.
        counters: those of the store, of prefetches, hints and what was not admitted.
        hints: that were given from what the trace knows of the future, as far as the policy heeds them.
    """

    ram: array[int] = field(default_factory=lambda: array("I"))
    nvme: array[int] = field(default_factory=lambda: array("I"))
    num_stored: int = 0
    num_bypassed: int = 0
    num_written: int = 0
    written_bytes: int = 0
    num_promoted: int = 0
    counters: Counters = field(default_factory=Counters)
    hints: frozenset[str] = frozenset()

    @property
    def num_found(self) -> int:
        """Of all requests together."""
        return sum(self.ram) + sum(self.nvme)

    def cut(self) -> None:
        """Leave out a request that was interrupted between the two."""
        del self.ram[len(self.nvme) :]
