"""Listings without a kernel: every name once, and attributes as long as they are any use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from pyfuse3 import EntryAttributes

from kvfs.catalog import Catalog, Chunk, ChunkTable
from kvfs.keys import Key
from kvfs.mount import listing as listings
from kvfs.mount.attributes import Attributes
from kvfs.mount.inodes import Inodes
from kvfs.mount.listing import Listing, Listings
from kvfs.mount.nodes import CHUNK_MODE, DIRECTORY_MODE, Node
from kvfs.mount.tree import Tree

TOLD, PROBES_FROM, PROBE_EVERY = 40, 20, 8
NUM_CHUNKS = 200


class Reader:
    """Lists a directory as the kernel does, some names at a time.

    Attributes: names: in the order in which they came; told: of these, those that came with attributes.
    """

    def __init__(self, tree: Tree, inodes: Inodes, path: str) -> None:
        self.inodes = inodes
        self.attributes = Attributes(tree)
        self.service = Listings(tree, self.attributes, inodes, EntryAttributes)
        self.node = walk(tree, path)
        self.listing: Listing = self.service.open(self.node, self.node.inode, 1)
        self.names: list[bytes] = []
        self.told: set[bytes] = set()
        self._at = 0

    async def read(self, most: int) -> int:
        """So many names at most; returns how many there were."""
        before = len(self.names)

        def reply(name: bytes, entry: EntryAttributes, next_at: int) -> bool:
            if len(self.names) - before == most:
                return False
            self.names.append(name)
            self._at = next_at
            if entry.st_ino:
                self.told.add(name)
            return True

        await self.service.send(self.listing, self._at, reply)
        return len(self.names) - before

    async def read_all(self) -> list[bytes]:
        while await self.read(7):
            pass
        return self.names


def walk(tree: Tree, path: str) -> Node:
    node: Node | None = tree.root
    for name in path.split("/"):
        assert node is not None
        node = tree.lookup(node, name.encode())
    assert node is not None
    return node


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crowd is what is more than a few."""
    for name, value in (("TOLD", TOLD), ("PROBES_FROM", PROBES_FROM), ("PROBE_EVERY", PROBE_EVERY)):
        monkeypatch.setattr(listings, name, value)
    monkeypatch.setattr(listings, "_AT_ONCE", 16)


@pytest.fixture
def chunks(catalog: Catalog, table: ChunkTable) -> list[Chunk]:
    """Chunks of which none is built on another, the newest last."""
    return [new_chunk(catalog, table, number) for number in range(NUM_CHUNKS)]


def new_chunk(catalog: Catalog, table: ChunkTable, number: int) -> Chunk:
    return catalog.create(table, Key(number.to_bytes(16, "big")), Key(b"\xff" * 16), 0, 16, 1_000 + number)[0]


@pytest.fixture
def tree(catalog: Catalog) -> Tree:
    return Tree(catalog, lambda _: 0, 0)


@pytest.fixture
def reader(tree: Tree, table: ChunkTable, chunks: list[Chunk]) -> Reader:
    return Reader(tree, Inodes(), f"{table.directory}/chunks")


async def test_attributes_come_with_the_first_only(reader: Reader, chunks: list[Chunk]) -> None:
    """The kernel counts what it was told, and nothing else."""
    assert await reader.read_all() == [chunk.file_name.encode() for chunk in reversed(chunks)]
    probes = {name for index, name in enumerate(reader.names) if index >= PROBES_FROM and index % PROBE_EVERY == 0}
    assert reader.told == {*reader.names[:TOLD]} - probes
    known = {chunk.file_name.encode() for chunk in chunks if reader.inodes.get(chunk.inode) is chunk}
    assert known == reader.told


async def test_who_looks_at_a_probe_is_told_more(reader: Reader, tree: Tree) -> None:
    """All are probes that came without attributes now and then; to look at another entry is no sign."""
    await reader.read(PROBES_FROM + PROBE_EVERY + 1)

    def look(name: bytes) -> None:
        node = tree.lookup(reader.node, name)
        assert node is not None
        reader.service.looked_up(reader.node.inode, node.inode)

    look(reader.names[1])
    await reader.read(TOLD)
    assert reader.names[-1] not in reader.told
    look(reader.names[PROBES_FROM + PROBE_EVERY - PROBES_FROM % PROBE_EVERY])
    so_far = len(reader.names)
    await reader.read_all()
    assert len(reader.told & {*reader.names[so_far:]}) >= TOLD - TOLD // PROBE_EVERY - 1
    assert not reader.told & {*reader.names[so_far + TOLD :]}


