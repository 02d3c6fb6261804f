"""Which namespace the KV of a transformers model belongs to, and which models are refused.

A model is held if every layer keeps plain keys and values of every token: what `DynamicLayer` of transformers holds.
One token is run through the model to see the layers as they are, instead of believing the configuration.

The identity has the weights' digest and the configuration in its revision. The attention implementation, the device and
the batch shape are *not* part of it: they change KV by rounding only, as they do between two plain calls.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvfs.engine_adapters.kv_slab import LayerShape
from kvfs.engine_adapters.model_digest import digest_weights
from kvfs.engine_adapters.transformers_calls import CACHE_ARGUMENT
from kvfs.errors import UsageError
from kvfs.namespace import Identity, LayerRun, Namespace, TensorSpec

LAYOUT = "transformers-htd"
"""A layer is the keys [heads, tokens, size], then the values: a token axis in the middle, as attention reads them."""

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class ModelKv:
    """A model's namespace and the shapes of its layers."""

    namespace: Namespace
    layers: tuple[LayerShape, ...]


def describe(model: Any, *, tokens_per_chunk: int, model_id: str | None, revision: str | None) -> ModelKv:
    """Describe the KV of `model`; raises UsageError, in one sentence, for a model that cannot be held.

    Runs one token through the model and, without `revision`, reads all weights once.
    """
    config = _text_config(model)
    layers = _probe(model, config)
    name = model_id or str(getattr(model.config, "_name_or_path", "") or "") or model.config.model_type
    identity = Identity(
        model=name.rstrip("/").rsplit("/", 1)[-1][:512] or model.config.model_type,
        revision=revision or digest_weights(model, model.config),
        kv_dtype=DTYPES[layers[0].dtype],
        layout=LAYOUT,
        num_layers=len(layers),
        num_kv_heads=max(layer.num_heads for layer in layers),
        head_size=max(layer.key_size for layer in layers),
        tokens_per_chunk=tokens_per_chunk,
        rope=_rope(config),
        quantization=_quantization(model),
    )
    runs = tuple(
        LayerRun(len(list(group)), _tensors(shape, tokens_per_chunk))
        for shape, group in itertools.groupby(layers, key=_without_device)
    )
    namespace = Namespace(identity, runs)
    namespace.check()
    return ModelKv(namespace, layers)


def uses_adapters(model: Any) -> bool:
    """Whether the model has LoRA or other adapters, which may be switched without a trace in the weights."""
    return bool(getattr(model, "_hf_peft_config_loaded", False)) or getattr(model, "peft_config", None) is not None


def _text_config(model: Any) -> Any:
    config = getattr(model, "config", None)
    if config is None or not callable(getattr(model, "generate", None)):
        raise UsageError("a PrefixCache takes a transformers model that can generate()")
    name = type(model).__name__
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "add_cross_attention", False):
        raise UsageError(f"{name} attends to an encoder's output, and kvfs holds the KV of decoder-only models")
    supports = getattr(model, "_supports_default_dynamic_cache", None)
    if supports is not None and not supports():
        raise UsageError(f"{name} keeps a state of its own kind, and kvfs holds keys and values of full attention only")
    if getattr(text, "is_causal", True) is False or getattr(text, "use_bidirectional_attention", None):
        raise UsageError(f"{name} attends to later tokens, so the KV of a prefix is not its own")
    for rope_type in sorted(_rope_types(text)):
        if rope_type in LENGTH_DEPENDENT_ROPE:
            raise UsageError(
                f"{name} has {rope_type!r} position encoding, which changes with the length of the prompt, "
                "so the KV of a prefix is not its own"
            )
    return text


def _probe(model: Any, config: Any) -> tuple[LayerShape, ...]:
    """The layers' shapes, seen by running one token."""
    name = type(model).__name__
    try:
        cache = DynamicCache(config=config)
    except KeyError as error:
        raise UsageError(f"{name} has layers of type {error}, and kvfs holds full attention only") from error
    for index, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            raise UsageError(
                f"layer {index} of {name} keeps its KV in a {type(layer).__name__}, "
                "and kvfs holds full attention over all tokens only"
            )
    with torch.no_grad():
        token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
        model(input_ids=token, use_cache=True, **{CACHE_ARGUMENT: cache})
    layers = tuple(_shape(name, index, layer) for index, layer in enumerate(cache.layers))
    if not layers:
        raise UsageError(f"{name} kept no KV")
    return layers


def _shape(name: str, index: int, layer: Any) -> LayerShape:
    keys, values = layer.keys, layer.values
    if keys is None or values is None or type(layer) is not DynamicLayer:
        raise UsageError(f"layer {index} of {name} keeps no keys and values of its own")
    if keys.ndim != 4 or keys.shape[:3] != values.shape[:3] or keys.shape[0] != 1 or keys.shape[2] != 1:
        raise UsageError(
            f"layer {index} of {name} keeps {tuple(keys.shape)} for one token, not keys and values of heads"
        )
    if keys.dtype != values.dtype or keys.dtype not in DTYPES:
        raise UsageError(f"layer {index} of {name} keeps its KV as {keys.dtype}, which kvfs does not hold")
    if not keys.shape[3] or not values.shape[3]:
        raise UsageError(f"layer {index} of {name} keeps keys or values of no size")
    return LayerShape(int(keys.shape[1]), int(keys.shape[3]), int(values.shape[3]), keys.dtype, keys.device)


def _without_device(shape: LayerShape) -> tuple[int, int, int, torch.dtype]:
    return shape.num_heads, shape.key_size, shape.value_size, shape.dtype


def _tensors(shape: tuple[int, int, int, torch.dtype], tokens_per_chunk: int) -> tuple[TensorSpec, ...]:
    heads, key_size, value_size, dtype = shape
    return (
        TensorSpec("k", DTYPES[dtype], (heads, tokens_per_chunk, key_size), token_axis=1),
        TensorSpec("v", DTYPES[dtype], (heads, tokens_per_chunk, value_size), token_axis=1),
    )


def _rope_parameters(config: Any) -> dict[str, Any]:
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return dict(found)


def _rope_types(config: Any) -> set[str]:
    """The rope types that a config names, for all layers or for each kind of layer."""
    parameters = _rope_parameters(config)
    levels = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(level["rope_type"]) for level in levels if level.get("rope_type")}


def _rope(config: Any) -> str:
    """Canonical JSON of how positions are encoded, as far as the config says."""
    facts = {
        "parameters": _rope_parameters(config),
        "max_position_embeddings": getattr(config, "max_position_embeddings", None),
    }
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), default=str)


def _quantization(model: Any) -> str:
    found = getattr(model.config, "quantization_config", None)
    if found is None:
        return ""
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method) or type(found).__name__)[:512]
