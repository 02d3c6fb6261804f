"""The chunks of one vLLM request: chain values from its token ids and from whatever else its KV depends on.

vLLM's own block hashes are not used: their seed may be random, and a block of theirs is no chunk of ours. What a request's
KV depends on beside its tokens goes into the chain: the cache salt and the LoRA adapter into the root; an image, or
another multimodal item, into the chunks that it reaches into, so that the text before it is still shared.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from kvfs.hints import Said, parse
from kvfs.keys import TOKEN_BYTES, ChainHash, extend, key_of, root, token_bytes
from kvfs.messages import NewChunk


def why_bypass(request: Any) -> str | None:
    """Why the cache cannot serve this request; None if it can."""
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "its prompt has embeddings instead of token ids"
    if request.resumable:
        return "its prompt may be changed while it runs"
    return None


def root_extras(request: Any, lora_digest: str) -> list[str]:
    """What all chunks of a request depend on. `lora_digest` names the weights of its adapter, if it has one."""
    extras = []
    if request.lora_request is not None:
        adapter = request.lora_request
        extras.append(f"lora:{adapter.lora_name}:{adapter.lora_path}:{lora_digest}")
    if request.cache_salt:
        extras.append(f"salt:{request.cache_salt}")
    return extras


def hint_of(request: Any) -> Said | None:
    """What a request says of its chain, once it is over: "kvfs" in its `kv_transfer_params`, see `kvfs.hints.parse`.

    Raises UsageError.
    """
    parameters = getattr(request, "kv_transfer_params", None)
    given = parameters.get("kvfs") if isinstance(parameters, dict) else None
    return None if given is None else parse(given)


class RequestChunks:
    """The full chunks of a request's tokens, which may grow.

    Attributes:
        tokens_per_chunk: tokens in each.
        chains: the chain value of each full chunk so far.
        num_tokens: tokens taken in.
    """

    def __init__(
        self, fingerprint: bytes, extras: Sequence[str], tokens_per_chunk: int, mm_features: Sequence[Any] = ()
    ) -> None:
        self.tokens_per_chunk = tokens_per_chunk
        self.chains: list[ChainHash] = []
        self.num_tokens = 0
        self._root = root(fingerprint, extras)
        self._rest = b""
        self._items = [
            (feature.mm_position.offset, feature.mm_position.length, feature.identifier) for feature in mm_features
        ]

    def take(self, tokens: Sequence[int]) -> None:
        """Take in the tokens behind those known: `tokens` are all of the request."""
        if len(tokens) <= self.num_tokens:
            return
        view = memoryview(self._rest + bytes(token_bytes(tokens[self.num_tokens :])))
        self.num_tokens = len(tokens)
        step = self.tokens_per_chunk * TOKEN_BYTES
        whole = len(view) - len(view) % step
        for start in range(0, whole, step):
            self.chains.append(extend(self._mixed(len(self.chains)), view[start : start + step]))
        self._rest = bytes(view[whole:])

    def new_chunk(self, position: int) -> NewChunk:
        """The full chunk at `position`, as a store names it."""
        return NewChunk(self.chains[position], key_of(self._before(position)), position, self.tokens_per_chunk)

    def _before(self, position: int) -> ChainHash:
        return self.chains[position - 1] if position else self._root

    def _mixed(self, position: int) -> ChainHash:
        """The chain value before a chunk, together with the items that reach into the chunk and where they lie."""
        before = self._before(position)
        begin = position * self.tokens_per_chunk
        end = begin + self.tokens_per_chunk
        inside = [
            (f"mm:{identifier}", f"at:{offset - begin}")
            for offset, length, identifier in self._items
            if offset < end and offset + length > begin
        ]
        return root(before, itertools.chain.from_iterable(inside)) if inside else before
