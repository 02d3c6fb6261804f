"""Namespaces: which KV bytes are interchangeable.

An `Identity` holds everything that makes the KV of equal tokens equal bytes between equal ranks. Its fingerprint is
the SHA-256 of its canonical JSON. A `Namespace` is one rank of an identity, together with the layout of its chunks;
it owns one directory of the mount. Any difference is another directory; nothing is converted silently.
"""

from __future__ import annotations

import functools
import hashlib
import re
from typing import Annotated, Any

import msgspec

from kvfs.errors import FormatError, UsageError

FORMAT = "kvfs-namespace/1"
MAX_LAYERS = 1024
MAX_TENSORS = 8192  # each is described in the header of every chunk
MAX_NAMESPACE_JSON_BYTES = 256 * 1024

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 1, "I8": 1,
}  # fmt: skip
"""safetensors names of the dtypes that KV comes in, with their size."""

Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Word = Annotated[str, msgspec.Meta(max_length=512)]
_PART = re.compile(r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$")
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*-r(\d+)of(\d+)-([0-9a-f]{12})$")


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What makes KV bytes interchangeable. Every field is part of the fingerprint; the rank is not.

    Attributes:
        model: a stable model id, not a local path.
        revision: which weights: a commit, or a digest of the weight files.
        kv_dtype: element type of the KV cache, as safetensors names it.
        layout: how the engine lays out the elements of a chunk (adapters define the names).
        num_layers, num_kv_heads, head_size: of the whole model, all ranks together.
        tokens_per_chunk: tokens in a full chunk.
        block_size: the engine's block where the bytes depend on it, else 0.
        isa: the instruction set where the bytes depend on it, else "".
        rope: canonical description of position encoding and its scaling.
        quantization: of weights and cache, "" for none.
        tp_size, pp_size: tensor and pipeline parallel sizes.
        kv_group: the engine's KV cache group, 0 where there is one only.
        format: version of this very description.
    """

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    revision: Word
    kv_dtype: Word
    layout: Word
    num_layers: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)]
    num_kv_heads: Positive
    head_size: Positive
    tokens_per_chunk: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 256
    block_size: Annotated[int, msgspec.Meta(ge=0)] = 0
    isa: Word = ""
    rope: Annotated[str, msgspec.Meta(max_length=8192)] = ""
    quantization: Word = ""
    tp_size: Positive = 1
    pp_size: Positive = 1
    kv_group: Annotated[int, msgspec.Meta(ge=0)] = 0
    format: str = FORMAT

    def fingerprint(self) -> bytes:
        """SHA-256 (32 bytes) of the canonical JSON: sorted keys, no spaces, UTF-8."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).digest()


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a layer in a chunk.

    Attributes:
        name: within its layer, e.g. "k".
        dtype: safetensors name.
        shape: of a full chunk; the extent of `token_axis` is replaced for other token counts.
        token_axis: the axis that grows with the number of tokens.
        tokens_per_row: tokens in one step of that axis (an engine block, or 1).
    """

    name: str
    dtype: str
    shape: tuple[Positive, ...]
    token_axis: Annotated[int, msgspec.Meta(ge=0)]
    tokens_per_row: Positive = 1

    def shape_for(self, num_tokens: int) -> tuple[int, ...]:
        """The shape for a chunk of `num_tokens`; raises UsageError if they do not fill whole rows."""
        if num_tokens % self.tokens_per_row:
            raise UsageError(f"a chunk of {num_tokens} tokens does not fill whole rows of {self.tokens_per_row} tokens")
        axis = self.token_axis
        return (*self.shape[:axis], num_tokens // self.tokens_per_row, *self.shape[axis + 1 :])


class LayerRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`count` layers in a row whose tensors look alike."""

    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)]
    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(min_length=1, max_length=64)]


