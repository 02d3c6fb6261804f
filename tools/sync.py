"""`kvfs sync`: wait until what a cache holds is on NVMe."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from kvfs.config import format_size
from kvfs.errors import KvfsError, UnavailableError
from kvfs.tools import faults, mounted

EXAMPLES = """
kvfs sync /mnt/kvfs

Returns when all that was dirty is on NVMe: a power loss would not cost it any more. What comes meanwhile is not waited for.

kvfs sync /mnt/kvfs --json && poweroff

`sync -f` cannot do this: Linux does not tell a FUSE file system of it. `sync /mnt/kvfs/NAMESPACE`, the fsync of a directory
or of a chunk's file, does it for one namespace, or one chunk.
"""

_LOOK_EVERY_S = 0.2


def sync(
    mountpoint: Annotated[str, typer.Argument(help="Where the cache is mounted.")],
    as_json: Annotated[bool, typer.Option("--json", help="What was waited for, for programs.")] = False,
) -> None:
    """Wait until everything that is in RAM only is on NVMe."""
    path = mounted.find(mountpoint)
    before = mounted.read_status(path)
    begin = time.monotonic()
    has_nvme = isinstance(before.get("nvme"), dict)
    if has_nvme:
        _wait(path, before)
    kept_back_bytes = int(mounted.read_status(path).get("kept_back_bytes", 0)) if has_nvme else 0
    result = {
        "mountpoint": path, "has_nvme": has_nvme, "dirty_bytes": before.get("dirty_bytes", 0),
        "kept_back_bytes": kept_back_bytes, "seconds": round(time.monotonic() - begin, 3),
    }  # fmt: skip
    if as_json:
        typer.echo(msgspec.json.encode(result).decode())
    elif not has_nvme:
        typer.echo(f"kvfs: {path} is a RAM cache: there is nothing to write to")
    elif kept_back_bytes:
        typer.echo(
            f"kvfs: all that was in {path} is on NVMe, but {format_size(kept_back_bytes)} that are not admitted to it and go "
            "with the daemon"
        )
    else:
        typer.echo(f"kvfs: all that was in {path} is on NVMe")


def _wait(path: str, before: dict[str, Any]) -> None:
    """Have the daemon sync all namespaces, in a thread that Ctrl-C leaves alone, and show what is left."""
    errors: list[OSError] = []

    def work() -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True, name="kvfs-sync")
    thread.start()
    total = int(before.get("dirty_bytes", 0))
    columns = (TextColumn("writing"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=total or None)
        thread.join(_LOOK_EVERY_S)
        while thread.is_alive():
            dirty = int(mounted.read_status(path).get("dirty_bytes", 0))  # raises if the daemon is stopped or gone
            bar.update(task, completed=max(0, total - dirty))
            thread.join(_LOOK_EVERY_S)
    if errors:
        raise _failed(path, errors[0])


def _failed(path: str, error: OSError) -> KvfsError:
    """What is to be said of it: what is wrong with a volume, where the daemon knows it."""
    why = error.strerror or str(error)
    try:
        found = [
            f"the volume in {each.directory}: {each.what}. {each.advice}"
            for each in faults.troubles(mounted.read_status(path))
        ]
    except (KvfsError, OSError):
        return UnavailableError(
            f"not everything in {path} is on NVMe: {why}; it is not mounted any more, or does not answer"
        )
    return KvfsError(f"not everything in {path} is on NVMe: {'; '.join(found) or why}")
