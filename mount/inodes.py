"""Which chunks and prefix directories the kernel knows, and how often it was told of each (lookup counts).

The kernel names a node by its inode from the first `lookup` or `readdir` that showed it until the `forget` that takes
the last count back; until then the number must mean the same node, removed or not. Fixed nodes are not counted here.

A directory is kept in the tree while the kernel knows it and for `LINGER_S` after: `rm -r` and other walkers come
back to a directory whose last chunk just went.

Concurrency: belongs to the event loop's thread, nothing here waits.
"""

from __future__ import annotations

from collections import deque

from kvfs.catalog import Chunk
from kvfs.mount.staged_names import DraftDirectory, StagedFile
from kvfs.prefixes import PrefixDirectory

LINGER_S = 60.0

Counted = Chunk | PrefixDirectory[Chunk] | StagedFile | DraftDirectory


class Inodes:
    """What the kernel knows.

    Invariant: a directory's `keep` is raised by one while it is known, and by one for each time that it was forgotten
    less than `LINGER_S` ago.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, Counted] = {}
        self._extra: dict[int, int] = {}  # counts above one: few, and `ls` of a million names need not pay for them
        self._lingering: deque[tuple[float, PrefixDirectory[Chunk]]] = deque()

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, inode: int) -> Counted | None:
        """The node that the kernel means, if it knows it."""
        return self._nodes.get(inode)

    def remember(self, node: Counted) -> None:
        """The kernel is told of a node once more."""
        inode = node.inode
        if inode in self._nodes:
            self._extra[inode] = self._extra.get(inode, 0) + 1
            return
        self._nodes[inode] = node
        if isinstance(node, PrefixDirectory):
            node.keep += 1

    def replace(self, chunk: Chunk) -> None:
        """A staged file has become this chunk, with the inode that it had."""
        if chunk.inode in self._nodes:
            self._nodes[chunk.inode] = chunk

    def forget(self, inode: int, count: int, now_s: float) -> None:
        """The kernel gives `count` back. What it was never told is ignored."""
        extra = self._extra.pop(inode, 0)
        if count <= extra:
            if count < extra:
                self._extra[inode] = extra - count
            return
        node = self._nodes.pop(inode, None)
        if isinstance(node, PrefixDirectory):
            self._lingering.append((now_s + LINGER_S, node))

    def expire(self, now_s: float) -> None:
        """Let go of directories that were forgotten long enough ago; the tree drops those that are empty."""
        while self._lingering and self._lingering[0][0] <= now_s:
            _, directory = self._lingering.popleft()
            directory.keep -= 1
            directory.tree.prune(directory)

    def forget_all(self) -> None:
        """The file system is unmounted: the kernel knows nothing any more."""
        for node in self._nodes.values():
            if isinstance(node, PrefixDirectory):
                node.keep -= 1
        self._nodes.clear()
        self._extra.clear()
        while self._lingering:
            self._lingering.popleft()[1].keep -= 1
