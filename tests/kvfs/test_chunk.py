"""The chunk format, against the real `safetensors` library and against every kind of damage."""

from __future__ import annotations

import hashlib
import json
import struct
import time
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvfs import chunk as c
from kvfs.errors import CorruptChunk, UsageError
from kvfs.keys import key_of
from kvfs.namespace import DTYPE_BYTES, Identity, LayerRun, Namespace, TensorSpec
from kvfs.testing import chain_of, checksums_of, payload_of, sized_namespace, tiny_namespace

CREATED_NS = 1_700_000_000_123_456_789


def every_dtype() -> Namespace:
    """One layer of each dtype, each of another shape."""
    identity = Identity("tests/dtypes", "1", "mixed", "test", len(DTYPE_BYTES), 1, 1, tokens_per_chunk=8)
    runs = tuple(
        LayerRun(1, (TensorSpec("k", dtype, (2, 8, 3 + i), 1), TensorSpec("v.scale", dtype, (8 + 0 * i, 1 + i), 0)))
        for i, dtype in enumerate(DTYPE_BYTES)
    )
    return Namespace(identity, runs)


def blocked() -> Namespace:
    """A namespace whose token axis counts engine blocks."""
    identity = Identity("tests/blocks", "1", "F16", "test", 3, 2, 4, tokens_per_chunk=64, block_size=16)
    return Namespace(identity, (LayerRun(3, (TensorSpec("kv", "F16", (2, 4, 16, 2, 4), 1, tokens_per_row=16),)),))


NAMESPACES = {
    "tiny": tiny_namespace(), "rank 1 of 2": tiny_namespace(rank=1), "one layer": tiny_namespace(num_layers=1),
    "no pad": sized_namespace(20 * 4096), "every dtype": every_dtype(), "blocks": blocked(),
    "long header": tiny_namespace(num_layers=60, head_size=1),
}  # fmt: skip
SHORT = {"blocks": 32}


def build(namespace: Namespace, num_tokens: int | None = None, position: int = 3) -> tuple[c.Geometry, c.Facts, bytes]:
    """A whole chunk file."""
    step = namespace.identity.tokens_per_chunk
    chain = chain_of(namespace, position + 1)
    num_tokens = step if num_tokens is None else num_tokens
    geo = c.geometry(namespace, num_tokens)
    payload = payload_of(chain.chains[position], geo)
    facts = c.Facts(
        chain.chains[position], key_of(chain.parent_of(position)), position, num_tokens, CREATED_NS,
        checksums_of(payload, geo),
    )  # fmt: skip
    return geo, facts, c.build_header(geo, facts) + payload + bytes(geo.pad_bytes)


def verify(namespace: Namespace, raw: bytes) -> c.Facts:
    """What a reader does."""
    geo, facts = c.parse_header(namespace, raw)
    if len(raw) != geo.file_bytes:
        raise CorruptChunk("wrong size")
    c.verify_payload(geo, facts, memoryview(raw))
    return facts


def test_golden_file() -> None:
    """The bytes of a chunk of the tiny namespace, for ever."""
    _, _, raw = build(tiny_namespace())
    assert hashlib.sha256(raw).hexdigest() == "0d7bfd33a65f76a5c1298fa7220e25f6c5099f11b3882252878209a96f7151b0"


@pytest.mark.parametrize("name", NAMESPACES)
@pytest.mark.parametrize("is_short", [False, True])
def test_layout(name: str, is_short: bool) -> None:
    """Header, payload and file are multiples of 4096; layers follow each other without gaps; the parser agrees."""
    namespace = NAMESPACES[name]
    geo, facts, raw = build(namespace, SHORT.get(name, 5) if is_short else None)
    assert len(raw) == geo.file_bytes
    assert geo.header_bytes % 4096 == geo.file_bytes % 4096 == 0
    assert struct.unpack_from("<Q", raw)[0] == geo.header_bytes - 8
    position = geo.header_bytes
    for layer in range(namespace.num_layers):
        begin, end = geo.layer_range(layer)
        assert begin == position < end
        position = end
    assert position == geo.header_bytes + geo.payload_bytes
    assert c.parse_header(namespace, raw) == (geo, facts)
    assert verify(namespace, raw) == facts
    expected = struct.pack(f">{len(facts.checksums)}Q", *facts.checksums)
    assert c.read_checksums(geo, facts.chain, memoryview(raw)) == expected


