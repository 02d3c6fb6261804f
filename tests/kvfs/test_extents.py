"""The extent allocator against a model that remembers every granule."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvfs.extents import ExtentAllocator

GRANULE = 4096
GRANULES = 40


class Extents(RuleBasedStateMachine):
    """A set of used granules says what the allocator must know."""

    @initialize(base=st.sampled_from([0, GRANULE]), used=st.sets(st.integers(0, GRANULES - 1), max_size=8))
    def begin(self, base: int, used: set[int]) -> None:
        self.base = base
        self.held = [(base + granule * GRANULE, GRANULE) for granule in sorted(used)]
        self.extents = ExtentAllocator(GRANULES * GRANULE + 100, base, self.held)

    def free_runs(self) -> list[tuple[int, int]]:
        """Maximal runs of free bytes: (offset, length)."""
        runs: list[tuple[int, int]] = []
        position = self.base
        for offset, length in [*sorted(self.held), (self.base + GRANULES * GRANULE, 0)]:
            if offset > position:
                runs.append((position, offset - position))
            position = offset + length
        return runs

    @rule(granules=st.integers(1, GRANULES + 1))
    def allocate(self, granules: int) -> None:
        """Best fit: the extent lies in a shortest run that is long enough; None only if there is no such run."""
        length = granules * GRANULE
        fitting = [run for run in self.free_runs() if run[1] >= length]
        offset = self.extents.allocate(length)
        if not fitting:
            assert offset is None
            return
        shortest = min(run[1] for run in fitting)
        assert any(start <= offset and offset + length <= start + size for start, size in fitting if size == shortest)
        self.held.append((offset, length))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        extent = data.draw(st.sampled_from(self.held))
        self.held.remove(extent)
        self.extents.free(*extent)

    @invariant()
    def sums_hold(self) -> None:
        """Bytes are accounted for, and neighbours are joined."""
        used = sum(length for _, length in self.held)
        assert self.extents.used_bytes == used
        assert self.extents.free_bytes + used == self.extents.capacity == GRANULES * GRANULE
        assert self.extents.largest_free == max((length for _, length in self.free_runs()), default=0)


Extents.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestExtents = Extents.TestCase


def test_equal_sizes_reuse_exactly() -> None:
    """A freed extent is taken again as it is by the next of its size: chunks of one namespace never fragment."""
    extents = ExtentAllocator(64 * GRANULE)
    offsets = [extents.allocate(4 * GRANULE) for _ in range(16)]
    assert extents.allocate(GRANULE) is None
    for offset in offsets[1::2]:
        extents.free(offset, 4 * GRANULE)
    assert {extents.allocate(4 * GRANULE) for _ in range(8)} == set(offsets[1::2])


@pytest.mark.parametrize("length", [0, -4096, 1, 4095, 4097])
def test_lengths_are_multiples(length: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        ExtentAllocator(1 << 20).allocate(length)


@pytest.mark.parametrize("used", [[(0, 8192), (4096, 4096)], [(1 << 20, 4096)], [(8192, 4096), (0, 4096)]])
def test_used_extents_may_not_overlap(used: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="overlaps"):
        ExtentAllocator(1 << 20, 0, used)
