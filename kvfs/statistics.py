"""How a store stands: the frozen values that `status.json`, `df` and Prometheus show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from kvfs.config import format_size
from kvfs.metrics import Gauge


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes of the largest tier, bytes in use there, and visible chunks."""

    total_bytes: int
    used_bytes: int
    num_chunks: int


class TierStatistics(msgspec.Struct, frozen=True):
    """One tier: its size, what is used, how many chunks it has."""

    capacity_bytes: int
    used_bytes: int
    num_chunks: int
    kind: str
    is_degraded: bool = False


class Fault(StrEnum):
    """Why nothing can be written to a volume.

    MISSING: it could not be opened at the start. GONE: its files were removed, or its disk was unmounted, under the daemon.
    DISK_FULL: its file system is. DEVICE: the device fails, or does not answer.
    """

    NONE = ""
    MISSING = "missing"
    GONE = "gone"
    DISK_FULL = "disk_full"
    DEVICE = "device"


class VolumeStatistics(msgspec.Struct, frozen=True):
    """One volume of the NVMe tier.

    `kind` is "missing" of one that could not be opened at the start; `is_disk_full`: its file system has no room for it, or
    for its index beside it; `fault` says why it is degraded.
    """

    directory: str
    capacity_bytes: int
    used_bytes: int
    num_chunks: int
    kind: str
    is_degraded: bool
    dirty_bytes: int
    is_disk_full: bool = False
    fault: Fault = Fault.NONE


class Unwritten(msgspec.Struct, frozen=True):
    """What was not on NVMe when a store ended; `is_kept`: it stays in RAM, for the next one."""

    num_chunks: int
    size_bytes: int
    reason: str
    is_kept: bool

    @property
    def what(self) -> str:
        """How much it is, for people."""
        return f"{self.num_chunks:,} chunk{'' if self.num_chunks == 1 else 's'}, {format_size(self.size_bytes)},"

    @property
    def sentence(self) -> str:
        """It for people."""
        end = "stay in RAM, for the next mount here" if self.is_kept else "are lost"
        return f"{self.what} could not be written to NVMe and {end}: {self.reason}"


class Statistics(msgspec.Struct, frozen=True):
    """How the store stands. `next_policy` is being made ready to take the place of `policy`, "" if none is."""

    policy: str
    next_policy: str
    num_chunks: int
    num_namespaces: int
    dirty_bytes: int
    num_dirty: int
    num_leases: int
    num_ghosts: int
    num_pinned: int
    held_bytes: int
    num_kept_back: int
    kept_back_bytes: int
    admitted_today_bytes: int
    num_staging: int
    staging_bytes: int
    ram: TierStatistics
    nvme: TierStatistics | None
    volumes: tuple[VolumeStatistics, ...]
    counters: dict[str, int]


_OF_A_VOLUME: tuple[tuple[str, str, Callable[[VolumeStatistics], float]], ...] = (
    ("capacity_bytes", "size of a volume", lambda each: each.capacity_bytes),
    ("used_bytes", "bytes allocated in a volume", lambda each: each.used_bytes),
    ("dirty_bytes", "bytes in RAM that are not on this volume yet", lambda each: each.dirty_bytes),
    ("degraded", "1 while writing to a volume fails, or it is missing or gone", lambda each: each.is_degraded),
    ("disk_full", "1 while the file system of a volume has no room", lambda each: each.is_disk_full),
)


def gauges(now: Statistics) -> list[Gauge]:
    """What Prometheus sees beside the counters."""
    found = [
        Gauge("policy", "1 for the policy in force", 1, ("policy", now.policy)),
        Gauge("chunks", "visible chunks", now.num_chunks),
        Gauge("ghosts", "chunks that went and are remembered", now.num_ghosts),
        Gauge("pinned", "chunks that are pinned", now.num_pinned),
        Gauge("held_bytes", "bytes of chunks that are not evicted because of pins", now.held_bytes),
        Gauge("dirty_bytes", "bytes in RAM that are not on NVMe yet", now.dirty_bytes),
        Gauge("kept_back_bytes", "bytes in RAM that admission keeps from NVMe", now.kept_back_bytes),
        Gauge("admitted_today_bytes", "bytes that were admitted to NVMe today (UTC)", now.admitted_today_bytes),
        Gauge("leases", "holds on chunks", now.num_leases),
        Gauge("staging_files", "files that are being copied in", now.num_staging),
        Gauge("staging_bytes", "bytes in RAM of files that are being copied in", now.staging_bytes),
        Gauge("ram_capacity_bytes", "size of the RAM tier", now.ram.capacity_bytes),
        Gauge("ram_used_bytes", "bytes allocated in the RAM tier", now.ram.used_bytes),
    ]
    if now.nvme is not None:
        found += [
            Gauge("nvme_capacity_bytes", "size of the NVMe tier", now.nvme.capacity_bytes),
            Gauge("nvme_used_bytes", "bytes allocated in the NVMe tier", now.nvme.used_bytes),
            Gauge("nvme_degraded", "1 while writing to NVMe fails", now.nvme.is_degraded),
        ]
    for name, said, value in _OF_A_VOLUME:
        found += [Gauge(f"volume_{name}", said, value(each), ("volume", each.directory)) for each in now.volumes]
    return found
