"""Reading by destination: what goes where, and what host memory gets. The GPU here is `kvfs.testing.devices.FakeGpu`."""

from __future__ import annotations

import errno
import mmap
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kvfs.addresses import address_of
from kvfs.device.destination import destination_of
from kvfs.device.gpu import Way
from kvfs.device.host import is_direct
from kvfs.device.reader import PIECE_BYTES, Reader
from kvfs.errors import UnavailableError, UsageError
from kvfs.system import System
from kvfs.testing import FaultySystem
from kvfs.testing.devices import FakeDeviceMemory, FakeGpu

SIZE = 3 * PIECE_BYTES + 12345


@pytest.fixture(scope="module")
def content() -> bytes:
    return random.Random(5).randbytes(SIZE)


@pytest.fixture(params=["direct", "buffered"])
def fd(request: pytest.FixtureRequest, tmp_path: Path, content: bytes) -> Iterator[int]:
    """A real file, open for direct I/O or through the page cache."""
    path = tmp_path / "file"
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if request.param == "direct" else 0))
    assert is_direct(descriptor) == (request.param == "direct")
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def reader() -> Iterator[Reader]:
    with Reader() as made:
        yield made


def aligned(size: int, shift: int = 0) -> memoryview:
    return memoryview(mmap.mmap(-1, size + shift + 1))[shift : shift + size]


@pytest.mark.parametrize(
    ("offset", "size", "shift"),
    [
        (0, SIZE, 0), (4096, 8192, 0), (0, 4096, 0), (0, 1, 0), (4096, 4095, 0), (1, 4096, 0), (4095, 2, 7),
        (8192, 8192, 512), (8191, PIECE_BYTES * 2 + 3, 1), (SIZE - 5, 5, 0), (SIZE - 4097, 4097, 3), (12288, SIZE - 12288, 0),
    ],
)  # fmt: skip
def test_the_host_gets_the_bytes(reader: Reader, fd: int, content: bytes, offset: int, size: int, shift: int) -> None:
    """Whatever the alignment of offset, size and address, direct or not; and no byte beside them."""
    memory = aligned(size + 2, shift)
    memory[:] = b"\xee" * len(memory)
    begin = 0 if shift % 4096 == 0 else 1
    assert reader.read(fd, [(offset, memory[begin : begin + size])]) is Way.HOST
    assert memory[begin : begin + size] == content[offset : offset + size]
    assert memory[begin + size :] == b"\xee" * (2 - begin)
    assert reader.statistics().read_bytes == {Way.HOST: size}


def test_many_parts_at_once(reader: Reader, fd: int, content: bytes) -> None:
    rng = random.Random(9)
    parts = []
    for _ in range(50):
        size = rng.choice([0, 1, 4096, 65536, 300_001])
        parts.append((rng.randrange(0, SIZE - size), aligned(size, rng.choice([0, 1, 512]))))
    reader.read(fd, parts)
    for offset, memory in parts:
        assert memory == content[offset : offset + len(memory)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.uint8])
def test_host_tensors(reader: Reader, fd: int, content: bytes, dtype: torch.dtype) -> None:
    """As bytes whatever the dtype; as they are where numpy knows it, with what to do where it does not."""
    tensor = torch.empty(8192, dtype=torch.uint8).view(dtype)
    reader.read(fd, [(4096, tensor.view(torch.uint8))])
    assert tensor.view(torch.uint8).numpy().tobytes() == content[4096 : 4096 + 8192]
    if dtype in (torch.float32, torch.uint8):
        reader.read(fd, [(0, tensor)])
        assert tensor.view(torch.uint8).numpy().tobytes() == content[:8192]
    else:
        with pytest.raises(UsageError, match=r"tensor\.view\(torch\.uint8\)"):
            reader.read(fd, [(0, tensor)])


def test_other_buffers(reader: Reader, fd: int, content: bytes) -> None:
    array = np.empty((3, 7, 100), dtype=np.uint16)
    reader.read(fd, [(17, array)])
    assert array.tobytes() == content[17 : 17 + array.nbytes]
    raw = bytearray(100)
    reader.read(fd, [(1, raw)])
    assert raw == content[1:101]


@pytest.mark.parametrize(
    ("target", "what"),
    [
        (bytes(64), "read-only"),
        (memoryview(bytearray(64)).toreadonly(), "read-only"),
        (np.zeros((8, 8), dtype=np.uint8)[:, :4], "not contiguous"),
        (torch.zeros(8, 8, dtype=torch.uint8).t()[:4], "not contiguous"),
        (torch.zeros(4, requires_grad=True), "no buffer on the host"),
        (object(), "no memory to read into"),
        (None, "no memory to read into"),
        (FakeDeviceMemory(64, is_read_only=True), "read-only"),
        (FakeDeviceMemory(64, strides=(2,)), "not contiguous"),
    ],
)
def test_what_is_no_destination_is_refused(reader: Reader, fd: int, target: object, what: str) -> None:
    """Nothing is written, and CUDA is not even looked for."""
    with pytest.raises(UsageError, match=what):
        reader.read(fd, [(0, bytearray(16)), (0, target)])
    assert not reader.statistics().read_bytes


