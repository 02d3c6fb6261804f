"""`kvfs simulate`: traces as they are, the optimum against all ways there are, replays against models and libcachesim."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from kvfs.chunk import geometry
from kvfs.errors import UsageError
from kvfs.policies.named import BLIND_TO_USES, NAMES, maker
from kvfs.tools.simulate import optimum, options
from kvfs.tools.simulate.cache import Cache
from kvfs.tools.simulate.replay import Replay
from kvfs.tools.simulate.report import Machine, result
from kvfs.tools.simulate.sizes import bytes_per_token, tier_bytes
from kvfs.tools.simulate.stand_ins import namespace_of
from kvfs.tools.simulate.tally import Tally
from kvfs.tools.simulate.traces import Reading, Trace, read

from .simulated import chats, play, trace_of

# traces


MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 2500, "input_length": 1024, "output_length": 5, "hash_ids": [0, 7]},
    {"timestamp": 1000, "input_length": 512, "output_length": 5, "hash_ids": [9]},
]


@pytest.mark.parametrize("is_gzipped", [False, True])
def test_a_mooncake_trace(is_gzipped: bool, tmp_path: Path) -> None:
    """In order of time; blocks of 512 tokens; the last of a prompt may be short."""
    text = "".join(json.dumps(line) + "\n" for line in MOONCAKE).encode()
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(text) if is_gzipped else text)
    trace = read([path], Reading())
    assert trace.tokens_per_chunk == 512
    assert [request.at_s for request in trace.requests] == [0.0, 1.0, 2.5]
    assert [list(request.chunks) for request in trace.requests] == [[0, 1, 2], [4], [0, 3]]
    assert trace.parents == [-1, 0, 1, 0, -1]
    assert trace.positions == [0, 1, 2, 1, 0]
    assert trace.tokens == [512, 512, 76, 512, 512]
    assert (trace.num_chunks, trace.num_references, trace.seconds) == (5, 6, 2.5)
    assert trace.num_out_of_order == 1


def test_equal_blocks_after_different_beginnings_are_different_chunks(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    lines = [{"timestamp": 0, "input_length": 1024, "hash_ids": ids} for ids in ([1, 2], [3, 2], [1, 2])]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    assert [list(request.chunks) for request in read([path], Reading()).requests] == [[0, 1], [2, 3], [0, 1]]


def test_a_trace_of_sessions(tmp_path: Path) -> None:
    """Requests within requests come at their parent's time and their own; ids are the session's; 4 blocks a chunk."""
    inner = {"t": 2.0, "in": 300, "hash_ids": [1, 2, 3, 4]}
    session = {
        "block_size": 64,
        "requests": [
            {"t": 1.0, "in": 640, "hash_ids": list(range(1, 11)), "requests": [inner]},
            {"t": 0.5, "in": 100, "hash_ids": [1]},  # less than a chunk
        ],
    }
    path = tmp_path / "trace"
    path.write_text(json.dumps(session) + "\n" + json.dumps(session) + "\n")
    trace = read([path], Reading(start_gap_s=100.0, seed=3))
    assert trace.tokens_per_chunk == 256
    gap = trace.requests[2].at_s - 1.0
    assert 0 < gap < 1000
    assert [(request.at_s - gap * request.session, list(request.chunks), request.tokens) for request in trace.requests] == [
        (1.0, [0, 1], 640), (3.0, [0], 300), (1.0, [2, 3], 640), (3.0, [2], 300),
    ]  # fmt: skip
    again = read([path], Reading(start_gap_s=100.0, seed=3))
    assert [request.at_s for request in again.requests] == [request.at_s for request in trace.requests]
    assert read([path], Reading(64, 0.0)).num_chunks == 20


def test_two_files_share_a_cache_but_no_prefix(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_text(json.dumps(MOONCAKE[0]) + "\n")
    trace = read(paths, Reading())
    assert trace.num_chunks == 6
    assert trace.sources == [0, 0, 0, 1, 1, 1]
    assert sum(play(trace, "lru", 10).ram) == 0


def line(namespace: str, at_ms: int, ids: list[int], block: int, size: int | None) -> str:
    said = {} if size is None else {"bytes_per_token": size}
    request = {"timestamp": at_ms, "input_length": block * len(ids), "hash_ids": ids, "block_size": block}
    return json.dumps({**request, "namespace": namespace, **said})


def test_namespaces_of_a_recording_have_chunks_of_their_own(tmp_path: Path) -> None:
    """Tokens and bytes of each as it says; equal ids of two namespaces are different chunks; what is asked for wins."""
    path = tmp_path / "trace"
    lines = [
        line("a", 0, [1, 2], 16, 1000),
        line("b", 1, [1, 2, 3], 256, 5000),
        line("a", 2, [1, 2], 16, 1000),
        line("c", 3, [1], 16, None),
    ]
    path.write_text("\n".join(lines))
    trace = read([path], Reading())
    assert [trace.blocks(source, 7) for source in range(3)] == [(16, 1000), (256, 5000), (16, 7)]
    assert trace.sources == [0, 0, 1, 1, 1, 2]
    assert not trace.is_uniform
    assert [list(request.chunks) for request in trace.requests] == [[0, 1], [2, 3, 4], [0, 1], [5]]
    tally = Tally()
    cache = Cache(trace, maker("lru"), 7, 1 << 26, 1 << 26, tally)
    replay = Replay(cache)
    for request in trace.requests:
        replay.request(request)
    sizes = [
        geometry(namespace_of(0, *trace.blocks(source, 7)), trace.blocks(source, 7)[0]).file_bytes
        for source in trace.sources
    ]
    assert tally.written_bytes == sum(sizes)
    machine = Machine(ram_bytes_s=1.0, nvme_bytes_s=1.0, prefill_tokens_s=1.0, bytes_per_token=7)
    found = result("lru", trace, tally, machine, 1.0, has_nvme=True, is_optimum=False)
    assert found.loaded_ram_bytes == 32 * 1000
    assert found.token_hit_rate == 32 / (32 + 768 + 32 + 16)
    assert read([path], Reading(bytes_per_token=9)).blocks(1, 7) == (256, 9)
    with pytest.raises(UsageError, match="chunks of one size only"):
        options.for_trace({"opt": None}, trace)
    assert list(options.for_trace({"opt": None, "lru": maker("lru")}, trace)) == ["lru"]


ONE = b'{"timestamp": 0, "input_length": 512, "hash_ids": [1]}\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "is empty"),
        (b"nonsense\n", "line 1 of .* is not JSON"),
        (b"[1]\n", "no JSON object"),
        (b'{"a": 1}\n', "neither a Mooncake trace nor one of sessions"),
        (b'{"timestamp": 0, "input_length": 512, "hash_ids": ["x"]}\n', "no list of whole numbers"),
        (b'{"timestamp": -1, "input_length": 512, "hash_ids": [1]}\n', "no timestamp"),
        (b'{"timestamp": 0, "input_length": 99999, "hash_ids": [1]}\n', "no usual size"),
        (b'{"block_size": 64, "requests": 5}\n', "line 1 of .* no list of requests"),
        (b'{"block_size": 64, "requests": [{"t": 0, "hash_ids": [1]}]}\n', "no in, or one"),
        (b'{"block_size": 0, "requests": []}\n', "line 1 of .* blocks of 0 tokens"),
        (b'{"block_size": 96, "requests": [{"t": 0, "in": 96, "hash_ids": [1]}]}\n{"block_size": 32, "requests": []}', "different"),
        (gzip.compress(b'{"timestamp": 0, "input_length": 512, "hash_ids": [1]}\n' * 999)[:-20], "cannot read"),
        (b'{"timestamp": 0, "input_length": 0, "hash_ids": []}\n', "no usual size|no request"),
        (ONE + b'{"timestamp": 0, "input_length": 512, "output_length": -1, "hash_ids": [1]}\n', "line 2 of .* no output_length"),
        (ONE + b'{"timestamp": NaN, "input_length": 512, "hash_ids": [1]}\n', "line 2 of .* no timestamp"),
        (ONE + b'{"timestamp": 0, "input_length": 1e300, "hash_ids": [1]}\n', "line 2 of .* no input_length"),
        (ONE + b'{"timestamp": 0, "input_length": 512, "hash_ids": [true]}\n', "line 2 of .* no list of whole numbers"),
        (ONE * 300 + b'{"timestamp": 0, "input_length": 9, "hash_ids": [1, 2]}\n', "line 301 of .* does not fit"),
        (ONE + b'{"timestamp": 0, "input_length": 512, "hash_ids": [' + b"1," * (1 << 20) + b"1]}", "line 2 of .* 1,048,577 hash_ids"),
        (ONE + b"[" + b"1," * (17 << 20) + b"1]", "line 2 of .* is longer than 32 MiB"),
        (gzip.compress(ONE + b" " * (40 << 20)), "line 2 of .* is longer than 32 MiB"),
        (b'{"block_size": 1e9, "requests": []}\n', "blocks of 1000000000 tokens"),
        (b'{"block_size": 64, "requests": ' + b'[{"t": 0, "requests": ' * 40 + b"[]" + b"}]" * 40 + b"}", "line 1 of .* more than 32 deep"),
        (ONE[:-2] + b', "namespace": 5}', "line 1 of .* a namespace that cannot be"),
        (ONE[:-2] + b', "bytes_per_token": "many"}', "line 1 of .* no bytes_per_token, or one that cannot be"),
        (b'{"block_size": 64, "requests": [5]}', "line 1 of .* a request that is no JSON object"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_told_in_one_sentence(text: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(text)
    with pytest.raises(UsageError, match=said):
        read([path], Reading())


def test_sizes(tmp_path: Path) -> None:
    assert tier_bytes("64GiB", 10, 5) == 64 << 30
    assert tier_bytes("2%", 182_790, 4096) == 3655 * 4096
    for wrong in ("0%", "101%"):
        with pytest.raises(UsageError):
            tier_bytes(wrong, 10, 5)
    config = tmp_path / "config.json"
    llama = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    config.write_text(json.dumps({**llama, "torch_dtype": "bfloat16"}))
    assert bytes_per_token(config) == 131_072
    mla = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}
    config.write_text(json.dumps(mla))
    assert bytes_per_token(config) == 61 * 576 * 2
    config.write_text("{}")
    with pytest.raises(UsageError, match="does not say num_hidden_layers"):
        bytes_per_token(config)


# the optimum


def best_of_all(trace: Trace, capacity: int) -> int:
    """By trying every set of chunks that a cache could keep after each request."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for request in trace.requests:
        after: dict[frozenset[int], int] = {}
        for kept, so_far in states.items():
            found = next((i for i, chunk in enumerate(request.chunks) if chunk not in kept), len(request.chunks))
            there = sorted(kept | set(request.chunks))
            for some in itertools.combinations(there, min(capacity, len(there))):
                state = frozenset(some)
                after[state] = max(after.get(state, -1), so_far + found)
        states = after
    return max(states.values())


