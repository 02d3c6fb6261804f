"""A tiny namespace and a real catalog for the tests of the mount."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest

from kvfs.catalog import Catalog, Chunk, ChunkTable
from kvfs.keys import Key
from kvfs.namespace import Identity, LayerRun, Namespace, TensorSpec

NOW_NS = 1_700_000_000_000_000_000


@pytest.fixture
def namespace() -> Namespace:
    identity = Identity(
        model="tiny", revision="1", kv_dtype="F32", layout="plain", num_layers=2, num_kv_heads=1, head_size=4,
        tokens_per_chunk=16,
    )  # fmt: skip
    tensors = tuple(TensorSpec(name=name, dtype="F32", shape=(1, 16, 4), token_axis=1) for name in ("k", "v"))
    return Namespace(identity=identity, layers=(LayerRun(count=2, tensors=tensors),))


@pytest.fixture
def catalog() -> Catalog:
    return Catalog()


@pytest.fixture
def table(catalog: Catalog, namespace: Namespace) -> ChunkTable:
    return catalog.table(namespace, NOW_NS)


def key(text: str) -> Key:
    return Key(hashlib.sha256(text.encode()).digest()[:16])


@pytest.fixture
def add(catalog: Catalog, table: ChunkTable) -> Callable[[str], Chunk]:
    """Adds the chunk of a path such as "ab": chunk b after chunk a; every prefix is a parent."""

    def add(path: str) -> Chunk:
        chunk, _ = catalog.create(table, key(path), key(path[:-1]), len(path) - 1, 16, NOW_NS + len(path))
        return chunk

    return add
