"""Fingerprints never change; any difference between identities is another directory; hostile JSON is an error."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs import namespace
from kvfs.chunk import geometry
from kvfs.errors import FormatError, KvfsError, UsageError
from kvfs.namespace import Identity, LayerRun, Namespace, TensorSpec
from kvfs.testing import tiny_namespace

IDENTITY = Identity(
    model="HuggingFaceTB/SmolLM2-135M-Instruct", revision="12fd25f", kv_dtype="BF16", layout="transformers/1",
    num_layers=30, num_kv_heads=3, head_size=64, rope='{"rope_theta":100000}',
)  # fmt: skip
CANONICAL = (
    '{"block_size":0,"format":"kvfs-namespace/1","head_size":64,"isa":"","kv_dtype":"BF16","kv_group":0,'
    '"layout":"transformers/1","model":"HuggingFaceTB/SmolLM2-135M-Instruct","num_kv_heads":3,"num_layers":30,'
    '"pp_size":1,"quantization":"","revision":"12fd25f","rope":"{\\"rope_theta\\":100000}","tokens_per_chunk":256,'
    '"tp_size":1}'
)
OTHERS: dict[str, Any] = {
    "model": "x", "revision": "x", "kv_dtype": "F16", "layout": "x", "num_layers": 29, "num_kv_heads": 4,
    "head_size": 65, "tokens_per_chunk": 128, "block_size": 16, "isa": "avx512", "rope": "", "quantization": "fp8",
    "tp_size": 2, "pp_size": 2, "kv_group": 1, "format": "kvfs-namespace/2",
}  # fmt: skip


def test_golden_fingerprint() -> None:
    """The fingerprint is SHA-256 of canonical JSON: sorted keys, no spaces, every field."""
    assert IDENTITY.fingerprint() == hashlib.sha256(CANONICAL.encode()).digest()
    assert IDENTITY.fingerprint().hex() == "befb921f2fbec8cdc66e9f402c81926c075d80c402d18f1d0a35bc9d9395ca59"


def test_every_field_is_tried() -> None:
    assert set(OTHERS) == set(Identity.__struct_fields__)


@pytest.mark.parametrize("field", OTHERS)
def test_any_field_changes_the_fingerprint(field: str) -> None:
    """No field may be left out of the fingerprint."""
    other = msgspec.structs.replace(IDENTITY, **{field: OTHERS[field]})
    assert other.fingerprint() != IDENTITY.fingerprint()


def test_rank_is_in_the_name_only() -> None:
    """Ranks share the fingerprint, so that one chain serves all of them, and have directories of their own."""
    spec = TensorSpec("k", "BF16", (256, 3, 64), 0)
    ranks = [Namespace(IDENTITY, (LayerRun(30, (spec,)),), rank, 2) for rank in range(2)]
    assert ranks[0].fingerprint_hex == ranks[1].fingerprint_hex == IDENTITY.fingerprint().hex()
    short = IDENTITY.fingerprint().hex()[:12]
    assert [rank.directory for rank in ranks] == [
        f"SmolLM2-135M-Instruct-bf16-r{n}of2-{short}" for n in range(2)
    ]  # fmt: skip


@given(st.text(min_size=1, max_size=200), st.text(max_size=512))
def test_directory_names_are_plain(model: str, dtype: str) -> None:
    """Whatever a model is called, its directory is one plain name, never hidden, absolute or with a way out."""
    identity = msgspec.structs.replace(IDENTITY, model=model, kv_dtype=dtype)
    name = Namespace(identity, (LayerRun(1, (TensorSpec("k", "U8", (256,), 0),)),)).directory
    assert namespace.is_directory_name(name)
    assert "/" not in name
    assert name.isascii()
    assert not name.startswith((".", "-"))


@pytest.mark.parametrize("name", ["", ".", "..", ".kvfs", "files", "a-r0of1-3f9c21ab77d0\n", "a/b-r0of1-3f9c21ab77d0",
                                  "-a-r0of1-3f9c21ab77d0", "a-r0of1-3F9C21AB77D0", "a-r0of1-3f9c21ab77d", "a" * 300 + "-r0of1-3f9c21ab77d0"])  # fmt: skip
def test_other_names_are_no_namespaces(name: str) -> None:
    assert not namespace.is_directory_name(name)


def test_encode_is_inverse_and_stable() -> None:
    """A namespace.json gives the namespace back, and is the same bytes each time."""
    one = tiny_namespace()
    raw = namespace.encode(one)
    assert namespace.decode(raw) == one
    assert namespace.encode(namespace.decode(raw)) == raw
    assert json.loads(raw)["fingerprint"] == one.fingerprint_hex


def changed(**changes: Any) -> bytes:
    """The tiny namespace's document with some members replaced; dots reach into it."""
    document = json.loads(namespace.encode(tiny_namespace()))
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = document
        for parent in parents:
            place = place[int(parent) if parent.isdigit() else parent]
        if value is None:
            del place[last]
        else:
            place[last] = value
    return json.dumps(document).encode()


