"""A worker that reads chunks from the volume itself, as on a GPU, with tensors on the host. On a GPU: tests/gpu."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvfs.client import Client
from kvfs.device.driver import open_driver
from kvfs.device.reader import Reader
from kvfs.engine_adapters.vllm_blocks import BlockOrder, block_view
from kvfs.engine_adapters.vllm_device_blocks import DeviceBlocks
from kvfs.engine_adapters.vllm_direct_loads import DirectLoads
from kvfs.engine_adapters.vllm_requests import RequestChunks
from kvfs.engine_adapters.vllm_settings import VllmSettings
from kvfs.errors import UnavailableError
from kvfs.keys import ChainHash
from kvfs.loading import VolumeExtent
from kvfs.messages import Tier
from kvfs.system import System
from kvfs.testing import DEADLINE_S, settings_in, socket_path, wait_until
from kvfs.testing.daemon import DaemonProcess

from .vllm_stand_in import BLOCK, CHUNK, CONTENT, HEADS, LAYERS, StandIn, namespace_of, request_of

BLOCK_IDS = list(range(10, 28))
TOKENS = [(7 * index) % 90 + 3 for index in range(4 * CHUNK + 6)]
PAYLOAD = LAYERS * CHUNK * HEADS * CONTENT
GIVEN_UP = "chunks on NVMe come through RAM from now on: "


class Failing(System):
    """Reads fail once there is a code. Attributes: code; num_reads."""

    code = 0
    num_reads = 0

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See System."""
        self.num_reads += 1
        if self.code:
            raise OSError(self.code, os.strerror(self.code))
        return super().preadv(fd, buffers, offset)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """With four chunks of `TOKENS` that are on NVMe only."""
    with DaemonProcess.start(settings_in(tmp_path), socket_path(tmp_path)) as daemon:
        engine = StandIn(tmp_path / "mount")
        request = request_of(TOKENS, "fill")
        engine.run(request, BLOCK_IDS)
        engine.finish(request)
        engine.workers[0].flush()
        engine.close()
        daemon.chill()
        yield daemon