def test_checksums_are_read_of_the_right_header_only() -> None:
    """Not of another chunk's, nor of one with any byte changed, or cut."""
    geo, facts, raw = build(tiny_namespace())
    header = bytearray(raw[: geo.header_bytes])
    other = chain_of(tiny_namespace(), 5).chains[4]
    assert c.read_checksums(geo, other, memoryview(header)) is None
    assert c.read_checksums(geo, facts.chain, memoryview(header)[:-1]) is None
    for offset in range(len(header)):
        for bit in (1, 32):  # 32: another case of a letter
            header[offset] ^= bit
            assert c.read_checksums(geo, facts.chain, memoryview(header)) is None, offset
            header[offset] ^= bit
    assert c.read_checksums(geo, facts.chain, memoryview(header)) is not None


@pytest.mark.parametrize("name", NAMESPACES)
@pytest.mark.parametrize("is_short", [False, True])
def test_safetensors_reads_it(name: str, is_short: bool, tmp_path: Path) -> None:
    """The real library opens every chunk, finds the metadata, and each tensor has its bytes, dtype and shape."""
    geo, facts, raw = build(NAMESPACES[name], SHORT.get(name, 5) if is_short else None)
    path = tmp_path / c.file_name(facts.key)
    path.write_bytes(raw)
    names = {place.name for places in geo.layers for place in places} | ({"kvfs.pad"} if geo.pad_bytes else set())
    with safetensors.safe_open(path, framework="pt") as file:
        assert set(file.keys()) == names
        metadata = file.metadata()
        assert metadata["key"] == facts.key.hex()
        assert metadata["chain"] == facts.chain.hex()
        assert metadata["parent"] == facts.parent.hex()
        assert int(metadata["position"]) == facts.position
        assert int(metadata["num_tokens"]) == facts.num_tokens
        for places in geo.layers:
            for place in places:
                tensor = file.get_tensor(place.name)
                found = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                assert tuple(tensor.shape) == place.shape
                assert found == raw[geo.header_bytes + place.begin : geo.header_bytes + place.end]


def test_padding_is_declared() -> None:
    """A payload that is no multiple of 4096 ends with zeros, declared as a tensor of their own."""
    geo, _, raw = build(tiny_namespace())
    header = json.loads(raw[8 : geo.header_bytes])
    assert 0 < geo.pad_bytes < 4096
    assert header["kvfs.pad"] == {
        "dtype": "U8", "shape": [geo.pad_bytes], "data_offsets": [geo.payload_bytes, geo.payload_bytes + geo.pad_bytes],
    }  # fmt: skip
    assert next(iter(header)) == "__metadata__"


@pytest.mark.parametrize("name", ["tiny", "rank 1 of 2", "no pad"])
def test_every_header_byte_counts(name: str) -> None:
    """Whichever byte of the header is flipped, whichever way, the header is not accepted as that chunk's."""
    namespace = NAMESPACES[name]
    geo, _, raw = build(namespace)
    for mask in (0x01, 0x20, 0x80, 0xFF):
        for offset in range(geo.header_bytes):
            damaged = bytearray(raw)
            damaged[offset] ^= mask
            try:
                found = c.parse_header(namespace, damaged)[1]
            except CorruptChunk:
                continue
            pytest.fail(f"byte {offset} ^ {mask:#x} went unseen: {found}")


@given(st.data())
def test_every_payload_byte_counts(data: st.DataObject) -> None:
    """A flipped bit anywhere behind the header, in a layer or in the pad, is found."""
    namespace = NAMESPACES[data.draw(st.sampled_from(["tiny", "every dtype", "blocks"]))]
    geo, _, raw = build(namespace)
    damaged = bytearray(raw)
    damaged[data.draw(st.integers(geo.header_bytes, geo.file_bytes - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptChunk):
        verify(namespace, bytes(damaged))


def test_the_ends_of_every_range_count() -> None:
    """First and last byte of each layer and of the pad."""
    namespace = tiny_namespace()
    geo, _, raw = build(namespace)
    ranges = [geo.layer_range(layer) for layer in range(namespace.num_layers)]
    ranges.append((geo.header_bytes + geo.payload_bytes, geo.file_bytes))
    for begin, end in ranges:
        for offset in (begin, end - 1):
            damaged = bytearray(raw)
            damaged[offset] ^= 4
            with pytest.raises(CorruptChunk):
                verify(namespace, bytes(damaged))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 24, 100, 500, 700, 4095, 4096, 4097, 8191])
