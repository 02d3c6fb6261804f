"""A load: chunks that a client may read, layer by layer or whole, each layer verified before it is given out.

Bytes in the arena are looked at in place; nobody but the daemon can write them, and the lease keeps them. Bytes that
found no room in RAM are read from the volume, past the page cache, into memory of this load.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import xxhash

from kvfs import messages as m
from kvfs.chunk import ALIGNMENT, CHECKSUM_BYTES, Geometry, align, geometry, parse_header, read_checksums
from kvfs.connection import Connection
from kvfs.copying import copy_layers
from kvfs.errors import CorruptChunk, KvfsError, UnavailableError, UsageError
from kvfs.helping import for_each, helpers_for
from kvfs.keys import ChainHash
from kvfs.messages import Tier
from kvfs.namespace import Namespace
from kvfs.volume import aligned_buffer


@dataclass(frozen=True)
class VolumeExtent:
    """Where a leased chunk's file lies on a volume: the header first, then the payload.

    Attributes: fd: read-only, of the load's connection; offset: of the file; is_proven: see `messages.Placement`.
    """

    fd: int
    offset: int
    is_proven: bool


class Load:
    """The answer to `Client.load`; close it, or use it as a context, to end the lease.

    Attributes: sources: where each chunk was when it was asked for, NONE for a miss.
    """

    def __init__(
        self,
        connection: Connection,
        namespace: Namespace,
        chains: Sequence[ChainHash],
        reply: m.Loaded,
        deadline: float,
    ) -> None:
        self.sources: list[Tier] = [
            place.source if place.tier is not Tier.NONE else Tier.NONE for place in reply.placements
        ]
        self._connection: Connection | None = connection
        self._namespace = namespace
        self._chains = chains
        self._id = reply.id
        self._lease = reply.lease
        self._placements = reply.placements
        self._num_layers = reply.num_layers  # below which all chunks have arrived
        self._layers = [  # the same of each chunk: of what was in RAM, or is read here, all have
            reply.num_layers if place.tier is Tier.RAM and place.source is Tier.NVME else namespace.num_layers
            for place in reply.placements
        ]
        self._deadline = deadline
        self._failed: set[int] = set()
        self._headers: dict[int, tuple[Geometry, bytes, memoryview]] = {}
        self._lock = threading.Lock()

    @classmethod
    def begin(
        cls,
        connection: Connection,
        namespace: Namespace,
        chains: Sequence[ChainHash],
        request: m.Load,
        deadline_s: float,
    ) -> Load:
        """Ask for a load. Raises UnavailableError or UsageError."""
        deadline = time.monotonic() + deadline_s
        reply = connection.ask(request, m.Loaded, deadline_s + 0.2)
        if not connection.hold():
            raise UnavailableError("the session has ended")
        return cls(connection, namespace, chains, reply, deadline)

    @property
    def num_chunks(self) -> int:
        """How many chunks were asked for."""
        return len(self._placements)

    def geometry(self, index: int) -> Geometry:
        """Sizes and offsets of a chunk; raises as `layer` does."""
        return self._header(index)[0]

    def extent(self, index: int) -> VolumeExtent | None:
        """Where a chunk lies on a volume, if it is not in RAM nor on its way there; to be read before `close`.

        What was read is worth something only if `is_held` says so afterwards. Whoever finds wrong bytes says so with `suspect`.
        """
        place, connection = self._placements[index], self._connection
        if place.tier is not Tier.NVME or connection is None or connection.is_closed:
            return None
        fds = connection.volume_fds
        return VolumeExtent(fds[place.volume], place.offset, place.is_proven) if place.volume < len(fds) else None

    def layer(self, index: int, layer: int) -> memoryview:
        """The verified bytes of one layer of one chunk, read-only; waits until it has arrived.

        Raises CorruptChunk for bytes that do not have their checksum, which the daemon has been told then, and
        UnavailableError for a miss, a device that fails, or a deadline that passed.
        """
        self._wait_for(index, layer + 1)
        geo, checksums, view = self._header(index)
        if self._connection is not None and self._connection.is_hung_up():
            # The lease ended with the daemon, and the one after it may reuse the extent. It needs longer to start than the
            # caller to copy a layer; `copy` needs no such hurry.
            raise UnavailableError("the session has ended")
        begin, end = geo.layer_range(layer)
        found = view[begin:end]
        if xxhash.xxh3_64_digest(found) != checksums[CHECKSUM_BYTES * layer : CHECKSUM_BYTES * (layer + 1)]:
            self.suspect(index)
            raise CorruptChunk(f"layer {layer} of chunk {self._chains[index][:16].hex()} does not have its checksum")
        return found

    def copy(self, index: int, target: memoryview, first: int = 0, stop: int | None = None) -> int:
        """Copy layers `first` to before `stop` (or the last) of one chunk to the start of `target`, verified there.

        Waits until they have arrived; returns how many bytes they have. Far faster than `layer` where layers are small.
        Raises as `layer` does, and what was copied is worth nothing then; UsageError if `target` is too short.
        """
        stop = self._namespace.num_layers if stop is None else stop
        self._wait_for(index, stop)
        geo, checksums, view = self._header(index)
        begin, size = geo.bounds[first], geo.bounds[stop] - geo.bounds[first]
        if len(target) < size:
            raise UsageError(f"{size} bytes do not fit into {len(target)}")
        found = copy_layers(geo, first, stop, view[geo.header_bytes + begin :], target)
        if found != checksums[CHECKSUM_BYTES * first : CHECKSUM_BYTES * stop]:
            self.suspect(index)
            raise CorruptChunk(f"a layer of chunk {self._chains[index][:16].hex()} does not have its checksum")
        return size

    def wait(self, layers: int) -> None:
        """Wait until so many layers of all chunks have arrived, as far as they could be read."""
        with self._lock:
            while self._num_layers < layers:
                self._receive_arrival()

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """What to `copy`, as it arrives: (index, first, stop), each layer of each stored chunk in one of them.

        Of a chunk that cannot be read there is a part too: its `copy` raises. Raises UnavailableError when the deadline
        has passed.
        """
        num_layers = self._namespace.num_layers
        left = {index: 0 for index, source in enumerate(self.sources) if source is not Tier.NONE}
        while True:
            for index, first in list(left.items()):
                stop = self._layers[index]
                if stop > first:
                    left[index] = stop
                    yield index, first, stop
                if stop == num_layers:
                    del left[index]
            if not left:
                return
            with self._lock:
                if not any(self._layers[index] > first for index, first in left.items()):
                    self._receive_arrival()

    def copy_all(
        self, place: Callable[[int, int, int], memoryview], *, num_helpers: int | None = None
    ) -> dict[int, KvfsError]:
        """Copy every stored chunk as it arrives, verified; `place(index, first, stop)` says where those layers go.

        Threads help, as many as `num_helpers` says: one, unless told otherwise, where this process has a second core and
        the load is worth it. `place` is called by one of them at a time. Returns the chunks that could not be read, or
        had not the bytes that they should, each with its error: what was copied of them is worth nothing. Raises
        UnavailableError when the deadline has passed, UsageError if a place is too short; no thread copies any more then.
        """
        failed: dict[int, KvfsError] = {}

        def copy_to(part: tuple[int, int, int, memoryview]) -> None:
            index, first, stop, target = part
            try:
                self.copy(index, target, first, stop)
            except (CorruptChunk, UnavailableError) as error:
                failed[index] = error

        if num_helpers is None:
            num_helpers = helpers_for(self._num_bytes())
        for_each(((*part, place(*part)) for part in self.parts()), copy_to, num_helpers)
        return failed

    def _num_bytes(self) -> int:
        return sum(place.length for place in self._placements if place.tier is not Tier.NONE)

    def _wait_for(self, index: int, layers: int) -> None:
        if self._layers[index] < layers:
            with self._lock:
                while self._layers[index] < layers:
                    self._receive_arrival()
        if index in self._failed:
            raise UnavailableError(f"chunk {self._chains[index][:16].hex()} could not be read")

    def _receive_arrival(self) -> None:
        connection = self._connection
        if connection is None:
            raise UnavailableError("the load was closed")
        deadline = self._deadline + 0.2
        with connection.turn(deadline):
            arrived = connection.receive(self._id, m.Arrived, deadline)
        self._failed.update(arrived.failed)
        for index in arrived.failed:
            self._layers[index] = self._namespace.num_layers
        for index, layers in arrived.ahead:
            self._layers[index] = max(self._layers[index], layers)
        if arrived.num_layers > self._num_layers:
            self._num_layers = arrived.num_layers
            self._layers = [max(layers, arrived.num_layers) for layers in self._layers]

    def _header(self, index: int) -> tuple[Geometry, bytes, memoryview]:
        """What a chunk's header says: sizes and offsets, and the checksum of each layer; and the whole chunk file."""
        known = self._headers.get(index)
        if known is None:
            self._wait_for(index, 1)
            view = self._view(index)
            try:
                geo, checksums = _read_header(self._namespace, self._chains[index], view)
            except CorruptChunk:
                self.suspect(index)
                raise
            known = self._headers[index] = (geo, checksums, view)
        return known

    def _view(self, index: int) -> memoryview:
        """The whole chunk file: in the arena, or read from the volume."""
        place, connection = self._placements[index], self._connection
        if connection is None or connection.is_closed:
            raise UnavailableError("the load has ended")
        if place.tier is Tier.NONE:
            raise UnavailableError(f"chunk {self._chains[index][:16].hex()} is not stored")
        if place.tier is Tier.RAM:
            return connection.arena[place.offset : place.offset + place.length].toreadonly()
        fds = connection.volume_fds
        if place.volume >= len(fds):
            raise UnavailableError("there is no room in RAM and the volume cannot be read")
        buffer = aligned_buffer(align(place.length))
        try:
            _read_to_the_end(fds[place.volume], buffer[: place.length], place.offset)
        except OSError as error:
            raise UnavailableError(f"the volume could not be read: {error}") from error
        return buffer[: place.length].toreadonly()

    def is_held(self) -> bool:
        """Whether the lease has not ended, so that no extent was reused: with the daemon it does."""
        return self._connection is not None and not self._connection.is_hung_up()

    def suspect(self, index: int) -> None:
        """Tell the daemon that a chunk has not the bytes that it should have: it looks for itself."""
        if self._connection is not None:
            self._connection.post(m.Suspect(self._connection.next_id(), self._chains[index][:16]))

    def close(self) -> None:
        """End the lease; views that were given out must not be used any more."""
        connection, self._connection = self._connection, None
        self._headers.clear()
        if connection is None:
            return
        deadline = self._deadline + 0.2
        try:
            with self._lock, connection.turn(max(deadline, time.monotonic() + 0.2)):
                while self._num_layers < self._namespace.num_layers and not connection.is_broken:
                    arrived = connection.receive(self._id, m.Arrived, deadline)
                    self._num_layers = max(self._num_layers, arrived.num_layers)
        except KvfsError:
            connection.give_up()  # its end gives everything back
        else:
            if self._lease:
                connection.tell(m.Release(connection.next_id(), self._lease))
        finally:
            connection.let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def layers(self, place: Callable[[int, int, int], memoryview]) -> Iterator[int]:
        """Copy every stored chunk as it arrives, verified, and say below which layer all are there, each time that it rises.

        For an engine that computes with the first layers meanwhile. `place` is as for `copy_all`; raises as `copy` does.
        """
        num_chunks = Counter({0: sum(source is not Tier.NONE for source in self.sources)})  # that have so many layers
        told = 0
        for index, first, stop in self.parts():
            self.copy(index, place(index, first, stop), first, stop)
            num_chunks[first] -= 1
            num_chunks[stop] += 1
            if not num_chunks[first]:
                del num_chunks[first]
                if min(num_chunks) > told:
                    told = min(num_chunks)
                    yield told


def _read_header(namespace: Namespace, chain: ChainHash, view: memoryview) -> tuple[Geometry, bytes]:
    """Sizes and offsets of a chunk, and its checksums. Raises CorruptChunk unless `view` is the file of the chunk `chain`."""
    geo = geometry(namespace, namespace.identity.tokens_per_chunk)  # most chunks are full
    checksums = read_checksums(geo, chain, view)
    if checksums is None:
        geo = parse_header(namespace, view)[0]
        checksums = read_checksums(geo, chain, view)
    if checksums is None or geo.file_bytes != len(view):
        raise CorruptChunk("these are the bytes of another chunk")
    return geo, checksums


def _read_to_the_end(fd: int, buffer: memoryview, offset: int) -> None:
    """Fill `buffer`, which is all zeros, as far as the file goes: bytes that a truncated volume lost fit no checksum."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        done += count
        if count == 0 or done % ALIGNMENT:
            return