def test_the_optimum_is_the_best_of_all_ways_there_are() -> None:
    chance = random.Random(11)
    for _ in range(150):
        prompts: list[list[int]] = []
        for _ in range(chance.randrange(3, 8)):
            begin = list(chance.choice(prompts)) if prompts and chance.random() < 0.7 else []
            prompts.append(
                [*begin[: chance.randrange(4)], *(chance.randrange(2) for _ in range(chance.randrange(1, 3)))]
            )
        trace = trace_of(prompts)
        for capacity in (1, 2, 3):
            assert sum(optimum.hits(trace, capacity)) == best_of_all(trace, capacity), prompts


# replays


def leaf_lru(trace: Trace, capacity: int) -> list[int]:
    """Leaf-first LRU in a dozen lines: of what was used together the tail goes first."""
    order: OrderedDict[int, None] = OrderedDict()
    found = []
    for request in trace.requests:
        chunks = list(request.chunks)
        hits = next((i for i, chunk in enumerate(chunks) if chunk not in order), len(chunks))
        found.append(hits)
        for chunk in reversed(chunks[:hits]):
            order.move_to_end(chunk)
        for index, chunk in enumerate(chunks[hits:]):
            if len(order) >= capacity:
                if next(iter(order)) == (chunks[hits + index - 1] if hits + index else None):
                    chunks = chunks[: hits + index]
                    break
                order.popitem(last=False)
            order[chunk] = None
        for chunk in reversed(chunks):
            if chunk in order:
                order.move_to_end(chunk)
    return found


