"""Extended attributes: ``getfattr -d`` shows what the cache knows, ``setfattr`` says what it is to keep.

Of a chunk: tier, hits, position, tokens, parent, checksum, dirty, key; volume, where there are several, the directory of
the one it is on; and pin and pinned_until while it is pinned.
Of a directory of the prefix view, and of a namespace's: pin and pinned_until, if everything in it is pinned. What is
pinned there is what it holds at that time, with all directories below.

Of a namespace's directory besides: quota ("20GiB") and max_age ("3d"), "none" without a limit, stored_bytes, and what went
because of the two since the daemon began, evicted_chunks and evicted_bytes; of files
that are being copied in, which nobody lists, staging_files and staging_bytes.

Of both kinds of node below a namespace also what was said of them, see `hint_xattrs`: class, expect, closed.
Of the root, to be set by the mount's owner: policy, the one in force (see `kvfs set`).

A pin is set as a duration ("90s", "15min", "2h", "3d") or "forever", and ended by "no", by nothing, or by removing it.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Iterable

from kvfs.catalog import NOWHERE, Chunk, ChunkTable
from kvfs.config import exact_size, parse_size
from kvfs.durations import NS, exact_duration, parse_duration, rfc3339
from kvfs.errors import UsageError
from kvfs.limits import Went
from kvfs.mount.errnos import Refused
from kvfs.mount.hint_xattrs import OF_HINTS, hint_value, hintable, hinted_names, is_said, meant, parse_hint
from kvfs.mount.nodes import Fixed, Node, Role
from kvfs.mount.staged_names import DraftDirectory, StagedFile, StagedNames
from kvfs.pins import FOREVER
from kvfs.policy_change import check as check_policy
from kvfs.prefixes import PrefixDirectory
from kvfs.store import Store

PREFIX = "user.kvfs."
UNLIMITED = "none"
_MAX_REMEMBERED = 4096
_MOST = (1 << 63) - 1  # what the index can keep


def tier_text(chunk: Chunk) -> str:
    """Where the bytes are: "ram", "nvme", "ram+nvme", or "none"."""
    tiers = [name for name, offset in (("ram", chunk.ram), ("nvme", chunk.nvme)) if offset != NOWHERE]
    return "+".join(tiers) or "none"


_FACTS: dict[str, Callable[[Chunk], str]] = {
    "tier": tier_text,
    "hits": lambda chunk: str(chunk.hits),
    "position": lambda chunk: str(chunk.position),
    "tokens": lambda chunk: str(chunk.num_tokens),
    "parent": lambda chunk: chunk.parent.hex(),
    "dirty": lambda chunk: "1" if chunk.is_dirty else "0",
    "key": lambda chunk: chunk.key.hex(),
}
_OF_CHUNKS = (*_FACTS, "checksum")
_OF_PINS = ("pin", "pinned_until")
_OF_NAMESPACES: dict[str, Callable[[ChunkTable], str]] = {
    "quota": lambda table: UNLIMITED if table.quota_bytes is None else exact_size(table.quota_bytes),
    "max_age": lambda table: UNLIMITED if table.max_age_ns is None else exact_duration(table.max_age_ns),
    "stored_bytes": lambda table: str(table.stored_bytes),
}
LIMITS = ("quota", "max_age")
POLICY = "policy"
_OF_STAGING: dict[str, Callable[[set[StagedFile]], str]] = {
    "staging_files": lambda files: str(len(files)),
    "staging_bytes": lambda files: str(sum(file.staged.capacity for file in files)),
}
_OF_LIMITS: dict[str, Callable[[Went], str]] = {
    "evicted_chunks": lambda went: str(went.num_chunks),
    "evicted_bytes": lambda went: str(went.size_bytes),
}
_READ_ONLY = frozenset({*_OF_CHUNKS, *_OF_STAGING, *_OF_LIMITS, "volume", "pinned_until", "stored_bytes"})


class Xattrs:
    """Reads and changes attributes; names come without their prefix.

    Only `checksum` needs the chunk's header: it is a digest of the checksums of the layers. The last checksums are
    remembered, for getfattr asks twice: for the size and for the value.
    """

    def __init__(self, store: Store, names: StagedNames) -> None:
        self._store = store
        self._names = names
        self._checksums: dict[int, bytes] = {}  # by inode: a chunk never changes

    def keep_for_later(self, node: Node, name: str, value: bytes) -> bool:
        """An attribute of what is being copied in, as `cp -a` and `rsync -X` bring them; whether nothing is left to do."""
        if isinstance(node, StagedFile):
            if name == "pin":
                parse_pin(value, 0)
                node.pin = value
            return True
        if is_told_only(name) or (name in OF_HINTS and isinstance(node, DraftDirectory | Fixed)):
            return True
        if not isinstance(node, Fixed) or node.table is not None:
            return False
        if name == "pin":
            parse_pin(value, 0)  # a pin is for what is there, and the chunks bring theirs
            return True
        if node.draft is None or name not in LIMITS:
            return False
        check_limit(name, value)
        node.draft.limits[name] = value
        return True

    def names(self, node: Node) -> list[str]:
        """What `listxattr` shows."""
        said = list(_OF_PINS) if self._end_of_pin(node) is not None else []
        said += hinted_names(node, self._store.system.monotonic())
        if isinstance(node, Chunk) and not node.is_removed:
            return [*_OF_CHUNKS, *(["volume"] if self._volume(node) is not None else []), *said]
        table = _namespace(node)
        if table is None:
            return said
        # Without what is only told: rsync -X sets again whatever is listed.
        return [name for name in LIMITS if _OF_NAMESPACES[name](table) != UNLIMITED] + said

    def value_nowait(self, node: Node, name: str) -> str | None:
        """The value of an attribute, None if the node has none of this name."""
        if name in _OF_PINS:
            until_ns = self._end_of_pin(node)
            if until_ns is None or until_ns == FOREVER:
                return None if until_ns is None else "forever"
            if name == "pinned_until":
                return rfc3339(until_ns)
            return f"{-(-(until_ns - self._store.system.time_ns()) // NS)}s"
        if name in OF_HINTS:
            return hint_value(node, name, self._store.system.monotonic())
        if _is_root(node):
            return self._store.policy.name if name == POLICY else None
        table = _namespace(node)
        if table is not None:
            if name in _OF_STAGING:
                return _OF_STAGING[name](self._names.of_table(table))
            if name in _OF_LIMITS:
                return _OF_LIMITS[name](self._store.limits.went(table))
            return _OF_NAMESPACES[name](table) if name in _OF_NAMESPACES else None
        if not isinstance(node, Chunk) or node.is_removed:
            return None
        if name == "volume":
            return self._volume(node)
        return _FACTS[name](node) if name in _FACTS else None

    def _volume(self, chunk: Chunk) -> str | None:
        return self._store.volume_directory(chunk) if len(self._store.settings.nvme) > 1 else None

    def checksum_nowait(self, chunk: Chunk) -> bytes | None:
        """The value of `checksum`, or None if it has to be read."""
        return self._checksums.get(chunk.inode)

    async def read_checksum(self, chunk: Chunk) -> bytes:
        """The value of `checksum`. Raises what `Store.facts` raises."""
        self._store.lease(chunk)
        try:
            facts = await self._store.facts(chunk)
        finally:
            self._store.release(chunk)
        text = facts.payload_digest.encode()
        if len(self._checksums) >= _MAX_REMEMBERED:
            self._checksums.clear()
        self._checksums[chunk.inode] = text
        return text

    def change(self, node: Node, name: str, value: bytes | None) -> Callable[[], Awaitable[object]]:
        """What sets an attribute, or removes it (None), durably.

        Raises Refused (EPERM for what is only told, ENOTSUP for what there is not, ENODATA for nothing to remove), and
        UsageError for a value that cannot be understood.
        """
        if name in _READ_ONLY:
            raise Refused(errno.EPERM)
        if name == "pin" and (chunks := _pinnable(node)) is not None:
            return self.change_pin(list(chunks), value)
        table = _namespace(node)
        if table is not None and name in LIMITS:
            check_limit(name, value)
            return lambda: set_limit(self._store, table, name, value)
        if name in OF_HINTS and hintable(node) is not None:
            if value is None and not is_said(node, name):
                raise Refused(errno.ENODATA)
            said = parse_hint(name, value)
            return lambda: self._store.hints.set_all(meant(node, name), said)
        if _is_root(node) and name == POLICY and value is not None:
            policy = _text(value)
            check_policy(policy)
            return lambda: self._store.policy.change(policy)
        raise Refused(errno.ENOTSUP)

    def change_pin(self, chunks: list[Chunk], value: bytes | None) -> Callable[[], Awaitable[object]]:
        """What pins these chunks, or ends that. Raises Refused (ENODATA for none to remove), and UsageError."""
        limits = self._store.limits
        if value is None and not any(limits.end_of_pin(chunk) is not None for chunk in chunks):
            raise Refused(errno.ENODATA)
        now_ns = self._store.system.time_ns()
        until_ns = parse_pin(value or b"no", now_ns)
        if until_ns <= now_ns:
            return lambda: limits.unpin(chunks)
        return lambda: limits.pin(chunks, until_ns)

    def _end_of_pin(self, node: Node) -> int | None:
        chunks = _pinnable(node)
        return None if chunks is None else self._store.limits.common_end(chunks)


async def set_limit(store: Store, table: ChunkTable, name: str, value: bytes | None) -> None:
    """Set "quota" or "max_age" of a namespace, durably. Raises UsageError, and what `Limits` raises."""
    if name == "quota":
        await store.limits.set_quota(table, parse_quota(value))
    else:
        await store.limits.set_max_age(table, parse_max_age(value))


def check_limit(name: str, value: bytes | None) -> None:
    """Raise UsageError for a value that `set_limit` would not understand."""
    (parse_quota if name == "quota" else parse_max_age)(value)


def is_told_only(name: str) -> bool:
    """Whether an attribute says a fact, which nobody can set."""
    return name in _READ_ONLY


def parse_pin(value: bytes, now_ns: int) -> int:
    """When a pin ends that is set to this now, in nanoseconds since the epoch; 0 for none. Raises UsageError."""
    text = _text(value)
    if text in ("no", ""):
        return 0
    if text == "forever":
        return FOREVER
    try:
        return min(FOREVER, now_ns + int(parse_duration(text, "pin") * NS))
    except UsageError as error:
        raise UsageError(f"{error}, or forever, or no") from error


def parse_quota(value: bytes | None) -> int | None:
    """Bytes; None for no limit. Raises UsageError."""
    text = _text(value or b"")
    return None if text in ("", UNLIMITED) else min(parse_size(text), _MOST)


def parse_max_age(value: bytes | None) -> int | None:
    """Nanoseconds; None for no limit. Raises UsageError."""
    text = _text(value or b"")
    return None if text in ("", UNLIMITED) else min(int(parse_duration(text, "max_age") * NS), _MOST)


def _text(value: bytes) -> str:
    return value.decode("ascii", "replace").strip("\0 \n")


def _namespace(node: Node) -> ChunkTable | None:
    """The namespace whose directory this is."""
    return node.table if isinstance(node, Fixed) and node.role is Role.NAMESPACE else None


def _is_root(node: Node) -> bool:
    return isinstance(node, Fixed) and node.role is Role.ROOT


def _pinnable(node: Node) -> Iterable[Chunk] | None:
    """The chunks that a pin on this node is for."""
    if isinstance(node, Chunk):
        return () if node.is_removed else (node,)
    if isinstance(node, PrefixDirectory):
        return node.subtree()
    table = _namespace(node)
    return None if table is None else table.chunks.values()
