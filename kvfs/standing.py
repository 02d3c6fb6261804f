"""How a store stands, gathered from all its parts; the values are those of `kvfs.statistics`.

Concurrency: nothing waits. `unwritten` may be called by a thread that looks on while the event loop is stuck.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvfs.config import Settings, VolumeSetting
from kvfs.metrics import Counters
from kvfs.policy_change import PolicyInForce
from kvfs.residency import Residency
from kvfs.staging import Staging
from kvfs.statistics import Capacity, Fault, Statistics, TierStatistics, Unwritten, VolumeStatistics
from kvfs.stripes import Stripe
from kvfs.system import System
from kvfs.write_behind import WriteBehind


@dataclass(frozen=True, slots=True)
class Standing:
    """What is looked at; `missing`: volumes that were not there at the start, `arena_kind`: see `Arena`."""

    settings: Settings
    system: System
    residency: Residency
    policy: PolicyInForce
    staging: Staging
    writer: WriteBehind | None
    missing: Sequence[VolumeSetting]
    arena_kind: str

    def capacity(self) -> Capacity:
        """See `Store.capacity`."""
        capacity = self.residency.capacity
        dirty = self.writer.dirty_bytes if self.writer is not None else 0
        used = min(self.residency.used_bytes + dirty, capacity)
        return Capacity(capacity, used, self.residency.catalog.num_chunks)

    def statistics(self) -> Statistics:
        """See `Store.statistics`."""
        residency, writer = self.residency, self.writer
        ram, nvme, counters = residency.ram, residency.nvme, residency.counters
        return Statistics(
            policy=self.policy.name,
            next_policy=self.policy.coming,
            num_chunks=residency.catalog.num_chunks,
            num_namespaces=len(residency.catalog.tables),
            dirty_bytes=writer.dirty_bytes if writer else 0,
            num_dirty=writer.num_dirty if writer else 0,
            num_leases=residency.num_leases,
            num_ghosts=len(residency.ghosts),
            num_pinned=len(residency.pins),
            held_bytes=residency.pins.held_bytes,
            num_kept_back=len(residency.kept_back),
            kept_back_bytes=residency.kept_back.size_bytes,
            admitted_today_bytes=writer.admission.spent_on(self.system.time_ns()).num_bytes if writer else 0,
            num_staging=self.staging.num_files,
            staging_bytes=self.staging.size_bytes,
            ram=TierStatistics(ram.extents.capacity, ram.extents.used_bytes, len(ram.policy), self.arena_kind),
            nvme=TierStatistics(
                nvme.capacity, nvme.used_bytes, nvme.num_chunks,
                "direct" if all(stripe.tier.volume.is_direct for stripe in nvme) else "buffered", nvme.is_degraded,
            ) if nvme else None,
            volumes=self._volumes(),
            counters={name: getattr(counters, name) for name in Counters.__slots__},
        )  # fmt: skip

    def _volumes(self) -> tuple[VolumeStatistics, ...]:
        """Each volume, in the order of the settings; one that was missing at the start has nothing."""
        found = {stripe.directory: self._volume(stripe) for stripe in self.residency.nvme or ()}
        found |= {
            each.directory: VolumeStatistics(each.directory, 0, 0, 0, "missing", True, 0, fault=Fault.MISSING)
            for each in self.missing
        }
        return tuple(found[each.directory] for each in self.settings.nvme if each.directory in found)

    def _volume(self, stripe: Stripe) -> VolumeStatistics:
        tier, writer = stripe.tier, self.writer
        fault = writer.fault_of(stripe) if writer is not None else Fault.NONE
        is_disk_full = fault is Fault.DISK_FULL or (stripe.commits.is_disk_full and fault is not Fault.GONE)
        return VolumeStatistics(
            stripe.directory, tier.extents.capacity, tier.extents.used_bytes, len(tier.policy),
            "direct" if tier.volume.is_direct else "buffered", tier.is_degraded,
            writer.dirty_bytes_of(stripe) if writer is not None else 0, is_disk_full,
            Fault.DISK_FULL if is_disk_full else fault,
        )  # fmt: skip

    def unwritten(self, *, is_kept: bool) -> Unwritten:
        """What would be lost, or stay in RAM, if the store ended now, and why it is not on NVMe."""
        if self.writer is None:
            return Unwritten(0, 0, "", is_kept)
        reason = self.writer.failure or "there was not enough time"
        return Unwritten(self.writer.num_dirty, self.writer.dirty_bytes, reason, is_kept)
