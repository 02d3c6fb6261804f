"""The namespace of a vLLM worker: what is part of it, what is not, and which engines are refused."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvfs.engine_adapters.vllm_namespace import WorkerKv, check_engine, describe_worker
from kvfs.engine_adapters.vllm_settings import VllmSettings, settings_from
from kvfs.engine_adapters.weights_on_disk import digest_files, weight_files
from kvfs.errors import UsageError

BLOCKS = 8


class FullAttentionSpec(SimpleNamespace):
    """Known by its name, as vLLM's is."""


class SlidingWindowSpec(SimpleNamespace):
    pass


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    model = tmp_path / "some-model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    return model


def describe(
    model: Path,
    *,
    layout: str = "LBNHC",
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    heads: int = 2,
    tp_rank: int = 0,
    tp_size: int = 1,
    replicas: int = 1,
    cpu_isa: str = "",
    config: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    **facts: Any,
) -> WorkerKv:
    """A worker with three layers in this layout."""
    hf_config = {"hidden_size": 64, "rope_theta": 1e4, **(config or {})}
    model_config = SimpleNamespace(
        model=str(model), hf_config=SimpleNamespace(to_dict=lambda: hf_config), hf_text_config=SimpleNamespace(),
        dtype=torch.bfloat16, quantization=None, revision=None, max_model_len=4096,
        get_total_num_kv_heads=lambda: 4, get_head_size=lambda: 8, get_total_num_hidden_layers=lambda: 3,
    )  # fmt: skip
    vllm_config = SimpleNamespace(
        model_config=model_config, load_config=SimpleNamespace(load_format=facts.pop("load_format", "auto")),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp_size, pipeline_parallel_size=1, decode_context_parallel_size=facts.pop("dcp", 1)
        ),
        cache_config=SimpleNamespace(cache_dtype=facts.pop("cache_dtype", "auto")), speculative_config=None,
    )  # fmt: skip
    for name, value in facts.items():
        setattr(model_config, name, value)
    names = [f"model.layers.{layer}.attn" for layer in (2, 10, 1)]
    spec = FullAttentionSpec(block_size=block_size)
    kv_cache_config = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(layer_names=names, kv_cache_spec=spec)], num_blocks=BLOCKS,
        kv_cache_layout=layout, kv_tp_replicas=replicas,
    )  # fmt: skip
    shape = (BLOCKS, heads, block_size, 16)
    if layout == "LBNHC":
        tensors = {name: torch.zeros(BLOCKS, block_size, heads, 16, dtype=dtype).transpose(1, 2) for name in names}
    else:
        tensors = {name: torch.zeros(shape, dtype=dtype) for name in names}
    return describe_worker(
        vllm_config, kv_cache_config, tensors, VllmSettings("/mnt", **(settings or {})),
        tp_rank=tp_rank, pp_rank=0, cpu_isa=cpu_isa,
    )  # fmt: skip


def fingerprint(model: Path, **changes: Any) -> str:
    return describe(model, **changes).namespace.fingerprint_hex


def test_layers_are_in_the_order_of_the_model(weights: Path) -> None:
    """By number, not by name: layer 10 comes after layer 2."""
    kv = describe(weights)
    assert [name.split(".")[2] for name, _ in sorted(kv.layer_numbers.items(), key=lambda pair: pair[1])] == [
        "1",
        "2",
        "10",
    ]
    assert kv.namespace.num_layers == 3
    assert kv.num_tokens == BLOCKS * 16


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float16}, {"dtype": torch.uint8, "cache_dtype": "fp8"}, {"tp_size": 2}, {"quantization": "awq"},
        {"config": {"rope_theta": 1e6}}, {"config": {"x": 1}},
        {"layout": "LBHNC"}, {"settings": {"model_id": "another"}}, {"settings": {"revision": "r2"}},
        {"settings": {"tokens_per_chunk": 128}}, {"cpu_isa": "vec"}, {"load_format": "dummy"},
    ],
    ids=str,
)  # fmt: skip
def test_what_changes_kv_is_another_namespace(weights: Path, changes: dict[str, Any]) -> None:
    assert fingerprint(weights, **changes) != fingerprint(weights)


