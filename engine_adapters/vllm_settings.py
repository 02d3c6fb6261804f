"""What a user may set in `kv_connector_extra_config`. Nothing here imports vLLM."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from types import FrameType
from typing import Annotated, Any

import msgspec

from kvfs.errors import UsageError

Seconds = Annotated[float, msgspec.Meta(gt=0, le=60)]


class VllmSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a KvfsConnector.

    Attributes:
        mount: where kvfs is mounted.
        tokens_per_chunk: tokens in a chunk; 0 is 256, or the multiple of vLLM's block below it (one block, if that is larger).
        load_async: load between steps, while others compute; False loads inside the step, layer by layer. By default
            what is in RAM is loaded inside the step where the engine computes on the CPU, all else between steps.
        floor_tokens: fewer tokens than this are computed, never loaded.
        break_even: load only if that was measured to be cheaper than computing.
        direct: a worker on a GPU reads chunks that are on NVMe only from there, past RAM; by default where kvikio is
            installed. Such chunks are not prefetched, and stay where they are.
        deadline_s: how long the scheduler waits for an answer of the cache; bytes get longer, by their size.
        window_bytes: what a worker may have in flight to the cache.
        model_id: names the model in the mount; by default what vLLM was told to load.
        revision: names the weights; by default their commit, or a digest of the weight files.
    """

    mount: Annotated[str, msgspec.Meta(min_length=1)]
    tokens_per_chunk: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] = 0
    load_async: bool | None = None
    floor_tokens: Annotated[int, msgspec.Meta(ge=1)] = 64
    break_even: bool = True
    direct: bool | None = None
    deadline_s: Seconds = 1.0
    window_bytes: Annotated[int, msgspec.Meta(ge=1 << 16)] = 256 << 20
    model_id: str | None = None
    revision: str | None = None

    def is_direct(self, device_type: str) -> bool:
        """Whether workers with KV on such a device read from the volume; the same in every process of an engine."""
        has_kvikio = importlib.util.find_spec("kvikio") is not None
        return device_type == "cuda" and (has_kvikio if self.direct is None else self.direct)

    def chunk_tokens(self, block_size: int) -> int:
        """Tokens in a chunk for vLLM blocks of `block_size`; raises UsageError if blocks do not fill chunks."""
        tokens = self.tokens_per_chunk or max(1, 256 // block_size) * block_size
        if tokens % block_size:
            raise UsageError(f"tokens_per_chunk {tokens} is not a multiple of vLLM's block size {block_size}")
        return tokens


def settings_from(extra_config: Mapping[str, Any]) -> VllmSettings:
    """The settings in a `kv_connector_extra_config`; raises UsageError, in one sentence, for what is wrong with it."""
    try:
        settings = msgspec.convert(dict(extra_config), VllmSettings)
    except msgspec.ValidationError as error:
        known = ", ".join(VllmSettings.__struct_fields__)
        raise UsageError(
            f"kv_connector_extra_config: {error}; a whole one is {{'mount': '/mnt/kvfs'}}, the settings are {known}"
        ) from error
    if not settings.mount.startswith("/"):
        raise UsageError(f"kv_connector_extra_config: mount is {settings.mount!r}, and has to begin with a slash")
    return settings


def check_config_being_made(frame: FrameType | None, module: str) -> None:
    """Raise UsageError for wrong settings in the configuration that vLLM is making, if `frame` is called from there.

    vLLM imports a connector's module when it makes its configuration, before it starts or loads anything, but hands the
    settings to nothing of the connector before the model is loaded: on GPUs to `requires_piecewise_for_cudagraph`, with
    eager execution and on CPUs not even there. So they are looked for with the callers of that import (0.32:
    `KVConnectorFactory.get_connector_class(kv_transfer_config)`). Where they are not found, the later checks remain.
    """
    while frame is not None:
        config = frame.f_locals.get("kv_transfer_config")
        if getattr(config, "kv_connector_module_path", None) == module:
            settings_from(config.kv_connector_extra_config)  # type: ignore[union-attr]
            return
        frame = frame.f_back
