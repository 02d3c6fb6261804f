"""The chunk format: a safetensors file that proves its own identity.

    offset            bytes               content
    0                 8                   u64 little-endian: length of the JSON that follows, spaces included
    8                 header_bytes - 8    JSON, filled with spaces up to a multiple of 4096
    header_bytes      payload_bytes       layer 0, layer 1, …; the tensors of a layer in the namespace's order
    …                 0 … 4095            zeros up to a multiple of 4096, declared as the U8 tensor "kvfs.pad"

``__metadata__`` comes first in the JSON; its values are strings of fixed width, in the order of `_FIELDS`, so the size
of a header follows from the namespace and the number of tokens alone. The header of a chunk is the *only* header its
facts can have: `parse_header` takes one text for each fact and knows every byte beside them. ``layers_xxh3_64`` holds
one checksum a layer, so that a layer can be used before the rest has arrived; ``facts_xxh3_128`` covers the facts.

Never change a value here without a new `FORMAT`: files and volumes of every earlier version stay readable.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
from binascii import Error as NotHex
from binascii import a2b_hex
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import xxhash

from kvfs import hashing
from kvfs.errors import CorruptChunk, UsageError
from kvfs.keys import KEY_BYTES, ChainHash, Key, key_of
from kvfs.namespace import DTYPE_BYTES, Namespace

FORMAT = "kvfs-chunk/1"
ALIGNMENT = 4096
MAX_CHUNK_BYTES = 1 << 30
MAX_HEADER_BYTES = 4 << 20
SUFFIX = ".safetensors"
_PREFIX = struct.Struct("<Q")
CHECKSUM_BYTES = 8
_CHECKSUM_HEX, _DIGEST_HEX = 2 * CHECKSUM_BYTES, 32
_CHECKSUMS_PART, _DIGEST_PART = 11, 13  # of a header that is cut at its facts
_GAP = "\0"  # where a fact stands that is another in each chunk
_NOT_CALLED_FOR = "the header is not the one its facts call for"
_MAX_TIME_NS = 1 << 63  # what the index can hold
_MAX_DERIVED_BYTES = 64 << 20  # of geometries that a namespace remembers
_FIELDS = (
    ("format", 12), ("fingerprint", 64), ("rank", 12), ("chain", 64), ("key", 32), ("parent", 32), ("position", 10),
    ("num_tokens", 6), ("created_ns", 20),
)  # fmt: skip
_BEGIN = f'{{"__metadata__":{{"format":"{FORMAT}",'.encode()
_RANK = re.compile(rb"(\d{5})of(\d{5})")
_FACTS_AT = _PREFIX.size + len('{"__metadata__":{')
_NUM_TOKENS_AT = _FACTS_AT + sum(len(f'"{name}":"",') + width for name, width in _FIELDS[:7]) + len('"num_tokens":"')
_NUM_TOKENS_DIGITS = dict(_FIELDS)["num_tokens"]
_FILE_NAME = re.compile(rf"^([0-9a-f]{{{2 * KEY_BYTES}}}){re.escape(SUFFIX)}$")


def align(size: int) -> int:
    """`size` rounded up to the alignment of everything on disk and in the arena."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def file_name(key: Key) -> str:
    """The name of a chunk's file."""
    return key.hex() + SUFFIX


def parse_file_name(name: str) -> Key | None:
    """The key in a chunk's file name, or None if it is not one."""
    match = _FILE_NAME.fullmatch(name)
    return Key(bytes.fromhex(match[1])) if match else None


