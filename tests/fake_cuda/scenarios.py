"""What the fake-cuda tests do, each in a process of its own: ``scenarios.py NAME DIRECTORY``, see conftest.py."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
import os
import random
import re
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from kvfs.addresses import address_of
from kvfs.device.destination import destination_of
from kvfs.device.gpu import Gpu, Way
from kvfs.device.reader import Reader
from kvfs.engine_adapters.pinned_arena import register
from kvfs.errors import UnavailableError, UsageError
from kvfs.system import System

SIZE = 37 * 4096 + (9 << 20)
ALIVE = ("device_allocations", "host_allocations", "registrations", "streams", "events")
SO_FAR = ("copies_to_device", "bytes_to_device", "bytes_from_pinned")


class FakeCuda:
    """The library: refuses to be where a real one is. Attribute: library."""

    def __init__(self, path: str) -> None:
        with contextlib.suppress(OSError):
            ctypes.CDLL("libcuda.so.1")
            sys.exit("there is a real libcuda here")
        self.library = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
        self.library.cuMemAlloc_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t]
        self.library.cuMemFree_v2.argtypes = [ctypes.c_uint64]

    def fail(self, function: str, code: int = 999) -> None:
        self.library.fake_fail(function.encode(), code)

    def heal(self) -> None:
        self.fail("")

    def counts(self) -> dict[str, int]:
        found = (ctypes.c_uint64 * 8)()
        self.library.fake_counts(found)
        return dict(zip(ALIVE + SO_FAR, found, strict=True))

    def assert_all_given_back(self, besides: int = 0) -> None:
        """`besides`: pinned buffers that kvikio keeps for the process."""
        left = {name: self.counts()[name] for name in ALIVE}
        assert left.pop("host_allocations") <= besides, left
        if not besides:  # kvikio's streams and events are its own
            assert not any(left.values()), left


class Memory:
    """Memory of the fake device. Attribute: host: its bytes."""

    def __init__(self, cuda: FakeCuda, size: int) -> None:
        address = ctypes.c_uint64()
        assert cuda.library.cuMemAlloc_v2(ctypes.byref(address), max(1, size)) == 0
        self._cuda, self._address, self._size = cuda, address.value, size
        self.host = memoryview((ctypes.c_ubyte * size).from_address(address.value)).cast("B")

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self._size,), "typestr": "|u1", "data": (self._address, False), "version": 3, "strides": None}

    def free(self) -> None:
        self.host.release()
        assert self._cuda.library.cuMemFree_v2(self._address) == 0


class NoDeviceMemory:
    """Says that it lies on a GPU, and does not."""

    def __init__(self) -> None:
        self._raw = bytearray(16)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        data = (address_of(memoryview(self._raw)), False)
        return {"shape": (16,), "typestr": "|u1", "data": data, "version": 3}


CONTENT = random.Random(3).randbytes(SIZE)


@contextlib.contextmanager
def file_in(directory: Path, *, direct: bool = True, name: str = "file") -> Iterator[int]:
    path = directory / name
    path.write_bytes(CONTENT)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    yield fd
    os.close(fd)


PARTS = [(0, 4096), (4096, 9 << 20), (8192, 12345), (4095, 65537), (SIZE - 1, 1), (12288, 0), (1, 2)]


def read_all(reader: Reader, cuda: FakeCuda, fd: int, way: Way) -> int:
    """Read all of `PARTS`, one by one and all at once, and compare; the number of bytes."""
    for parts in [*([part] for part in PARTS), PARTS]:
        memories = [Memory(cuda, size) for _, size in parts]
        found = reader.read(fd, [(at, memory) for (at, _), memory in zip(parts, memories, strict=True)])
        assert found is (way if any(size for _, size in parts) else Way.HOST), found
        for (at, size), memory in zip(parts, memories, strict=True):
            assert memory.host == CONTENT[at : at + size], (at, size)
            memory.free()
    return 2 * sum(size for _, size in PARTS)


def without_kvikio(system: System) -> Gpu:
    return Gpu.open(system, use_kvikio=False)


def ring(cuda: FakeCuda, directory: Path) -> None:
    """Every byte goes through pinned memory, and all that was taken is given back."""
    for direct in (True, False):
        with file_in(directory, direct=direct) as fd, Reader(open_gpu=without_kvikio) as reader:
            before = cuda.counts()["bytes_from_pinned"]
            total = read_all(reader, cuda, fd, Way.RING)
            counts = cuda.counts()
            assert counts["bytes_from_pinned"] - before == total
            assert counts["bytes_to_device"] == counts["bytes_from_pinned"]
            assert reader.statistics().read_bytes == {Way.RING: total}
            target = Memory(cuda, SIZE)
            assert reader.copy(memoryview(CONTENT), target) is Way.RING
            assert target.host == CONTENT
            target.free()
        cuda.assert_all_given_back()
    assert "kvikio" not in sys.modules


def ring_failures(cuda: FakeCuda, directory: Path) -> None:
    """What fails is raised, the ring works on, and nothing is lost, however often."""
    with file_in(directory) as fd, Reader(open_gpu=without_kvikio) as reader:
        cuda.fail("cuMemHostAlloc", 2)
        target = Memory(cuda, SIZE)
        raises(UnavailableError, "cuMemHostAlloc failed: FAKE_CUDA_ERROR", lambda: reader.read(fd, [(0, target)]))
        assert cuda.counts()["host_allocations"] == cuda.counts()["streams"] == 0
        cuda.heal()
        for _ in range(20):  # more often than there are buffers
            cuda.fail("cuMemcpyHtoDAsync_v2")
            raises(UnavailableError, "cuMemcpyHtoDAsync_v2", lambda: reader.read(fd, [(0, target)]))
            cuda.heal()
            raises(EOFError, "ends", lambda: reader.read(fd, [(4096, target)]))
            reader.read(fd, [(0, target)])
            assert target.host == CONTENT
        target.free()
        raises(UnavailableError, "cuPointerGetAttribute", lambda: reader.read(fd, [(0, NoDeviceMemory())]))
    cuda.assert_all_given_back()


def kvikio(cuda: FakeCuda, directory: Path) -> None:
    """The real kvikio reads the same bytes, and its own count says that its buffers carried them, not GDS."""
    with file_in(directory) as fd, Reader() as reader:
        total = read_all(reader, cuda, fd, Way.KVIKIO)
        found = reader.statistics()
        assert found.read_bytes == {Way.KVIKIO: total}
        assert found.kvikio_bytes == {"POSIX": total}, found
        assert not found.kvikio_failures
        raises(EOFError, "1 bytes too early", lambda: reader.read(fd, [(SIZE - 15, destination_of(NoDeviceMemory()))]))
        (directory / "file").unlink()  # what is open can be read, whatever became of its name
        read_all(reader, cuda, fd, Way.KVIKIO)
        assert not reader.statistics().kvikio_failures
    cuda.assert_all_given_back(besides=16)


def kvikio_handles(cuda: FakeCuda, directory: Path) -> None:
    """Files stay open, but not too many, also while many threads read; a file that took a name is another file."""
    before = num_descriptors()
    with contextlib.ExitStack() as files, Reader() as reader:
        fds = [files.enter_context(file_in(directory, name=f"file{number}")) for number in range(40)]
        for fd in fds * 2:
            memory = Memory(cuda, 4096)
            reader.read(fd, [(8192, memory)])
            assert memory.host == CONTENT[8192 : 8192 + 4096]
            memory.free()
        gpu = reader._gpu
        assert isinstance(gpu, Gpu)
        assert gpu.files is not None
        assert gpu.files.num_open == 16

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(60):
                size = rng.choice([1, 4096, 70_000, 1 << 20])
                at = rng.randrange(SIZE - size)
                memory = Memory(cuda, size)
                assert reader.read(rng.choice(fds), [(at, memory)]) is Way.KVIKIO
                assert memory.host == CONTENT[at : at + size]
                memory.free()

        failures: list[BaseException] = []

        def watched(seed: int) -> None:
            try:
                work(seed)
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=watched, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        assert gpu.files.num_open == 16
        os.unlink(directory / "file0")
        (directory / "file0").write_bytes(CONTENT[::-1])
        fd = os.open(directory / "file0", os.O_RDONLY)
        memory = Memory(cuda, 4096)
        reader.read(fd, [(0, memory)])
        assert memory.host == CONTENT[:-4097:-1]
        os.close(fd)
    assert num_descriptors() == before, "kvikio's files are closed with the reader"


def kvikio_fails(cuda: FakeCuda, directory: Path) -> None:
    """Where kvikio fails and pinned buffers do not, they take over: once said, and for good."""
    with file_in(directory) as fd, file_in(directory, name="other") as other, Reader() as reader:
        target = Memory(cuda, SIZE)
        reader.read(fd, [(0, target)])
        cuda.fail("cuMemcpyHtoDAsync_v2")  # fails both ways: no fault of kvikio's
        raises(UnavailableError, "", lambda: reader.read(fd, [(0, target)]))
        cuda.heal()
        assert reader.read(fd, [(0, target)]) is Way.KVIKIO
        reader.copy(memoryview(CONTENT), target)  # the ring is there, and needs no descriptor
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (num_descriptors() - 1, limit[1])
        )  # kvikio cannot open the other file
        for at in (0, 4096):
            part = destination_of(target).part(at, SIZE)
            target.host[:] = bytes(SIZE)
            assert reader.read(other, [(at, part)]) is Way.RING
            assert target.host[at:] == CONTENT[at:]
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        assert reader.read(fd, [(0, target)]) is Way.RING
        assert reader.statistics().kvikio_failures == 1
        target.free()


def slab(cuda: FakeCuda, directory: Path) -> None:
    """A slab lies on a 4 KiB boundary though its allocation does not, is read into in parts, and given back."""
    with file_in(directory) as fd:
        gpu = Gpu.open(System())
        with Reader(open_gpu=lambda _: gpu) as reader:
            made = reader.slab(SIZE - 5, 0)
            assert made.memory.address % 4096 == 0
            assert made.memory.size_bytes == SIZE
            assert made.is_registered
            halves = [(0, made.memory.part(0, 8 << 20)), (8 << 20, made.memory.part(8 << 20, SIZE))]
            assert reader.read(fd, halves) is Way.KVIKIO
            assert bytes((ctypes.c_ubyte * SIZE).from_address(made.memory.address)) == CONTENT
            made.close()
        raises(UsageError, "do not lie within", lambda: made.memory.part(5, SIZE + 1))
        cuda.fail("cuMemAlloc_v2", 2)
        raises(UnavailableError, "cuMemAlloc_v2", lambda: gpu.slab(SIZE, 0))
    assert cuda.counts()["device_allocations"] == 0


def pinned(cuda: FakeCuda, directory: Path) -> None:
    """An arena that may only be read is registered where the device can, and then copied out of without a stop."""
    fd = os.memfd_create("arena")
    os.truncate(fd, SIZE)
    os.pwrite(fd, CONTENT, 0)
    arena = mmap.mmap(fd, SIZE, prot=mmap.PROT_READ)
    gpu = Gpu.open(System(), use_kvikio=False)
    with Reader(open_gpu=lambda _: gpu) as reader:
        cuda.fail("no_read_only", 1)
        raises(UnavailableError, "fake-cuda cannot register .* only be read", lambda: gpu.pin(memoryview(arena), 0))
        target = Memory(cuda, 70_000)
        view = memoryview(arena)[5000:75_000]
        assert reader.copy(view, target) is Way.RING
        cuda.heal()
        held = gpu.pin(memoryview(arena), 0)
        cuda.fail("cuMemHostAlloc")  # nothing is staged
        before = cuda.counts()
        assert reader.copy(view, target) is Way.PINNED
        assert target.host == CONTENT[5000:75_000]
        after = cuda.counts()
        assert after["copies_to_device"] - before["copies_to_device"] == 1
        assert after["bytes_from_pinned"] - before["bytes_from_pinned"] == 70_000
        target.host[:] = bytes(70_000)
        held.copy(view, destination_of(target).address, 0)
        assert target.host == CONTENT[5000:75_000]
        assert not held.holds(memoryview(bytes(10)))
        raises(BufferError, "", arena.close)  # it stays mapped while CUDA knows it
        gpu.unpin(held)
        cuda.heal()
        assert reader.copy(view, target) is Way.RING
        target.free()
        view.release()
    arena.close()
    cuda.assert_all_given_back()


def pinned_arena(cuda: FakeCuda, directory: Path) -> None:
    """What a vLLM worker does with the arena of its session: registers it if that can be, and copies out of it."""
    fd = os.memfd_create("arena")
    os.truncate(fd, SIZE)
    os.pwrite(fd, CONTENT, 0)
    read_only = mmap.mmap(fd, SIZE, prot=mmap.PROT_READ)
    writable = mmap.mmap(fd, SIZE)
    assert register(memoryview(b""), 0) is None
    cuda.fail("no_read_only", 1)
    assert register(memoryview(read_only), 0) is None
    cuda.heal()
    target = Memory(cuda, 70_000)
    for arena in (read_only, writable):
        held = register(memoryview(arena), 0)
        assert held is not None
        view = memoryview(arena)[5000:75_000]
        assert held.holds(view)
        target.host[:] = bytes(70_000)
        held.copy(view, destination_of(target).address, 0)
        assert target.host == CONTENT[5000:75_000]
        cuda.fail("cuMemcpyHtoDAsync_v2")
        copying = functools.partial(held.copy, view, destination_of(target).address, 0)
        raises(UnavailableError, "cuMemcpyHtoDAsync_v2", copying)
        del copying
        cuda.heal()
        held.close()
        view.release()
        arena.close()
    target.free()
    os.close(fd)
    cuda.assert_all_given_back()


def fork(cuda: FakeCuda, directory: Path) -> None:
    """A child that was forked after CUDA was used is told so; it does not hang, and the parent goes on."""
    with file_in(directory) as fd, Reader() as reader:
        target = Memory(cuda, 4096)
        reader.read(fd, [(0, target)])
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                raises(UsageError, "outlive", lambda: reader.read(fd, [(0, target)]))
                with Reader() as own:
                    raises(UnavailableError, "before this process was forked", lambda: own.read(fd, [(0, target)]))
                    assert own.read(fd, [(0, bytearray(4096))]) is Way.HOST
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert reader.read(fd, [(4096, target)]) is Way.KVIKIO
        assert target.host == CONTENT[4096:8192]


def fork_before(cuda: FakeCuda, directory: Path) -> None:
    """Importing, making a reader and reading on the host look for nothing, so a child may use CUDA for itself."""
    with file_in(directory) as fd, Reader() as reader:
        reader.read(fd, [(0, bytearray(4096))])
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException), Reader() as own:
                target = Memory(cuda, 4096)
                assert own.read(fd, [(0, target)]) is Way.KVIKIO
                assert target.host == CONTENT[:4096]
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def no_device(cuda: FakeCuda, directory: Path) -> None:
    """A driver without a device is no CUDA."""
    cuda.fail("no_device", 1)
    with file_in(directory) as fd, Reader() as reader:
        for _ in range(2):
            raises(UnavailableError, "no device", lambda: reader.read(fd, [(0, NoDeviceMemory())]))
    assert "kvikio" not in sys.modules


def no_cuda(cuda: None, directory: Path) -> None:
    """Without libcuda kvikio is not even imported, though it is installed; host destinations are read all the same."""
    with file_in(directory) as fd, Reader() as reader:
        assert reader.read(fd, [(0, bytearray(4096))]) is Way.HOST
        raises(UnavailableError, "there is no CUDA driver", lambda: reader.read(fd, [(0, NoDeviceMemory())]))
        raises(UsageError, "read-only", lambda: reader.read(fd, [(0, bytes(16))]))
    assert "kvikio" not in sys.modules


def no_kvikio(cuda: FakeCuda, directory: Path) -> None:
    """Where it is not installed pinned buffers do it, and the log says what to install."""
    with file_in(directory) as fd, Reader() as reader:
        read_all(reader, cuda, fd, Way.RING)
    cuda.assert_all_given_back()


def raises(kind: type[BaseException], text: str, call: Callable[[], object]) -> None:
    said = None
    try:
        call()
    except kind as error:
        said = str(error)  # the error itself would hold on to what its frames hold
    assert said is not None, f"it did not raise {kind.__name__}"
    assert re.search(text, said), said


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    library = os.environ["FAKE_CUDA"]
    globals()[sys.argv[1]](FakeCuda(library) if library else None, Path(sys.argv[2]))
