"""Listings: what open directories show, piece by piece, and how much the kernel is told with each name.

The kernel asks for attributes with every name. It makes an inode of each that has them, which takes most of the time of
`ls -f`, and a GiB of its memory for a million: worth it only if somebody looks at what the names stand for before the
attributes are out of date. So the first `TOLD` entries of a directory have them, and those that follow are *bare*, unless
whoever lists also looks. That shows by *probes*: entries that are bare in any case, so that the kernel has to look them up.
For one of those the next `TOLD` entries have attributes again: `ls -l`, `du`, `find` and `rm -r` read on only when they have
looked at what they have, fts(3) after 100,000 entries at most.

A listing is right while chunks come and go: it is a copy of what was there when it began, offsets are places in that, and
what has gone meanwhile is left out.

Concurrency: belongs to the event loop's thread. Only `send`, when it begins, and `close` give others a turn: to copy or to
let go of a million entries takes 10 to 50 ms. One reply of 128 KiB takes less than 3 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic

import trio

from kvfs.catalog import Chunk
from kvfs.mount.attributes import Attributes, E
from kvfs.mount.bare_entry import BareEntry
from kvfs.mount.inodes import Inodes
from kvfs.mount.nodes import CHUNK_MODE, DIRECTORY_MODE, Fixed, Node, Role
from kvfs.mount.staged_names import DraftDirectory
from kvfs.mount.tree import Tree
from kvfs.prefixes import PrefixDirectory

TOLD = 1 << 17  # more than fts reads ahead, and than can be listed in the second for which attributes are believed
PROBES_FROM = TOLD // 2  # smaller directories need none
PROBE_EVERY = 1024  # each costs whoever looks a request, some 100 µs
_AT_ONCE = 1 << 14  # entries that are copied, or let go of, before others get a turn: below 1 ms


@dataclass(slots=True, eq=False)
class Listing:
    """A directory that is being listed.

    Attributes:
        node, inode: of the directory; viewer: the process that opened it.
        entries: what it held when the listing began. Offsets index it.
        told_until: entries from here on are bare.
        num_sent: as far as the listing has got.
        probes: inodes of those that the kernel has to look up before anybody can look at them.
    """

    node: Node
    inode: int
    viewer: int
    entries: list[Node] = field(default_factory=list)
    told_until: int = TOLD
    num_sent: int = 0
    probes: set[int] = field(default_factory=set)

    def looked_up(self, inode: int) -> None:
        """Somebody looks at an entry: if it is a probe, at others too."""
        if inode in self.probes:
            self.probes.clear()
            self.told_until = max(self.told_until, self.num_sent + TOLD)


class Listings(Generic[E]):
    """Opens listings, and sends what is in them. `new_entry` makes an entry for the kernel."""

    def __init__(self, tree: Tree, attributes: Attributes, inodes: Inodes, new_entry: Callable[[], E]) -> None:
        self._tree = tree
        self._attributes = attributes
        self._inodes = inodes
        self._entry, self._chunk_entry = new_entry(), new_entry()
        self._bare_chunk = _bare(new_entry(), CHUNK_MODE)
        self._bare_directory = _bare(new_entry(), DIRECTORY_MODE)
        self._probed: dict[int, list[Listing]] = {}  # by the inode of the directory: those that have probes

    def open(self, node: Node, inode: int, viewer: int) -> Listing:
        """A directory was opened."""
        return Listing(node, inode, viewer)

    async def send(self, listing: Listing, start: int, reply: Callable[[bytes, E, int], bool]) -> None:
        """Give `reply` a name, an entry and the offset behind it for each entry from `start` on, until it takes no more.

        An entry that it took counts as looked up by the kernel, if it was not bare.
        """
        if start == 0:
            listing.entries = await self._copied(listing)
            listing.num_sent, listing.told_until = 0, TOLD
        parent, entries, tree = listing.node, listing.entries, self._tree
        is_plain = isinstance(parent, Fixed | PrefixDirectory)  # in other directories second names are not believed
        home = parent if isinstance(parent, PrefixDirectory) else None
        is_chunk_told = False
        for index in range(start, len(entries)):
            node = entries[index]
            bare = None
            if is_plain and (index >= listing.told_until or (index >= PROBES_FROM and not index % PROBE_EVERY)):
                bare = self._bare_of(node)
            if type(node) is Chunk:
                if node.is_removed or (home is not None and node.home is not home):
                    continue
                if bare is not None:
                    entry = bare.naming(node.inode)
                elif is_chunk_told and is_plain:
                    entry = self._attributes.fill_next_chunk(self._chunk_entry, node)
                else:
                    is_chunk_told = True
                    entry = self._attributes.fill(self._chunk_entry, node)
            elif not tree.holds(parent, node):
                continue
            elif bare is not None:
                entry = bare.naming(node.inode)
            else:
                entry = self._attributes.fill(self._entry, node)
            if isinstance(parent, DraftDirectory):
                entry.entry_timeout = 0  # nobody is told when what it shows goes
            if not reply(tree.name(node), entry, index + 1):
                break
            if bare is not None:
                if not index % PROBE_EVERY:
                    self._probe(listing, node.inode)
            elif not isinstance(node, Fixed):
                self._inodes.remember(node)
            listing.num_sent = index + 1

    def looked_up(self, parent_inode: int, inode: int) -> None:
        """The kernel asked for an entry of a directory, by name."""
        for listing in self._probed.get(parent_inode, ()):
            listing.looked_up(inode)

    async def close(self, listing: Listing) -> None:
        """A listing is over."""
        probed = self._probed.get(listing.inode)
        if probed is not None and listing in probed:
            probed.remove(listing)
            if not probed:
                del self._probed[listing.inode]
        while len(listing.entries) > _AT_ONCE:
            del listing.entries[-_AT_ONCE:]
            await trio.lowlevel.checkpoint()

    async def _copied(self, listing: Listing) -> list[Node]:
        """What the directory holds; a crowd is copied bit by bit, if nothing comes or goes meanwhile."""
        node = listing.node
        is_whole = isinstance(node, Fixed) and node.role is Role.CHUNKS and node.draft is None
        table = node.table if isinstance(node, Fixed) and is_whole else None
        if table is not None and len(table.chunks) > _AT_ONCE:
            entries: list[Node] = [*self._tree.staged.listed(node.inode)]
            before, newest_first = (table.num_stored, len(table.chunks)), reversed(table.chunks.values())
            while part := [*islice(newest_first, _AT_ONCE)]:
                entries += part
                await trio.lowlevel.checkpoint()
                if (table.num_stored, len(table.chunks)) != before:
                    break
            else:
                return entries
        return self._tree.entries(node, listing.viewer)

    def _bare_of(self, node: Node) -> BareEntry[E] | None:
        if isinstance(node, Chunk):
            return self._bare_chunk
        return self._bare_directory if isinstance(node, PrefixDirectory) else None

    def _probe(self, listing: Listing, inode: int) -> None:
        if not listing.probes:
            probed = self._probed.setdefault(listing.inode, [])
            if listing not in probed:
                probed.append(listing)
        listing.probes.add(inode)


def _bare(entry: E, mode: int) -> BareEntry[E] | None:
    entry.st_mode = mode
    return BareEntry.of(entry)
