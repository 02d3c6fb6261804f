"""What `kvfs ls` shows, gathered from the mount with plain file calls. How it is shown is in `ls`.

Chunks come and go while this looks: what is gone by the time it is looked at is left out.

Concurrency: every function blocks; they are called in a thread and say through `beat` that they get on.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime

from kvfs import namespace as namespaces
from kvfs.chunk import SUFFIX
from kvfs.durations import NS
from kvfs.errors import UsageError
from kvfs.tools.mounted import Beat

MAX_LOOKED_INTO = 20_000  # chunks whose extended attributes are read: each costs a request to the daemon
FOREVER = "forever"
SHORT_NAME = 8  # hex digits of a key in a pattern: one in four thousand million others begins alike


@dataclass(slots=True)
class Entry:
    """A namespace, a prefix with all that is built on it, or a chunk.

    Attributes:
        name: of its directory or file; a chunk's is its key.
        path, short_path: of a prefix, what `rm -rf` takes below "prefixes"; the short one is a pattern for the shell
            that fits nothing else. None for the others.
        depth: of a prefix below the first ones.
        num_chunks, size_bytes: how many and how large.
        num_tokens: in those chunks, None if not looked into.
        tiers: where the bytes are, "ram", "nvme"; None if not looked into.
        last_used_ns, published_ns: of the latest, nanoseconds since the epoch, 0 if there is none.
        position, hits: of a chunk; pinned_until: when its pin ends, nanoseconds since the epoch, or "forever"; None without one.
        staging_files, staging_bytes: of a namespace: what is being copied in, which is no chunk yet.
    """

    name: str
    path: str | None = None
    short_path: str | None = None
    depth: int = 0
    num_chunks: int = 0
    size_bytes: int = 0
    num_tokens: int | None = 0
    tiers: set[str] | None = field(default_factory=set)
    last_used_ns: int = 0
    published_ns: int = 0
    position: int | None = None
    hits: int | None = None
    pinned_until: int | str | None = None
    staging_files: int | None = None
    staging_bytes: int | None = None

    def add(self, other: Entry) -> None:
        """Count `other` in."""
        self.num_chunks += other.num_chunks
        self.size_bytes += other.size_bytes
        self.last_used_ns = max(self.last_used_ns, other.last_used_ns)
        self.published_ns = max(self.published_ns, other.published_ns)
        if self.num_tokens is not None:
            self.num_tokens = None if other.num_tokens is None else self.num_tokens + other.num_tokens
        if self.tiers is not None:
            self.tiers = None if other.tiers is None else self.tiers | other.tiers


def list_namespaces(path: str, beat: Beat) -> list[Entry]:
    """The namespaces of the mount at `path`, the last used first."""
    entries = []
    for name in namespace_names(path):
        total = Entry(name, num_tokens=None, tiers=None)
        for chunk in _chunks(os.path.join(path, name, "chunks"), beat, looks_into=False):
            total.add(chunk)
        total.staging_files, total.staging_bytes = staging_of(os.path.join(path, name))
        entries.append(total)
    return _by_last_use(entries)


def staging_of(directory: str) -> tuple[int, int]:
    """How many files are being copied to a namespace, and the bytes that they take; none if it is gone."""
    try:
        files, size = (int(os.getxattr(directory, f"user.kvfs.{name}")) for name in ("staging_files", "staging_bytes"))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODATA):
            raise
        return 0, 0
    return files, size


def namespace_names(path: str) -> list[str]:
    """The names of all namespaces of the mount at `path`."""
    return sorted(name for name in os.listdir(path) if namespaces.is_directory_name(name))


def find_namespace(path: str, wanted: str, beat: Beat) -> str:
    """The one namespace whose name is or begins with `wanted`; raises UsageError if there is none, or several."""
    names = namespace_names(path)
    beat()
    if wanted in names:
        return wanted
    found = [name for name in names if name.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{wanted!r} is the beginning of several namespaces: {', '.join(found)}")
    raise UsageError(f"there is no namespace {wanted!r} in {path}; there are: {', '.join(names) or 'none'}")


def list_prefixes(path: str, namespace: str, beat: Beat) -> list[Entry]:
    """The prefix directories of a namespace, each before those below it, the last used first.

    Each counts what `rm -rf` of it would remove; those that hold nothing any more are left out. Attributes of chunks
    are read unless there are too many.
    """
    root = os.path.join(path, namespace)
    looks_into = len(_names(os.path.join(root, "chunks"))) <= MAX_LOOKED_INTO
    beat()
    prefixes = os.path.join(root, "prefixes")
    found = _trees(prefixes, _names(prefixes), None, beat, looks_into)
    return [entry for tree in found for entry in tree]


def list_chunks(path: str, namespace: str, limit: int, beat: Beat) -> tuple[list[Entry], int]:
    """The `limit` chunks of a namespace that were used last, and how many there are."""
    directory = os.path.join(path, namespace, "chunks")
    chunks = _by_last_use(list(_chunks(directory, beat, looks_into=False)))
    shown = chunks[:limit]
    for chunk in shown:
        _look_into(chunk, os.path.join(directory, chunk.name + SUFFIX))
        beat()
    return [chunk for chunk in shown if chunk.tiers is not None], len(chunks)


def short_names(names: Iterable[str]) -> dict[str, str]:
    """For each name a pattern that fits no other of them: its first letters and "*"."""
    ordered = sorted(names)
    needed = {}
    for name, before, after in zip(ordered, ["", *ordered], [*ordered[1:], ""], strict=False):
        alike = max(len(os.path.commonprefix((name, other))) for other in (before, after))  # noqa: RUF071 - letters count
        end = max(SHORT_NAME, alike + 1)
        needed[name] = name if end >= len(name) else f"{name[:end]}*"
    return needed


def _trees(parent: str, names: list[str], above: Entry | None, beat: Beat, looks_into: bool) -> list[list[Entry]]:
    """The prefix directories among the `names` in a directory, each with those below it, the last used first."""
    patterns = short_names(names)
    trees = []
    for name in names:
        if name.endswith(SUFFIX):
            continue
        entry = Entry(name, name, patterns[name])
        if above is not None:
            entry.path, entry.short_path = f"{above.path}/{name}", f"{above.short_path}/{entry.short_path}"
            entry.depth = above.depth + 1
        tree = _tree(os.path.join(parent, name), entry, beat, looks_into)
        if entry.num_chunks:
            trees.append(tree)
    return sorted(trees, key=lambda tree: (-tree[0].last_used_ns, tree[0].name))


def _tree(directory: str, total: Entry, beat: Beat, looks_into: bool) -> list[Entry]:
    """A prefix directory, which counts in all that is below it, and what is."""
    for chunk in _chunks(directory, beat, looks_into):
        total.add(chunk)
    below = _trees(directory, _names(directory), total, beat, looks_into)
    for tree in below:
        total.add(tree[0])
    return [total, *(entry for tree in below for entry in tree)]


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def _chunks(directory: str, beat: Beat, looks_into: bool) -> Iterator[Entry]:
    for name in _names(directory):
        if not name.endswith(SUFFIX):
            continue
        path = os.path.join(directory, name)
        beat()
        try:
            stat = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            continue
        chunk = Entry(
            name.removesuffix(SUFFIX),
            num_chunks=1,
            size_bytes=stat.st_size,
            num_tokens=None,
            tiers=None,
            last_used_ns=stat.st_atime_ns,
            published_ns=stat.st_mtime_ns,
        )
        if looks_into:
            _look_into(chunk, path)
        yield chunk


def _look_into(chunk: Entry, path: str) -> None:
    """Fill in what only the extended attributes tell; leaves it open if the chunk is gone."""
    try:
        tier, tokens, position, hits = (
            os.getxattr(path, f"user.kvfs.{name}", follow_symlinks=False).decode()
            for name in ("tier", "tokens", "position", "hits")
        )
    except OSError:
        return
    chunk.pinned_until = _end_of_pin(path)
    chunk.tiers = set(tier.split("+")) - {"none"}
    chunk.num_tokens, chunk.position, chunk.hits = int(tokens), int(position), int(hits)


def _end_of_pin(path: str) -> int | str | None:
    try:
        text = os.getxattr(path, "user.kvfs.pinned_until", follow_symlinks=False).decode()
    except OSError:
        return None
    return text if text == FOREVER else int(datetime.fromisoformat(text).timestamp()) * NS


def _by_last_use(entries: list[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: (-entry.last_used_ns, entry.name))
