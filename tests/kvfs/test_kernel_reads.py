"""The kernel's queue of reads: what comes back for each, whole or not."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvfs.kernel_reads import KernelReads
from kvfs.system import System
from kvfs.volume import aligned_buffer

BLOCK = 4096
NUM_BLOCKS = 24


class _Read(NamedTuple):
    buffer: memoryview
    offset: int


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(b"".join(bytes([number]) * BLOCK for number in range(NUM_BLOCKS)))
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def collect(queue: KernelReads[_Read]) -> list[tuple[_Read, int]]:
    ended: list[tuple[_Read, int]] = []
    while queue.num_under_way:
        ended += queue.wait()
    return ended


@pytest.mark.parametrize("may_wait", [True, False])
def test_every_read_comes_back_with_its_bytes(fd: int, may_wait: bool) -> None:
    """As many as the queue is made for, in whatever order they end."""
    queue: KernelReads[_Read] = KernelReads(fd, NUM_BLOCKS)
    try:
        reads = [_Read(aligned_buffer(BLOCK), number * BLOCK) for number in reversed(range(NUM_BLOCKS))]
        assert queue.submit(reads, may_wait=may_wait) == []
        assert queue.num_under_way == NUM_BLOCKS
        ended = collect(queue)
    finally:
        queue.close()
    assert {read.offset: count for read, count in ended} == dict.fromkeys(range(0, NUM_BLOCKS * BLOCK, BLOCK), BLOCK)
    assert all(bytes(read.buffer) == bytes([read.offset // BLOCK]) * BLOCK for read, _ in ended)


def test_a_read_across_the_end_says_how_far_it_came(fd: int) -> None:
    """It is no error; behind the end nothing comes at all."""
    queue: KernelReads[_Read] = KernelReads(fd, 2)
    try:
        for offset in ((NUM_BLOCKS - 1) * BLOCK, NUM_BLOCKS * BLOCK):
            assert queue.submit([_Read(aligned_buffer(2 * BLOCK), offset)], may_wait=True) == []
        assert {read.offset // BLOCK: count for read, count in collect(queue)} == {NUM_BLOCKS - 1: BLOCK, NUM_BLOCKS: 0}
    finally:
        queue.close()


def test_one_that_cannot_begin_keeps_none_of_the_others_from_it(fd: int) -> None:
    """It is given back; those behind it begin."""
    queue: KernelReads[_Read] = KernelReads(fd, NUM_BLOCKS)
    try:
        reads = [_Read(aligned_buffer(BLOCK), number * 2 * BLOCK) for number in range(8)]
        reads[3] = _Read(aligned_buffer(BLOCK), -BLOCK)
        assert queue.submit(reads, may_wait=True) == [reads[3]]
        assert queue.num_under_way == 7
        ended = collect(queue)
    finally:
        queue.close()
    assert sorted(read.offset for read, count in ended if count == BLOCK) == [
        read.offset for number, read in enumerate(reads) if number != 3
    ]


def test_what_cannot_begin_is_not_under_way(tmp_path: Path) -> None:
    """A file that may not be read refuses at once, and the queue goes on."""
    fd = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        queue: KernelReads[_Read] = KernelReads(fd, 2)
        reads = [_Read(aligned_buffer(BLOCK), 0), _Read(aligned_buffer(BLOCK), 2 * BLOCK)]
        assert queue.submit(reads, may_wait=True) == reads
        assert queue.num_under_way == 0
        queue.close()
    finally:
        os.close(fd)


def test_where_there_is_no_queue_nobody_fails(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine whose numbers are not known, of a kernel that gives none, and where another preadv has to see all."""

    class Seeing(System):
        def preadv(self, fd: int, buffers: object, offset: int) -> int:
            return 0

    assert Seeing().kernel_reads(fd, 2) is None
    assert System().kernel_reads(fd, 1 << 20) is None  # more than any kernel gives
    with monkeypatch.context() as patch:
        patch.setattr(platform, "machine", lambda: "pdp11")
        assert System().kernel_reads(fd, 2) is None
    queue = System().kernel_reads(fd, 2)
    assert queue is not None
    queue.close()


def test_what_the_kernel_has_for_one_queue_serves_the_next(fd: int) -> None:
    """One after the other, more at once than are kept, and in a forked child, which has none of its parent's."""

    def read_all(num_queues: int) -> None:
        queues = [KernelReads[_Read](fd, 4) for _ in range(num_queues)]
        for number, queue in enumerate(queues):
            read = _Read(aligned_buffer(BLOCK), number * BLOCK)
            assert queue.submit([read], may_wait=True) == []
            assert collect(queue) == [(read, BLOCK)]
            assert bytes(read.buffer) == bytes([number]) * BLOCK
        for queue in queues:
            queue.close()

    for num_queues in (1, 1, 12, 10):
        read_all(num_queues)
    child = os.fork()
    if not child:
        code = 1
        try:
            read_all(2)
            code = 7
        finally:  # whatever it was, pytest must not go on in the child
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
