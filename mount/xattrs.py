"""Extended attributes of a chunk: ``getfattr -d`` shows what the cache knows of it."""

from __future__ import annotations

from collections.abc import Callable

from kvfs.catalog import NOWHERE, Chunk
from kvfs.store import Store

PREFIX = "user.kvfs."
_MAX_REMEMBERED = 4096


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
_CHECKSUM = (PREFIX + "checksum").encode()
XATTRS = (*((PREFIX + name).encode() for name in _FACTS), _CHECKSUM)
"""All names, as the kernel has them."""


class Xattrs:
    """Reads attributes. Only `checksum` needs the chunk's header: it is a digest of the checksums of the layers.

    The last checksums are remembered, for getfattr asks twice: for the size and for the value.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._checksums: dict[int, bytes] = {}  # by inode: a chunk never changes

    def value_nowait(self, chunk: Chunk, name: bytes) -> bytes | None:
        """The value of one of `XATTRS`, or None if it has to be read."""
        if name == _CHECKSUM:
            return self._checksums.get(chunk.inode)
        return _FACTS[name.decode().removeprefix(PREFIX)](chunk).encode()

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