async def test_it_is_not_told_of_another_directory(reader: Reader, tree: Tree) -> None:
    await reader.read(TOLD)
    for name in reader.names:
        node = tree.lookup(reader.node, name)
        assert node is not None
        reader.service.looked_up(reader.node.inode + 1, node.inode)
    assert not reader.told & {*(await reader.read_all())[TOLD:]}
    await reader.service.close(reader.listing)
    reader.service.looked_up(reader.node.inode, 1)  # nobody lists it any more


@pytest.mark.parametrize("when", [0, 3, TOLD, NUM_CHUNKS - 9])
async def test_what_is_there_all_the_time_is_listed_once(
    reader: Reader, catalog: Catalog, table: ChunkTable, chunks: list[Chunk], when: int
) -> None:
    """While others come and go, before and behind the place where the listing is."""
    while len(reader.names) < when and await reader.read(1):
        pass
    removed = [chunks[0], chunks[5], chunks[NUM_CHUNKS // 2], chunks[-2]]
    for number, chunk in enumerate(removed):
        catalog.discard(chunk)
        new_chunk(catalog, table, NUM_CHUNKS + number)
        await reader.read(2)
    names = await reader.read_all()
    assert len(names) == len({*names})
    assert {*names} >= {chunk.file_name.encode() for chunk in chunks if not chunk.is_removed}
    assert chunks[0].file_name.encode() not in names


@pytest.mark.parametrize("turn", [0, 1, 5])
async def test_a_crowd_is_copied_while_it_changes(
    reader: Reader, catalog: Catalog, table: ChunkTable, chunks: list[Chunk], turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others get a turn meanwhile, and may remove and store."""
    turns = 0
    checkpoint: Callable[[], Any] = trio.lowlevel.checkpoint

    async def change() -> None:
        nonlocal turns
        if turns == turn:
            catalog.discard(chunks[3])
            new_chunk(catalog, table, NUM_CHUNKS)
        turns += 1
        await checkpoint()

    monkeypatch.setattr(trio.lowlevel, "checkpoint", change)
    names = await reader.read_all()
    assert turns > turn
    assert names == [chunk.file_name.encode() for chunk in reversed(table.chunks.values())]
    turns = turn + 1
    await reader.service.close(reader.listing)
    assert turns - turn > NUM_CHUNKS // 16


async def test_it_begins_anew(reader: Reader, catalog: Catalog, table: ChunkTable) -> None:
    """rewinddir(3): offset 0 shows what is there now."""
    await reader.read_all()
    newest = new_chunk(catalog, table, NUM_CHUNKS)
    before, reader.names, reader._at = reader.names, [], 0
    assert await reader.read_all() == [newest.file_name.encode(), *before]


async def test_prefixes_are_listed_likewise(tree: Tree, table: ChunkTable, chunks: list[Chunk]) -> None:
    """A directory that came without attributes is not kept for the kernel."""
    reader = Reader(tree, Inodes(), f"{table.directory}/prefixes")
    names = await reader.read_all()
    assert names == [chunk.key.hex().encode() for chunk in chunks]
    assert 0 < len(reader.told) < TOLD
    kept = {name.encode() for name, directory in table.prefixes.directories.items() if directory.keep}
    assert kept == reader.told


async def test_what_comes_with_a_name_is_what_stat_says(reader: Reader, tree: Tree, chunks: list[Chunk]) -> None:
    """Of each chunk, whatever was filled in for the one before."""
    chunks[7].last_used_ns = 5_000_000_007
    chunks[-3].length = 3 * 4096
    tree.staged.copied(chunks[-2])
    fields = [name for name in dir(EntryAttributes) if name.startswith("st_") or name.endswith("_timeout")]
    named = {chunk.file_name.encode(): chunk for chunk in chunks}
    kinds = set()

    def reply(name: bytes, entry: EntryAttributes, _: int) -> bool:
        kinds.add(entry.st_mode)
        if entry.st_ino:
            expected = reader.attributes.fill(EntryAttributes(), named[name])
            assert {field: getattr(entry, field) for field in fields} == {
                field: getattr(expected, field) for field in fields
            }
        return True

    await reader.service.send(reader.listing, 0, reply)
    assert kinds == {CHUNK_MODE}
    assert DIRECTORY_MODE not in kinds


async def test_without_bare_entries_all_have_attributes(
    tree: Tree, table: ChunkTable, chunks: list[Chunk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another pyfuse3 may lay its entries out otherwise."""
    monkeypatch.setattr(listings.BareEntry, "of", lambda _: None)
    reader = Reader(tree, Inodes(), f"{table.directory}/chunks")
    assert {*await reader.read_all()} == reader.told
    assert len(reader.told) == NUM_CHUNKS