def test_truncated(size: int) -> None:
    """A file that ends early is corrupt, wherever it ends."""
    namespace = tiny_namespace()
    _, _, raw = build(namespace)
    with pytest.raises(CorruptChunk):
        verify(namespace, raw[:size])


def test_chunks_of_another_namespace_or_rank_are_refused() -> None:
    """A whole and sound chunk of somebody else is no chunk of this namespace."""
    _, _, raw = build(tiny_namespace())
    for other in (tiny_namespace("other"), tiny_namespace(rank=1), tiny_namespace(num_layers=5), every_dtype()):
        with pytest.raises(CorruptChunk):
            c.parse_header(other, raw)


@given(st.binary(max_size=6000))
def test_any_bytes_are_corrupt(raw: bytes) -> None:
    with pytest.raises(CorruptChunk):
        c.parse_header(tiny_namespace(), raw)


@pytest.mark.parametrize("field", [name for name, _ in c._FIELDS] + ["layers_xxh3_64", "facts_xxh3_128"])
@pytest.mark.parametrize("filler", [b"9", b"f", b"-", b" ", b"_", b"\xff", b"\0", "٣".encode()])
def test_hostile_fields(field: str, filler: bytes) -> None:
    """A field filled with anything is corrupt, and costs nothing: widths bound every integer."""
    namespace = tiny_namespace()
    geo, _, raw = build(namespace)
    start = raw.index(f'"{field}":"'.encode()) + len(field) + 4
    end = raw.index(b'"', start)
    damaged = raw[:start] + (filler * 2000)[: end - start] + raw[end:]
    assert damaged[: geo.header_bytes] != raw[: geo.header_bytes]
    begin = time.thread_time()
    with pytest.raises(CorruptChunk):
        c.parse_header(namespace, damaged)
    assert time.thread_time() - begin < 0.5


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**62, 2**64 - 1])
def test_hostile_length(length: int) -> None:
    """The length at the head of the file is compared, never used to allocate."""
    namespace = tiny_namespace()
    _, _, raw = build(namespace)
    with pytest.raises(CorruptChunk):
        c.parse_header(namespace, struct.pack("<Q", length) + raw[8:])


def test_numbers_of_tokens() -> None:
    """A chunk holds 1 to tokens_per_chunk tokens, in whole rows."""
    for bad in (0, -1, 17, 1 << 40):
        with pytest.raises(UsageError):
            c.geometry(tiny_namespace(), bad)
    with pytest.raises(UsageError, match="whole rows"):
        c.geometry(blocked(), 17)


def test_facts_have_to_fit() -> None:
    """Facts of another geometry, or too large for their fields, are refused when a header is built."""
    geo, facts, _ = build(tiny_namespace())
    import msgspec

    for change in ({"num_tokens": 5}, {"checksums": facts.checksums[1:]}, {"position": 10**10}, {"created_ns": 10**20}):
        with pytest.raises(UsageError):
            c.build_header(geo, msgspec.structs.replace(facts, **change))


@pytest.mark.parametrize("name", ["", "x", "0" * 32, "0" * 31 + ".safetensors", "0" * 32 + ".safetensors\n", "A" * 32 + ".safetensors",
                                  "0" * 32 + ".SAFETENSORS", "../" + "0" * 32 + ".safetensors", "0" * 33 + ".safetensors"])  # fmt: skip
def test_other_file_names_are_none(name: str) -> None:
    assert c.parse_file_name(name) is None


@given(st.binary(min_size=16, max_size=16))
def test_file_names_are_inverse(key: bytes) -> None:
    assert c.parse_file_name(c.file_name(c.Key(key))) == key
