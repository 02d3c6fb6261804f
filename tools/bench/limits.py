"""The hardware's limits: the same bytes by the shortest way there is, without kvfs."""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from kvfs.addresses import address_of
from kvfs.helping import for_each
from kvfs.kernel_reads import KernelReads
from kvfs.keys import TOKEN_BYTES

_LAYERS_BYTES = 128 << 10
_MAX_UNDER_WAY = 32


def memcpy(source: memoryview, target: memoryview, piece_bytes: int, num_threads: int = 1) -> float:
    """Seconds to copy `source` in pieces into `target`, used as a ring, by so many threads that take the next piece each."""
    base, ring, num_places = address_of(source), address_of(target), len(target) // piece_bytes
    num_pieces = len(source) // piece_bytes

    def copy(number: int) -> None:
        ctypes.memmove(ring + number % num_places * piece_bytes, base + number * piece_bytes, piece_bytes)

    started = time.perf_counter()
    for_each(iter(range(num_pieces)), copy, num_threads - 1)
    return time.perf_counter() - started


@dataclass(slots=True)
class _Read:
    buffer: memoryview
    offset: int


class RawFile:
    """A file past the page cache, read and written by as many threads as the daemon has."""

    def __init__(self, path: Path, size_bytes: int, num_threads: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(self._fd, 0, size_bytes)
        self._pool = ThreadPoolExecutor(num_threads)
        self._path = path

    def write(self, source: memoryview, piece_bytes: int) -> float:
        """Seconds until `source` is durable."""
        return self._run(os.pwritev, source, piece_bytes, sync=True)

    def read(self, target: memoryview, piece_bytes: int) -> float:
        """Seconds to fill `target`."""
        return self._run(os.preadv, target, piece_bytes, sync=False)

    def layers(self, ring: memoryview, chunk_bytes: int, num_layers: int, num_chunks: int) -> Iterator[int]:
        """Read chunks that lie one behind the other, the first layers of all before the next of any.

        Says of how many layers all are there, each time that it is more. Through the kernel's queue, which takes less of the
        processor than threads do; nobody looks at the bytes, nor copies them.
        """
        at_once = max(1, _LAYERS_BYTES * num_layers // chunk_bytes)
        size = at_once * chunk_bytes // num_layers
        reads = iter(
            [
                _Read(ring[start % len(ring) :][:size], start)
                for first in range(0, chunk_bytes, size)
                for start in range(first, first + num_chunks * chunk_bytes, chunk_bytes)
            ]
        )
        left = [num_chunks] * (chunk_bytes // size)
        told = 0
        queue: KernelReads[_Read] = KernelReads(self._fd, _MAX_UNDER_WAY)
        try:
            queue.submit(list(islice(reads, _MAX_UNDER_WAY)), may_wait=True)
            while queue.num_under_way:
                ended = queue.wait()
                queue.submit(list(islice(reads, len(ended))), may_wait=True)
                for read, count in ended:
                    if count != size:
                        raise OSError(f"short transfer at {read.offset}")
                    left[read.offset % chunk_bytes // size] -= 1
                while told < len(left) and not left[told]:
                    told += 1
                    yield told * at_once
        finally:
            queue.close()

    def _run(
        self, call: Callable[[int, list[memoryview], int], int], memory: memoryview, piece_bytes: int, *, sync: bool
    ) -> float:
        def transfer(start: int) -> None:
            count = call(self._fd, [memory[start : start + piece_bytes]], start)
            if count != min(piece_bytes, len(memory) - start):
                raise OSError(f"short transfer at {start}")

        started = time.perf_counter()
        for _ in self._pool.map(transfer, range(0, len(memory), piece_bytes)):
            pass
        if sync:
            os.fdatasync(self._fd)
        return time.perf_counter() - started

    def close(self) -> None:
        """Close and remove it."""
        self._pool.shutdown()
        os.close(self._fd)
        self._path.unlink()


def sha256_chain(tokens: memoryview, tokens_per_chunk: int) -> float:
    """Seconds for the bare chain of SHA-256 over a buffer of u32 tokens."""
    step = tokens_per_chunk * TOKEN_BYTES
    started = time.perf_counter()
    previous = bytes(32)
    for start in range(0, len(tokens) - step + 1, step):
        digest = hashlib.sha256(previous)
        digest.update(tokens[start : start + step])
        previous = digest.digest()
    return time.perf_counter() - started


_ECHO = """
import socket, sys
peer = socket.socket(fileno=int(sys.argv[1]))
while peer.recv(1 << 18):
    peer.send(bytes(24))
"""


class Echo:
    """A process that answers a packet with a packet, as small as a match's reply."""

    def __init__(self, request_bytes: int) -> None:
        self._near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._request = bytes(request_bytes)
        self._process = subprocess.Popen([sys.executable, "-c", _ECHO, str(far.fileno())], pass_fds=[far.fileno()])
        far.close()
        self.round_trip()

    def round_trip(self) -> float:
        """Seconds from the request to the reply."""
        started = time.perf_counter()
        self._near.send(self._request)
        self._near.recv(64)
        return time.perf_counter() - started

    def close(self) -> None:
        """End the other side."""
        self._near.close()
        self._process.wait()


def read_file(path: Path, piece_bytes: int = 1 << 20) -> float:
    """Seconds to read a file by read(2), none of which is in the page cache, unless it lives there."""
    buffer = bytearray(piece_bytes)
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    started = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - started


def stat_missing(directory: Path, names: list[str]) -> float:
    """Seconds a stat(2) of a name that is not there, the mean over `names`."""
    started = time.perf_counter()
    for name in names:
        try:
            os.stat(directory / name)
        except FileNotFoundError:
            continue
        raise AssertionError(f"{name} is there")
    return (time.perf_counter() - started) / len(names)