class OddTensor:
    """What a float8 tensor on a GPU does when it is asked what it is (torch 2.13)."""

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        raise KeyError("float8_e4m3fn")


def test_a_gpu_tensor_that_cannot_say_what_it_is(reader: Reader, fd: int) -> None:
    with pytest.raises(UsageError, match=r"tensor\.view\(torch\.uint8\)"):
        reader.read(fd, [(0, OddTensor())])


def test_a_file_that_ends_early(reader: Reader, fd: int) -> None:
    with pytest.raises(EOFError, match=f"ends at {SIZE}, 1 bytes too early"):
        reader.read(fd, [(SIZE - 4096, aligned(4097))])
    with pytest.raises(EOFError):
        reader.read(fd, [(0, aligned(4096)), (SIZE + 8192, aligned(4096))])


def test_short_reads_are_gone_on_with(fd: int, content: bytes) -> None:
    system = FaultySystem()
    system.max_transfer = 8192
    with Reader(system=system) as reader:
        memory = aligned(PIECE_BYTES + 8192)
        reader.read(fd, [(4096, memory)])
        assert memory == content[4096 : 4096 + len(memory)]


def test_a_device_that_fails(fd: int) -> None:
    """The error is the device's; nobody writes to the memory any more when it is raised."""
    system = FaultySystem()
    system.read_error = errno.EIO
    with Reader(system=system) as reader, pytest.raises(OSError, match="Input/output error"):
        reader.read(fd, [(0, aligned(PIECE_BYTES * 3))])


def test_the_destination_decides(fd: int, content: bytes) -> None:
    gpu, opened = FakeGpu(), []

    def open_gpu(system: System) -> FakeGpu:
        opened.append(system)
        return gpu

    with Reader(open_gpu=open_gpu) as reader:
        reader.read(fd, [(0, bytearray(10))])
        reader.copy(memoryview(b"1234"), bytearray(4))
        assert not opened
        memory = FakeDeviceMemory(8192)
        assert (
            reader.read(fd, [(0, destination_of(memory).part(0, 4096)), (77, destination_of(memory).part(4096, 8192))])
            is Way.KVIKIO
        )
        assert memory.host == content[:4096] + content[77 : 77 + 4096]
        assert gpu.reads == [(0, 4096), (77, 4096)]
        assert reader.copy(memoryview(content[:8192]), memory) is Way.RING
        assert len(opened) == 1
        with pytest.raises(UsageError, match="not to both"):
            reader.read(fd, [(0, memory), (0, bytearray(1))])
        with pytest.raises(UsageError, match="3 bytes do not fill 8192"):
            reader.copy(memoryview(b"123"), memory)
        with pytest.raises(EOFError):  # before kvikio is asked
            reader.read(fd, [(SIZE - 1, memory)])
        found = reader.statistics()
        assert found.read_bytes == {Way.HOST: 10, Way.KVIKIO: 8192}
        assert found.copied_bytes == {Way.HOST: 4, Way.RING: 8192}
        assert found.kvikio_bytes == {"FAKE": 8192}
    assert gpu.is_closed


def test_cuda_is_looked_for_once(fd: int) -> None:
    tries = []

    def no_gpu(system: System) -> FakeGpu:
        tries.append(system)
        raise UnavailableError("there is no CUDA driver")

    with Reader(open_gpu=no_gpu) as reader:
        for _ in range(3):
            with pytest.raises(UnavailableError, match="no CUDA driver"):
                reader.read(fd, [(0, FakeDeviceMemory(16))])
        assert len(tries) == 1
        assert reader.read(fd, [(0, bytearray(16))]) is Way.HOST


def test_nothing_is_read_into_nothing(reader: Reader, fd: int) -> None:
    assert reader.read(fd, []) is Way.HOST
    assert reader.read(fd, [(SIZE + 5, bytearray()), (0, np.empty((0, 3)))]) is Way.HOST
    assert reader.copy(memoryview(b""), FakeDeviceMemory(0)) is Way.HOST


def test_a_reader_does_not_outlive_a_fork(reader: Reader, fd: int) -> None:
    """It says so at once; its threads are not there, and would never answer."""
    reader.read(fd, [(0, aligned(PIECE_BYTES * 2))])
    child = os.fork()
    if not child:
        code = 1
        try:
            reader.read(fd, [(0, bytearray(16))])
        except UsageError:
            reader.close()
            with Reader() as own:
                own.read(fd, [(0, aligned(PIECE_BYTES * 2))])
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_addresses_of_memory_that_may_only_be_read() -> None:
    raw = bytearray(100)
    view = memoryview(raw)
    assert address_of(view.toreadonly()[3:]) == address_of(view) + 3
    before = sys.getrefcount(raw)
    for _ in range(100):
        address_of(view)
    assert sys.getrefcount(raw) == before
    view.release()
    raw.extend(b"no buffer is held")