class Namespace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """One rank of an identity: the owner of one directory of the mount.

    Attributes:
        identity: what the bytes are.
        layers: this rank's layers, in order.
        rank, num_ranks: which of the engine's ranks this is.

    Raises UsageError from `check` if the parts contradict each other.
    """

    identity: Identity
    layers: Annotated[tuple[LayerRun, ...], msgspec.Meta(min_length=1, max_length=MAX_LAYERS)]
    rank: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] = 0
    num_ranks: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1

    @functools.cached_property
    def fingerprint_hex(self) -> str:
        """The identity's fingerprint in hex."""
        return self.identity.fingerprint().hex()

    @functools.cached_property
    def derived(self) -> dict[int, Any]:
        """What `kvfs.chunk` worked out for each number of tokens."""
        return {}

    @functools.cached_property
    def num_layers(self) -> int:
        """Layers of this rank."""
        return sum(run.count for run in self.layers)

    @functools.cached_property
    def directory(self) -> str:
        """The name of the namespace's directory: model, dtype, rank and the head of the fingerprint."""
        base = (
            re.sub(r"[^A-Za-z0-9._]+", "-", self.identity.model.rstrip("/").rsplit("/", 1)[-1]).strip("-._") or "model"
        )
        dtype = re.sub(r"[^a-z0-9]+", "", self.identity.kv_dtype.lower()) or "kv"
        return f"{base[:64]}-{dtype[:16]}-r{self.rank}of{self.num_ranks}-{self.fingerprint_hex[:12]}"

    def check(self) -> None:
        """Raise UsageError, in one sentence, for what the types alone do not forbid."""
        if self.identity.format != FORMAT:
            raise UsageError(f"namespace format {self.identity.format!r} is not {FORMAT!r}")
        if self.rank >= self.num_ranks:
            raise UsageError(f"rank {self.rank} is not one of {self.num_ranks} ranks")
        if self.num_layers > MAX_LAYERS:
            raise UsageError(f"{self.num_layers} layers are more than {MAX_LAYERS}")
        if (num_tensors := sum(run.count * len(run.tensors) for run in self.layers)) > MAX_TENSORS:
            raise UsageError(f"{num_tensors} tensors in a chunk are more than {MAX_TENSORS}")
        for run in self.layers:
            names = [tensor.name for tensor in run.tensors]
            if len(set(names)) != len(names):
                raise UsageError("two tensors of one layer have the same name")
            for tensor in run.tensors:
                if not _PART.fullmatch(tensor.name) or len(tensor.name) > 64:
                    raise UsageError(f"tensor name {tensor.name[:80]!r} is not made of letters, digits, '_' and '.'")
                if tensor.dtype not in DTYPE_BYTES:
                    raise UsageError(f"dtype {tensor.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
                if not 0 < len(tensor.shape) <= 8 or tensor.token_axis >= len(tensor.shape):
                    raise UsageError(f"tensor {tensor.name!r} has no axis {tensor.token_axis}")
                if tensor.shape_for(self.identity.tokens_per_chunk) != tensor.shape:
                    raise UsageError(f"tensor {tensor.name!r} of shape {tensor.shape} does not hold a full chunk")


def encode(namespace: Namespace) -> bytes:
    """The content of `namespace.json`: readable, and the same bytes for the same namespace."""
    document: dict[str, Any] = {
        "fingerprint": namespace.fingerprint_hex,
        **msgspec.to_builtins(namespace),
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def decode(raw: bytes) -> Namespace:
    """The namespace in a `namespace.json`.

    Raises FormatError for what is not one, and UsageError for one that contradicts itself.
    """
    if len(raw) > MAX_NAMESPACE_JSON_BYTES:
        raise FormatError("namespace.json is too large")
    try:
        document = msgspec.json.decode(raw, type=dict[str, Any])
        claimed = document.pop("fingerprint", None)
        namespace = msgspec.convert(document, Namespace)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"not a namespace.json: {error}") from error
    if claimed is not None and claimed != namespace.identity.fingerprint().hex():
        raise FormatError("the fingerprint in namespace.json is not that of its identity")
    namespace.check()
    return namespace


def is_directory_name(name: str) -> bool:
    """Whether `name` could be a namespace's directory."""
    return len(name) <= 200 and _NAME.fullmatch(name) is not None
