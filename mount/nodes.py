"""Nodes: what a name in the mount can stand for, and what `stat` says of it.

A node is a `Fixed` (a place that is always there), a `Chunk`, or a `PrefixDirectory` of the catalog; or what is being
copied in, see `staged_names`. Which names there are is in `tree`.
"""

from __future__ import annotations

import enum
import stat
from dataclasses import dataclass
from typing import NamedTuple

from kvfs.catalog import Chunk, ChunkTable
from kvfs.mount.staged_names import Draft, DraftDirectory, StagedFile
from kvfs.prefixes import PrefixDirectory

MAX_NAME_BYTES = 255
TIMEOUT_S = 1.0  # how long the kernel may believe an attribute: `ls -ltu` shows the last second's hits
SECTOR_BYTES = 512  # the unit of st_blocks, stat(2)
DIRECTORY_BLOCK_BYTES = 128 << 10  # st_blksize: glibc reads a directory by so much, and no more than this comes at once
CHUNK_BLOCK_BYTES = 1 << 20  # st_blksize: cat and cp then read by the MiB, the largest FUSE request


class Role(enum.Enum):
    """What a fixed node is."""

    ROOT = enum.auto()
    README = enum.auto()
    CONTROL = enum.auto()
    SESSION = enum.auto()
    STATUS = enum.auto()
    METRICS = enum.auto()
    EVENTS = enum.auto()
    CONFIG = enum.auto()
    NAMESPACE = enum.auto()
    NAMESPACE_JSON = enum.auto()
    CHUNKS = enum.auto()
    PREFIXES = enum.auto()


DIRECTORIES = frozenset({Role.ROOT, Role.CONTROL, Role.NAMESPACE, Role.CHUNKS, Role.PREFIXES})
DIRECTORY_MODE = stat.S_IFDIR | 0o750
CHUNK_MODE = (
    stat.S_IFREG | 0o640
)  # its owner may copy over it and set attributes: what does not prove itself is refused
FILE_MODE = stat.S_IFREG | 0o440
LINK_MODE = stat.S_IFLNK | 0o777  # the mode of a link is never looked at, symlink(7)


@dataclass(frozen=True, slots=True, eq=False)
class Fixed:
    """A node that is always there.

    `table` is the namespace it belongs to, if it belongs to one; `draft` tells that somebody is copying it in.
    """

    role: Role
    inode: int
    name: bytes
    table: ChunkTable | None = None
    draft: Draft | None = None


Node = Fixed | Chunk | PrefixDirectory[Chunk] | StagedFile | DraftDirectory


class Attributes(NamedTuple):
    """What `stat` says. Times are nanoseconds since the epoch, sizes bytes; `timeout_s`: how long it may be cached."""

    inode: int
    mode: int
    links: int
    size: int
    block_bytes: int
    modified_ns: int
    used_ns: int
    created_ns: int
    timeout_s: float


def is_directory(node: Node) -> bool:
    """Whether a node has entries."""
    return isinstance(node, PrefixDirectory | DraftDirectory) or (isinstance(node, Fixed) and node.role in DIRECTORIES)


def is_growing(node: Node) -> bool:
    """Whether the size of a file changes under the reader, as `tail -f` expects."""
    return isinstance(node, Fixed) and node.role is Role.EVENTS


def text_of(name: bytes) -> str:
    """A name as the catalog has it. What is no ASCII is no name of ours, and stays different from all of them."""
    return name.decode("ascii", "surrogateescape")