def test_other_weights_at_the_same_place_are_another_namespace(weights: Path) -> None:
    before = fingerprint(weights)
    assert fingerprint(weights) == before
    (weights / "model.safetensors").write_bytes(b"WEIGHTS")
    assert fingerprint(weights) != before


def test_the_place_of_a_model_is_not_part_of_it(weights: Path, tmp_path: Path) -> None:
    before = fingerprint(weights)
    elsewhere = tmp_path / "elsewhere" / "some-model"
    elsewhere.parent.mkdir()
    weights.rename(elsewhere)
    assert fingerprint(elsewhere) == before


def test_a_commit_names_weights_of_a_hub(tmp_path: Path) -> None:
    commit = "a" * 40
    known = describe(Path("org/some-model"), revision=commit).namespace.identity
    assert known.revision.startswith(commit)
    assert known.model == "some-model"
    with pytest.raises(UsageError, match="set revision"):
        describe(Path("org/some-model"), revision="main")


def test_block_size_counts_where_bytes_depend_on_it(weights: Path) -> None:
    """Tokens first, blocks of 16 and of 32 are the same bytes; heads first, and packed by the CPU, they are not."""
    assert fingerprint(weights, block_size=32) == fingerprint(weights)
    for changes in ({"layout": "LBHNC"}, {"cpu_isa": "vec"}):
        assert fingerprint(weights, block_size=32, **changes) != fingerprint(weights, **changes)
    assert fingerprint(weights, cpu_isa="amx") != fingerprint(weights, cpu_isa="vec")


def test_ranks_share_a_fingerprint(weights: Path) -> None:
    """Four ranks, each pair with the same KV: two namespaces of one identity, stored by one rank of each pair."""
    workers = [describe(weights, tp_rank=rank, tp_size=4, replicas=2) for rank in range(4)]
    assert len({kv.namespace.fingerprint_hex for kv in workers}) == 1
    assert [(kv.namespace.rank, kv.is_storing) for kv in workers] == [(0, True), (0, False), (1, True), (1, False)]


def test_chunks_hold_whole_blocks(weights: Path) -> None:
    assert describe(weights, block_size=96).namespace.identity.tokens_per_chunk == 192
    assert describe(weights, block_size=512).namespace.identity.tokens_per_chunk == 512
    with pytest.raises(UsageError, match="block size 16"):
        describe(weights, settings={"tokens_per_chunk": 40})


def test_engines_that_cannot_be_held_are_refused_in_one_sentence(weights: Path) -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=1))

    def groups(*specs: Any) -> Any:
        return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])

    check_engine(config, groups(FullAttentionSpec()))
    with pytest.raises(UsageError, match="2 groups"):
        check_engine(config, groups(FullAttentionSpec(), FullAttentionSpec()))
    with pytest.raises(UsageError, match="SlidingWindowSpec"):
        check_engine(config, groups(SlidingWindowSpec()))
    with pytest.raises(UsageError, match="later tokens"):
        check_engine(config, groups(FullAttentionSpec(non_causal=True)))
    with pytest.raises(UsageError, match="context parallel"):
        describe(weights, dcp=2)


def test_settings_are_checked() -> None:
    assert settings_from({"mount": "/mnt/kvfs"}).load_async is None
    for wrong in ({}, {"mount": "/m", "monut": 1}, {"mount": "/m", "floor_tokens": 0}):
        with pytest.raises(UsageError, match="kv_connector_extra_config"):
            settings_from(wrong)


def test_weights_are_read_once(weights: Path, tmp_path: Path) -> None:
    """The digest is remembered for files with the same place, size, inode and times; a change is noticed."""
    files = weight_files(weights)
    first = digest_files(files, weights)
    (record,) = (tmp_path / "cache" / "kvfs" / "digests").iterdir()
    record.write_text("0" * 32)
    assert digest_files(files, weights) == "0" * 32
    facts = files[0].stat()
    files[0].write_bytes(b"WEIGHTS")
    os.utime(files[0], ns=(facts.st_atime_ns, facts.st_mtime_ns))  # only the time of the change tells
    assert digest_files(files, weights) not in ("0" * 32, first)
