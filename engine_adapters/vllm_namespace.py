"""Which namespace the KV of a vLLM worker belongs to, and which engines are refused.

Everything comes from vLLM's own configuration and from the KV tensors as they are. A worker describes itself when its
tensors are there, and the scheduler's side is told by the workers, so both mean the same.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvfs.engine_adapters.model_digest import config_facts
from kvfs.engine_adapters.vllm_blocks import BlockOrder, block_view, order_of
from kvfs.engine_adapters.vllm_settings import VllmSettings
from kvfs.engine_adapters.weights_on_disk import digest_files, weight_files
from kvfs.errors import UsageError
from kvfs.namespace import DTYPE_BYTES, Identity, LayerRun, Namespace, TensorSpec

DTYPES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.uint8: "U8", torch.int8: "I8",
}  # fmt: skip
HELD_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
_COMMIT = re.compile(r"^[0-9a-f]{40}([0-9a-f]{24})?$")


@dataclass(frozen=True)
class WorkerKv:
    """The KV of one worker.

    Attributes:
        namespace: what its chunks are filed under.
        views: for each layer of a chunk, in order, the tensor as `vllm_blocks.block_view` shows it.
        layer_numbers: the number of each of vLLM's layers, by name; layers that share a tensor share a number.
        num_tokens: how many tokens fit into all blocks.
        is_storing: False if another rank stores the same bytes.
    """

    namespace: Namespace
    views: tuple[torch.Tensor, ...]
    layer_numbers: dict[str, int]
    num_tokens: int
    is_storing: bool


def check_engine(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise UsageError, in one sentence, for an engine whose KV cannot be held."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise UsageError(
            f"this model keeps its KV in {len(groups)} groups, and kvfs holds models whose layers all keep every "
            "token: start vLLM without the KvfsConnector"
        )
    for spec in _layer_specs(groups[0]):
        name = type(spec).__name__
        if name not in HELD_SPECS or getattr(spec, "tokens_per_state", 1) != 1:
            raise UsageError(f"a layer of this model is a {name}, and kvfs holds full attention over all tokens only")
        if getattr(spec, "non_causal", False):
            raise UsageError("this model attends to later tokens, so the KV of a prefix is not its own")
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise UsageError("kvfs does not hold KV whose tokens are spread over ranks: context parallel sizes must be 1")


def describe_worker(
    vllm_config: Any,
    kv_cache_config: Any,
    tensors: dict[str, torch.Tensor],
    settings: VllmSettings,
    *,
    tp_rank: int,
    pp_rank: int,
    cpu_isa: str,
) -> WorkerKv:
    """Describe a worker; `cpu_isa` is "" but for vLLM's CPU backend. Raises UsageError."""
    check_engine(vllm_config, kv_cache_config)
    group = kv_cache_config.kv_cache_groups[0]
    numbers, distinct = _number_layers(group.layer_names, tensors)
    first = distinct[0]
    order = _order(kv_cache_config, first, cpu_isa)
    num_blocks = int(kv_cache_config.num_blocks)
    views = tuple(block_view(tensor, num_blocks, order) for tensor in distinct)
    block_size = int(group.kv_cache_spec.block_size)
    tokens_per_chunk = settings.chunk_tokens(block_size)
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    tp_size, pp_size = int(parallel.tensor_parallel_size), int(parallel.pipeline_parallel_size)
    replicas = max(1, int(getattr(kv_cache_config, "kv_tp_replicas", 1)))
    kernel_tokens = int(first.shape[2])
    identity = Identity(
        model=_model_name(model, settings),
        revision=_revision(vllm_config, settings),
        kv_dtype=_dtype(first),
        layout=f"vllm-cpu-{order.value}" if cpu_isa else f"vllm-{order.value}",
        num_layers=_num_layers(model, len(distinct), pp_size),
        num_kv_heads=int(model.get_total_num_kv_heads()),
        head_size=int(model.get_head_size()),
        tokens_per_chunk=tokens_per_chunk,
        block_size=0 if order is BlockOrder.TOKENS_FIRST else kernel_tokens,
        isa=cpu_isa,
        rope=_rope(model),
        quantization=_quantization(vllm_config),
        tp_size=tp_size // replicas,
        pp_size=pp_size,
    )
    specs = [_tensor_spec(tensor, order, tokens_per_chunk) for tensor in distinct]
    namespace = Namespace(
        identity,
        tuple(LayerRun(len(list(run)), (spec,)) for spec, run in itertools.groupby(specs)),
        rank=pp_rank * (tp_size // replicas) + tp_rank // replicas,
        num_ranks=pp_size * (tp_size // replicas),
    )
    namespace.check()
    return WorkerKv(namespace, views, numbers, num_blocks * block_size, is_storing=tp_rank % replicas == 0)


def _layer_specs(group: Any) -> list[Any]:
    """The specs of a group's layers: one for all, or one each."""
    each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return list(each.values()) if each is not None else [group.kv_cache_spec]


def _number_layers(names: Sequence[str], tensors: dict[str, torch.Tensor]) -> tuple[dict[str, int], list[torch.Tensor]]:
    """Number the layers in the order of the model; those that share memory have one number."""
    numbers: dict[str, int] = {}
    distinct: list[torch.Tensor] = []
    by_address: dict[int, int] = {}
    for name in sorted(names, key=lambda name: ([int(digits) for digits in re.findall(r"\d+", name)], name)):
        tensor = tensors[name]
        number = by_address.setdefault(tensor.data_ptr(), len(distinct))
        if number == len(distinct):
            distinct.append(tensor)
        numbers[name] = number
    return numbers, distinct


def _order(kv_cache_config: Any, tensor: torch.Tensor, cpu_isa: str) -> BlockOrder:
    layout = str(getattr(kv_cache_config, "kv_cache_layout", None) or "LBNHC")
    order = order_of(layout, int(tensor.shape[1]))
    # The CPU backend's blocks are opaque: there is one order in which they are contiguous.
    return BlockOrder.HEADS_FIRST if cpu_isa else order


def _dtype(tensor: torch.Tensor) -> str:
    found = DTYPES.get(tensor.dtype)
    if found is None:
        raise UsageError(f"vLLM keeps its KV as {tensor.dtype}, which kvfs does not hold")
    return found


def _tensor_spec(tensor: torch.Tensor, order: BlockOrder, tokens_per_chunk: int) -> TensorSpec:
    _, heads, tokens, content = (int(extent) for extent in tensor.shape)
    dtype = _dtype(tensor)
    assert DTYPE_BYTES[dtype] == tensor.dtype.itemsize
    if order is BlockOrder.TOKENS_FIRST:
        return TensorSpec("kv", dtype, (tokens_per_chunk, heads, content), token_axis=0)
    shape = (tokens_per_chunk // tokens, heads, tokens, content)
    return TensorSpec("kv", dtype, shape, token_axis=0, tokens_per_row=tokens)


def _num_layers(model: Any, num_here: int, pp_size: int) -> int:
    """Layers of the whole model; with one stage those that are there, layers of a draft model among them."""
    return num_here if pp_size == 1 else int(model.get_total_num_hidden_layers())


def _model_name(model: Any, settings: VllmSettings) -> str:
    name = (settings.model_id or str(model.model)).rstrip("/")
    return (name if settings.model_id else name.rsplit("/", 1)[-1])[:512] or "model"


def _revision(vllm_config: Any, settings: VllmSettings) -> str:
    """The weights, and a digest of every other fact that changes KV: the model's configuration, its dtype, a draft."""
    model = vllm_config.model_config
    speculative = vllm_config.speculative_config
    facts = {
        "config": config_facts(model.hf_config),
        "dtype": str(model.dtype),
        "draft": [str(speculative.method), str(speculative.model)] if speculative is not None else None,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=_plain).encode()).hexdigest()
    return f"{settings.revision or _weights(vllm_config)}-{digest[:32]}"[:512]


def _weights(vllm_config: Any) -> str:
    model, load = vllm_config.model_config, vllm_config.load_config
    load_format = str(getattr(load.load_format, "value", load.load_format))
    if load_format == "dummy":
        return "dummy"
    path = Path(str(getattr(model, "model_weights", "") or model.model))
    if path.exists():
        files = weight_files(path)
        if not files:
            raise UsageError(f"there are no weight files in {path}: set revision in kv_connector_extra_config")
        return digest_files(files, path)
    for commit in (model.revision, getattr(model.hf_config, "_commit_hash", None)):
        if commit and _COMMIT.fullmatch(str(commit)):
            return str(commit)
    raise UsageError(
        f"vLLM does not say which commit of {model.model} it has loaded: set revision in kv_connector_extra_config"
    )


def _plain(value: Any) -> Any:
    """Something for JSON that is the same in every process."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else f"{type(value).__name__} {value}"


def _rope(model: Any) -> str:
    """Canonical JSON of how positions are encoded."""
    config = model.hf_text_config
    parameters = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    facts = {"parameters": parameters, "max_position_embeddings": getattr(config, "max_position_embeddings", None)}
    if "longrope" in json.dumps(parameters, default=str):
        facts["max_model_len"] = model.max_model_len  # decides which factors vLLM takes
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), default=str)[:8192]


def _quantization(vllm_config: Any) -> str:
    of_weights = vllm_config.model_config.quantization
    of_cache = str(vllm_config.cache_config.cache_dtype)
    parts = [str(of_weights)] if of_weights else []
    if of_cache not in ("auto", "bfloat16", "float16", "float32"):
        parts.append(f"kv:{of_cache}")
    return " ".join(parts)[:512]
