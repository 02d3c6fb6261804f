"""What must be true of the store after every step, by its model: events, bytes, tiers, quotas."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

from kvfs.catalog import NOWHERE, Chunk, ChunkTable
from kvfs.intake import Reservation
from kvfs.keys import Key
from kvfs.messages import Tier
from kvfs.store import Store

from .store_loop import Loop
from .store_model import NODE_AT, Model, Node

EVENTS = frozenset({
    "namespace", "namespace_removed", "publish", "rm", "evict", "expire", "degraded", "recovered", "pin", "pin_refused",
    "unpin", "limits",
})  # fmt: skip


class Checks:
    """Of a machine that has these attributes. Each method named `_do_…` runs in the event loop's thread."""

    loop: Loop
    model: Model
    store: Store
    nvme: int | None
    numbers: dict[str, int]
    tables: Sequence[ChunkTable]
    being_published: list[tuple[Node, Reservation]]

    def _node_of(self, chunk: Chunk) -> Node:
        return NODE_AT[self.numbers[chunk.table.directory], chunk.key]

    def _chunk(self, node: Node) -> Chunk | None:
        return self._table(node).chunks.get(node.key)

    def _tidy(self) -> None:
        """Forget promotions that ended, but those that failed and whose extent a lease still keeps."""
        self.model.promotions = [
            promotion for promotion in self.model.promotions
            if promotion.num_left or (promotion.error is not None and promotion.chunk.leases)
        ]  # fmt: skip

    def _check(self) -> None:
        async def work() -> None:
            self._do_check()

        self.loop.run(work)

    def _do_check(self) -> None:
        self._tidy()
        self._do_take_events()
        self._do_check_bytes()
        self._do_check_tiers()
        self._do_check_quotas()

    def _do_take_events(self) -> None:
        """What is visible is what the events say, and each event was called for."""
        model = self.model
        raw = self.store.events.read(model.num_event_bytes, 1 << 30)
        model.num_event_bytes += len(raw)
        removed = set()
        for event in map(json.loads, raw.splitlines()):
            kind = event["event"]
            assert kind in EVENTS, event
            if kind == "degraded":
                model.was_degraded = True
            if "key" not in event:
                continue
            node = NODE_AT[self.numbers[event["namespace"]], Key(bytes.fromhex(event["key"]))]
            was_held = model.held
            if kind == "publish":
                assert node not in model.visible
                model.visible.add(node)
                continue
            model.visible.remove(node)
            if kind == "rm":
                removed.add(node)
                model.pinned.discard(node)
            else:
                assert kind == "evict" or model.is_expiring
                assert node not in was_held, f"{node} was evicted though it was held"
                model.evicted.add(node)
                model.num_evictions += kind == "evict"
        for hold in model.holds:
            if hold.chunk.is_removed and not hold.was_removed:
                assert hold.node in removed, f"{hold.node} was evicted while it was held"
                hold.was_removed = True
        found = {self._node_of(chunk) for chunk in self.store.catalog.chunks()}
        assert found == model.visible
        pinned = {node for node in found if (chunk := self._chunk(node)) and self.store.limits.end_of_pin(chunk)}
        assert pinned == model.pinned
        statistics = self.store.statistics()
        assert statistics.num_pinned == len(pinned)
        assert statistics.held_bytes == sum(node.geo.file_bytes for node in model.held)
        counters = self.store.counters
        if self.nvme and not model.was_degraded:
            assert counters.evictions_nvme + counters.evictions_quota == model.num_evictions
        assert counters.corrupt == 0

    def _do_check_bytes(self) -> None:
        for chunk in self.store.catalog.chunks():
            assert chunk.tier is not Tier.NONE
            if chunk.ram != NOWHERE:
                node = self._node_of(chunk)
                begin = chunk.ram + node.geo.header_bytes
                assert self.store.arena.view[begin : begin + node.geo.payload_bytes] == node.payload
        for hold in self.model.holds:
            chunk = hold.chunk
            assert chunk.tier is not Tier.NONE
            assert hold.view is None or hold.view == hold.expected
            if chunk.ram != NOWHERE:
                assert self.store.arena.view[chunk.ram : chunk.ram + chunk.length] == hold.expected

    def _do_check_tiers(self) -> None:
        """Extents do not overlap, and what is used is what somebody has."""
        model, statistics = self.model, self.store.statistics()
        model.known = {chunk for chunk in model.known if not chunk.is_removed or chunk.leases}
        in_ram = [(chunk.ram, chunk.length) for chunk in model.known if chunk.ram != NOWHERE]
        in_ram += [(one.offset, one.geometry.file_bytes) for _, one in [*model.reservations, *self.being_published]]
        in_ram += [(promotion.offset, promotion.chunk.length) for promotion in model.promotions]
        on_nvme = [
            (chunk.volume * (1 << 40) + chunk.nvme, chunk.length) for chunk in model.known if chunk.nvme != NOWHERE
        ]
        for extents in (in_ram, on_nvme):
            extents.sort()
            for (begin, length), (follower, _) in itertools.pairwise(extents):
                assert begin + length <= follower
        assert statistics.ram.used_bytes == sum(length for _, length in in_ram)
        assert statistics.ram.num_chunks == sum(chunk.ram != NOWHERE for chunk in self.store.catalog.chunks())
        assert statistics.num_leases == sum(chunk.leases for chunk in model.known)
        assert statistics.num_leases >= len(model.holds)
        if statistics.nvme is not None:
            assert statistics.nvme.used_bytes >= sum(length for _, length in on_nvme)
            assert statistics.nvme.num_chunks == sum(chunk.nvme != NOWHERE for chunk in self.store.catalog.chunks())

    def _do_check_quotas(self) -> None:
        """A namespace that has more than its quota, because of a pin or a crash or an earlier one, does not grow."""
        model = self.model
        for number, table in enumerate(self.tables):
            stored = sum(node.geo.file_bytes for node in model.visible if node.namespace == number)
            waiting = [one for _, one in [*model.reservations, *self.being_published] if one.table is table]
            reserved = sum(one.geometry.file_bytes for one in waiting)
            assert (table.stored_bytes, table.reserved_bytes) == (stored, reserved)
            quota = table.quota_bytes
            assert quota == model.quotas[number]
            assert quota is None or stored + reserved <= max(quota, model.num_bytes[number])
            model.num_bytes[number] = stored + reserved

    def _do_check_quiet(self) -> None:
        """Nothing is under way: only what the test holds is leased, and NVMe has room for all but what is clean."""
        model, statistics = self.model, self.store.statistics()
        assert statistics.num_dirty == statistics.dirty_bytes == 0
        assert statistics.num_leases == len(model.holds)
        if statistics.nvme is not None:
            assert not any(chunk.is_dirty for chunk in self.store.catalog.chunks())
            lengths = [chunk.length for chunk in model.known if chunk.nvme != NOWHERE]
            assert statistics.nvme.used_bytes == sum(lengths)