Start = Callable[..., StandIn]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[StandIn] = []

    def make(system: System | None = None, **settings: object) -> StandIn:
        made.append(StandIn(tmp_path / "mount", readers=[Reader(system=system)], **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def counters(daemon: DaemonProcess) -> dict[str, int]:
    found: dict[str, int] = daemon.statistics()["counters"]
    return found


def load(engine: StandIn, num_local: int = 0) -> dict[str, int]:
    """Load all of the prompt that is not there, and compare; what the worker counted."""
    request = request_of(TOKENS)
    assert engine.run(request, BLOCK_IDS, num_local) == 4 * CHUNK - num_local
    assert not engine.wrong_tokens(request, len(TOKENS))
    engine.finish(request)
    return engine.workers[0].take_counts()


def extents(tmp_path: Path) -> list[VolumeExtent | None]:
    """Where a client is told to read the chunks."""
    with Client(tmp_path / "mount", namespace_of(0, 1), deadline_s=DEADLINE_S) as client:
        chains = request_chains()
        with client.load(chains, stay_on_volume=True) as found:
            return [found.extent(index) for index in range(len(chains))]


def request_chains() -> list[ChainHash]:
    chunks = RequestChunks(namespace_of(0, 1).identity.fingerprint(), [], CHUNK, [])
    chunks.take(TOKENS)
    return list(chunks.chains)


@pytest.mark.parametrize("load_async", [True, False])
@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_chunks_on_nvme_are_read_past_ram(daemon: DaemonProcess, start: Start, num_rows: int, load_async: bool) -> None:
    """All four, however many at once; none is prefetched or promoted, and the metrics say how they came."""
    counts = load(start(num_rows=num_rows, load_async=load_async))
    assert counts["gpu_bytes_host"] == 4 * PAYLOAD
    assert counts["hit_tokens_nvme"] == 4 * CHUNK
    assert "loads_failed" not in {name for name, count in counts.items() if count}
    found = counters(daemon)
    assert (found["loads_on_volume"], found["loads_nvme"], found["promotions"]) == (4, 4, 0)
    assert daemon.statistics()["ram"]["num_chunks"] == 0
    wait_until(lambda: daemon.statistics()["num_leases"] == 0, "the leases have ended")


def test_what_is_in_ram_comes_from_there(daemon: DaemonProcess, start: Start, tmp_path: Path) -> None:
    """The second and the fourth chunk are in RAM; each chunk comes from where it is."""
    chains = request_chains()
    with Client(tmp_path / "mount", namespace_of(0, 1)) as client, client.load([chains[1], chains[3]]) as found:
        assert found.extent(0) is None
    counts = load(start())
    assert counts["gpu_bytes_host"] == 2 * PAYLOAD
    assert (counts["hit_tokens_ram"], counts["hit_tokens_nvme"]) == (2 * CHUNK, 2 * CHUNK)


def test_what_is_on_its_way_into_ram_comes_from_there(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Somebody else has it promoted: nobody reads it twice at the same time."""
    chains = request_chains()
    daemon.slow(0.3)
    with Client(tmp_path / "mount", namespace_of(0, 1), deadline_s=DEADLINE_S) as other:
        with other.load(chains[:2], stream=True):
            assert [one is not None for one in extents(tmp_path)] == [False, False, True, True]
        assert counters(daemon)["promotions"] == 2


def test_blocks_that_the_engine_has_are_left_alone(daemon: DaemonProcess, start: Start) -> None:
    """The local prefix ends inside the second chunk; what others may be reading is not written."""
    engine = start()
    request = request_of(TOKENS, "local")
    engine.block_ids["local"] = BLOCK_IDS
    engine.compute(request, 0, CHUNK + BLOCK)
    for tensor in engine.tensors[0]:
        tensor[BLOCK_IDS[0]] += 1  # it would be put right by a load that writes it
    spoilt = [tensor[BLOCK_IDS[0]].clone() for tensor in engine.tensors[0]]
    request = request_of(TOKENS)
    assert engine.run(request, BLOCK_IDS, CHUNK + BLOCK) == 3 * CHUNK - BLOCK
    assert engine.wrong_tokens(request, len(TOKENS)) == list(range(BLOCK))
    assert all((tensor[BLOCK_IDS[0]] == one).all() for tensor, one in zip(engine.tensors[0], spoilt, strict=True))


def test_a_client_is_told_what_is_proven(daemon: DaemonProcess, tmp_path: Path) -> None:
    """What this daemon wrote, or has promoted, not what an earlier one left."""
    assert [one is not None and one.is_proven for one in extents(tmp_path)] == [True] * 4
    daemon.terminate()
    with DaemonProcess.start(settings_in(tmp_path), socket_path(tmp_path)) as other:
        assert [one is not None and one.is_proven for one in extents(tmp_path)] == [False] * 4
        with Client(tmp_path / "mount", namespace_of(0, 1)) as client, client.load(request_chains()[:1]) as found:
            assert found.sources == [Tier.NVME]
        other.chill()
        assert [one is not None and one.is_proven for one in extents(tmp_path)] == [True, False, False, False]


def test_a_chunk_that_rotted_before_the_daemon_started_is_computed(
    daemon: DaemonProcess, tmp_path: Path, expect_log: Callable[[str], None]
) -> None:
    """Nobody has proven it, so the worker does: what is before it is loaded, it and the rest computed, and it is dropped."""
    where = extents(tmp_path)[2]
    assert where is not None
    daemon.terminate()
    flip(tmp_path, where.offset)
    with (
        DaemonProcess.start(settings_in(tmp_path), socket_path(tmp_path)) as other,
        contextlib.closing(StandIn(tmp_path / "mount", readers=[Reader()])) as engine,
    ):
        request = request_of(TOKENS)
        expect_log("a prefix is computed instead of loaded: layer 1 of chunk .* does not have its checksum")
        assert engine.run(request, BLOCK_IDS) == 4 * CHUNK
        assert engine.failed == set(BLOCK_IDS[2 * CHUNK // BLOCK : 4 * CHUNK // BLOCK])
        assert not engine.wrong_tokens(request, 2 * CHUNK)
        counts = engine.workers[0].take_counts()
        assert (counts["loads_failed"], counts["hit_tokens_nvme"]) == (1, 2 * CHUNK)
        wait_until(lambda: counters(other)["corrupt"] == 1, "the daemon has dropped it")


def flip(tmp_path: Path, offset: int) -> None:
    """Flip a bit in the second layer of the chunk at this place of the volume."""
    (volume,) = [path for path in (tmp_path / "nvme").iterdir() if path.stat().st_size > 1 << 20]
    fd = os.open(volume, os.O_RDWR)
    header_bytes = 8 + int.from_bytes(os.pread(fd, 8, offset), "little")
    at = offset + header_bytes + PAYLOAD // LAYERS + 7
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 4]), at)
    os.fsync(fd)
    os.close(fd)


def test_what_was_read_while_the_daemon_ended_is_computed(
    daemon: DaemonProcess, start: Start, expect_log: Callable[[str], None]
) -> None:
    """Its leases have ended, and the next daemon may have used the places, though these bytes are still right."""

    class Ending(System):
        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            """See System."""
            daemon.kill()
            return super().preadv(fd, buffers, offset)

    expect_log("a prefix is computed instead of loaded: the session has ended")
    expect_log("does not answer, going on without it")
    engine = start(Ending())
    request = request_of(TOKENS)
    assert engine.run(request, BLOCK_IDS) == 4 * CHUNK
    assert engine.failed == set(BLOCK_IDS[: 4 * CHUNK // BLOCK])
    counts = engine.workers[0].take_counts()
    assert (counts["loads_failed"], counts.get("direct_failures", 0), counts.get("gpu_bytes_host", 0)) == (1, 0, 0)


def test_the_engine_does_not_wait_for_a_device_that_hangs(daemon: DaemonProcess, start: Start) -> None:
    """Its steps, and what is counted in each of them, go on while a read does not end."""
    begun, may_go = threading.Event(), threading.Event()

    class Hanging(System):
        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            """See System."""
            begun.set()
            may_go.wait()
            return super().preadv(fd, buffers, offset)

    engine = start(Hanging())
    request = request_of(TOKENS)
    engine.scheduler.arrived(request)
    try:
        assert engine.admit(request, BLOCK_IDS) == 4 * CHUNK
        with ThreadPoolExecutor(1) as thread:
            thread.submit(engine.step).result(DEADLINE_S)
            assert begun.wait(DEADLINE_S)
            assert thread.submit(engine.workers[0].take_counts).result(DEADLINE_S).get("gpu_bytes_host", 0) == 0
            may_go.set()
    finally:
        may_go.set()
    engine.settle(request)
    assert not engine.wrong_tokens(request, 4 * CHUNK)


def test_a_way_that_fails_is_given_up(daemon: DaemonProcess, start: Start, expect_log: Callable[[str], None]) -> None:
    """The load under way is right all the same; those that come have their chunks brought into RAM. Counted and said once."""
    system = Failing()
    engine = start(system)
    system.code = errno.EIO
    expect_log(GIVEN_UP + r"\[Errno 5\]")
    counts = load(engine)
    assert (counts["direct_failures"], counts["loads_failed"], counts.get("gpu_bytes_host", 0)) == (1, 0, 0)
    assert counts["hit_tokens_nvme"] == 4 * CHUNK
    num_reads, system.code = system.num_reads, 0
    counts = load(engine)
    assert (counts.get("direct_failures", 0), system.num_reads) == (0, num_reads)
    assert counters(daemon)["promotions"] == 4


def test_without_cuda_chunks_come_through_ram(expect_log: Callable[[str], None]) -> None:
    try:
        open_driver()
    except UnavailableError:
        expect_log("chunks on NVMe come through RAM: ")
        view = block_view(torch.zeros(4, HEADS, BLOCK, CONTENT, dtype=torch.uint8), 4, BlockOrder.TOKENS_FIRST)
        assert DirectLoads.open(namespace_of(0, 1), DeviceBlocks([view] * LAYERS)) is None
    else:
        pytest.skip("there is a CUDA device: tests/gpu opens one")


@pytest.mark.parametrize(
    ("device", "setting", "is_direct"),
    [("cuda", True, True), ("cuda", False, False), ("cpu", True, False), ("cpu", None, False)],
)
def test_only_workers_on_a_gpu_read_directly(device: str, setting: bool | None, is_direct: bool) -> None:
    """Both sides of an engine come to the same, from its settings and its device alone."""
    assert VllmSettings("/m", direct=setting).is_direct(device) is is_direct
