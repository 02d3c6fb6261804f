"""Making room: who is evicted for what comes, in RAM and on a volume, and what finds none.

* what is leased stays, and so does what is held, in the lowest tier;
* no chunk is evicted to make room for one that is built on it: what finds nothing less worthy goes itself;
* for a file that is copied in nothing goes that another copy has brought, but what stands deeper (see `copied_in`).

Concurrency: belongs to the event loop's thread. Only `reserve_nvme` waits; what it returns is true when it returns and must
be used before the next await.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from kvfs.catalog import NOWHERE, Chunk
from kvfs.copied_in import CopiedIn
from kvfs.errors import UnavailableError
from kvfs.kept_back import KeptBack
from kvfs.metrics import Counters
from kvfs.pins import Pins
from kvfs.policies import Holding
from kvfs.stripes import Stripe, Stripes
from kvfs.tiers.ram import RamTier

Discard = Callable[[Chunk, str, str], None]


class Room:
    """Room in the tiers. `discard` takes a chunk out of all of them, and says why, and whose doing it was."""

    def __init__(
        self,
        ram: RamTier,
        nvme: Stripes | None,
        pins: Pins,
        copied_in: CopiedIn,
        kept_back: KeptBack,
        counters: Counters,
        discard: Discard,
    ) -> None:
        self._ram = ram
        self._nvme = nvme
        self._pins = pins
        self._copied_in = copied_in
        self._kept_back = kept_back
        self._counters = counters
        self._discard = discard
        self._longest_in_ram: int | None = None  # see `_longest_gap`; None: not known
        if nvme is None:
            self._order_as_lowest(ram.policy, None)
        for stripe in nvme or ():
            self._order_as_lowest(stripe.tier.policy, stripe)

    def _order_as_lowest(self, order: Holding[Chunk], stripe: Stripe | None) -> None:
        """What goes from this order is gone."""
        order.is_held = self._pins.is_held
        order.is_grouped = lambda chunk: self._copied_in.depth(chunk) is not None
        order.group = partial(self._deepest_copied, stripe)

    def _deepest_copied(self, stripe: Stripe | None) -> Iterator[Chunk]:
        """What copies have brought that may leave this volume, or a RAM cache, the deepest first."""
        for chunk in self._copied_in.deepest_first():
            if self._offset(chunk, stripe) != NOWHERE and not self._pins.is_held(chunk):
                yield chunk

    def _offset(self, chunk: Chunk, stripe: Stripe | None) -> int:
        """Where a chunk is on this volume, or in RAM if none is named."""
        if stripe is None:
            return chunk.ram
        return chunk.nvme if chunk.volume == stripe.number else NOWHERE

    # RAM

    def reserve_ram(self, length: int, above: Chunk | None = None, spared: Collection[Chunk] = ()) -> int | None:
        """An extent of the arena, making room if need be; None under pressure. What is `spared` stays.

        `above` is the deepest of what a new chunk is built on that is there: none of that is lost for it. A RAM cache takes
        no chunk that would be the first to go.
        """
        if self._nvme is not None:
            may_go = self._may_leave_ram
            lost = frozenset(above.prefix()) if above is not None and len(self._kept_back) else ()
            if spared or lost:
                return self._ram.reserve(
                    length,
                    lambda chunk: (
                        chunk not in spared and may_go(chunk) and not (chunk.nvme == NOWHERE and chunk in lost)
                    ),
                    self._evict_from_ram,
                )
            return self._ram.reserve(length, may_go, self._evict_from_ram)
        if length > self._longest_gap(None):
            return None
        return self._ram.reserve(length, self._may_leave_ram, self._evict_from_ram, above)

    def reserve_ram_for_copy(self, length: int, position: int | None) -> int | None:
        """The same for a file that is being copied in, the chunk at this position of its chain if that is known."""

        def may_go(chunk: Chunk) -> bool:
            is_lost = chunk.nvme == NOWHERE
            return self._may_leave_ram(chunk) and (not is_lost or self._copied_in.may_go_for(chunk, position))

        if self._nvme is None and length > self._longest_gap(None):
            return None
        return self._ram.reserve(length, may_go, self._evict_from_ram)

    def _may_leave_ram(self, chunk: Chunk) -> bool:
        if chunk.leases:
            return False
        if chunk.nvme != NOWHERE:
            return True
        if self._pins.is_held(chunk):
            return False
        return self._nvme is None or self._nvme.of(chunk).tier.is_degraded or chunk in self._kept_back

    def _evict_from_ram(self, chunk: Chunk) -> None:
        self._counters.evictions_ram += 1
        if chunk.nvme == NOWHERE:
            self._discard(chunk, "evict", "policy" if self._nvme is None else "not_admitted")
        else:
            self._ram.drop(chunk)

    # volumes

    async def reserve_nvme(self, stripe: Stripe, chunks: Sequence[Chunk]) -> list[int]:
        """Extents of a volume for these chunks, evicting the least worthy; fewer than asked for if they cannot be had.

        A chunk for which only what it is built on could go is the least worthy itself: it goes, and has NOWHERE.
        Raises UnavailableError if the index cannot be written.
        """
        extents = stripe.tier.extents
        offsets: list[int] = []
        try:
            for chunk in chunks:
                while (offset := extents.allocate(chunk.length)) is None and not chunk.is_removed:
                    if not self._make_room_on_nvme(stripe, chunk, frozenset(chunks)):
                        return offsets
                    await stripe.commits.flush()
                    await stripe.eraser.free()
                offsets.append(NOWHERE if offset is None else offset)
        except UnavailableError:
            for chunk, offset in zip(chunks, offsets, strict=False):
                if offset != NOWHERE:
                    extents.free(offset, chunk.length)
            raise
        return offsets

    def _make_room_on_nvme(self, stripe: Stripe, chunk: Chunk, group: frozenset[Chunk]) -> bool:
        """Evict something for a chunk, or the chunk itself and what is built on it; returns whether anything could go.

        A chunk that an engine stored without the one before it is less worthy than all others: nobody can reach it.

        `group` is what is being written with it.
        """
        tier = stripe.tier
        if chunk.length > self._longest_gap(stripe):
            return False
        prefix = frozenset(chunk.prefix())
        is_held = self._pins.is_held(chunk)
        is_copied = self._copied_in.depth(chunk) is not None and not is_held
        is_wanted = is_held or is_copied or not chunk.position or chunk.parent in chunk.table.chunks

        def may_go(victim: Chunk) -> bool:
            if victim.leases or victim in prefix:
                return False
            return not is_copied or self._copied_in.may_go_for(victim, chunk.position)

        victims = tier.least_worthy(chunk.length, may_go) if is_wanted else []
        are_last = not victims or self._copied_in.depth(victims[0]) is not None
        if is_copied and are_last and self._copied_in.is_writing_deeper(chunk, group):
            return False
        if victims:
            self._evict_from_nvme(victims, chunk.length)
            return True
        if is_held or not any(tier.policy.victims(lambda victim: not victim.leases)):
            return False
        for orphan in [each for each in chunk.table.prefixes.descendants(chunk) if each.is_dirty]:
            self._lost_room(orphan)
        self._lost_room(chunk)
        return True

    def _lost_room(self, chunk: Chunk) -> None:
        """A dirty chunk is less worthy than all that is on the volume, and it is not held."""
        self._counters.evictions_nvme += 1
        self._discard(chunk, "evict", "no_room")

    def _evict_from_nvme(self, victims: list[Chunk], wanted: int) -> None:
        """Evict what makes room for `wanted` bytes and some more, but copied chunks only as far as need be."""
        freed = 0
        for victim in victims:
            if freed >= wanted and self._copied_in.depth(victim) is not None:
                return
            freed += victim.length
            self._counters.evictions_nvme += 1
            self._discard(victim, "evict", "policy")

    # what pins leave

    def forget_gap(self, chunk: Chunk) -> None:
        """A chunk that is held got its extent in the lowest tier; or one is held there from now on, or no longer."""
        if self._nvme is None:
            self._longest_in_ram = None
        else:
            self._nvme.of(chunk).longest_gap = None

    def _longest_gap(self, stripe: Stripe | None) -> int:
        """The longest extent that a volume, or a RAM cache, could give if all went that is not held.

        Scattered pins may leave none for a longer chunk; to look for it would cost everything else.
        """
        extents = self._ram.extents if stripe is None else stripe.tier.extents
        if not self._pins.held_bytes:
            return extents.capacity
        known = self._longest_in_ram if stripe is None else stripe.longest_gap
        if known is not None:
            return known
        longest, end = 0, extents.base
        for offset, length in sorted((self._offset(chunk, stripe), chunk.length) for chunk in self._pins.held()):
            if offset != NOWHERE:
                longest, end = max(longest, offset - end), offset + length
        longest = max(longest, extents.base + extents.capacity - end)
        if stripe is None:
            self._longest_in_ram = longest
        else:
            stripe.longest_gap = longest
        return longest
