"""The tree over a real catalog, without FUSE."""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable

import pytest

from kvfs.catalog import Catalog, Chunk, ChunkTable
from kvfs.mount.errnos import Refused
from kvfs.mount.namespace_nodes import FIRST_TABLE_INODE
from kvfs.mount.nodes import Fixed, Node, Role, is_directory
from kvfs.mount.tree import Tree
from kvfs.namespace import Namespace
from kvfs.testing import tiny_namespace

Add = Callable[[str], Chunk]


@pytest.fixture
def tree(catalog: Catalog) -> Tree:
    return Tree(catalog, lambda node: 7, 5)


def walk(tree: Tree, path: str) -> Node:
    node: Node = tree.root
    for name in path.split("/"):
        found = tree.lookup(node, name.encode())
        assert found is not None, f"no {name} in {path}"
        node = found
    return node


def names(tree: Tree, node: Node) -> list[str]:
    return [tree.name(entry).decode() for entry in tree.entries(node)]


def refused(number: int) -> object:
    return pytest.raises(Refused, match=f"^{errno.errorcode[number]}$")


def test_layout(tree: Tree, table: ChunkTable, add: Add) -> None:
    """The tree is the one that the design shows."""
    chunk = add("a")
    assert names(tree, tree.root) == ["README.txt", ".kvfs", table.directory]
    assert names(tree, walk(tree, ".kvfs")) == ["session", "status.json", "metrics", "events", "config.toml"]
    assert names(tree, walk(tree, table.directory)) == ["namespace.json", "chunks", "prefixes"]
    assert names(tree, walk(tree, f"{table.directory}/chunks")) == [chunk.file_name]
    assert names(tree, walk(tree, f"{table.directory}/prefixes")) == [chunk.key.hex()]
    assert names(tree, walk(tree, f"{table.directory}/prefixes/{chunk.key.hex()}")) == [chunk.file_name]


def test_everything_listed_can_be_looked_up_and_has_its_own_inode(tree: Tree, table: ChunkTable, add: Add) -> None:
    for path in ("a", "ab", "abc", "abd", "x"):
        add(path)
    seen: dict[int, Node] = {}
    waiting: list[Node] = [tree.root]
    while waiting:
        parent = waiting.pop()
        for node in tree.entries(parent):
            assert tree.lookup(parent, tree.name(node)) is node
            assert tree.holds(parent, node)
            inode = tree.attributes(node).inode
            assert seen.setdefault(inode, node) is node
            if isinstance(node, Fixed):
                assert tree.fixed(inode) is node
            if is_directory(node):
                waiting.append(node)
    assert sum(isinstance(node, Chunk) for node in seen.values()) == 5


def test_both_names_are_one_file(tree: Tree, table: ChunkTable, add: Add) -> None:
    chunk = add("a")
    one = walk(tree, f"{table.directory}/chunks/{chunk.file_name}")
    other = walk(tree, f"{table.directory}/prefixes/{chunk.key.hex()}/{chunk.file_name}")
    assert one is other is chunk
    attributes = tree.attributes(chunk)
    assert (attributes.inode, attributes.links, attributes.size) == (chunk.inode, 2, chunk.length)


def test_times_of_a_chunk(tree: Tree, add: Add) -> None:
    """Published shows as mtime and ctime, the last load as atime."""
    chunk = add("a")
    chunk.last_used_ns += 99
    attributes = tree.attributes(chunk)
    assert attributes.modified_ns == attributes.created_ns == chunk.created_ns
    assert attributes.used_ns == chunk.created_ns + 99
    assert attributes.timeout_s <= 1


def test_nothing_is_open_to_others(tree: Tree, table: ChunkTable, add: Add) -> None:
    add("a")
    waiting: list[Node] = [tree.root]
    while waiting:
        node = waiting.pop()
        mode = tree.attributes(node).mode
        if not stat.S_ISLNK(mode):
            assert not mode & 0o007
        if stat.S_ISREG(mode):
            assert not mode & 0o022
        if is_directory(node):
            assert stat.S_ISDIR(mode)
            waiting += tree.entries(node)


def test_a_branch_is_a_directory_beside_the_others(tree: Tree, table: ChunkTable, add: Add) -> None:
    a, b, c, d = add("a"), add("ab"), add("abc"), add("abd")
    run = walk(tree, f"{table.directory}/prefixes/{a.key.hex()}")
    assert names(tree, run) == [c.key.hex(), d.key.hex(), b.file_name, a.file_name]  # leaves first, for rm -r
    assert tree.lookup(run, c.file_name.encode()) is None  # it moved into its own directory
    assert walk(tree, f"{table.directory}/prefixes/{a.key.hex()}/{c.key.hex()}/{c.file_name}") is c


