"""KV tensors as bytes of chunks, in every layout that vLLM's enum names."""

from __future__ import annotations

import ctypes
import math
import mmap
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from kvfs.addresses import address_of
from kvfs.engine_adapters.vllm_blocks import LAYOUT_ORDERS, BlockOrder, HostBlocks, block_view, order_of
from kvfs.engine_adapters.vllm_device_blocks import DeviceBlocks
from kvfs.errors import UnavailableError, UsageError

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 7, 2, 4, 6
LOGICAL = "LBHNC"
FORMS = {"host": HostBlocks, "device": DeviceBlocks}


def kv_tensors(
    layout: str,
    *,
    blocks: int = BLOCKS,
    heads: int = HEADS,
    tokens: int = TOKENS,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> list[torch.Tensor]:
    """One [blocks, heads, tokens, content] view a layer, over one allocation in the physical order of the layout."""
    extents = dict(zip(LOGICAL, (LAYERS, blocks, heads, tokens, CONTENT), strict=True))
    physical = torch.randint(0, 256, (math.prod(extents.values()) * dtype.itemsize,), dtype=torch.uint8)
    whole = physical.to(device).view(dtype).view([extents[axis] for axis in layout])
    logical = whole.permute([layout.index(axis) for axis in LOGICAL])
    return [logical[layer] for layer in range(LAYERS)]


def views_of(tensors: Sequence[torch.Tensor], layout: str, num_blocks: int = BLOCKS) -> list[torch.Tensor]:
    return [block_view(tensor, num_blocks, order_of(layout, int(tensor.shape[1]))) for tensor in tensors]


def read(blocks: Any, layer: int, block_ids: Sequence[int]) -> bytes:
    raw = bytearray(blocks.block_bytes(layer) * len(block_ids))
    blocks.read(layer, [(block_ids, memoryview(raw))])
    return bytes(raw)


def raw_of(tensor: torch.Tensor) -> bytes:
    found: bytes = tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUT_ORDERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn])
def test_what_is_read_is_written_elsewhere(layout: str, form: str, dtype: torch.dtype) -> None:
    """Blocks of one engine, written to other blocks of another: those are equal, all others are untouched."""
    source, target = kv_tensors(layout, dtype=dtype), kv_tensors(layout, dtype=dtype)
    before = [raw_of(tensor) for tensor in target]
    there, here = FORMS[form](views_of(source, layout)), FORMS[form](views_of(target, layout))
    for layer in range(LAYERS):
        raw = read(there, layer, [5, 0, 2])
        cut = here.block_bytes(layer)
        here.write(layer, [([1, 4], memoryview(raw)[: 2 * cut]), ([6], memoryview(raw)[2 * cut :])])
        here.flush()
        for block, original in ((1, 5), (4, 0), (6, 2)):
            assert raw_of(target[layer][block]) == raw_of(source[layer][original])
        untouched = [0, 2, 3, 5]
        old = torch.frombuffer(bytearray(before[layer]), dtype=torch.uint8).view(BLOCKS, -1)
        now = torch.frombuffer(bytearray(raw_of(target[layer])), dtype=torch.uint8).view(BLOCKS, -1)
        assert torch.equal(now[untouched], old[untouched])


@pytest.mark.parametrize("layout", LAYOUT_ORDERS)
def test_both_forms_give_the_same_bytes(layout: str) -> None:
    """What a GPU worker stores is what a worker with the same tensors on the host would."""
    tensors = kv_tensors(layout)
    host, device = HostBlocks(views_of(tensors, layout)), DeviceBlocks(views_of(tensors, layout))
    for layer in range(LAYERS):
        assert host.block_bytes(layer) == device.block_bytes(layer)
        assert read(host, layer, [6, 1, 3]) == read(device, layer, [6, 1, 3])


