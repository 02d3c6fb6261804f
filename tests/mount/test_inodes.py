"""Lookup counts, and how long a directory is kept."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import cast

import pytest

from kvfs.catalog import Catalog, Chunk, ChunkTable
from kvfs.mount.inodes import LINGER_S, Inodes
from kvfs.prefixes import PrefixDirectory


def home(chunk: Chunk) -> PrefixDirectory[Chunk]:
    return cast("PrefixDirectory[Chunk]", chunk.directory)


def test_a_node_is_known_until_the_last_count_is_taken_back(add: Callable[[str], Chunk], catalog: Catalog) -> None:
    chunk = add("a")
    inodes = Inodes()
    assert inodes.get(chunk.inode) is None
    for _ in range(3):
        inodes.remember(chunk)
    catalog.discard(chunk)  # removal does not change what the number means
    inodes.forget(chunk.inode, 2, 0)
    assert inodes.get(chunk.inode) is chunk
    inodes.forget(chunk.inode, 1, 0)
    assert inodes.get(chunk.inode) is None
    assert len(inodes) == 0


@pytest.mark.parametrize("seed", range(5))
def test_counts_are_kept_in_any_order(add: Callable[[str], Chunk], seed: int) -> None:
    """Known exactly as long as more was told than was taken back."""
    source = random.Random(seed)
    chunk = add("a")
    inodes = Inodes()
    count = 0
    for _ in range(200):
        if count and source.random() < 0.5:
            taken = source.randint(1, count)
            inodes.forget(chunk.inode, taken, 0)
            count -= taken
        else:
            inodes.remember(chunk)
            count += 1
        assert (inodes.get(chunk.inode) is chunk) == (count > 0)


def test_forgetting_more_than_was_told_does_no_harm(add: Callable[[str], Chunk]) -> None:
    directory = home(add("a"))
    inodes = Inodes()
    inodes.forget(directory.inode, 5, 0)
    inodes.remember(directory)
    inodes.forget(directory.inode, 5, 0)
    inodes.forget(directory.inode, 5, 0)
    inodes.expire(LINGER_S)
    assert directory.keep == 0


def test_an_empty_directory_goes_a_minute_after_it_was_forgotten(
    add: Callable[[str], Chunk], catalog: Catalog, table: ChunkTable
) -> None:
    chunk = add("a")
    directory = home(chunk)
    inodes = Inodes()
    inodes.remember(directory)
    catalog.discard(chunk)
    assert directory.is_attached
    inodes.forget(directory.inode, 1, 100.0)
    inodes.expire(100.0 + LINGER_S - 1)
    assert directory.is_attached
    inodes.expire(100.0 + LINGER_S)
    assert not directory.is_attached
    assert not table.prefixes.directories


def test_a_directory_that_is_looked_at_again_meanwhile_stays(add: Callable[[str], Chunk], catalog: Catalog) -> None:
    chunk = add("a")
    directory = home(chunk)
    inodes = Inodes()
    inodes.remember(directory)
    catalog.discard(chunk)
    inodes.forget(directory.inode, 1, 0.0)
    inodes.remember(directory)
    inodes.expire(LINGER_S)
    assert directory.is_attached
    inodes.forget(directory.inode, 1, LINGER_S)
    inodes.expire(2 * LINGER_S)
    assert not directory.is_attached


def test_a_directory_that_is_not_empty_stays(add: Callable[[str], Chunk]) -> None:
    directory = home(add("a"))
    inodes = Inodes()
    inodes.remember(directory)
    inodes.forget(directory.inode, 1, 0.0)
    inodes.expire(LINGER_S)
    assert directory.is_attached
    assert directory.keep == 0


def test_after_an_unmount_nothing_is_kept(add: Callable[[str], Chunk]) -> None:
    one, other = home(add("a")), home(add("b"))
    inodes = Inodes()
    inodes.remember(one)
    inodes.remember(other)
    inodes.forget(other.inode, 1, 0.0)
    inodes.forget_all()
    assert one.keep == other.keep == 0
    assert inodes.get(one.inode) is None
