"""On a real GPU: the bytes are right, by every way, and how fast beside what the hardware does in the same minutes.

They run where there is a CUDA device and a torch built for it (`make test-device`), and are skipped with the reason
elsewhere. Ratios are medians of interleaved rounds. Nothing of this has been seen to pass yet.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from kvfs.chunk import geometry
from kvfs.device.driver import open_driver
from kvfs.device.gpu import Gpu, Way
from kvfs.device.reader import Reader
from kvfs.engine_adapters.device_checksum import checksums
from kvfs.engine_adapters.direct_read import Wanted, read_chunks, row_bytes
from kvfs.engine_adapters.vllm_blocks import block_view, order_of
from kvfs.engine_adapters.vllm_device_blocks import DeviceBlocks
from kvfs.errors import UnavailableError
from kvfs.loading import VolumeExtent
from kvfs.system import System
from kvfs.testing import chain_of, open_table, payload_of, store_chain, tiny_namespace
from kvfs.volume import aligned_buffer

ROUNDS = 7
MIB = 1 << 20


def reason_to_skip() -> str:
    """Why these tests cannot run here; "" if they can."""
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA"
    try:
        open_driver()
    except UnavailableError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _needs_a_gpu() -> None:
    """Looked for when a test is to run, and not when it is found: other tests fork."""
    reason = reason_to_skip()
    if reason:
        pytest.skip(reason)


def gbps(size: int, works: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """GB/s of each, median of interleaved rounds after one that does not count; each is waited for."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(ROUNDS + 1):
        for name, work in works.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            work()
            torch.cuda.synchronize()
            if number:
                seconds[name].append(time.perf_counter() - begin)
    found = {name: size / statistics.median(values) / 1e9 for name, values in seconds.items()}
    print(", ".join(f"{name} {rate:.2f} GB/s" for name, rate in found.items()))
    return found


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    opened = Gpu.open(System())
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """256 MiB, written densely, in the directory of KVFS_TEST_NVME if that is set."""
    directory = Path(os.environ.get("KVFS_TEST_NVME") or tmp_path_factory.mktemp("nvme"))
    path = directory / f"kvfs-gpu-test-{os.getpid()}"
    with open(path, "wb") as written:
        written.write(os.urandom(256 * MIB))
        os.fsync(written.fileno())
    return path


@pytest.fixture(scope="module", autouse=True)
def _no_file_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for path in Path(os.environ.get("KVFS_TEST_NVME") or "/nonexistent").glob(f"kvfs-gpu-test-{os.getpid()}"):
        path.unlink()


