"""LMCache's storage backends, driven line by line: run by the Python of an environment with LMCache, where kvfs is not.

The first argument is JSON with what `Task` in kvfs.tools.bench_peers.lmcache has. Then each line of standard input is
an order, JSON with `do` and what that takes; each is answered by a line of JSON on standard output. The end of standard
input ends the process. What is timed ends when the bytes lie in memory of our own, outside LMCache's pool, as they would
lie in the engine's; what is compared, byte by byte, is not timed.
"""

from __future__ import annotations

import argparse
import asyncio
import glob
import json
import mmap
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lmcache import __version__
from lmcache.utils import CacheEngineKey, start_loop_in_thread_with_exceptions
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

DEADLINE_S = 120.0
MODEL = "kvfs/bench"
MADV_POPULATE_WRITE = 23
DISK_GIB = 4096.0  # no bound: LocalDisk 0.5.6 counts what was removed for ever
NUM_WORKERS = 4  # of fs_native; LocalDisk has as many unless told otherwise


class Memory:
    """What is stored, shared with whoever started us, and where loads end, in chunks."""

    def __init__(self, source_fd: int, chunk_bytes: int, num_chunks: int) -> None:
        self.chunk_bytes = chunk_bytes
        size = chunk_bytes * num_chunks
        shared = mmap.mmap(source_fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        own = mmap.mmap(-1, size)
        try:
            own.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without them
        own.madvise(MADV_POPULATE_WRITE)
        self.source = _chunks(shared, chunk_bytes)
        self.target = _chunks(own, chunk_bytes)

    def wipe(self) -> None:
        """Let nothing of an earlier load be there."""
        for chunk in self.target:
            chunk.zero_()

    def check(self, what: str) -> None:
        """Every byte of the target has to be the source's."""
        for number, (found, wanted) in enumerate(zip(self.target, self.source, strict=True)):
            if not torch.equal(found, wanted):
                raise RuntimeError(f"{what}: chunk {number} has other bytes than were stored")


def _chunks(memory: mmap.mmap, chunk_bytes: int) -> list[torch.Tensor]:
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return [whole[start : start + chunk_bytes] for start in range(0, len(memory), chunk_bytes)]


class Pool:
    """LMCache's memory for chunks on their way, or for those it keeps in RAM."""

    def __init__(self, layout: tuple[int, ...], chunk_bytes: int, num_chunks: int) -> None:
        self.metadata = LMCacheMetadata(
            model_name=MODEL, world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=torch.bfloat16, kv_shape=layout,
        )  # fmt: skip
        self._shape = self.metadata.get_shapes()[0]
        self._gib = chunk_bytes * (num_chunks + 2) / (1 << 30)
        self.backend = LocalCPUBackend(self.config(local_cpu=True), self.metadata, "cpu")
        self.buffer = self.backend.memory_allocator.buffer
        self.buffer[::4096] = 1

    def config(self, **settings: Any) -> Any:
        """LMCache's settings: its defaults but for these."""
        return LMCacheEngineConfig.from_defaults(
            chunk_size=256, max_local_cpu_size=self._gib, lmcache_instance_id="bench", extra_config={}, **settings
        )

    def allocate(self) -> Any:
        """Room for a chunk."""
        found = self.backend.allocate(self._shape, torch.bfloat16, MemoryFormat.KV_2LTD, eviction=False)
        if found is None:
            raise RuntimeError("LMCache's pool has no room")
        return found


def key(number: int) -> CacheEngineKey:
    """The key of a chunk for the backends that live in the engine's process."""
    return CacheEngineKey(MODEL, 1, 0, (0x9E3779B97F4A7C15 * (number + 1)) & (2**63 - 1), torch.bfloat16)


def object_key(chunk_hash: bytes) -> ObjectKey:
    """The key of a chunk for the multi-process server."""
    return ObjectKey(chunk_hash=chunk_hash, model_name=MODEL, kv_rank=1 << 24)


def raw(chunk: Any) -> torch.Tensor:
    """The bytes of a chunk in LMCache's memory."""
    found: torch.Tensor = chunk.tensor.view(torch.uint8).view(-1)
    return found


class LocalCPU:
    """Chunks in RAM; loading copies them out."""

    def __init__(self, pool: Pool, memory: Memory, directory: str) -> None:
        self._backend = pool.backend
        self._memory = memory
        for number, wanted in enumerate(memory.source):
            chunk = pool.allocate()
            raw(chunk).copy_(wanted)
            self._backend.submit_put_task(key(number), chunk)
            chunk.ref_count_down()

    def load(self, numbers: list[int], batch: bool) -> tuple[float, float]:
        """Seconds to load the chunks: until copied, and until they could be used in LMCache's own memory."""
        in_pool = 0.0
        started = time.perf_counter()
        for number, target in zip(numbers, self._memory.target, strict=True):
            asked = time.perf_counter()
            chunk = self._backend.get_blocking(key(number))
            in_pool += time.perf_counter() - asked
            target.copy_(raw(chunk))
            chunk.ref_count_down()
        return time.perf_counter() - started, in_pool


class LocalDisk:
    """Its default for disks: files through the page cache; a chunk counts as stored when write(2) has returned."""

    def __init__(self, pool: Pool, memory: Memory, directory: str) -> None:
        loop = asyncio.new_event_loop()
        threading.Thread(target=start_loop_in_thread_with_exceptions, args=(loop,), daemon=True).start()
        settings = pool.config(local_disk=directory, max_local_disk_size=DISK_GIB)
        self._backend = LocalDiskBackend(settings, loop, pool.backend, "cpu", None, pool.metadata)
        self._pool, self._memory = pool, memory

    def store(self, numbers: list[int]) -> float:
        """Seconds until it says of each chunk that it is stored; each is handed over as soon as it is copied."""
        stored = threading.Semaphore(0)
        started = time.perf_counter()
        for number, wanted in zip(numbers, self._memory.source, strict=True):
            chunk = self._pool.allocate()
            raw(chunk).copy_(wanted)
            self._backend.batched_submit_put_task(
                [key(number)], [chunk], on_complete_callback=lambda _: stored.release()
            )
            chunk.ref_count_down()
        for _ in numbers:
            if not stored.acquire(timeout=DEADLINE_S):
                raise RuntimeError("a chunk was not stored")
        return time.perf_counter() - started

    def load(self, numbers: list[int], batch: bool) -> tuple[float, float]:
        """Seconds to load the chunks: until copied, and until they lie in LMCache's memory."""
        in_pool = 0.0
        started = time.perf_counter()
        groups = [numbers] if batch else [[number] for number in numbers]
        targets = iter(self._memory.target)
        for group in groups:
            asked = time.perf_counter()
            found = self._backend.batched_get_blocking([key(number) for number in group])
            in_pool += time.perf_counter() - asked
            for chunk in found:
                next(targets).copy_(raw(chunk))
                chunk.ref_count_down()
        return time.perf_counter() - started, in_pool

    def remove(self, numbers: list[int]) -> None:
        """Forget the chunks, files and all."""
        for number in numbers:
            self._backend.remove(key(number))


class FsNative:
    """Its fastest for disks: C++ threads that go past the page cache; stored when written and renamed."""

    def __init__(self, pool: Pool, memory: Memory, directory: str) -> None:
        spec = {"type": "fs_native", "num_workers": NUM_WORKERS, "use_odirect": True, "base_path": directory}
        arguments = argparse.Namespace(l2_adapter=[json.dumps(spec)])
        (config,) = parse_args_to_l2_adapters_config(arguments).adapters
        room = L1MemoryDesc(ptr=pool.buffer.data_ptr(), size=pool.buffer.numel(), align_bytes=4096)
        self._adapter = create_l2_adapter(config, room)
        self._pool, self._memory, self._directory = pool, memory, directory

    def _keys(self, numbers: list[int]) -> list[ObjectKey]:
        return [object_key(number.to_bytes(32, "big")) for number in numbers]

    def store(self, numbers: list[int]) -> float:
        """Seconds until it says of each chunk that it is stored; each is handed over as soon as it is copied."""
        chunks, tasks = [], set()
        started = time.perf_counter()
        for name, wanted in zip(self._keys(numbers), self._memory.source, strict=True):
            chunk = self._pool.allocate()
            raw(chunk).copy_(wanted)
            tasks.add(self._adapter.submit_store_task([name], [chunk]))
            chunks.append(chunk)
        for done in _until(self._adapter.get_store_event_fd(), self._adapter.pop_completed_store_tasks):
            tasks -= done.keys()
            if not tasks:
                break
        took_s = time.perf_counter() - started
        for chunk in chunks:
            chunk.ref_count_down()
        return took_s

    def load(self, numbers: list[int], batch: bool) -> tuple[float, float]:
        """Seconds to load the chunks: until copied, and until they lie in LMCache's memory.

        A batch is a task for each chunk, all asked for at once, each copied when it and those before it have come.
        """
        chunks = [self._pool.allocate() for _ in numbers]
        in_pool = 0.0
        started = time.perf_counter()
        names = self._keys(numbers)
        ask = self._adapter.submit_load_task
        asked = [ask([name], [chunk]) for name, chunk in zip(names, chunks, strict=True)] if batch else []
        for number, (name, chunk, target) in enumerate(zip(names, chunks, self._memory.target, strict=True)):
            waiting = time.perf_counter()
            task = asked[number] if batch else ask([name], [chunk])
            found = self._loaded(task)
            in_pool += time.perf_counter() - waiting
            if found.popcount() != 1:
                raise RuntimeError("fs_native did not find a chunk")
            target.copy_(raw(chunk))
        took_s = time.perf_counter() - started
        for chunk in chunks:
            chunk.ref_count_down()
        return took_s, in_pool

    def _loaded(self, task: int) -> Any:
        for found in _until(self._adapter.get_load_event_fd(), lambda: self._adapter.query_load_result(task)):
            if found is not None:
                return found
        raise AssertionError("it raises before that")

    def remove(self, numbers: list[int]) -> None:
        """Remove the chunks' files: it has no other way without a capacity."""
        for path in _files(self._directory):
            os.unlink(path)


def _until(event_fd: int, look: Callable[[], Any]) -> Iterator[Any]:
    """What `look` finds, first at once, then each time that the adapter has something to say."""
    give_up = time.monotonic() + DEADLINE_S
    while time.monotonic() < give_up:
        yield look()
        if select.select([event_fd], [], [], 1.0)[0]:
            os.eventfd_read(event_fd)
    raise RuntimeError("LMCache did not come to an end")


class Lookup:
    """How its server finds a prompt: the hash chain over the tokens, then a read lock on each chunk that is in RAM."""

    def __init__(self, tokens: list[int]) -> None:
        memory = L1MemoryManagerConfig(size_in_bytes=64 << 20, use_lazy=False, shm_name="")
        self._manager = L1Manager(L1ManagerConfig(memory))
        self._hasher = TokenHasher(256, "blake3")
        self._tokens = tokens
        keys = [object_key(each) for each in self._hasher.compute_chunk_hashes(tokens)]
        layout = MemoryLayoutDesc([torch.Size([2, 1, 1, 64])], [torch.bfloat16])
        self._manager.reserve_write(keys, [False] * len(keys), layout)
        self._manager.finish_write(keys)

    def run(self) -> tuple[float, float]:
        """Seconds of it all, and of the hashing in it."""
        started = time.perf_counter()
        hashes = self._hasher.compute_chunk_hashes(self._tokens)
        hashed_s = time.perf_counter() - started
        keys = [object_key(each) for each in hashes]
        found = self._manager.reserve_read(keys)
        count = sum(chunk is not None for _, chunk in found.values())
        took_s = time.perf_counter() - started
        self._manager.finish_read(keys)
        if count != len(self._tokens) // 256:
            raise RuntimeError(f"LMCache found {count} chunks")
        return took_s, hashed_s

    def close(self) -> None:
        """Give its memory back."""
        self._manager.close()


def _files(directory: str) -> list[str]:
    return [path for path in glob.glob(os.path.join(directory, "**", "*"), recursive=True) if os.path.isfile(path)]


def sync_and_drop(directory: str) -> float:
    """Write what is dirty of a directory's files and take them out of the page cache; seconds."""
    started = time.perf_counter()
    for path in _files(directory):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return time.perf_counter() - started


class Worker:
    """Answers orders."""

    def __init__(self, task: dict[str, Any]) -> None:
        torch.set_num_threads(1)  # one thread copies here, as one copies in kvfs's client
        num_chunks, chunk_bytes = task["num_chunks"], task["chunk_bytes"]
        layout = (task["num_layers"], 2, 256, task["num_heads"], task["head_size"])
        self._num_chunks = num_chunks
        self._memory = Memory(task["source_fd"], chunk_bytes, num_chunks)
        hot, staging = (Pool(layout, chunk_bytes, num_chunks) for _ in range(2))
        self._directories = {}
        for name in ("LocalDisk", "fs_native"):
            self._directories[name] = os.path.join(task["directory"], name)
            os.mkdir(self._directories[name])
        self._paths: dict[str, Any] = {
            "LocalCPU": LocalCPU(hot, self._memory, ""),
            "LocalDisk": LocalDisk(staging, self._memory, self._directories["LocalDisk"]),
            "fs_native": FsNative(staging, self._memory, self._directories["fs_native"]),
        }
        self._lookup = Lookup([number * 2_654_435_761 % 50_000 for number in range(task["num_tokens"])])

    def obey(self, order: dict[str, Any]) -> dict[str, float]:
        """Do what is asked."""
        do = order["do"]
        if do == "lookup":
            took_s, hashed_s = self._lookup.run()
            return {"seconds": took_s, "hashing": hashed_s}
        name = order["path"]
        path = self._paths[name]
        numbers = list(range(order["first"], order["first"] + self._num_chunks))
        if do == "store":
            took_s = path.store(numbers)
            return {"seconds": took_s, "sync": sync_and_drop(self._directories[name])}
        if do == "remove":
            path.remove(numbers)
            return {}
        if do not in ("load", "load_batch"):
            raise RuntimeError(f"there is no {do}")
        self._memory.wipe()
        if name in self._directories:
            sync_and_drop(self._directories[name])
        took_s, in_pool_s = path.load(numbers, do == "load_batch")
        self._memory.check(f"{name}, {do}")
        return {"seconds": took_s, "in_pool": in_pool_s}

    def close(self) -> None:
        """Give back what would outlive the process."""
        self._lookup.close()


def main() -> None:
    """See the module."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # LMCache logs to standard output
    try:
        worker = Worker(json.loads(sys.argv[1]))
        print(json.dumps({"version": __version__, "torch": torch.__version__}), file=answers)
        for line in sys.stdin:
            print(json.dumps(worker.obey(json.loads(line))), file=answers)
        worker.close()
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers)
        raise
    finally:
        answers.flush()
        sys.stderr.flush()
    os._exit(0)  # its threads do not end by themselves


if __name__ == "__main__":
    main()
