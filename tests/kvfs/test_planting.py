"""Planting: many chunks at once make the tree, and the order of need, that they make one after the other."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from kvfs.catalog import Catalog, Chunk, ChunkTable, last_needed
from kvfs.keys import Key
from kvfs.namespace import Identity, LayerRun, Namespace, TensorSpec
from kvfs.planting import by_need, plant, runs
from kvfs.prefixes import PrefixDirectory

SPEC = TensorSpec("k", "U8", (16, 8), 0)
NAMESPACE = Namespace(Identity("model", "1", "U8", "bench", 1, 1, 8, 16), (LayerRun(1, (SPEC,)),))

paths = st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=12)
"""Prompts: each letter a chunk, so that prompts with a common beginning share it."""


def key(path: str) -> Key:
    return Key(path.encode().ljust(16, b"\0"))


def parent(path: str) -> Key:
    return key(path[:-1] or "root")


def names(prompts: list[str]) -> list[str]:
    return sorted({prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1)})


def planted(stored: list[str], used_ns: dict[str, int]) -> tuple[ChunkTable, list[list[Chunk]]]:
    """The table of chunks in this order, as a start makes it."""
    catalog = Catalog()
    table = catalog.table(NAMESPACE, 0)
    chunks = [Chunk.new(table, key(name), parent(name), len(name) - 1, 16, 0, catalog.next_inode()) for name in stored]
    for chunk, name in zip(chunks, stored, strict=True):
        chunk.last_used_ns = used_ns[name]
    catalog.take(table, chunks)
    found = runs(table)
    plant(table, found)
    return table, found


def shape(table: ChunkTable) -> dict[str, list[bytes]]:
    """Path of each directory → its chunks."""
    found = {}

    def walk(directory: PrefixDirectory[Chunk], above: str) -> None:
        path = f"{above}/{directory.name}"
        found[path] = [chunk.key for chunk in directory.chunks()]
        assert all(chunk.home is directory for chunk in directory.chunks())
        assert directory.num_chunks == len(found[path])
        for below in directory.subdirectories.values():
            walk(below, path)

    for directory in table.prefixes.directories.values():
        walk(directory, "")
    return found


@given(paths, st.data())
def test_the_tree_is_the_one_that_grows_chunk_by_chunk(prompts: list[str], data: st.DataObject) -> None:
    """Whatever is missing, and in whatever order the chunks stand."""
    stored = [name for name in names(prompts) if data.draw(st.integers(0, 9))]
    data.draw(st.randoms(use_true_random=False)).shuffle(stored)
    table, found = planted(stored, dict.fromkeys(stored, 0))
    grown = Catalog()
    one_by_one = grown.table(NAMESPACE, 0)
    for name in sorted(stored, key=len):
        grown.create(one_by_one, key(name), parent(name), len(name) - 1, 16, 0)
    assert shape(table) == shape(one_by_one)
    assert sorted(chunk.key for run in found for chunk in run) == sorted(map(key, stored))
    assert all(after.parent == before.key for run in found for before, after in itertools.pairwise(run))
    assert [run[0].position for run in found] == sorted(run[0].position for run in found)


@given(paths, st.data())
def test_the_order_of_need(prompts: list[str], data: st.DataObject) -> None:
    """Each was needed when it, or anything built on it, was last used; what is built on a chunk comes before it."""
    stored = names(prompts)
    used_ns = {name: data.draw(st.integers(0, 5)) for name in stored}
    table, found = planted(stored, used_ns)
    chunks, needed_ns = by_need([found])
    later = last_needed(table.chunks.values())
    assert needed_ns == [later.get(chunk, chunk.last_used_ns) for chunk in chunks]
    assert needed_ns == sorted(needed_ns)
    places = {chunk: place for place, chunk in enumerate(chunks)}
    assert len(places) == len(stored)
    for chunk in chunks:
        above = chunk.above()
        assert above is None or places[above] > places[chunk]


def test_a_chain_is_one_run_wherever_its_chunks_stand() -> None:
    """Chains that were stored side by side stand interleaved."""
    prompts = [letter * 16 for letter in "abcdefgh"]  # a key has room for no more
    stored = names(prompts)
    random.Random(1).shuffle(stored)
    _, found = planted(stored, dict.fromkeys(stored, 0))
    assert [len(run) for run in found] == [16] * 8


def test_positions_that_contradict_each_other_lose_no_chunk() -> None:
    """A client may lie: chunks that claim impossible positions are in the tree all the same, each once."""
    catalog = Catalog()
    table = catalog.table(NAMESPACE, 0)
    lies = [("p", "q", 5), ("q", "p", 6), ("r", "q", 2), ("s", "r", 2), ("t", "s", 3), ("u", "u", 4)]
    chunks = [Chunk.new(table, key(a), key(b), at, 16, 0, catalog.next_inode()) for a, b, at in lies]
    catalog.take(table, chunks)
    plant(table, runs(table))
    assert sorted(chunk for there in shape(table).values() for chunk in there) == sorted(key(a) for a, _, _ in lies)
