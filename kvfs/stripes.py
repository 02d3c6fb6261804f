"""Stripes: the volumes of a store, each on a device of its own, and which of them has which chunk.

A stripe is a volume with all that belongs to it: its index, its order of eviction, its eraser, its threads. It stands
alone: what is in its directory is a whole cache that another kvfs can open, and a device that fails takes no other along.

Which volume a new chunk goes to follows from its key, by weighted rendezvous hashing: each volume draws a number from
the key and its own identity, and the highest in proportion to its capacity wins. So chunks are spread as capacities are,
a volume that is added takes its share from all others and nothing else changes, and the volumes' order and paths do not
matter. Where a chunk *is* its index says: one that was written before a volume was added, or while one was missing,
stays where it is.

Concurrency: belongs to the event loop's thread.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from heapq import merge

import xxhash

from kvfs import namespace as namespaces
from kvfs.catalog import Chunk, ChunkTable
from kvfs.commits import Commits
from kvfs.erasing import Eraser
from kvfs.index import ChunkRow, LimitRow, NamespaceRow
from kvfs.tiers.nvme import NvmeTier


class Stripe:
    """One volume of a store.

    Attributes:
        number: its place among the volumes; directory: where it lies; identity: of the volume.
        tier, commits, eraser.
        held_bytes: of its chunks that must not be evicted; longest_gap: see `Residency`, None: not known.

    The rows of an index bear numbers of namespaces that are its own: two caches that become one had given the same
    number to different namespaces.
    """

    def __init__(
        self, number: int, directory: str, identity: bytes, tier: NvmeTier, commits: Commits, eraser: Eraser
    ) -> None:
        self.number = number
        self.directory = directory
        self.identity = identity
        self.tier = tier
        self.commits = commits
        self.eraser = eraser
        self.held_bytes = 0
        self.longest_gap: int | None = None
        self._last_number = 0  # of a namespace

    # what becomes of namespaces, in the index of this volume

    def recovered(self, table: ChunkTable, number: int) -> None:
        """The index knows this namespace by this number."""
        table.numbers[self.number] = number
        self._last_number = max(self._last_number, number)

    def put_namespace(self, table: ChunkTable) -> None:
        """A namespace is new, or something in its row."""
        if self.number not in table.numbers:
            self.recovered(table, self._last_number + 1)
        document = namespaces.encode(table.namespace)
        row = NamespaceRow(table.numbers[self.number], table.directory, document, table.created_ns)
        self.commits.add_namespace(row)

    def limit(self, table: ChunkTable) -> None:
        """What the namespace may be has changed."""
        self.commits.limit(LimitRow(table.numbers[self.number], table.quota_bytes, table.max_age_ns))

    def remove_namespace(self, table: ChunkTable) -> None:
        """A namespace is gone."""
        self.commits.remove_namespace(table.numbers[self.number], table.directory)

    # what becomes of its chunks

    def row(self, chunk: Chunk, offset: int) -> ChunkRow:
        """The row of a chunk that is at this offset."""
        return ChunkRow(
            chunk.table.numbers[self.number], chunk.key, chunk.parent, chunk.position, chunk.num_tokens, offset, chunk.length,
            chunk.created_ns, chunk.last_used_ns, chunk.hits,
        )  # fmt: skip

    def delete(self, chunk: Chunk) -> None:
        """See `Commits`."""
        self.commits.delete(chunk.table.numbers[self.number], chunk.key)

    def pin(self, chunk: Chunk, until_ns: int | None) -> None:
        """See `Commits`."""
        self.commits.pin(chunk.table.numbers[self.number], chunk.key, until_ns)

    def used(self, chunk: Chunk) -> None:
        """See `Commits`."""
        self.commits.used(chunk.last_used_ns, chunk.hits, chunk.table.numbers[self.number], chunk.key)

    def free_later(self, offset: int, length: int) -> None:
        """An extent is to be erased, and freed, when no durable row can name it any more."""
        self.commits.free_later(offset, length, self.eraser.put)


class Stripes:
    """The volumes that are there, at least one; together they are the NVMe tier."""

    def __init__(self, stripes: Sequence[Stripe]) -> None:
        self._stripes = tuple(stripes)
        self._draws = [
            (stripe.number, int.from_bytes(stripe.identity[:8], "little"), -stripe.tier.volume.capacity)
            for stripe in stripes
        ]

    def __iter__(self) -> Iterator[Stripe]:
        return iter(self._stripes)

    def __len__(self) -> int:
        return len(self._stripes)

    def of(self, chunk: Chunk) -> Stripe:
        """The volume that has the chunk, or will."""
        return self._stripes[chunk.volume]

    def holding(self, chunks: Collection[Chunk]) -> list[Stripe]:
        """The volumes that these chunks are on, or will be."""
        if len(self._stripes) == 1:
            return list(self._stripes)
        numbers = {chunk.volume for chunk in chunks}
        return [stripe for stripe in self._stripes if stripe.number in numbers]

    def choose(self, key: bytes) -> int:
        """The number of the volume that a new chunk goes to; see the module."""
        if len(self._draws) == 1:
            return 0
        return max(self._draws, key=lambda draw: draw[2] / math.log(_draw(key, draw[1])))[0]

    # as one tier

    @property
    def capacity(self) -> int:
        """Bytes for chunks, of all."""
        return sum(stripe.tier.extents.capacity for stripe in self._stripes)

    @property
    def used_bytes(self) -> int:
        """Bytes allocated, of all."""
        return sum(stripe.tier.extents.used_bytes for stripe in self._stripes)

    @property
    def num_chunks(self) -> int:
        """Visible chunks with an extent on one of them."""
        return sum(len(stripe.tier.policy) for stripe in self._stripes)

    @property
    def is_degraded(self) -> bool:
        """Whether writing to one of them fails."""
        return any(stripe.tier.is_degraded for stripe in self._stripes)

    def touch(self, prefix: Sequence[Chunk]) -> None:
        """An engine loaded these chunks of one chain, head first."""
        for stripe in self._stripes:  # a policy passes over what is on others
            stripe.tier.policy.touch(prefix)

    def victims(self, table: ChunkTable) -> Iterator[Chunk]:
        """The chunks of a namespace that may go, each volume's in its order, those that were used longest ago first."""
        orders = [stripe.tier.policy.victims(lambda chunk: chunk.table is table) for stripe in self._stripes]
        return (
            orders[0] if len(orders) == 1 else merge(*orders, key=lambda chunk: (chunk.last_used_ns, -chunk.position))
        )


def _draw(key: bytes, seed: int) -> float:
    """A number between 0 and 1, both excluded, that is even over keys and another for each volume."""
    return ((xxhash.xxh3_64_intdigest(key, seed) >> 12) + 0.5) / (1 << 52)
