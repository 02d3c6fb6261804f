"""Slabs: bytes go to their place and back, memory is reused only when nobody looks at it."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from kvfs.engine_adapters.kv_slab import KvSlab, LayerShape, SlabPool

HOST = torch.device("cpu")
LAYERS = (
    LayerShape(2, 8, 8, torch.float32, HOST),
    LayerShape(3, 8, 4, torch.bfloat16, HOST),  # fewer numbers in a value than in a key, and other heads
)


@pytest.fixture
def pool() -> SlabPool:
    return SlabPool(max_free_bytes=64 << 20)


def random_layer(shape: LayerShape, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, memoryview]:
    keys = torch.randn(shape.num_heads, num_tokens, shape.key_size).to(shape.dtype)
    values = torch.randn(shape.num_heads, num_tokens, shape.value_size).to(shape.dtype)
    raw = b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in (keys, values))
    return keys, values, memoryview(raw)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_chunk_is_written_where_attention_reads_it(pool: SlabPool, layer: int) -> None:
    slab = KvSlab(LAYERS, 300, pool)
    keys, values, raw = random_layer(LAYERS[layer], 64)
    slab.write(layer, 100, raw, 64, 64)
    assert torch.equal(slab.keys[layer][0, :, 100:164], keys)
    assert torch.equal(slab.values[layer][0, :, 100:164], values)
    out = bytearray(len(raw))
    slab.read(layer, 100, memoryview(out), 64)
    assert out == raw


def test_only_the_wanted_tokens_of_a_chunk_are_written(pool: SlabPool) -> None:
    slab = KvSlab(LAYERS, 300, pool)
    slab.keys[0].fill_(7)
    keys, _, raw = random_layer(LAYERS[0], 64)
    slab.write(0, 0, raw, 64, 63)
    assert torch.equal(slab.keys[0][0, :, :63], keys[:, :63])
    assert bool((slab.keys[0][0, :, 63] == 7).all())


def test_growing_keeps_what_was_there(pool: SlabPool) -> None:
    slab = KvSlab(LAYERS, 256, pool)
    _, _, raw = random_layer(LAYERS[1], 256)
    slab.write(1, 0, raw, 256, 256)
    slab.grow(257, used_tokens=256)
    assert slab.capacity >= 257
    out = bytearray(len(raw))
    slab.read(1, 0, memoryview(out), 256)
    assert out == raw


def test_memory_comes_back_when_the_last_tensor_is_gone(pool: SlabPool) -> None:
    slab = KvSlab(LAYERS, 256, pool)
    where = slab.keys[0].data_ptr()
    part = slab.keys[0][:, :, :3]
    del slab
    gc.collect()
    other = KvSlab(LAYERS, 256, pool)
    assert other.keys[0].data_ptr() != where  # `part` still lies there
    del part
    again = KvSlab(LAYERS, 256, pool)
    assert again.keys[0].data_ptr() == where


def test_a_pool_keeps_no_more_than_it_may() -> None:
    pool = SlabPool(max_free_bytes=4 << 20)
    first, second = pool.take(4 << 20), pool.take(4 << 20)
    where = second.ctypes.data
    del first, second
    assert pool.take(1).ctypes.data == where  # the later one was kept, the earlier one given back


def test_reserved_memory_is_what_the_first_slab_gets(pool: SlabPool) -> None:
    pool.reserve(KvSlab.host_bytes(LAYERS, 256))
    reserved = pool.take(1)
    where = reserved.ctypes.data
    del reserved
    assert KvSlab(LAYERS, 256, pool).keys[0].data_ptr() == where


def test_host_bytes_is_what_the_tensors_take() -> None:
    assert KvSlab.host_bytes(LAYERS, 256) == 256 * (2 * (8 + 8) * 4 + 3 * (8 + 4) * 2)


def test_a_slab_made_in_inference_mode_may_be_written_outside(pool: SlabPool) -> None:
    with torch.inference_mode():
        slab = KvSlab(LAYERS, 256, pool)
    slab.keys[0][:, :, :1] = 1.0
    assert not slab.keys[0].is_inference()


def test_other_devices_are_staged_through_the_host(pool: SlabPool) -> None:
    """There is no GPU here: torch's meta device shows only that nothing of the layer lies in the pool."""
    layers = (LAYERS[0], LayerShape(2, 8, 8, torch.float32, torch.device("meta")))
    slab = KvSlab(layers, 256, pool)
    assert slab.keys[1].device.type == "meta"
    assert KvSlab.host_bytes(layers, 256) == KvSlab.host_bytes(layers[:1], 256)
    slab.write(1, 0, random_layer(layers[1], 64)[2], 64, 64)


def test_raw_bytes_are_not_copied_to_be_looked_at(pool: SlabPool) -> None:
    slab = KvSlab(LAYERS, 256, pool)
    raw = random_layer(LAYERS[0], 64)[2]
    source = slab._places(0, raw, 64)[0][0]
    assert np.shares_memory(source, np.frombuffer(raw, dtype=np.uint8))