class Facts(msgspec.Struct, frozen=True):
    """What a chunk says of itself beside its bytes.

    Attributes:
        chain: the full chain value; its head is the key.
        parent: the key of the chunk before it, or the head of the root for position 0.
        position: index of the chunk in its chain.
        num_tokens: tokens whose KV it holds; fewer than `tokens_per_chunk` only in a short last chunk.
        created_ns: when it was published, nanoseconds since the epoch.
        checksums: xxh3_64 of each layer's bytes.
    """

    chain: ChainHash
    parent: Key
    position: int
    num_tokens: int
    created_ns: int
    checksums: tuple[int, ...]

    @property
    def key(self) -> Key:
        """The name under which the chunk is stored."""
        return key_of(self.chain)

    @property
    def payload_digest(self) -> str:
        """xxh3_128, in hex, of the layer checksums: equal for equal payloads."""
        return xxhash.xxh3_128_hexdigest(struct.pack(f">{len(self.checksums)}Q", *self.checksums))


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor lies: `begin` and `end` count bytes from the start of the payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes and offsets of every chunk of one namespace with one number of tokens.

    Attributes:
        layers: for each layer, its tensors in order; the layer's bytes are contiguous.
        header_bytes, payload_bytes, pad_bytes: the three parts of the file, in this order.
        bounds: where each layer begins, in bytes from the start of the payload, and where the last one ends.
    """

    namespace: Namespace
    num_tokens: int
    layers: tuple[tuple[TensorPlace, ...], ...]
    header_bytes: int
    payload_bytes: int
    pad_bytes: int
    bounds: tuple[int, ...]
    _facts: str  # the fields of __metadata__, to be filled in with %
    _metadata_bytes: int
    _tail: bytes  # the JSON behind __metadata__, the same for every chunk, with its spaces
    _layout: struct.Struct  # cuts a header into what is fixed, a fact, what is fixed, …, the tail
    _fixed: tuple[bytes, ...]  # what is between and around the facts
    _binary: struct.Struct  # of chain, parent and checksums
    _facts_end: int  # in a header, where what their digest covers ends

    @property
    def file_bytes(self) -> int:
        """Size of the whole file, a multiple of 4096."""
        return self.header_bytes + self.payload_bytes + self.pad_bytes

    def layer_range(self, layer: int) -> tuple[int, int]:
        """Begin and end of a layer, in bytes from the start of the *file*."""
        tensors = self.layers[layer]
        return self.header_bytes + tensors[0].begin, self.header_bytes + tensors[-1].end


def geometry(namespace: Namespace, num_tokens: int) -> Geometry:
    """The geometry of the namespace's chunks of `num_tokens` tokens.

    Raises UsageError for a count that the namespace cannot have or a chunk above 1 GiB.
    """
    known: Geometry | None = namespace.derived.get(num_tokens)
    if known is None:
        known = _geometry(namespace, num_tokens)
        if len(namespace.derived) * known.header_bytes > _MAX_DERIVED_BYTES:
            namespace.derived.clear()
        namespace.derived[num_tokens] = known
    return known


def _geometry(namespace: Namespace, num_tokens: int) -> Geometry:
    if not 0 < num_tokens <= namespace.identity.tokens_per_chunk:
        raise UsageError(f"a chunk holds 1 to {namespace.identity.tokens_per_chunk} tokens, not {num_tokens}")
    layers: list[tuple[TensorPlace, ...]] = []
    offset = 0
    for run in namespace.layers:
        for _ in range(run.count):
            places = []
            for spec in run.tensors:
                shape = spec.shape_for(num_tokens)
                size = math.prod(shape) * DTYPE_BYTES[spec.dtype]
                places.append(
                    TensorPlace(f"layers.{len(layers)}.{spec.name}", spec.dtype, shape, offset, offset + size)
                )
                offset += size
            layers.append(tuple(places))
            if offset > MAX_CHUNK_BYTES:
                raise UsageError(f"chunks of this namespace would exceed {MAX_CHUNK_BYTES >> 20} MiB")
    pad = align(offset) - offset
    tensors = {place.name: _describe(place) for places in layers for place in places}
    if pad:
        tensors["kvfs.pad"] = _describe(TensorPlace("kvfs.pad", "U8", (pad,), offset, offset + pad))
    tail = b"," + msgspec.json.encode(tensors)[1:]
    template = _metadata_template(namespace)
    metadata_bytes = len(_encode_metadata(template, ("0" * 64, "0" * 32, "0" * 32, 0, 0, 0, "00" * 8 * len(layers))))
    header_bytes = align(_PREFIX.size + metadata_bytes + len(tail))
    if header_bytes > MAX_HEADER_BYTES:
        raise UsageError("headers of this namespace would exceed 4 MiB")
    tail += b" " * (header_bytes - _PREFIX.size - metadata_bytes - len(tail))
    bounds = (*(places[0].begin for places in layers), offset)
    fixed = _fixed_parts(namespace, num_tokens, header_bytes, tail)
    widths = [
        width
        for part in itertools.zip_longest(map(len, fixed), _varying_widths(len(layers)), fillvalue=0)
        for width in part
    ]
    return Geometry(
        namespace, num_tokens, tuple(layers), header_bytes, offset, pad, bounds, template, metadata_bytes, tail,
        struct.Struct("".join(f"{width}s" for width in widths[:-1])), fixed, struct.Struct(f">32s16s{len(layers)}Q"),
        sum(widths[:_CHECKSUMS_PART + 1]) + len('"'),
    )  # fmt: skip


def _describe(place: TensorPlace) -> dict[str, object]:
    return {"dtype": place.dtype, "shape": place.shape, "data_offsets": (place.begin, place.end)}


def _fixed_facts(namespace: Namespace) -> dict[str, str]:
    """The facts that all chunks of a namespace share."""
    rank = f"{namespace.rank:05d}of{namespace.num_ranks:05d}"
    return {"format": FORMAT, "fingerprint": namespace.fingerprint_hex, "rank": rank}


def _metadata_template(namespace: Namespace) -> str:
    """The text of the facts before their digest, with a % conversion for each that differs from chunk to chunk."""
    fixed = _fixed_facts(namespace)
    numbers = ("position", "num_tokens", "created_ns")
    values = [(name, fixed.get(name, f"%0{width}d" if name in numbers else "%s")) for name, width in _FIELDS]
    return ",".join(f'"{name}":"{value}"' for name, value in [*values, ("layers_xxh3_64", "%s")])


def _encode_metadata(template: str, values: tuple[str, str, str, int, int, int, str]) -> bytes:
    facts = (template % values).encode()
    digest = xxhash.xxh3_128_hexdigest(facts).encode()
    return b'{"__metadata__":{%b,"facts_xxh3_128":"%b"}' % (facts, digest)


def _varying_widths(num_layers: int) -> list[int]:
    """Characters of chain, key, parent, position, created_ns, the checksums, and the digest of the facts."""
    widths = dict(_FIELDS)
    names = ("chain", "key", "parent", "position", "created_ns")
    return [*(widths[name] for name in names), _CHECKSUM_HEX * num_layers, _DIGEST_HEX]


def _fixed_parts(namespace: Namespace, num_tokens: int, header_bytes: int, tail: bytes) -> tuple[bytes, ...]:
    """What the headers of these chunks have around those, the tail last."""
    fixed = _fixed_facts(namespace) | {"num_tokens": f"{num_tokens:06d}"}
    facts = ",".join(f'"{name}":"{fixed.get(name, _GAP)}"' for name in [*dict(_FIELDS), "layers_xxh3_64"])
    metadata = f'{{"__metadata__":{{{facts},"facts_xxh3_128":"{_GAP}"}}'
    parts = metadata.encode().split(_GAP.encode())
    return (_PREFIX.pack(header_bytes - _PREFIX.size) + parts[0], *parts[1:-1], parts[-1] + tail)


def build_header(geo: Geometry, facts: Facts) -> bytes:
    """The header of the chunk with these facts, `geo.header_bytes` long."""
    if len(facts.checksums) != len(geo.layers) or facts.num_tokens != geo.num_tokens:
        raise UsageError("these facts are of a chunk with another geometry")
    values = (
        facts.chain.hex(), facts.key.hex(), facts.parent.hex(), facts.position, facts.num_tokens, facts.created_ns,
        struct.pack(f">{len(facts.checksums)}Q", *facts.checksums).hex(),
    )  # fmt: skip
    metadata = _encode_metadata(geo._facts, values)
    if len(metadata) != geo._metadata_bytes:
        raise UsageError("a fact does not fit its field")
    return _PREFIX.pack(geo.header_bytes - _PREFIX.size) + metadata + geo._tail


def parse_header(namespace: Namespace, raw: bytes | bytearray | memoryview) -> tuple[Geometry, Facts]:
    """The facts in the header at the start of `raw`, which may hold more than the header.

    Raises CorruptChunk unless the header is, byte for byte, the one that the namespace's chunk with these facts has.
    """
    view = memoryview(raw)
    geo = geometry(namespace, namespace.identity.tokens_per_chunk)  # most chunks are full
    parts = _parts(geo, view)
    if parts is None:
        geo = _claimed_geometry(namespace, view)
        parts = _parts(geo, view)
    if parts is None:
        if len(view) < geo.header_bytes:
            raise CorruptChunk(f"it ends after {len(view)} bytes, within its header of {geo.header_bytes}")
        raise _wrong_header(namespace, view, _NOT_CALLED_FOR)
    _, chain, _, key, _, parent, _, position, _, created_ns, _, checksums, _, digest, _ = parts
    if _digest_of_facts(geo, view) != digest:
        raise CorruptChunk(f"{_NOT_CALLED_FOR}: they do not have their checksum")
    text = chain + parent + checksums
    try:
        binary = a2b_hex(text)
    except NotHex as error:
        raise CorruptChunk(_NOT_CALLED_FOR) from error
    if binary.hex().encode() != text or key != chain[: 2 * KEY_BYTES] or not (position + created_ns).isdigit():
        raise CorruptChunk(_NOT_CALLED_FOR)
    if int(created_ns) >= _MAX_TIME_NS:
        raise CorruptChunk("a chunk header that names an impossible time")
    numbers = geo._binary.unpack(binary)
    return geo, Facts(
        ChainHash(numbers[0]), Key(numbers[1]), int(position), geo.num_tokens, int(created_ns), numbers[2:]
    )


def read_checksums(geo: Geometry, chain: ChainHash, raw: memoryview) -> bytes | None:
    """The xxh3_64 of each layer, 8 bytes big-endian each, from the header at the start of `raw`.

    None unless that is the header of the chunk `chain`, with this geometry: what it is then `parse_header` says. For whoever
    knows which chunk it has to be, and wants nothing else of it: 3 us beside 8.
    """
    parts = _parts(geo, raw)
    if parts is None or parts[1] != chain.hex().encode() or _digest_of_facts(geo, raw) != parts[_DIGEST_PART]:
        return None
    try:
        return a2b_hex(parts[_CHECKSUMS_PART])
    except NotHex:
        return None


def _digest_of_facts(geo: Geometry, raw: memoryview) -> bytes:
    return xxhash.xxh3_128_hexdigest(raw[_FACTS_AT : geo._facts_end]).encode()


def _parts(geo: Geometry, view: memoryview) -> tuple[bytes, ...] | None:
    """A header, cut at its facts; None unless all that is around them is right."""
    if len(view) < geo.header_bytes:
        return None
    parts: tuple[bytes, ...] = geo._layout.unpack_from(view)
    return parts if parts[::2] == geo._fixed else None


def _claimed_geometry(namespace: Namespace, view: memoryview) -> Geometry:
    """The geometry of chunks with as many tokens as a header says that its chunk has. Raises CorruptChunk."""
    text = bytes(view[_NUM_TOKENS_AT : _NUM_TOKENS_AT + _NUM_TOKENS_DIGITS])
    if len(text) != _NUM_TOKENS_DIGITS or not text.isdigit():
        raise _wrong_header(namespace, view, "not a chunk header of this namespace")
    try:
        return geometry(namespace, int(text))
    except UsageError as error:
        raise _wrong_header(namespace, view, f"impossible facts in a chunk header: {error}") from error


class Claim(NamedTuple):
    """What a block says of itself that may begin a chunk file, before anything of it is proven."""

    fingerprint: str
    rank: int
    num_ranks: int
    num_tokens: int


def read_claim(block: memoryview) -> Claim | None:
    """What the first 4096 bytes of a file claim; None if they begin no chunk file."""
    if block[_PREFIX.size : _PREFIX.size + len(_BEGIN)] != _BEGIN:
        return None
    texts = {}
    offset = _PREFIX.size + len('{"__metadata__":{')
    for name, width in _FIELDS:
        offset += len(f'"{name}":"')
        texts[name] = bytes(block[offset : offset + width])
        offset += width + len('",')
    match = _RANK.fullmatch(texts["rank"])
    if match is None or not texts["num_tokens"].isdigit():
        return None
    return Claim(
        texts["fingerprint"].decode("ascii", "replace"), int(match[1]), int(match[2]), int(texts["num_tokens"])
    )


def _wrong_header(namespace: Namespace, raw: memoryview, otherwise: str) -> CorruptChunk:
    """Says of which namespace a header is that is none of this one, if it says so itself."""
    claim = read_claim(raw)
    if claim is not None and claim.fingerprint != namespace.fingerprint_hex:
        otherwise = f"it is of another namespace: its fingerprint begins with {claim.fingerprint[:12]}"
    elif claim is not None and (claim.rank, claim.num_ranks) != (namespace.rank, namespace.num_ranks):
        otherwise = f"it is of another rank: {claim.rank} of {claim.num_ranks}"
    return CorruptChunk(otherwise)


def checksum(data: bytes | bytearray | memoryview) -> int:
    """xxh3_64 of a layer's bytes. Releases the GIL on large buffers."""
    return xxhash.xxh3_64_intdigest(data)


