"""The command: looks at everything, says it in a line each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from kvfs.tools import mounted
from kvfs.tools.doctor import gpu, machine, places
from kvfs.tools.doctor.finding import Finding
from kvfs.tools.words import format_count, printable

EXAMPLES = """
kvfs doctor

What this machine can do, and how the caches stand that are mounted. The exit code is 0 if kvfs can run here, 1 if something
that it needs is missing, or something in use has failed (a volume, a disk that is full); what would only make it faster is no
failure.

kvfs doctor /data

The same, and whether /data is a good place for a volume: file system, direct I/O, room.

kvfs doctor /mnt/kvfs

A running mount: whether its arena has huge pages, its volumes direct I/O, and what of them is missing or fails.

kvfs doctor --json | jq -r '.findings[] | select(.is_ok | not) | .advice'
"""


def doctor(
    where: Annotated[
        list[str] | None, typer.Argument(metavar="[DIR|MOUNT]...", help="Directories for a volume, or mounts of kvfs.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="What was found, for programs.")] = False,
) -> None:
    """Say what of kvfs this machine can do, and what to do about the rest."""
    found = list(machine.findings())
    for place in where or []:
        found += places.findings(place)
    if not where:
        for path in mounted.all_paths():
            found += places.mount_findings(path)
    found += gpu.findings()
    missing = [finding for finding in found if finding.is_needed and not finding.is_ok]
    failed = [finding for finding in found if finding.is_fault and not finding.is_ok]
    if as_json:
        document = {"can_run": not missing, "findings": found}
        typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2))
    else:
        width = max(len(finding.name) for finding in found)
        for finding in found:
            typer.echo(line(finding, width))
        typer.echo(printable(f"kvfs: {_verdict(missing, failed)}"))
    if missing or failed:
        raise typer.Exit(1)


def _verdict(missing: Sequence[Finding], failed: Sequence[Finding]) -> str:
    if missing:
        names = ", ".join(finding.name for finding in missing)
        return f"cannot run here, {format_count(len(missing), 'thing')} missing: {names}"
    if failed:
        return f"can run here, but something has failed: {', '.join(finding.name for finding in failed)}"
    return "can run here"


def line(finding: Finding, width: int) -> str:
    """One line: whether it is so, what was looked at, what was found, and what to do."""
    verdict = "ok" if finding.is_ok else ("NO" if finding.is_needed or finding.is_fault else "no")
    advice = f" -> {finding.advice}" if finding.advice else ""
    return f"{verdict}  {printable(finding.name):{width}}  {printable(finding.what)}{printable(advice)}"
