"""The prefix view: named runs and a state machine that adds and removes the chunks of a forest in any order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvfs.keys import Key
from kvfs.prefixes import Member, Moves, PrefixDirectory, PrefixTree

Directory = PrefixDirectory[Member]


class Forest:
    """Chunks with their true parents, of which the tree sees those that are stored; keys are made from names."""

    def __init__(self) -> None:
        self.chunks: dict[Key, Member] = {}
        self.inodes = itertools.count(1)
        self.tree: PrefixTree[Member] = PrefixTree("ns", self.chunks, self.inodes)

    def add(self, name: str, parent: str, position: int) -> tuple[Member, Moves[Member]]:
        """As `Catalog.create` does it."""
        chunk = Member(key(name), key(parent), position, next(self.inodes), None, None, None)
        self.chunks[chunk.key] = chunk
        return chunk, self.tree.add(chunk)

    def remove(self, name: str) -> Directory | None:
        """As `Catalog.discard` does it."""
        return self.tree.remove(self.chunks.pop(key(name)))

    def store(self, *names: str) -> None:
        """Add chunks named by their paths: "abc" is the child of "ab"."""
        for name in names:
            self.add(name, name[:-1] or "root", len(name) - 1)

    def shape(self) -> dict[str, list[str]]:
        """What `find prefixes` shows: path of each directory → its chunks."""
        return {
            "/".join(name_of(step.key) for step in path): [name_of(chunk.key) for chunk in path[-1].chunks()]
            for path in walk(self.tree)
        }


def key(name: str) -> Key:
    return Key(name.encode().ljust(16, b"\0"))


def name_of(key_: Key) -> str:
    return key_.rstrip(b"\0").decode()


def walk(tree: PrefixTree[Member]) -> Iterator[list[Directory]]:
    """Every directory, as the list of directories that lead to it."""
    waiting = [[directory] for directory in tree.directories.values()]
    while waiting:
        path = waiting.pop()
        yield path
        waiting.extend([*path, below] for below in path[-1].subdirectories.values())


def remove_tree(forest: Forest, directory: Directory) -> None:
    """What ``rm -r`` does: list, unlink what was listed, descend, rmdir; any error of its own is a failure.

    The kernel knows each directory it has walked through, so all are kept.
    """
    directory.keep += 1
    chunks, below = list(directory.chunks()), list(directory.subdirectories.values())
    for subdirectory in below:
        assert directory.subdirectories[subdirectory.name] is subdirectory, "a directory moved under rm -r"
        remove_tree(forest, subdirectory)
    for chunk in chunks:
        assert chunk.directory is directory, "a chunk moved under rm -r"
        forest.remove(name_of(chunk.key))
    assert directory.is_empty, "rmdir would say: not empty"
    assert forest.tree.prune(directory, even_if_kept=True)
    directory.keep -= 1


def test_a_run_is_one_directory() -> None:
    """A chain without branches lies in one directory that bears the key of its first chunk."""
    forest = Forest()
    forest.store("a", "ab", "abc")
    assert forest.shape() == {"a": ["a", "ab", "abc"]}


def test_a_branch_splits() -> None:
    """A second continuation moves what lay behind the branch into a directory beside the new one."""
    forest = Forest()
    forest.store("a", "ab", "abc", "abcd")
    home = forest.tree.directories[key("a").hex()]
    _, moves = forest.add("abX", "ab", 2)
    assert [(name_of(chunk.key), directory) for chunk, directory in moves.chunks] == [("abc", home), ("abcd", home)]
    assert forest.shape() == {"a": ["a", "ab"], "a/abc": ["abc", "abcd"], "a/abX": ["abX"]}


def test_a_third_branch_moves_nothing() -> None:
    forest = Forest()
    forest.store("a", "ab", "aX")
    assert forest.add("aY", "a", 1)[1] == Moves()
    assert forest.shape() == {"a": ["a"], "a/ab": ["ab"], "a/aX": ["aX"], "a/aY": ["aY"]}


def test_branches_go_with_what_they_are_built_on() -> None:
    """A split takes the branches behind it along, and leaves those that hang before it."""
    forest = Forest()
    forest.store("a", "ab", "abc", "abcd", "abcX")
    forest.store("aY")
    assert forest.shape() == {
        "a": ["a"], "a/ab": ["ab", "abc"], "a/ab/abcd": ["abcd"], "a/ab/abcX": ["abcX"], "a/aY": ["aY"],
    }  # fmt: skip


def test_directories_never_merge() -> None:
    """When a branch goes again, the other stays where it is; new chunks go on behind it there."""
    forest = Forest()
    forest.store("a", "ab", "aX")
    forest.remove("aX")
    forest.store("abc")
    assert forest.shape() == {"a": ["a"], "a/ab": ["ab", "abc"]}


def test_a_chunk_without_its_parent_waits_at_the_top() -> None:
    """A fragment heads a directory of its own until the chunk comes that it was built on; then they are one run."""
    forest = Forest()
    forest.store("abc", "ab")
    assert forest.shape() == {"ab": ["ab", "abc"]}
    forest.store("abcde", "abcdX")
    assert forest.shape() == {"ab": ["ab", "abc"], "abcde": ["abcde"], "abcdX": ["abcdX"]}
    forest.store("abcd")
    assert forest.shape() == {
        "ab": ["ab", "abc", "abcd"], "ab/abcde": ["abcde"], "ab/abcdX": ["abcdX"],
    }  # fmt: skip
    forest.store("aY", "a")
    assert forest.shape() == {
        "a": ["a"], "a/ab": ["ab", "abc", "abcd"], "a/ab/abcde": ["abcde"], "a/ab/abcdX": ["abcdX"], "a/aY": ["aY"],
    }  # fmt: skip


def test_the_smaller_run_is_moved() -> None:
    """Leaf first, each chunk moves once; the directory is renamed, and whoever knew the old names is told."""
    forest = Forest()
    names = ["a" * length for length in range(1, 200)]
    num_moved = 0
    for name in reversed(names):
        _, moves = forest.add(name, name[:-1] or "root", len(name) - 1)
        num_moved += len(moves.chunks)
    assert num_moved == len(names) - 1
    assert [(renamed.parent, name_of(Key(bytes.fromhex(renamed.name)))) for renamed in moves.directories] == [
        (None, "aa"), (None, "a"),
    ]  # fmt: skip
    assert len(forest.tree.directories) == 1
    assert list(forest.shape()) == ["a"]


def test_a_directory_that_the_kernel_knows_stays() -> None:
    """Whoever made a directory to copy into it finds it again, however large the fragment is that joins it."""
    forest = Forest()
    made = forest.tree.make_directory(key("a"), None)
    made.keep += 1
    forest.store("abcd", "abc", "ab", "a")
    assert forest.tree.directories == {made.name: made}
    assert forest.shape() == {"a": ["a", "ab", "abc", "abcd"]}


def test_a_made_directory_makes_way_and_is_taken() -> None:
    """A mkdir in the prefix view only prepares; what comes goes where the tree has it."""
    forest = Forest()
    made = forest.tree.make_directory(key("abX"), forest.tree.make_directory(key("a"), None))
    made.keep += 1
    assert forest.tree.make_directory(key("abX"), made.parent) is made
    forest.store("abX", "abc", "ab", "a")
    assert forest.shape() == {"a": ["a", "ab"], "a/abX": ["abX"], "a/abc": ["abc"]}
    assert not made.is_attached


def test_a_fragment_that_lost_its_first_chunk() -> None:
    """It is joined when that chunk comes back, not before: until then nobody knows what is behind the hole."""
    forest = Forest()
    forest.store("ab", "abc", "abcd")
    forest.remove("ab")
    forest.store("a")
    assert forest.shape() == {"ab": ["abc", "abcd"], "a": ["a"]}
    forest.store("ab")
    assert forest.shape() == {"a": ["a", "ab", "abc", "abcd"]}


def test_a_fragment_whose_position_contradicts_is_not_joined() -> None:
    forest = Forest()
    forest.add("b", "a", 7)
    forest.add("a", "root", 0)
    assert forest.shape() == {"b": ["b"], "a": ["a"]}


def test_a_hole_is_filled() -> None:
    """A chunk that is stored again takes its old place in the run."""
    forest = Forest()
    forest.store("a", "ab", "abc")
    forest.remove("ab")
    assert forest.shape() == {"a": ["a", "abc"]}
    forest.store("ab")
    assert forest.shape() == {"a": ["a", "ab", "abc"]}


def test_the_first_chunk_comes_back() -> None:
    forest = Forest()
    forest.store("a", "ab")
    forest.remove("a")
    forest.store("a")
    assert forest.shape() == {"a": ["a", "ab"]}


def test_a_sibling_in_a_hole_does_not_capture_what_is_behind_it() -> None:
    """What stands behind a hole is not built on the next chunk that is stored before it."""
    forest = Forest()
    forest.store("a", "ab", "abc")
    forest.remove("ab")
    forest.store("aX")
    forest.store("ab")
    shape = forest.shape()
    assert "abc" not in shape["a/aX"]
    assert shape == {"a": ["a", "abc"], "a/ab": ["ab"], "a/aX": ["aX"]}


def test_branches_of_a_removed_chunk_stay_before_a_split() -> None:
    """Branches whose root is gone do not wander below a chunk that they were not built on."""
    forest = Forest()
    forest.store("a", "ab", "abX", "abY")
    forest.remove("ab")
    forest.store("ac", "acd", "acZ")
    shape = forest.shape()
    assert set(shape) >= {"a/abX", "a/abY"}


def test_an_empty_directory_goes_with_its_parents() -> None:
    """An empty directory that nobody keeps goes at once, and so do empty ones above it."""
    forest = Forest()
    forest.store("a", "ab", "aX")
    for name in ("a", "ab", "aX"):
        forest.remove(name)
    assert forest.shape() == {}


def test_a_kept_directory_stays_until_it_is_pruned() -> None:
    """While the kernel knows a directory it stays, even empty; the same object is used when its chunks come back."""
    forest = Forest()
    forest.store("a")
    directory = forest.tree.directories[key("a").hex()]
    directory.keep += 1
    forest.remove("a")
    assert forest.shape() == {"a": []}
    assert not forest.tree.prune(directory)
    forest.store("a")
    assert forest.tree.directories[key("a").hex()] is directory
    forest.remove("a")
    directory.keep -= 1
    assert forest.tree.prune(directory)
    assert not directory.is_attached


def test_descendants_are_what_was_built_on_a_chunk() -> None:
    forest = Forest()
    forest.store("a", "ab", "abc", "abX", "abXY", "Z")
    found = [name_of(chunk.key) for chunk in forest.tree.descendants(forest.chunks[key("a")])]
    assert sorted(found) == ["ab", "abX", "abXY", "abc"]
    assert found.index("abX") < found.index("abXY")


@pytest.mark.parametrize("position", [0, 1, 7])
def test_lying_positions_do_no_harm(position: int) -> None:
    """A client that gives a wrong position, or a parent that is the chunk itself, breaks nothing."""
    forest = Forest()
    forest.store("a", "ab", "abc")
    forest.add("x", "ab", position)
    forest.add("y", "y", position)
    listed = sorted(name for names in forest.shape().values() for name in names)
    assert listed == ["a", "ab", "abc", "x", "y"]
    for directory in list(forest.tree.directories.values()):
        remove_tree(forest, directory)
    assert not forest.chunks


class Prefixes(RuleBasedStateMachine):
    """A random forest of true parents; its chunks come and go in any order, and so does whoever keeps directories."""

    @initialize(parents=st.lists(st.integers(0, 3), min_size=3, max_size=10), num_stored=st.integers(0, 10))
    def begin(self, parents: list[int], num_stored: int) -> None:
        self.forest = Forest()
        self.parent: dict[str, str] = {}
        self.position: dict[str, int] = {}
        for number, choice in enumerate(parents):
            name = chr(ord("a") + number)
            above = number - 1 - choice  # mostly chains, with a branch here and there
            self.parent[name] = "root" if above < 0 else chr(ord("a") + above)
            self.position[name] = 0 if above < 0 else self.position[self.parent[name]] + 1
        self.kept: list[Directory] = []
        for name in list(self.parent)[:num_stored]:
            self.forest.add(name, self.parent[name], self.position[name])

    @property
    def stored(self) -> list[str]:
        return [name_of(key_) for key_ in self.forest.chunks]

    @property
    def missing(self) -> list[str]:
        return [name for name in self.parent if key(name) not in self.forest.chunks]

    def homes(self) -> dict[str, Directory | None]:
        return {name_of(key_): chunk.directory for key_, chunk in self.forest.chunks.items()}

    def names(self) -> dict[tuple[Directory | None, str], Directory]:
        paths = [[None, *path] for path in walk(self.forest.tree)]
        return {(path[-2], path[-1].name): path[-1] for path in paths if path[-1] is not None}

    @precondition(lambda self: self.missing)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        """Only what is said to have moved did: what is behind a split, and what is joined, which is built on the new."""
        name = data.draw(st.sampled_from(self.missing))
        before, names_before = self.homes(), self.names()
        _, moves = self.forest.add(name, self.parent[name], self.position[name])
        origin = {name_of(chunk.key): directory for chunk, directory in reversed(moves.chunks)}
        for other, directory in self.homes().items():
            if other != name and other not in origin:
                assert directory is before[other]
            elif other != name:
                assert origin[other] is before[other]
        gone = {(renamed.parent, renamed.name): renamed.directory for renamed in moves.directories}
        for place, directory in names_before.items():
            assert self.names().get(place) is directory or gone[place] is directory

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """A removal moves nothing."""
        name = data.draw(st.sampled_from(self.stored))
        before = self.homes()
        assert self.forest.remove(name) is before.pop(name)
        assert self.homes() == before

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        directory = self.homes()[data.draw(st.sampled_from(self.stored))]
        assert directory is not None
        directory.keep += 1
        self.kept.append(directory)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        directory = data.draw(st.sampled_from(self.kept))
        self.kept.remove(directory)
        directory.keep -= 1
        self.forest.tree.prune(directory)

    @precondition(lambda self: self.forest.tree.directories)
    @rule(data=st.data())
    def remove_recursively(self, data: st.DataObject) -> None:
        """``rm -r`` of any directory succeeds, and takes what was in it, no more."""
        paths = list(walk(self.forest.tree))
        directory = data.draw(st.sampled_from([path[-1] for path in paths]))
        doomed = {name_of(chunk.key) for chunk in directory.subtree()}
        survivors = set(self.stored) - doomed
        kept_before = {below: below.keep for path in paths for below in path if directory in path}
        for below in kept_before:
            below.keep = 0
        self.kept = [other for other in self.kept if other not in kept_before]
        remove_tree(self.forest, directory)
        assert set(self.stored) == survivors
        assert not directory.is_attached

    @invariant()
    def every_chunk_is_in_one_directory(self) -> None:
        listed = [chunk for path in walk(self.forest.tree) for chunk in path[-1].chunks()]
        assert len(listed) == len(set(listed))
        assert set(listed) == set(self.forest.chunks.values())

    @invariant()
    def directories_are_linked(self) -> None:
        for path in walk(self.forest.tree):
            directory = path[-1]
            assert directory.is_attached
            assert directory.parent is (path[-2] if len(path) > 1 else None)
            chunks = list(directory.chunks())
            assert directory.num_chunks == len(chunks)
            assert all(directory.has(chunk) for chunk in chunks)
            assert [chunk.position for chunk in chunks] == sorted(chunk.position for chunk in chunks)
            assert [chunk.previous for chunk in chunks] == [None, *chunks][: len(chunks)]
            assert directory.keep or not directory.is_empty

    @invariant()
    def directories_hold_what_was_built_on_their_name(self) -> None:
        """``rm -r`` of a prefix never takes what was not built on it."""
        for path in walk(self.forest.tree):
            for chunk in path[-1].chunks():
                ancestors, name = [], name_of(chunk.key)
                while name != "root":
                    ancestors.append(name)
                    name = self.parent[name]
                assert {name_of(directory.key) for directory in path} <= set(ancestors)

    @invariant()
    def what_waits_at_the_top_has_no_parent_there(self) -> None:
        """A fragment is joined as soon as it can be."""
        for directory in self.forest.tree.directories.values():
            first = next(directory.chunks(), None)
            if first is not None and first.key == directory.key and (parent := self.forest.chunks.get(first.parent)):
                raise AssertionError(f"{name_of(directory.key)} was not joined to {name_of(parent.key)}")

    @invariant()
    def descendants_were_built_on_their_chunk(self) -> None:
        """What is demoted when a chunk goes really was built on it."""
        for name in self.stored:
            for chunk in self.forest.tree.descendants(self.forest.chunks[key(name)]):
                above = self.parent[name_of(chunk.key)]
                while above != name:
                    above = self.parent[above]

    @invariant()
    def a_run_ends_at_a_branch(self) -> None:
        """No chunk has both its next in the run and another child heading a directory there."""
        for path in walk(self.forest.tree):
            heads = {first.parent for below in path[-1].subdirectories.values() for first in list(below.chunks())[:1]}
            for chunk in path[-1].chunks():
                if chunk.next is not None and chunk.next.parent == chunk.key:
                    assert chunk.key not in heads


Prefixes.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestPrefixes = Prefixes.TestCase


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[dict[str, str], list[str]]:
    """Several chains that branch, by parent, and an order in which their chunks come."""
    parent: dict[str, str] = {}
    for number in range(draw(st.integers(1, 30))):
        above = number - 1 - draw(st.sampled_from([0, 0, 0, 0, 1, 2, 5, 40]))
        parent[f"c{number}"] = f"c{above}" if above >= 0 else "root"
    order = draw(st.one_of(st.permutations(list(parent)), st.just(list(reversed(parent)))))
    return parent, order


@given(arrivals(), st.sets(st.integers(0, 29)))
@settings(max_examples=250)
def test_any_order_of_arrival_gives_the_same_prefixes(
    arrival: tuple[dict[str, str], list[str]], made: set[int]
) -> None:
    """Nothing is lost, each chunk reaches what was built on it, and nesting comes from branches alone."""
    parent, order = arrival
    forest = Forest()
    position = {"root": -1}
    for name, above in parent.items():
        position[name] = position[above] + 1
    for number in made:  # mkdir, by whoever copies
        top = forest.tree.make_directory(key(f"c{number}"), None)
        forest.tree.make_directory(key(f"c{number + 2}"), top).keep += 1
    for name in order:
        forest.add(name, parent[name], position[name])

    children: dict[str, set[str]] = {}
    for name, above in parent.items():
        children.setdefault(above, set()).add(name)

    def below(name: str) -> set[str]:
        return set().union(*({child} | below(child) for child in children.get(name, ())))

    for name in parent:
        found = [name_of(chunk.key) for chunk in forest.tree.descendants(forest.chunks[key(name)])]
        assert len(found) == len(set(found))
        assert set(found) == below(name)
    tops = {path: names for path, names in forest.shape().items() if "/" not in path and names}
    assert set(tops) == children["root"]
    for path in walk(forest.tree):
        chunks = list(path[-1].chunks())
        if chunks:
            assert path[-1].key == chunks[0].key
            first = name_of(chunks[0].key)
            num_branches = 0
            while (first := parent[first]) != "root":
                num_branches += len(children[first]) > 1
            assert len(path) - 1 == num_branches