@pytest.mark.parametrize(
    "name",
    [
        b"", b".", b"..", b"\xff\xfe", b"\xc3\xa4", b"a" * 255, b"%s", b"*", b"-rf", b"\n", b"../..",
        b"0" * 32 + b".safetensors", b"0" * 32 + b".safetensors\n", b"0" * 32, b"g" * 32 + b".safetensors",
    ],
)  # fmt: skip
def test_hostile_names_are_not_there(tree: Tree, table: ChunkTable, add: Add, name: bytes) -> None:
    add("a")
    waiting: list[Node] = [tree.root]
    while waiting:
        node = waiting.pop()
        assert tree.lookup(node, name) is None
        waiting += [entry for entry in tree.entries(node) if is_directory(entry)]


def test_a_name_is_matched_exactly(tree: Tree, table: ChunkTable, add: Add) -> None:
    """Neither another case nor anything behind it names a chunk."""
    chunk = add("a")
    chunks = walk(tree, f"{table.directory}/chunks")
    name = chunk.file_name.encode()
    for other in (name.upper(), name + b"\n", name + b" ", b" " + name, name[:-1], name.replace(b".", b"\0")):
        assert tree.lookup(chunks, other) is None


def test_a_name_that_is_too_long(tree: Tree) -> None:
    with refused(errno.ENAMETOOLONG):
        tree.lookup(tree.root, b"a" * 256)


def test_a_file_has_no_entries(tree: Tree, add: Add) -> None:
    for node in (add("a"), walk(tree, "README.txt"), walk(tree, ".kvfs/session")):
        with refused(errno.ENOTDIR):
            tree.lookup(node, b"x")
        with refused(errno.ENOTDIR):
            tree.entries(node)


def test_what_unlink_removes(tree: Tree, table: ChunkTable, add: Add) -> None:
    chunk = add("a")
    chunks = walk(tree, f"{table.directory}/chunks")
    assert tree.chunk_to_unlink(chunks, chunk.file_name.encode()) is chunk
    with refused(errno.ENOENT):
        tree.chunk_to_unlink(chunks, b"x")
    with refused(errno.EISDIR):
        tree.chunk_to_unlink(tree.root, b".kvfs")
    with refused(errno.EPERM):
        tree.chunk_to_unlink(tree.root, b"README.txt")
    directory = walk(tree, table.directory)
    table.num_sessions = 1
    with refused(errno.EBUSY):
        tree.chunk_to_unlink(directory, b"namespace.json")
    table.num_sessions = 0
    assert tree.chunk_to_unlink(directory, b"namespace.json") is None
    assert names(tree, directory) == ["chunks", "prefixes"]


def test_rmdir(tree: Tree, catalog: Catalog, table: ChunkTable, add: Add) -> None:
    """Only an empty prefix directory goes."""
    chunk = add("a")
    prefixes = walk(tree, f"{table.directory}/prefixes")
    directory = walk(tree, f"{table.directory}/prefixes/{chunk.key.hex()}")
    assert not isinstance(directory, Fixed | Chunk)
    directory.keep += 1  # as if the kernel knew it
    name = directory.name.encode()
    with refused(errno.ENOTEMPTY):
        tree.remove_directory(prefixes, name)
    catalog.discard(chunk)
    assert tree.lookup(prefixes, name) is directory  # kept, though empty
    tree.remove_directory(prefixes, name)
    assert tree.lookup(prefixes, name) is None
    assert not tree.holds(prefixes, directory)
    assert tree.attributes(directory).links == 0
    with refused(errno.ENOENT):
        tree.remove_directory(prefixes, name)


def test_rmdir_of_what_is_always_there(tree: Tree, table: ChunkTable, add: Add) -> None:
    add("a")
    for name in ("chunks", "prefixes"):
        with refused(errno.ENOTEMPTY):
            tree.remove_directory(walk(tree, table.directory), name.encode())
    with refused(errno.ENOTEMPTY):
        tree.remove_directory(tree.root, table.directory.encode())
    with refused(errno.EPERM):
        tree.remove_directory(tree.root, b".kvfs")
    with refused(errno.ENOTDIR):
        tree.remove_directory(tree.root, b"README.txt")


