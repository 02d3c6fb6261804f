"""A whole chunk from the volume straight into an engine's memory, verified there: on a GPU without a stop in RAM.

The header is read to the host, and says what the payload must be. Then the payload goes where it is wanted, by whatever
way the reader has (see `kvfs.device`), and the layers' checksums are computed on what has arrived.
"""

from __future__ import annotations

import torch
import xxhash

from kvfs.chunk import Facts, Geometry, geometry, parse_header
from kvfs.device.reader import Reader
from kvfs.engine_adapters.device_checksum import checksums
from kvfs.errors import CorruptChunk, UsageError
from kvfs.keys import ChainHash
from kvfs.namespace import Namespace
from kvfs.volume import aligned_buffer


def read_chunk(
    reader: Reader, fd: int, offset: int, namespace: Namespace, chain: ChainHash, num_tokens: int, target: torch.Tensor
) -> Facts:
    """Read the chunk at `offset` of a volume; its payload into the first bytes of `target`, a uint8 tensor [bytes].

    The extent has to be leased until this returns. Raises CorruptChunk for a chunk that is another, or does not have its
    checksums, OSError and EOFError from the volume, UnavailableError where CUDA fails; what is in `target` is worth
    nothing then.
    """
    geo = geometry(namespace, num_tokens)
    if target.dtype != torch.uint8 or target.ndim != 1 or len(target) < geo.payload_bytes:
        raise UsageError(f"a chunk needs {geo.payload_bytes} bytes, not {list(target.shape)} of {target.dtype}")
    header = aligned_buffer(geo.header_bytes)
    reader.read(fd, [(offset, header)])
    found, facts = parse_header(namespace, header)
    if facts.chain != chain or found.num_tokens != num_tokens:
        raise CorruptChunk("these are the bytes of another chunk")
    payload = target[: geo.payload_bytes]
    reader.read(fd, [(offset + geo.header_bytes, payload)])
    verify(geo, facts, payload)
    return facts


def verify(geo: Geometry, facts: Facts, payload: torch.Tensor) -> None:
    """Check the layers of a payload where it lies; raises CorruptChunk for the first that is wrong."""
    found = layer_checksums(geo, payload)
    for layer, (one, other) in enumerate(zip(found, facts.checksums, strict=True)):
        if one != other:
            raise CorruptChunk(f"layer {layer} does not have its checksum")


def layer_checksums(geo: Geometry, payload: torch.Tensor) -> list[int]:
    """The checksum of each layer: on the host by xxhash, on a GPU for all layers of one length in a row at once."""
    bounds = geo.bounds
    if payload.device.type == "cpu":
        whole = payload.numpy().data
        return [xxhash.xxh3_64_intdigest(whole[bounds[i] : bounds[i + 1]]) for i in range(len(bounds) - 1)]
    found: list[int] = []
    while len(found) < len(bounds) - 1:
        first = len(found)
        size = bounds[first + 1] - bounds[first]
        after = first + 1
        while after < len(bounds) - 1 and bounds[after + 1] - bounds[after] == size:
            after += 1
        found += checksums(payload[bounds[first] : bounds[after]].view(after - first, size))
    return found