@pytest.mark.parametrize("capacity", [40, 100, 200])
def test_a_replay_with_lru_is_leaf_first_lru(capacity: int) -> None:
    trace = chats(1, 400)
    assert list(play(trace, "lru", capacity).ram) == leaf_lru(trace, capacity)


@pytest.mark.parametrize("name", [*NAMES])
@pytest.mark.parametrize(("num_ram", "num_nvme"), [(40, 0), (30, 90)])
def test_every_policy_is_replayed_within_its_room(name: str, num_ram: int, num_nvme: int) -> None:
    """No more is kept than fits, none is better than the optimum, what was found adds up, and it is the same again."""
    trace = chats(2, 400)
    tally = play(trace, name, num_ram, num_nvme)
    found = [ram + nvme for ram, nvme in zip(tally.ram, tally.nvme, strict=True)]
    assert all(count <= len(request.chunks) for count, request in zip(found, trace.requests, strict=True))
    best = sum(optimum.hits(trace, num_nvme or num_ram))
    assert 0.3 * best < sum(found) <= best
    assert sum(found) + tally.num_stored + tally.num_bypassed <= trace.num_references
    if num_nvme:
        assert sum(tally.nvme) > 0
        assert tally.num_written == tally.num_stored
    else:
        assert sum(tally.nvme) == tally.num_written == 0
    again = play(trace, name, num_ram, num_nvme, has_ghosts=name not in BLIND_TO_USES)
    assert (again.ram, again.nvme, again.num_stored) == (tally.ram, tally.nvme, tally.num_stored)


