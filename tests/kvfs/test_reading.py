"""Reading from a volume: order, bounds, and what is told of each read, with the kernel's queue and without."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from kvfs.kernel_reads import KernelReads
from kvfs.system import System
from kvfs.testing import SlowSystem, eventually
from kvfs.tiers.reading import MAX_UNDER_WAY, Read, Reads
from kvfs.volume import Volume, aligned_buffer

BLOCK = 4096
NUM_READS = 4 * MAX_UNDER_WAY
Told = list[tuple[Read, OSError | None]]


class GivenUp(Read):
    """Nobody waits for it."""

    def is_given_up(self) -> bool:
        return True


class Gated:
    """A volume without a queue; reads wait for `gate`. Attributes: begun: offsets, as they were."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.gate = threading.Event()
        self.error = 0

    def read(self, buffer: memoryview, offset: int) -> None:
        self.begun.append(offset)
        self.gate.wait()
        if self.error:
            raise OSError(self.error, "told to")

    def kernel_reads(self, max_under_way: int) -> KernelReads[Any] | None:
        return None


@pytest.fixture(params=[System, SlowSystem], ids=["queue", "threads"])
def volume(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    volume = Volume.open(tmp_path / "volume", (NUM_READS + 1) * BLOCK, request.param())
    block = aligned_buffer(BLOCK)
    for number in range(1, NUM_READS + 1):
        block[:] = number.to_bytes(2, "little") * (BLOCK // 2)
        volume.write([block], number * BLOCK)
    yield volume
    volume.close()


def reads_of(numbers: range, kind: Callable[[memoryview, int], Read] = Read) -> list[Read]:
    return [kind(aligned_buffer(BLOCK), number * BLOCK) for number in numbers]


async def test_everything_is_read_and_told_once(volume: Volume) -> None:
    """More than may be under way, put in two parts, the second perhaps while the first is read."""
    told: Told = []
    reads: Reads[Read] = Reads(volume, 4, told.extend)
    wanted = reads_of(range(1, NUM_READS + 1))
    reads.put(iter(wanted[:100]), MAX_UNDER_WAY)
    reads.put(iter(wanted[100:]), 1)
    await eventually(lambda: len(told) == NUM_READS)
    assert sorted(read.offset for read, _ in told) == [read.offset for read in wanted]
    assert all(error is None for _, error in told)
    for read in wanted:
        assert bytes(read.buffer) == (read.offset // BLOCK).to_bytes(2, "little") * (BLOCK // 2)


async def test_it_reads_again_after_it_had_nothing_to_do(volume: Volume) -> None:
    """A thread that has ended is followed by another."""
    told: Told = []
    reads: Reads[Read] = Reads(volume, 2, told.extend)
    for number in range(1, 20):
        reads.put(iter(reads_of(range(number, number + 1))), 2)
        await eventually(lambda number=number: len(told) == number)


async def test_what_a_truncated_volume_lost_reads_as_zeros(volume: Volume) -> None:
    """A read that comes back short is no failure of the device: those bytes fit no checksum."""
    told: Told = []
    with volume.path.open("r+b") as file:
        file.truncate(2 * BLOCK)
    reads: Reads[Read] = Reads(volume, 2, told.extend)
    lost = [Read(memoryview(aligned_buffer(2 * BLOCK)), BLOCK)]
    lost[0].buffer[:] = b"x" * 2 * BLOCK
    reads.put(iter(lost), 2)
    await eventually(lambda: told)
    assert told == [(lost[0], None)]
    assert bytes(lost[0].buffer) == (1).to_bytes(2, "little") * (BLOCK // 2) + bytes(BLOCK)


async def test_what_was_given_up_is_told_and_not_read(volume: Volume) -> None:
    """Its memory stays as it was."""
    told: Told = []
    reads: Reads[Read] = Reads(volume, 2, told.extend)
    wanted = reads_of(range(1, 9), GivenUp)
    reads.put(iter(wanted), 4)
    await eventually(lambda: len(told) == len(wanted))
    assert all(error is None for _, error in told)
    assert not any(any(read.buffer) for read in wanted)


async def test_a_failure_is_told_of_its_read() -> None:
    """The others go on."""
    told: Told = []
    gated = Gated()
    gated.error = errno.EIO
    gated.gate.set()
    reads: Reads[Read] = Reads(gated, 2, told.extend)
    reads.put(iter(reads_of(range(3))), 2)
    await eventually(lambda: len(told) == 3)
    assert [error.errno for _, error in told if error is not None] == [errno.EIO] * 3


async def test_a_batch_has_no_more_under_way_than_it_may_and_holds_up_no_other() -> None:
    """Threads to spare go on with the next batch; in each the first read begins first."""
    told: Told = []
    gated = Gated()
    reads: Reads[Read] = Reads(gated, 4, told.extend)
    try:
        reads.put(iter(reads_of(range(4))), 2)
        reads.put(iter(reads_of(range(10, 14))), 1)
        await eventually(lambda: len(gated.begun) == 3)
        assert sorted(gated.begun) == [0, BLOCK, 10 * BLOCK]
    finally:
        gated.gate.set()
    await eventually(lambda: len(told) == 8)
    assert [offset for offset in gated.begun if offset >= 10 * BLOCK] == [n * BLOCK for n in range(10, 14)]


def test_a_defect_in_a_reading_thread_ends_the_loop() -> None:
    """Nobody would ever hear of what it had begun."""
    gated = Gated()
    gated.gate.set()

    def tell(told: Told) -> None:
        raise ZeroDivisionError

    async def read() -> None:
        Reads(gated, 1, tell).put(iter(reads_of(range(1))), 1)
        await trio.sleep_forever()

    with pytest.raises(trio.TrioInternalError) as caught:
        trio.run(read)
    cause = caught.value.__cause__
    assert isinstance(cause, BaseExceptionGroup)
    assert cause.subgroup(ZeroDivisionError) is not None