def test_an_empty_namespace_is_removed(
    tree: Tree, catalog: Catalog, table: ChunkTable, namespace: Namespace, add: Add
) -> None:
    """Whole, or piece by piece as `rm -r` does it; while a client is attached it stays as it is."""
    catalog.discard(add("a"))
    directory = walk(tree, table.directory)
    chunks = walk(tree, f"{table.directory}/chunks")
    table.num_sessions = 1
    for name in ("chunks", "prefixes"):
        with refused(errno.EBUSY):
            tree.remove_directory(directory, name.encode())
    with refused(errno.EBUSY):
        tree.chunk_to_unlink(directory, b"namespace.json")
    with refused(errno.EBUSY):
        tree.remove_directory(tree.root, table.directory.encode())
    assert names(tree, directory) == ["namespace.json", "chunks", "prefixes"]
    table.num_sessions = 0
    listing = tree.entries(directory)
    for name in ("chunks", "prefixes"):
        assert tree.remove_directory(directory, name.encode()) is None
        with refused(errno.ENOENT):
            tree.remove_directory(directory, name.encode())
    assert tree.chunk_to_unlink(directory, b"namespace.json") is None
    assert names(tree, directory) == [node for node in listing if tree.holds(directory, node)] == []
    assert tree.attributes(chunks).links == 0
    assert tree.remove_directory(tree.root, table.directory.encode()) is table
    catalog.forget(table)
    assert tree.lookup(tree.root, table.directory.encode()) is None
    assert names(tree, tree.root) == ["README.txt", ".kvfs"]
    assert tree.entries(chunks) == []
    assert tree.attributes(directory).links == 0
    catalog.table(namespace, 7)
    again = walk(tree, f"{table.directory}/chunks")
    assert tree.attributes(again).inode != tree.attributes(chunks).inode


@pytest.mark.parametrize("how", ["a chunk is stored", "a client attaches"])
def test_hidden_names_appear_again(tree: Tree, catalog: Catalog, table: ChunkTable, add: Add, how: str) -> None:
    """As other directories than those that the kernel has seen removed."""
    directory = walk(tree, table.directory)
    before = {name: tree.lookup(directory, name.encode()) for name in names(tree, directory)}
    tree.chunk_to_unlink(directory, b"namespace.json")
    tree.remove_directory(directory, b"chunks")
    assert names(tree, directory) == ["prefixes"]
    if how == "a client attaches":
        table.num_attached += 1
    else:
        chunk = add("a")
        parent, _ = tree.places(chunk, None)[0]
        assert parent == tree.attributes(walk(tree, f"{table.directory}/chunks")).inode
    assert names(tree, directory) == ["namespace.json", "chunks", "prefixes"]
    for name, node in before.items():
        assert (tree.lookup(directory, name.encode()) is node) == (name == "prefixes")
    for chunk in list(catalog.chunks()):
        catalog.discard(chunk)
    assert names(tree, directory) == ["namespace.json", "chunks", "prefixes"]


def test_inodes_of_removed_namespaces_are_used_again(
    tree: Tree, catalog: Catalog, table: ChunkTable, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After many others, and never one that is in use."""
    monkeypatch.setattr("kvfs.mount.namespace_nodes.LAST_FIXED_INODE", FIRST_TABLE_INODE + 9)
    kept = catalog.table(tiny_namespace(), 0)
    inodes = [tree.attributes(walk(tree, kept.directory)).inode]
    for _ in range(5):
        inodes.append(tree.attributes(walk(tree, table.directory)).inode)
        assert tree.remove_directory(tree.root, table.directory.encode()) is table
        catalog.forget(table)
        table = catalog.table(namespace, 0)
        assert inodes[-1] not in [tree.attributes(node).inode for node in tree.entries(walk(tree, kept.directory))]
    assert tree.attributes(walk(tree, kept.directory)).inode == inodes[0]
    assert len(set(inodes)) < 6


def test_a_removed_chunk_has_no_name_left(tree: Tree, catalog: Catalog, table: ChunkTable, add: Add) -> None:
    a, b = add("a"), add("ab")
    chunks = walk(tree, f"{table.directory}/chunks")
    directory = walk(tree, f"{table.directory}/prefixes/{a.key.hex()}")
    listing = tree.entries(chunks)
    assert tree.places(b, b.directory) == [  # type: ignore[arg-type]
        (tree.attributes(chunks).inode, b.file_name.encode()),
        (tree.attributes(directory).inode, b.file_name.encode()),
    ]
    catalog.discard(b)
    assert [node for node in listing if tree.holds(chunks, node)] == [a]
    assert tree.lookup(chunks, b.file_name.encode()) is None
    assert tree.lookup(directory, b.file_name.encode()) is None
    assert tree.attributes(b).links == 0


def test_a_listing_is_what_was_there_when_it_began(tree: Tree, table: ChunkTable, add: Add) -> None:
    a = add("a")
    chunks = walk(tree, f"{table.directory}/chunks")
    listing = tree.entries(chunks)
    add("b")
    assert listing == [a]


def test_inodes_of_a_namespace_stay(tree: Tree, table: ChunkTable) -> None:
    node = walk(tree, f"{table.directory}/chunks")
    assert isinstance(node, Fixed)
    assert node.role is Role.CHUNKS
    assert walk(tree, f"{table.directory}/chunks") is node
    assert node.inode < 1 << 20
    assert tree.fixed(node.inode + 100) is None
    assert tree.fixed(0) is None