def layer_checksums(geo: Geometry, payload: memoryview, first: int = 0, stop: int | None = None) -> tuple[int, ...]:
    """The checksums of layers `first` to before `stop`, or the last, of a payload that is in memory as far as that."""
    return hashing.checksums(payload, geo.bounds[first:] if stop is None else geo.bounds[first : stop + 1])


def verify_payload(geo: Geometry, facts: Facts, chunk: memoryview) -> None:
    """Check the layers and the pad of a whole chunk in memory; raises CorruptChunk for the first that is wrong."""
    verify_layers(geo, facts, chunk, 0, len(geo.layers))
    verify_pad(geo, chunk)


def verify_layers(geo: Geometry, facts: Facts, chunk: memoryview, first: int, stop: int) -> None:
    """Check layers `first` to before `stop` of a chunk file; raises CorruptChunk for the first that is wrong."""
    found = layer_checksums(geo, chunk[geo.header_bytes :], first, stop)
    expected = facts.checksums[first:stop]
    if found != expected:
        layer = first + next(i for i, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other)
        raise CorruptChunk(f"layer {layer} does not have its checksum")


def verify_pad(geo: Geometry, chunk: memoryview) -> None:
    """Check that the bytes behind the last layer are zeros."""
    if geo.pad_bytes and any(chunk[geo.header_bytes + geo.payload_bytes : geo.file_bytes]):
        raise CorruptChunk("the padding is not zero")
