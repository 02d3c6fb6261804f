"""A directory for a volume, and a mount that runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvfs.config import format_size
from kvfs.errors import KvfsError, UsageError
from kvfs.mount import mountpoint as mountpoints
from kvfs.tools import faults, mounted
from kvfs.tools.doctor.finding import Finding
from kvfs.tools.doctor.machine import arena_form
from kvfs.volume import aligned_buffer

LITTLE_BYTES = 1 << 30
_UNFIT = {
    "tmpfs": "it lies in memory: nothing is there after a restart of the machine",
    "ramfs": "it lies in memory: nothing is there after a restart of the machine",
    "overlay": "it is the inside of a container: slow, and gone with it; GPUDirect Storage does not know it",
    "nfs": "it is on the network; kvfs is for disks of this node",
    "nfs4": "it is on the network; kvfs is for disks of this node",
    "fuse.kvfs": "it is a mount of kvfs itself",
}
_PROBE_BYTES = 1 << 16


def findings(place: str) -> Iterator[Finding]:
    """All about a mount of kvfs or a directory; told apart by what it is."""
    mount, rest = mountpoints.reached(place)
    top = mountpoints.mount_at(mount)
    if top is not None and top.is_ours:
        if rest:
            yield Finding(place, False, f"it lies inside the mount on {mount}", "name the mount itself", is_needed=True)
        else:
            yield from mount_findings(mount)
    else:
        yield from _of_directory(place)


def _of_directory(place: str) -> Iterator[Finding]:
    directory = Path(mountpoints.resolve(place))
    if os.path.exists(directory) and not os.path.isdir(directory):
        yield Finding(place, False, "it is not a directory", "name the directory for the volume", is_needed=True)
        return
    there = directory if os.path.isdir(directory) else directory.parent  # kvfs makes the last directory
    if not os.path.isdir(there):
        what = f"{there} does not exist, or is not to be seen by this user"
        yield Finding(place, False, what, "is the disk mounted? mkdir it", is_needed=True)
        return
    fstype = _fstype_of(there)
    why = _UNFIT.get(fstype, "FUSE: slow" if fstype.startswith("fuse") else "")
    advice = "name a directory of an ext4 or xfs on a local NVMe" if why else ""
    yield Finding(f"{place}: file system", not why, f"{fstype}{': ' if why else ''}{why}", advice)
    yield _direct_io(place, there)
    stat = os.statvfs(there)
    free = (stat.f_bfree if os.geteuid() == 0 else stat.f_bavail) * stat.f_frsize
    has_volume = os.path.exists(directory / "volume")
    what = f"{format_size(free)} free{', and there is a volume already' if has_volume else ''}"
    is_ok = has_volume or free >= LITTLE_BYTES
    yield Finding(f"{place}: room", is_ok, what, "" if is_ok else "a volume wants more; its size is --nvme DIR:SIZE")


def _direct_io(place: str, directory: Path) -> Finding:
    """Whether a file can be made, and written and read past the page cache."""
    name = f"{place}: direct I/O"
    try:
        fd, path = tempfile.mkstemp(prefix=".kvfs-doctor-", dir=directory)
    except OSError as error:
        advice = "run as the user who will mount, or chown the directory"
        return Finding(
            f"{place}: access", False, f"no file can be made there: {error.strerror}", advice, is_needed=True
        )
    try:
        os.close(fd)
        fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        try:
            memory = aligned_buffer(_PROBE_BYTES)
            memory[:] = bytes(range(256)) * (_PROBE_BYTES // 256)
            written, found = os.pwrite(fd, memory, 0), aligned_buffer(_PROBE_BYTES)
            is_same = written == os.preadv(fd, [found], 0) == _PROBE_BYTES and found == memory
        finally:
            os.close(fd)
    except OSError as error:
        advice = "kvfs works without, through the page cache: slower, and memory is used twice; ext4 and xfs have it"
        return Finding(name, False, f"the file system refuses it: {error.strerror}", advice)
    finally:
        os.unlink(path)
    if not is_same:
        return Finding(name, False, "what was written came back different", "do not use this disk", is_needed=True)
    return Finding(name, True, "64 KiB written and read")


def _fstype_of(directory: Path) -> str:
    above = [mount for mount in mountpoints.mounts() if directory.is_relative_to(mount.path)]
    return max(above, key=lambda mount: len(mount.path)).fstype if above else "unknown"


def mount_findings(path: str) -> Iterator[Finding]:
    """How a cache stands that is mounted."""
    try:
        status = mounted.read_status(path)
    except UsageError as error:  # of somebody else, who has not asked
        yield Finding(f"{path}: daemon", False, str(error))
        return
    except KvfsError as error:
        yield Finding(f"{path}: daemon", False, str(error), "see the daemon's log", is_fault=True)
        return
    yield Finding(f"{path}: daemon", True, f"kvfs {status.get('version', '?')}, process {status.get('pid', '?')}")
    arena = arena_form(str(_tier(status, "ram").get("kind", "memfd")))
    yield Finding(f"{path}: arena", arena.is_ok, arena.what, arena.advice)
    nvme = _tier(status, "nvme")
    if not nvme:
        yield Finding(f"{path}: volume", True, "none: it is a RAM cache")
        return
    is_direct = nvme.get("kind") == "direct"
    advice = "" if is_direct else "put the volume on ext4 or xfs"
    yield Finding(f"{path}: direct I/O", is_direct, "on" if is_direct else "off: the file system refuses it", advice)
    for found in faults.troubles(status):
        yield Finding(f"{path}: volume in {found.directory}", False, found.what, found.advice, is_fault=True)


def _tier(status: dict[str, Any], name: str) -> dict[str, Any]:
    tier = status.get(name)
    return tier if isinstance(tier, dict) else {}