def test_from_the_arena_to_the_device(gpu: Gpu) -> None:
    """H2D out of registered shared memory ≥ 0.9 × that out of pinned memory."""
    size = 256 * MIB
    fd = os.memfd_create("arena")
    os.truncate(fd, size)
    writable = gpu.driver.can_register(0, read_only=True) is False
    writer = mmap.mmap(fd, size)
    writer[:] = os.urandom(MIB) * 256
    arena = mmap.mmap(fd, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    os.close(fd)
    view = memoryview(arena)
    held = gpu.pin(view, 0)
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream()
    rates = gbps(
        size,
        {
            "arena": lambda: held.copy(view, target.data_ptr(), stream.cuda_stream),
            "pinned": lambda: target.copy_(pinned, non_blocking=True),
        },
    )
    held.copy(view, target.data_ptr(), stream.cuda_stream)
    torch.cuda.synchronize()
    assert target.cpu().numpy().tobytes() == bytes(writer)
    gpu.unpin(held)
    view.release()
    arena.close()
    assert rates["arena"] >= 0.9 * rates["pinned"]


@pytest.mark.parametrize("use_kvikio", [True, False])
def test_from_nvme_to_the_device(file: Path, use_kvikio: bool, record_property: Callable[[str, object], None]) -> None:
    """The bytes are right by kvikio and by pinned buffers; which backend carried them is kvikio's own word."""
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    opened = Gpu.open(System(), use_kvikio=use_kvikio)
    if use_kvikio and opened.files is None:
        opened.close()
        os.close(fd)
        pytest.skip("kvikio cannot be imported: pip install 'kvfs[gds]'")
    with Reader(open_gpu=lambda _: opened) as reader:
        size = 256 * MIB
        slab = opened.slab(size, 0)
        chunks = [(at, slab.memory.part(at, at + 32 * MIB)) for at in range(0, size, 32 * MIB)]
        host = aligned_buffer(size)
        way = reader.read(fd, chunks)
        assert way is (Way.KVIKIO if use_kvikio else Way.RING)
        on_device = torch.as_tensor(slab.memory, device="cuda:0")
        assert on_device.cpu().numpy().tobytes() == file.read_bytes()
        unaligned = torch.zeros(70_001, dtype=torch.uint8, device="cuda")
        reader.read(fd, [(4097, unaligned[1:])])
        assert unaligned[1:].cpu().numpy().tobytes() == file.read_bytes()[4097 : 4097 + 70_000]
        rates = gbps(
            size, {"device": lambda: reader.read(fd, chunks), "host O_DIRECT": lambda: reader.read(fd, [(0, host)])}
        )
        carried = reader.statistics().kvikio_bytes
        print(f"kvikio says: {dict(carried)}; failures: {reader.statistics().kvikio_failures}")
        record_property("backend", dict(carried))
        record_property("ratio_to_host", rates["device"] / rates["host O_DIRECT"])
        assert not use_kvikio or sum(carried.values()) >= size
        del on_device
        slab.close()
    os.close(fd)


@pytest.mark.parametrize("is_proven", [True, False])
async def test_chunks_from_a_volume_to_blocks(tmp_path: Path, is_proven: bool) -> None:
    """As a vLLM worker does it: the slab, the checksums, the blocks; and a flipped bit is found where nobody has looked."""
    namespace = tiny_namespace()
    chain, geo, size = chain_of(namespace, 3), geometry(namespace, 16), row_bytes(namespace, 16)
    async with open_table(tmp_path, namespace) as (store, table):
        await store_chain(store, table, chain)
        assert await store.flush()
        offsets = [table.chunks[key].nvme for key in chain.keys]
    layers = [geo.bounds[layer + 1] - geo.bounds[layer] for layer in range(namespace.num_layers)]
    fd = os.open(tmp_path / "nvme" / "volume", os.O_RDWR | os.O_DIRECT)
    with Reader() as reader:
        slab = reader.slab(3 * size, 0)
        rows = torch.as_tensor(slab.memory, device="cuda:0").view(3, size)
        wanted = [Wanted(VolumeExtent(fd, at, is_proven), one) for at, one in zip(offsets, chain.chains, strict=True)]
        way, errors = read_chunks(reader, namespace, 16, wanted, rows)
        assert (way in (Way.KVIKIO, Way.RING), errors) == (True, [None] * 3)
        blocks = DeviceBlocks([torch.zeros(4, 1, 1, each, dtype=torch.uint8, device="cuda") for each in layers])
        for number, row in enumerate(rows):
            blocks.write_payload(row, geo.bounds, [3 - number], 0)
        blocks.flush()
        for number, one in enumerate(chain.chains):
            found = b"".join(view[3 - number].cpu().view(torch.uint8).numpy().tobytes() for view in blocks._views)
            assert found == payload_of(one, geo)
        at = offsets[1] + geo.header_bytes
        page = aligned_buffer(4096)
        os.preadv(fd, [page], at)
        page[5] ^= 1
        os.pwritev(fd, [page], at)
        errors = read_chunks(reader, namespace, 16, wanted, rows)[1]
        assert [error is not None for error in errors] == [False, not is_proven, False]
        del rows, row
        slab.close()
    os.close(fd)


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
def test_gather_and_scatter(layout: str) -> None:
    """Paged KV of one layer to and from a slab ≥ 0.8 × a copy on the device of as many bytes."""
    blocks, heads, tokens, content = 4096, 8, 16, 256
    physical = torch.randint(0, 100, (blocks * heads * tokens * content,), device="cuda", dtype=torch.int16)
    axes = {"B": blocks, "H": heads, "N": tokens, "C": content}
    order = [axis for axis in layout if axis != "L"]
    tensor = physical.view([axes[axis] for axis in order]).permute([order.index(axis) for axis in "BHNC"])
    moved = DeviceBlocks([block_view(tensor, blocks, order_of(layout, heads))])
    view = moved._views[0]
    ids = torch.randperm(blocks, device="cuda")[: blocks // 2]
    slab = torch.empty((len(ids), *view.shape[1:]), dtype=view.dtype, device="cuda")
    other, size = torch.empty_like(slab), slab.numel() * slab.dtype.itemsize
    rates = gbps(
        size,
        {
            "gather": lambda: torch.index_select(view, 0, ids, out=slab),
            "scatter": lambda: view.index_copy_(0, ids, slab),
            "copy": lambda: other.copy_(slab),
        },
    )
    assert rates["gather"] >= 0.8 * rates["copy"]
    assert rates["scatter"] >= 0.8 * rates["copy"]


@pytest.mark.parametrize(("pieces", "length"), [(1, 1 << 20), (3, 100_003), (512, 1 << 16), (64, 5000)])
def test_the_checksum_on_the_device(pieces: int, length: int) -> None:
    on_host = torch.randint(0, 256, (pieces, length), dtype=torch.uint8)
    on_device = on_host.cuda()
    expected = tuple(xxhash.xxh3_64_intdigest(row.numpy().tobytes()) for row in on_host)
    assert checksums(on_device) == expected
    gbps(pieces * length, {"checksum": lambda: checksums(on_device)})
