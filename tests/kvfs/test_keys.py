"""Keys never change: the vectors here were worked out once, with hashlib alone, and stand for what is on people's disks."""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
import subprocess
import sys
from array import array

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvfs import keys
from kvfs.errors import UsageError
from kvfs.keys import KeyChain

TOKENS = [0, 1, 2, 49151, 2**31, 2**32 - 1]
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=60)


def test_golden_root() -> None:
    """The root of a fingerprint, without and with extra keys."""
    assert keys.root(bytes(32)).hex() == "6e2b78aeb01d036be7322643eb3a2fd34dae0f921c501555c84e12529e6b257a"
    assert (
        keys.root(bytes(32), ["lora-7", b"\x01"]).hex()
        == "071b3553da2fd06d77d48f802232f50adf1a823d45a0822bb04ff9ca63732e54"
    )


def test_golden_chain() -> None:
    """The chain values of three chunks of two tokens."""
    chain = KeyChain(keys.root(bytes(range(32))), 2, TOKENS)
    assert [value.hex() for value in chain.chains] == [
        "98da1ed29537c909e0f908870d7d45044b1da4ed0dfa65df71e060d05cc1e276",
        "c204f130c6b86c191ad63a47164505041970e770792af71b3705c5500ee436ad",
        "372e0772a1cc91c8397f0991096c9946672537674888fd46e6ad382b0cf1a3e6",
    ]
    assert chain.keys[0].hex() == "98da1ed29537c909e0f908870d7d4504"


def test_chain_is_plain_sha256() -> None:
    """chain[i] = SHA-256(chain[i-1] ‖ tokens as little-endian u32); a key is its first 16 bytes."""
    root = hashlib.sha256(b"kvfs-root/1\0" + b"fp" + struct.pack("<Q", 4) + b"salt").digest()
    chain = KeyChain(keys.root(b"fp", ["salt"]), 3, TOKENS)
    first = hashlib.sha256(root + struct.pack("<3I", *TOKENS[:3])).digest()
    second = hashlib.sha256(first + struct.pack("<3I", *TOKENS[3:])).digest()
    assert chain.chains == [first, second]
    assert chain.keys == [first[:16], second[:16]]
    assert chain.parent_of(0) == root
    assert chain.parent_of(1) == first


@given(st.lists(st.text(max_size=5), max_size=4), st.lists(st.text(max_size=5), max_size=4))
def test_extra_keys_cannot_be_confused(one: list[str], other: list[str]) -> None:
    """Different lists of extra keys have different roots, however their texts run together."""
    assert (keys.root(b"f", one) == keys.root(b"f", other)) == (one == other)


@given(token_lists, st.lists(st.integers(0, 60), max_size=6), st.integers(1, 9))
def test_growing_equals_at_once(tokens: list[int], cuts: list[int], step: int) -> None:
    """A prompt taken in by pieces has the keys of the prompt taken in at once."""
    root = keys.root(b"f")
    grown = KeyChain(root, step)
    ends = sorted({0, len(tokens), *(cut for cut in cuts if cut <= len(tokens))})
    for begin, end in itertools.pairwise(ends):
        grown.extend(tokens[begin:end])
    whole = KeyChain(root, step, tokens)
    assert grown.chains == whole.chains
    assert grown.num_tokens == whole.num_tokens == len(tokens)
    assert len(whole.chains) == len(tokens) // step


@given(token_lists)
def test_every_form_of_tokens_is_equal(tokens: list[int]) -> None:
    """Lists, tuples, arrays, bytes, numpy of any integer type and torch tensors of the same ids give the same bytes."""
    expected = struct.pack(f"<{len(tokens)}I", *tokens)
    forms = [
        tokens, tuple(tokens), array("I", tokens), expected, bytearray(expected), memoryview(expected),
        np.array(tokens, dtype="u4"), np.array(tokens, dtype="i8"), np.array(tokens, dtype=">u4"),
        np.array(tokens, dtype="i8").repeat(2)[::2], torch.tensor(tokens, dtype=torch.int64),
        torch.tensor(tokens, dtype=torch.int64).reshape(1, -1),
    ]  # fmt: skip
    for form in forms:
        assert bytes(keys.token_bytes(form)) == expected


@pytest.mark.parametrize(
    "tokens",
    [
        [-1], [2**32], np.array([-1]), np.array([2**32]), torch.tensor([-1]), b"abc", array("Q", [1]),
        memoryview(array("H", [1, 2])), np.array([1.5]), np.array([1.0]), torch.tensor([1.0]), array("f", [1.0]),
        array("i", [-1]),
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_token_id_is_refused(tokens: object) -> None:
    """Ids outside 32 bits, floats and buffers of other widths are a ValueError, never quietly something else."""
    with pytest.raises(ValueError, match="token"):
        keys.token_bytes(tokens)


def test_short_last_chunk() -> None:
    """A short chunk hashes just its own tokens; it needs tokens behind the last full chunk."""
    chain = KeyChain(keys.root(b"f"), 4, TOKENS)
    assert chain.short_chain(2) == keys.extend(chain.chains[0], struct.pack("<2I", *TOKENS[4:]))
    assert chain.short_chain(1) == keys.extend(chain.chains[0], struct.pack("<I", TOKENS[4]))
    for bad in (0, 3, -1):
        with pytest.raises(ValueError, match="tokens lie behind"):
            chain.short_chain(bad)


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=9))
def test_join_and_split_are_inverse(parts: list[bytes]) -> None:
    """Keys survive being packed into a message."""
    assert keys.split(keys.join([keys.Key(part) for part in parts])) == parts


@given(st.binary(max_size=70).filter(lambda raw: len(raw) % 16))
def test_split_refuses_a_part_of_a_key(raw: bytes) -> None:
    """A buffer that is no whole number of keys is the sender's mistake."""
    with pytest.raises(UsageError):
        keys.split(raw)


def test_keys_do_not_depend_on_the_process() -> None:
    """Processes with different hash seeds compute the same keys."""
    script = "from kvfs import keys; print(keys.KeyChain(keys.root(b'f', ['a', 'b']), 3, range(300)).keys[-1].hex())"
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("0", "1", "4294967295")
    }  # fmt: skip
    assert found == {KeyChain(keys.root(b"f", ["a", "b"]), 3, list(range(300))).keys[-1].hex() + "\n"}
