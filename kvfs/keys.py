"""Keys: what names a chunk.

The chain hash of chunk *i* is ``SHA-256(chain[i-1] ‖ tokens[i] as little-endian u32)``; before the first chunk stands
the *root*, made from the namespace's fingerprint and the extra keys of a request (LoRA, multimodal hashes, cache
salt). A key is the first 128 bits of a chain hash. Nothing here is random or depends on the process, so every engine
on every machine computes the same keys, and no crafted prompt reaches another prompt's chunk.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NewType

from kvfs.errors import UsageError

ChainHash = NewType("ChainHash", bytes)
"""32 bytes: the full chain value of a chunk, kept in its header and compared on every load."""

Key = NewType("Key", bytes)
"""16 bytes: the name of a chunk."""

KEY_BYTES = 16
CHAIN_BYTES = 32
TOKEN_BYTES = 4
_BUFFER_FORMATS = ("B", "c", "I", "L")
_ROOT_DOMAIN = b"kvfs-root/1\0"


def key_of(chain: ChainHash) -> Key:
    """The key under which the chunk of this chain value is stored."""
    return Key(bytes(chain[:KEY_BYTES]))


def root(fingerprint: bytes, extra_keys: Iterable[str | bytes] = ()) -> ChainHash:
    """The chain value before the first chunk.

    `extra_keys` are whatever else the KV depends on beside the tokens, in an order that the adapter fixes. Each is
    length-prefixed, so ``("ab", "c")`` and ``("a", "bc")`` differ.
    """
    digest = hashlib.sha256(_ROOT_DOMAIN + fingerprint)
    for extra in extra_keys:
        raw = extra.encode() if isinstance(extra, str) else bytes(extra)
        digest.update(struct.pack("<Q", len(raw)) + raw)
    return ChainHash(digest.digest())


def extend(parent: ChainHash, tokens: bytes | memoryview) -> ChainHash:
    """The chain value of the chunk with these `tokens` (little-endian u32 bytes) after `parent`."""
    digest = hashlib.sha256(parent)
    digest.update(tokens)
    return ChainHash(digest.digest())


def token_bytes(tokens: Any) -> memoryview:
    """Token ids as a byte view of little-endian u32.

    Takes a list of ints, an integer numpy array, a CPU torch tensor, or a buffer of u32 (`array('I')`, bytes). A
    32-bit buffer is used as it is; others are copied. Raises ValueError for ids outside 0 … 2³²-1 and for
    buffers of other widths.
    """
    if hasattr(tokens, "detach"):  # a torch tensor, known without importing torch
        tokens = tokens.detach().reshape(-1).numpy()
    if hasattr(tokens, "astype"):  # a numpy array, known without importing numpy
        if tokens.dtype.kind not in "iu":
            raise ValueError(f"token ids are integers, not {tokens.dtype}")
        if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= 1 << 32):
            raise ValueError("token ids must lie between 0 and 2**32 - 1")
        tokens = tokens.reshape(-1).astype("<u4", copy=False)
    elif not isinstance(tokens, bytes | bytearray | memoryview | array):
        try:
            tokens = array("I", tokens)
        except OverflowError as error:
            raise ValueError("token ids must lie between 0 and 2**32 - 1") from error
    if isinstance(tokens, array) and sys.byteorder == "big":
        tokens = array("I", tokens)
        tokens.byteswap()
    view = memoryview(tokens)
    if view.format.lstrip("<=@") not in _BUFFER_FORMATS or view.itemsize > TOKEN_BYTES or view.nbytes % TOKEN_BYTES:
        raise ValueError(
            f"a token buffer holds unsigned 4-byte ids; this one has items of format {view.format!r}, {view.nbytes} bytes"
        )
    return view.cast("B")


class KeyChain:
    """The chain values of a token sequence that may grow.

    Attributes:
        root: the chain value before the first chunk.
        tokens_per_chunk: tokens in a full chunk.
        chains: the chain value of each full chunk so far.

    Growing by a few tokens hashes only what is new.
    """

    def __init__(self, root: ChainHash, tokens_per_chunk: int, tokens: Any = ()) -> None:
        self.root = root
        self.tokens_per_chunk = tokens_per_chunk
        self.chains: list[ChainHash] = []
        self._rest = b""  # bytes of the tokens behind the last full chunk, always shorter than a chunk
        self.extend(tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens taken in so far."""
        return len(self.chains) * self.tokens_per_chunk + len(self._rest) // TOKEN_BYTES

    @property
    def keys(self) -> list[Key]:
        """The keys of the full chunks."""
        return [key_of(chain) for chain in self.chains]

    def extend(self, tokens: Any) -> None:
        """Take in more tokens (see `token_bytes` for what is accepted)."""
        view = token_bytes(tokens)
        if self._rest:
            view = memoryview(self._rest + bytes(view))
        step = self.tokens_per_chunk * TOKEN_BYTES
        previous: Any = self.parent_of(len(self.chains))
        whole = view.nbytes - view.nbytes % step
        add, sha256 = self.chains.append, hashlib.sha256
        for start in range(0, whole, step):  # `extend`, written out: its calls are a seventh of the time
            digest = sha256(previous)
            digest.update(view[start : start + step])
            previous = digest.digest()
            add(previous)
        self._rest = bytes(view[whole:])

    def parent_of(self, position: int) -> ChainHash:
        """The chain value before the chunk at `position`: the root for position 0."""
        return self.chains[position - 1] if position else self.root

    def short_chain(self, num_tokens: int) -> ChainHash:
        """The chain value of a short last chunk of `num_tokens` of the tokens behind the last full chunk."""
        length = num_tokens * TOKEN_BYTES
        if not 0 < length <= len(self._rest):
            raise ValueError(
                f"{len(self._rest) // TOKEN_BYTES} tokens lie behind the last full chunk, not {num_tokens}"
            )
        return extend(self.parent_of(len(self.chains)), self._rest[:length])


def join(keys: Sequence[Key]) -> bytes:
    """Keys in one buffer, as session messages carry them."""
    return b"".join(keys)


def split(packed: bytes) -> list[Key]:
    """The keys in a buffer; raises UsageError if it is not a whole number of them."""
    if len(packed) % KEY_BYTES:
        raise UsageError("not a whole number of keys")
    cut: list[Any] = [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]
    return cut  # without a call for each: a match has hundreds
