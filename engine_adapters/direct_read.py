"""Whole chunks from a volume straight into an engine's memory, on a GPU without a stop in RAM, and proven there.

The headers are read to the host, and say what the payloads must be. Then the payloads go where they are wanted, by whatever
way the reader has (see `kvfs.device`), and what the daemon has not proven is proven where it lies: by the checksums of its
layers, those of all chunks at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash

from kvfs.chunk import Facts, Geometry, align, geometry, parse_header
from kvfs.device.gpu import Way
from kvfs.device.reader import Reader
from kvfs.engine_adapters.device_checksum import checksums
from kvfs.errors import CorruptChunk, UsageError
from kvfs.keys import ChainHash
from kvfs.loading import VolumeExtent
from kvfs.namespace import Namespace
from kvfs.volume import aligned_buffer


@dataclass(frozen=True)
class Wanted:
    """A chunk to be read: where it is, and which it has to be."""

    extent: VolumeExtent
    chain: ChainHash


def row_bytes(namespace: Namespace, num_tokens: int) -> int:
    """What a row of `read_chunks` has to have: a payload, up to a multiple of 4096, as direct transfers want it."""
    return align(geometry(namespace, num_tokens).payload_bytes)


def read_chunks(
    reader: Reader, namespace: Namespace, num_tokens: int, wanted: Sequence[Wanted], rows: torch.Tensor
) -> tuple[Way, list[CorruptChunk | None]]:
    """Read chunks of `num_tokens` tokens, the payload of each into the beginning of its row of `rows`, uint8 [chunks, bytes].

    Returns how the payloads came, and of each chunk what is wrong with it. The extents have to be leased until this returns.
    Raises OSError and EOFError from a volume, UnavailableError where CUDA fails; what is in `rows` is worth nothing then.
    """
    size = row_bytes(namespace, num_tokens)
    if rows.dtype != torch.uint8 or rows.ndim != 2 or len(rows) < len(wanted) or rows.shape[1] < size:
        raise UsageError(f"chunks need {len(wanted)} rows of {size} bytes, not {list(rows.shape)} of {rows.dtype}")
    geo = geometry(namespace, num_tokens)
    headers = [aligned_buffer(geo.header_bytes) for _ in wanted]
    _read_each(reader, wanted, [(one.extent.offset, header) for one, header in zip(wanted, headers, strict=True)])
    found = [_facts(namespace, geo, one, header) for one, header in zip(wanted, headers, strict=True)]
    targets = [(one.extent.offset + geo.header_bytes, row[:size]) for one, row in zip(wanted, rows, strict=False)]
    good = [index for index, facts in enumerate(found) if isinstance(facts, Facts)]
    way = _read_each(reader, [wanted[index] for index in good], [targets[index] for index in good])
    errors = [facts if isinstance(facts, CorruptChunk) else None for facts in found]
    unproven = [index for index in good if not wanted[index].extent.is_proven]
    if unproven:
        payloads = rows[: len(wanted)] if len(unproven) == len(wanted) else rows[unproven]
        for index, have in zip(unproven, layer_checksums(geo, payloads[:, : geo.payload_bytes]), strict=True):
            facts = found[index]
            assert isinstance(facts, Facts)
            errors[index] = _compare(have, facts)
    return way, errors


def _read_each(reader: Reader, wanted: Sequence[Wanted], parts: Sequence[tuple[int, object]]) -> Way:
    """Read parts of several volumes, those of each at once; how the last came."""
    way = Way.HOST
    for fd in dict.fromkeys(one.extent.fd for one in wanted):
        way = reader.read(fd, [part for one, part in zip(wanted, parts, strict=True) if one.extent.fd == fd])
    return way


def _facts(namespace: Namespace, geo: Geometry, wanted: Wanted, header: memoryview) -> Facts | CorruptChunk:
    try:
        found, facts = parse_header(namespace, header)
    except CorruptChunk as error:
        return error
    if facts.chain != wanted.chain or found.file_bytes != geo.file_bytes:
        return CorruptChunk("these are the bytes of another chunk")
    return facts


def _compare(have: Sequence[int], facts: Facts) -> CorruptChunk | None:
    for layer, (one, other) in enumerate(zip(have, facts.checksums, strict=True)):
        if one != other:
            return CorruptChunk(f"layer {layer} of chunk {facts.key.hex()} does not have its checksum")
    return None


def layer_checksums(geo: Geometry, payloads: torch.Tensor) -> list[list[int]]:
    """The checksums of each layer of each payload, a row of `payloads`, uint8 [chunks, payload bytes].

    On the host by xxhash, on a GPU for all chunks and all layers of one length in a row at once.
    """
    bounds = geo.bounds
    found: list[list[int]] = [[] for _ in payloads]
    first, num_layers = 0, len(bounds) - 1
    while first < num_layers:
        size, after = bounds[first + 1] - bounds[first], first + 1
        while after < num_layers and bounds[after + 1] - bounds[after] == size:
            after += 1
        layers = payloads[:, bounds[first] : bounds[after]].reshape(-1, size)
        values = _checksums_on_host(layers) if payloads.device.type == "cpu" else checksums(layers)
        for number, each in enumerate(found):
            each += values[number * (after - first) : (number + 1) * (after - first)]
        first = after
    return found


def _checksums_on_host(layers: torch.Tensor) -> Sequence[int]:
    return [xxhash.xxh3_64_intdigest(layer.data) for layer in layers.numpy()]