TENSOR = "layers__0__tensors__0__"


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"\0", b"[]", b"null", b"{}", b"{" * 200_000, b'{"identity":' + b"[" * 200_000, b'{"a":"\\ud800"}',
        b'{"a":"\xff"}', b" " * 300_000, changed(unknown=1), changed(identity__unknown=1), changed(identity__model=""),
        changed(identity__model=None), changed(fingerprint="00"), changed(fingerprint=7), changed(rank=1),
        changed(rank=-1), changed(num_ranks=0), changed(identity__format="kvfs-namespace/2", fingerprint=None),
        changed(identity__num_layers=10**30), changed(layers=[]), changed(layers__0__count=0),
        changed(layers__0__count=2000), changed(layers__1__count=1024), changed(**{TENSOR + "name": "../x"}),
        changed(**{TENSOR + "name": "v"}), changed(**{TENSOR + "name": "k" * 65}), changed(**{TENSOR + "name": "k\n"}),
        changed(**{TENSOR + "dtype": "F99"}), changed(**{TENSOR + "shape": []}),
        changed(**{TENSOR + "shape": [3, 17, 40]}), changed(**{TENSOR + "shape": [1 << 50, 16]}),
        changed(**{TENSOR + "token_axis": 3}), changed(**{TENSOR + "token_axis": -1}),
        changed(**{TENSOR + "tokens_per_row": 3}), changed(**{TENSOR + "shape": [1.5, 16]}),
    ],
    ids=lambda raw: repr(raw[:20]),
)  # fmt: skip
def test_hostile_documents_are_errors(raw: bytes) -> None:
    """What is no namespace.json, or contradicts itself, is a FormatError or a UsageError of one sentence."""
    with pytest.raises((FormatError, UsageError)):
        namespace.decode(raw)


@given(st.binary(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_any_bytes_are_an_error(raw: bytes) -> None:
    with pytest.raises(KvfsError):
        namespace.decode(raw)


@pytest.mark.parametrize("num_tensors", [1, 64])
def test_huge_namespaces_are_bounded(num_tensors: int) -> None:
    """The largest namespace that a client may send costs little to refuse or to take."""
    specs = [TensorSpec(f"t{i}" + "x" * 60, "U8", (1 << 16, 1 << 20, 1 << 20), 0) for i in range(num_tensors)]
    small = [TensorSpec(f"t{i}" + "x" * 60, "U8", (1 << 16,), 0) for i in range(num_tensors)]
    for tensors in (specs, small):
        identity = msgspec.structs.replace(IDENTITY, tokens_per_chunk=1 << 16)
        raw = namespace.encode(Namespace(identity, (LayerRun(1024, tuple(tensors)),)))
        begin = time.thread_time()
        with contextlib.suppress(UsageError):
            geometry(namespace.decode(raw), 1 << 16)
        assert time.thread_time() - begin < 3


def test_shape_for_short_chunks() -> None:
    """The token axis shrinks in whole rows; parts of a row are refused."""
    spec = TensorSpec("k", "BF16", (2, 8, 5), 1, tokens_per_row=2)
    assert spec.shape_for(16) == (2, 8, 5)
    assert spec.shape_for(6) == (2, 3, 5)
    with pytest.raises(UsageError, match="whole rows"):
        spec.shape_for(5)