def test_what_a_replay_comes_to() -> None:
    """Two tiers, by hand: the second request finds all of its 3 chunks, one of them in RAM only if it fits there."""
    trace = trace_of([["a", "b", "c"], ["a", "b", "c"], ["x"]], step_s=43_200.0)
    tally = play(trace, "lru", 10, 10)
    machine = Machine(ram_bytes_s=1600.0, nvme_bytes_s=160.0, prefill_tokens_s=16.0, bytes_per_token=10)
    file_bytes = geometry(namespace_of(0, 16, 10), 16).file_bytes
    found = result("lru", trace, tally, machine, 2.0, has_nvme=True, is_optimum=False)
    assert (found.requests, found.references, found.is_partial) == (3, 7, False)
    assert found.hit_rate == found.token_hit_rate == found.ram_token_hit_rate == 3 / 7
    assert (found.loaded_ram_bytes, found.loaded_nvme_bytes) == (480, 0)
    assert (found.stored_chunks, found.written_chunks, found.written_bytes) == (4, 4, 4 * file_bytes)
    assert found.written_bytes_a_day == 4 * file_bytes
    assert found.ttft_s["mean"] == pytest.approx((3 + 0.3 + 1) / 3)
    assert found.input_tokens_s == pytest.approx(7 * 16 / 4.3)
    cold = Tally(ram=type(tally.ram)("I", [0, 1, 0]), nvme=type(tally.ram)("I", [0, 2, 0]))
    found = result("opt", trace, cold, machine, 2.0, has_nvme=True, is_optimum=True)
    assert (found.ram_token_hit_rate, found.nvme_token_hit_rate) == (1 / 7, 2 / 7)
    assert found.ttft_s["mean"] == pytest.approx((3 + 0.1 + 2 + 1) / 3)
    assert found.written_bytes is None


# an independent library


def blocks(seed: int) -> list[int]:
    """Requests of one block each, a few of them often, with a scan between."""
    chance = random.Random(seed)
    asked = [min(int(chance.paretovariate(0.7)), 1_000_000) for _ in range(20_000)]
    return [block if number % 5 else 2_000_000 + number for number, block in enumerate(asked)]


@pytest.mark.parametrize("capacity", [100, 1000])
@pytest.mark.parametrize(
    ("name", "theirs", "tolerance"), [("lru", "LRU", 0), ("fifo", "FIFO", 0), ("s3fifo", "S3FIFO", 0.004)]
)
def test_an_independent_library_finds_the_same(name: str, theirs: str, tolerance: float, capacity: int) -> None:
    """libcachesim, block by block. Its S3-FIFO takes up room by other rules while the cache fills for the first time."""
    library: Any = pytest.importorskip("libcachesim", reason="libcachesim is not installed: pip install kvfs[compare]")
    asked = blocks(4)
    cache = getattr(library, theirs)(cache_size=capacity)
    hits = 0
    for block in asked:
        request = library.Request()
        request.obj_id, request.obj_size = block, 1
        hits += bool(cache.get(request))
    ours = sum(play(trace_of([[block] for block in asked], step_s=0.1), name, capacity).ram)
    assert abs(ours - hits) <= tolerance * len(asked), (ours / len(asked), hits / len(asked))
    assert hits > 0.05 * len(asked)
