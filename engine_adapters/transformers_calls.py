"""Which calls of `generate()` the cache can serve, and what is left of its arguments.

A call that it cannot serve is *bypassed*: it runs as if there were no cache. Only a call that asks for two caches at
once is an error. What is not known to be harmless is bypassed, as an argument may change what the KV of a token is.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerationMixin

from kvfs.errors import UsageError

CACHE_ARGUMENT = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
"""What the installed transformers calls the argument for a cache: `past_key_values` in 5.17, `cache` in 5.24."""

OWN_CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")

HARMLESS_ARGUMENTS = {
    "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer", "tokenizer",
    "attention_mask", "use_model_defaults", "logits_to_keep",
}  # fmt: skip
"""Arguments beside the settings of a GenerationConfig that leave the KV of a prompt alone."""

SERVED_SETTINGS: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0, 0.0),
    "constraints": (),
    "force_words_ids": (),
    "use_mtp": (False,),
    "prompt_lookup_num_tokens": (),
    "assistant_early_exit": (),
    "speculation_type": (),
    "is_assistant": (False,),
    "dola_layers": (),
    "use_cache": (True,),
    "cache_implementation": ("dynamic",),
    "token_healing": (False,),
    "guidance_scale": (1, 1.0),
}
"""Settings by which a call may ask for more than greedy search or sampling of one sequence with an ordinary cache, and
the values, beside None, by which it does not."""

DEFAULT_NEW_TOKENS = 256


def pop_prompt(input_ids: Any, arguments: dict[str, Any]) -> Any:
    """The prompt, wherever the caller put it; removes it from `arguments`.

    Raises UsageError for a second cache, and for a prompt that `generate` would stumble over without saying why.
    """
    for name in OWN_CACHE_ARGUMENTS:
        if arguments.get(name) is not None:
            raise UsageError(f"PrefixCache.generate makes its own cache: call it without {name}=")
        arguments.pop(name, None)
    inputs = arguments.pop("inputs", None)
    if input_ids is not None and inputs is not None:
        raise UsageError("generate takes either input_ids or inputs, not both")
    prompt = inputs if input_ids is None else input_ids
    if prompt is not None and not isinstance(prompt, torch.Tensor):
        raise UsageError(f"generate takes a tensor of token ids [1, tokens], not a {type(prompt).__name__}")
    if prompt is not None and prompt.ndim < 2:
        shape = list(prompt.shape)
        raise UsageError(
            f"generate takes a tensor of token ids [1, tokens], not one of shape {shape}: give input_ids[None]"
        )
    return prompt


def add_tokenizer(model: Any, tokenizer: Any, arguments: dict[str, Any]) -> None:
    """Put in the tokenizer where `generate` needs one: for `stop_strings`."""
    if tokenizer is not None and _Settings(model, arguments).get("stop_strings") is not None:
        arguments.setdefault("tokenizer", tokenizer)


def why_bypass(model: Any, prompt: Any, arguments: Mapping[str, Any]) -> str | None:
    """Why this call runs without the cache, or None if it need not."""
    if not isinstance(prompt, torch.Tensor) or prompt.ndim != 2 or prompt.dtype.is_floating_point:
        return "the prompt is not a tensor of token ids [1, tokens]"
    if prompt.shape[0] != 1:
        return "the batch has more than one sequence"
    if prompt.shape[1] < 2:
        return "the prompt has fewer than two tokens"
    if model.training:
        return "the model is in training mode"
    mask = arguments.get("attention_mask")
    if mask is not None and (mask.shape != prompt.shape or not bool((mask == 1).all())):
        return "the attention mask leaves tokens out"
    known = HARMLESS_ARGUMENTS | set(vars(GenerationConfig()))  # type: ignore[no-untyped-call]
    for name in sorted(arguments):
        if name not in known and arguments[name] is not None:
            return f"the argument {name} may change the KV of a token"
    return _why_bypass_settings(model, arguments)


def _why_bypass_settings(model: Any, arguments: Mapping[str, Any]) -> str | None:
    settings = _Settings(model, arguments)
    for name, served in SERVED_SETTINGS.items():
        if (value := settings.get(name)) is not None and value not in served:
            return f"{name} is {value}"
    return None


def new_tokens(model: Any, num_prompt_tokens: int, arguments: Mapping[str, Any]) -> int:
    """How many tokens this call is likely to generate at most: to size its slab, which grows where this is wrong."""
    settings = _Settings(model, arguments)
    limit = settings.get("max_new_tokens")
    if limit is None and (length := settings.get("max_length")) is not None:
        limit = int(length) - num_prompt_tokens
    return max(1, min(DEFAULT_NEW_TOKENS, DEFAULT_NEW_TOKENS if limit is None else int(limit)))


class _Settings:
    """The settings of a call: its own arguments, else those of its GenerationConfig, else the model's."""

    def __init__(self, model: Any, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments
        self._configs = [arguments.get("generation_config"), getattr(model, "generation_config", None)]

    def get(self, name: str) -> Any:
        if self._arguments.get(name) is not None:
            return self._arguments[name]
        for config in self._configs:
            if (value := getattr(config, name, None)) is not None:
                return value
        return None


class PromptOnceStreamer(BaseStreamer):
    """Passes everything on to `streamer`, but the prompt only the first time: a load may fail and be repeated.

    A load fails in the first forward pass or never, so no generated token is passed on twice.
    """

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._has_prompt = False
        self._is_repeated = False

    def begin_again(self) -> None:
        """The next call of `generate` repeats an abandoned one."""
        self._is_repeated = self._has_prompt

    def put(self, value: Any) -> None:
        """The prompt, then each token."""
        if self._is_repeated:
            self._is_repeated = False
            return
        self._has_prompt = True
        self._streamer.put(value)

    def end(self) -> None:
        """There are no more tokens."""
        self._streamer.end()
