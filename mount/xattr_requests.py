"""What is asked of extended attributes: whose a name is, what may wait, what goes to what is being copied in.

What the attributes are is in `xattrs`.

Concurrency: belongs to the event loop's thread. What reads a checksum from a tier, or changes something, waits; it is
bounded, see `tier_work`.
"""

from __future__ import annotations

import errno

from kvfs.catalog import Chunk
from kvfs.mount.copying_in import CopyingIn
from kvfs.mount.errnos import Refused
from kvfs.mount.nodes import Node
from kvfs.mount.staged_names import DraftDirectory, StagedNames
from kvfs.mount.tier_work import TierWork
from kvfs.mount.xattrs import PREFIX, Xattrs
from kvfs.store import Store

_NO_SUCH_ATTRIBUTE = errno.ENODATA


class XattrRequests:
    """Answers them. Names come with their prefix, as the kernel has them."""

    def __init__(self, store: Store, names: StagedNames, copying: CopyingIn, tier: TierWork) -> None:
        self._names = names
        self._copying = copying
        self._tier = tier
        self._xattrs = Xattrs(store, names)

    async def get(self, node: Node, name: bytes) -> bytes:
        """The value. Raises Refused (ENODATA, ENOTSUP)."""
        own = _own(name)
        if own is None:
            # `ls -l` asks for ACLs; told that there are none here at all, it asks once and not for every file
            # (90 against 8 µs a file).
            raise Refused(_NO_SUCH_ATTRIBUTE if name.startswith(b"user.") else errno.ENOTSUP)
        if own == "checksum" and isinstance(node, Chunk) and not node.is_removed:
            checksum = self._xattrs.checksum_nowait(node)
            if checksum is not None:
                return checksum
            return await self._tier.run(node, lambda: self._xattrs.read_checksum(node))
        value = self._xattrs.value_nowait(node, own)
        if value is None:
            raise Refused(_NO_SUCH_ATTRIBUTE)
        return value.encode()

    def listed(self, node: Node) -> list[bytes]:
        """The names that a node has."""
        return [(PREFIX + name).encode() for name in self._xattrs.names(node)]

    async def set(self, node: Node, name: bytes, value: bytes) -> None:
        """Set a value, now or when what is being copied in is there. Raises Refused and UsageError."""
        own = _own(name)
        if own is not None and self._copying.is_under_way(node):  # cp -a and rsync -X bring those of what they copy
            if isinstance(node, DraftDirectory) and own == "pin":
                await self._tier.run(None, self._xattrs.change_pin([*self._names.below(node)], value))
                return
            if self._xattrs.keep_for_later(node, own, value):
                return
        await self.change(node, name, value)

    async def change(self, node: Node, name: bytes, value: bytes | None) -> None:
        """Set a value, or remove it. Raises Refused and UsageError."""
        own = _own(name)
        if own is None:
            raise Refused(errno.ENOTSUP)
        await self._tier.run(None, self._xattrs.change(node, own, value))


def _own(name: bytes) -> str | None:
    """The name of one of our attributes without its prefix."""
    text = name.decode("ascii", "replace")
    return text.removeprefix(PREFIX) if text.startswith(PREFIX) else None