@pytest.mark.parametrize("layout", [name for name, order in LAYOUT_ORDERS.items() if order is BlockOrder.TOKENS_FIRST])
@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_tokens_first_is_the_same_for_every_block_size(layout: str, tokens: int) -> None:
    """[tokens, heads, content], whatever the engine's block: engines with other blocks may share."""
    kv = torch.randn(16, HEADS, CONTENT, dtype=torch.bfloat16)
    tensors = kv_tensors(layout, blocks=16 // tokens, tokens=tokens)
    for tensor in tensors:
        tensor.copy_(kv.view(16 // tokens, tokens, HEADS, CONTENT).transpose(1, 2))
    blocks = HostBlocks(views_of(tensors, layout, 16 // tokens))
    assert read(blocks, 0, range(16 // tokens)) == raw_of(kv)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_a_block_of_the_scheduler_may_be_several_of_the_kernel(layout: str, form: str) -> None:
    """Block ids are the scheduler's: with kernel blocks of half the size, block 2 is kernel blocks 4 and 5."""
    tensors = kv_tensors(layout, blocks=2 * BLOCKS)
    blocks = FORMS[form](views_of(tensors, layout, BLOCKS))
    order = (0, 2, 1, 3) if LAYOUT_ORDERS[layout] is BlockOrder.TOKENS_FIRST else (0, 1, 2, 3)
    assert read(blocks, 1, [2]) == raw_of(tensors[1][4:6].permute(order))


@pytest.mark.parametrize("form", FORMS)
def test_pages_may_be_padded(form: str) -> None:
    """A backend may align its blocks: the bytes between them are neither read nor written."""
    padded = torch.randint(0, 256, (BLOCKS, HEADS * TOKENS * CONTENT * 2 + 32), dtype=torch.uint8)
    before = padded.clone()
    strides = (padded.shape[1] // 2, TOKENS * CONTENT, CONTENT, 1)
    tensor = torch.as_strided(padded.view(torch.bfloat16), (BLOCKS, HEADS, TOKENS, CONTENT), strides)
    blocks = FORMS[form](views_of([tensor], "LBHNC"))
    raw = read(blocks, 0, [3])
    assert raw == padded[3, :-32].numpy().tobytes()
    blocks.write(0, [([5], memoryview(raw))])
    assert torch.equal(padded[5, :-32], before[3, :-32])
    assert torch.equal(padded[:, -32:], before[:, -32:])


def test_one_head_has_one_order() -> None:
    """MLA's latent vectors: heads first and tokens first are the same bytes, so they have the same name."""
    assert {order_of(layout, 1) for layout in LAYOUT_ORDERS} == {BlockOrder.TOKENS_FIRST}


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(UsageError, match="CNHBL"):
        order_of("CNHBL", 2)
    with pytest.raises(UsageError, match="blocks, heads, tokens, content"):
        block_view(torch.zeros(2, BLOCKS, 3), BLOCKS, BlockOrder.HEADS_FIRST)


@pytest.mark.parametrize("form", FORMS)
def test_threads_that_write_do_not_mix(form: str) -> None:
    """Loads that a step waits for run beside those that it does not: each block holds what its own thread wrote."""
    blocks, num_threads = 64, 8
    target = kv_tensors("LBNHC", blocks=blocks, heads=16, tokens=64)
    here = FORMS[form](views_of(target, "LBNHC", blocks))
    share = blocks // num_threads
    size = here.block_bytes(0) * share

    def write(thread: int) -> None:
        ids = list(range(thread * share, (thread + 1) * share))
        raw = memoryview(bytes([thread + 1]) * size)
        for _ in range(100):
            here.write(0, [(ids, raw)])
            assert read(here, 0, ids) == raw

    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(write, range(num_threads)))


class HostArena:
    """Stands for an arena that a device copies from: here the host does. Attributes: num_copies; is_closed; is_failing."""

    def __init__(self, size: int) -> None:
        self.view = memoryview(mmap.mmap(-1, size))
        self.num_copies = 0
        self.is_closed = False
        self.is_failing = False

    def holds(self, view: memoryview) -> bool:
        begin = address_of(self.view)
        return begin <= address_of(view) and address_of(view) + len(view) <= begin + len(self.view)

    def copy(self, source: memoryview, target_address: int, stream: int) -> None:
        if self.is_failing:
            raise UnavailableError("cuMemcpyHtoDAsync_v2 failed")
        ctypes.memmove(target_address, address_of(source), len(source))
        self.num_copies += 1

    def close(self) -> None:
        self.is_closed = True


def test_what_lies_in_a_registered_arena_is_copied_from_there(expect_log: Callable[[str], None]) -> None:
    """All pieces of a layer or none; when it fails, and when the arena is another, it goes on, and the bytes are right."""
    tensors = kv_tensors("LBNHC")
    reference = HostBlocks(views_of(kv_tensors("LBNHC"), "LBNHC"))
    blocks = DeviceBlocks(views_of(tensors, "LBNHC"))
    size = blocks.block_bytes(0)
    arena, other = HostArena(4 * size), HostArena(4 * size)
    for each in (arena, other):
        each.view[:] = random.Random(id(each)).randbytes(4 * size)

    def write(*parts: tuple[list[int], memoryview]) -> None:
        for each in (blocks, reference):
            each.write(0, parts)
        for ids, _ in parts:
            assert read(blocks, 0, ids) == read(reference, 0, ids)

    blocks.use_arena(arena)
    write(([1, 3], arena.view[size : 3 * size].toreadonly()), ([0], arena.view[:size].toreadonly()))
    assert (arena.num_copies, dict(blocks.bytes_by_way)) == (2, {"arena": 3 * size, "staged": 0})
    write(([1], arena.view[:size]), ([2], memoryview(bytes(size))))
    assert (arena.num_copies, blocks.bytes_by_way["staged"]) == (2, 2 * size)
    blocks.use_arena(other)
    assert arena.is_closed
    write(([0], other.view[size : 2 * size]))
    assert other.num_copies == 1
    other.is_failing = True
    expect_log("what is in RAM goes to the GPU through pinned buffers from now on: cuMemcpyHtoDAsync")
    write(([1], other.view[2 * size : 3 * size]))
    write(([2], other.view[3 * size :]))
    assert other.is_closed
    assert dict(blocks.bytes_by_way) == {"arena": 4 * size, "staged": 4 * size}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("layout", LAYOUT_ORDERS)
def test_on_a_gpu(layout: str) -> None:
    """Pinned staging, a stream of our own, events: many loads and stores in a row, compared with the host's bytes."""
    source, target = kv_tensors(layout, blocks=64, device="cuda"), kv_tensors(layout, blocks=64, device="cuda")
    there, here = DeviceBlocks(views_of(source, layout, 64)), DeviceBlocks(views_of(target, layout, 64))
    reference = HostBlocks([view.cpu() for view in views_of(source, layout, 64)])
    for turn in range(8):
        block_ids = [(turn * 7 + step) % 64 for step in range(16)]
        fence = there.fence()
        there.after(fence)
        here.after(here.fence())
        for layer in range(LAYERS):
            raw = read(there, layer, block_ids)
            assert raw == read(reference, layer, block_ids)
            here.write(layer, [(block_ids, memoryview(raw))])
            here.wait(here.written(layer))
        here.flush()
        for layer in range(LAYERS):
            assert raw_of(target[layer][block_ids]) == raw_of(source[layer][block_ids])
