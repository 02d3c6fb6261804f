"""`kvfs fsck`: check a volume that is not mounted, or make its index anew from what is on it.

Exit codes are those of fsck(8) where they make sense: 0 all is well, or the index was rebuilt; 4 something is wrong and
left so; 8 it could not be looked at.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvfs.checking import Report, check
from kvfs.config import format_size
from kvfs.errors import KvfsError
from kvfs.rebuilding import Rebuilt, rebuild
from kvfs.system import System
from kvfs.tools.offline import Bar
from kvfs.tools.words import format_count, printable
from kvfs.volume import Volume

EXAMPLES = """
kvfs fsck /data/kvfs

Checks the superblock, the index, and the header of each chunk, which takes seconds. The exit code is 0 if all is well, 4
if something is wrong, 8 if it could not be looked at, because a daemon uses it, for one.

kvfs fsck /data/kvfs --payload

Reads the whole volume and checks every byte of every chunk.

kvfs fsck /data/kvfs --rebuild

Makes a new index, and a superblock if need be, from the chunks that are whole on the volume. The old index is set aside.
Ctrl-C leaves everything as it was.
"""

EXIT_ERRORS_LEFT = 4
EXIT_OPERATION = 8


def fsck(
    directory: Annotated[str, typer.Argument(help="Directory of the volume, as in --nvme DIR:SIZE.")],
    rebuild_index: Annotated[
        bool, typer.Option("--rebuild", help="Make the index anew from what is on the volume.")
    ] = False,
    payload: Annotated[bool, typer.Option("--payload", help="Check every byte of every chunk.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="What was found, for programs.")] = False,
) -> None:
    """Check a volume that is not mounted; restore its index."""
    try:
        found = _work(Path(directory), rebuild_index, payload)
    except KeyboardInterrupt:
        typer.echo(f"kvfs: interrupted; {directory} is as it was", err=True)
        raise
    except (KvfsError, OSError, sqlite3.Error) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        typer.echo(f"kvfs: {reason if isinstance(error, KvfsError) else f'{directory}: {reason}'}", err=True)
        raise typer.Exit(EXIT_OPERATION) from error
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
    else:
        lines = _report_lines(found) if isinstance(found, Report) else _rebuilt_lines(found)
        typer.echo("\n".join(map(printable, lines)))
    if isinstance(found, Report) and found.findings:
        raise typer.Exit(EXIT_ERRORS_LEFT)


def _work(directory: Path, rebuild_index: bool, payload: bool) -> Report | Rebuilt:
    with closing(Volume.open_present(directory, System())) as volume, Bar() as bar:
        return rebuild(volume, bar) if rebuild_index else check(volume, bar, read_payloads=payload)


def _report_lines(report: Report) -> list[str]:
    lines = [f"{finding.kind:<11} {finding.what}" for finding in report.findings]
    for kind, number in report.num_findings.items():
        told = sum(finding.kind == kind for finding in report.findings)
        if number > told:
            lines.append(f"{kind:<11} and {number - told:,} more")
    checked = "every byte" if report.read_payloads else "headers"
    lines.append(
        f"kvfs: {report.directory}: {format_count(report.num_chunks, 'good chunk')}, {format_size(report.chunk_bytes)} "
        f"of {format_size(report.capacity_bytes)}, in {format_count(report.num_namespaces, 'namespace')} ({checked} checked)"
    )
    if report.num_unclaimed:
        lines.append(
            f"kvfs: {format_count(report.num_unclaimed, 'whole chunk')} beside them, which the index does not know"
        )
    lines += _unknown_lines(report.directory, report.unknown)
    remedies = {finding.remedy for finding in report.findings}
    if "rebuild" in remedies:
        lines.append(f"kvfs: to mend it: kvfs fsck {report.directory} --rebuild")
    elif "load" in remedies:
        lines.append(
            f"kvfs: what is bad is never given out: a load or kvfs verify drops it; kvfs fsck {report.directory} --rebuild does now"
        )
    if remedies == {"mount"}:
        lines.append("kvfs: the next mount mends it, and forgets what is bad")
    return lines


def _rebuilt_lines(result: Rebuilt) -> list[str]:
    lines = [
        f"kvfs: {result.directory}: the new index has {format_count(result.num_chunks, 'chunk')}, "
        f"{format_size(result.chunk_bytes)}, in {format_count(result.num_namespaces, 'namespace')}; "
        f"{result.num_returned:,} of them came back"
    ]
    if result.num_let_go:
        lines.append(
            f"kvfs: {format_count(result.num_let_go, 'whole chunk')} on the volume the index had evicted: left so"
        )
    if result.num_lost:
        lines.append(
            f"kvfs: {format_count(result.num_lost, 'chunk')} of the old index had not their bytes, and are gone"
        )
    if result.unreadable_bytes:
        lines.append(
            f"kvfs: the device did not give {format_size(result.unreadable_bytes)}; "
            f"{format_count(result.num_unread, 'chunk')} there stayed in the index"
        )
    lines += _unknown_lines(result.directory, result.unknown)
    if result.mended_superblock:
        lines.append("kvfs: the superblock was damaged and is written anew")
    if result.set_aside:
        lines.append(f"kvfs: the old index is {result.set_aside}")
    return lines


def _unknown_lines(directory: str, unknown: dict[str, int]) -> list[str]:
    return [
        f"kvfs: {format_count(number, 'chunk')} of a namespace that nobody knows, {place}: put its namespace.json into "
        f"{directory}/namespaces, named like its directory, and rebuild"
        for place, number in unknown.items()
    ]
