"""`kvfs stat`: all that a mount tells of a chunk, a prefix or a namespace."""

from __future__ import annotations

import fnmatch
import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from kvfs import namespace as namespaces
from kvfs.chunk import SUFFIX, geometry, parse_file_name
from kvfs.config import format_size
from kvfs.errors import UsageError
from kvfs.tools import listing, mounted
from kvfs.tools.listing import Entry
from kvfs.tools.mounted import Beat
from kvfs.tools.words import format_duration, printable

EXAMPLES = """
kvfs stat /mnt/kvfs SmolLM2

The namespace that begins with these letters: its identity, what it holds, its limits.

kvfs stat /mnt/kvfs SmolLM2 0a1b2c3d '4e5f6a7b*/8c9d0e1f*'

A chunk by the beginning of its key, and a prefix by the PATH that `kvfs ls` prints.

kvfs stat /mnt/kvfs/*/chunks/0a1b2c3d* --json

By their names in the mount.
"""

_XATTR = "user.kvfs."
_KEY = re.compile(r"[0-9a-f]{1,32}")


class Place(NamedTuple):
    """Something in a mount: the `path` below its root, and the namespace in which it is."""

    namespace: str
    path: str


def stat(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH… | MOUNTPOINT NAMESPACE [KEY | PREFIX]…",
            help="Names in a mount; or a mount, a namespace, and in it chunks by key and prefixes by the PATH of `kvfs ls`.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Bytes and nanoseconds, for programs.")] = False,
) -> None:
    """Show all that is known of chunks, prefixes and namespaces."""
    root, work = _plan(paths)

    def look(beat: Beat) -> list[dict[str, Any]]:
        return [_facts(root, place, beat) for place in work(beat)]

    found = mounted.ask(root, look)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
    else:
        typer.echo("\n\n".join(_text(facts) for facts in found))


def _plan(paths: list[str]) -> tuple[str, Any]:
    """The mount, and what finds the places in it."""
    first = mounted.inside(paths[0])
    if first is not None:
        root = first[0]
        insides = [mounted.inside(path) for path in paths]
        if any(inside is None or inside[0] != root for inside in insides):
            raise UsageError(f"not all of these are names in the mount on {root}")
        return root, lambda beat: [_named(inside[1]) for inside in insides if inside is not None]
    root = mounted.find(paths[0])
    if len(paths) == 1:
        raise UsageError(f"say of what: kvfs stat {root} NAMESPACE [KEY]; `kvfs status` shows the mount as a whole")

    def find(beat: Beat) -> list[Place]:
        namespace = listing.find_namespace(root, paths[1], beat)
        if len(paths) == 2:
            return [Place(namespace, namespace)]
        return [_find(root, namespace, wanted, beat) for wanted in paths[2:]]

    return root, find


def _named(path: str) -> Place:
    """The place of a name in the mount."""
    parts = path.split("/")
    is_chunk = parse_file_name(parts[-1]) is not None
    if not namespaces.is_directory_name(parts[0]) or not (
        len(parts) == 1
        or (parts[1] == "chunks" and len(parts) == 3 and is_chunk)
        or (parts[1] == "prefixes" and len(parts) > 2)
    ):
        raise UsageError(f"{path} is neither a chunk nor a prefix nor a namespace")
    return Place(parts[0], path)


def _find(root: str, namespace: str, wanted: str, beat: Beat) -> Place:
    """The place of a key, of the beginning of one, or of a prefix's PATH; raises UsageError unless it is one."""
    key = wanted.removesuffix(SUFFIX)
    if _KEY.fullmatch(key):
        names = [name for name in os.listdir(os.path.join(root, namespace, "chunks")) if name.startswith(key)]
        found = [f"{namespace}/chunks/{name}" for name in names if parse_file_name(name) is not None]
        what = "chunk"
    else:
        entries = listing.list_prefixes(root, namespace, beat)
        pattern = wanted.strip("/")
        found = [
            f"{namespace}/prefixes/{entry.path}"
            for entry in entries
            if entry.path is not None
            and entry.depth == pattern.count("/")
            and all(map(fnmatch.fnmatchcase, entry.path.split("/"), pattern.split("/")))
        ]
        what = "prefix"
    if len(found) == 1:
        return Place(namespace, found[0])
    raise UsageError(
        f"{wanted!r} fits {len(found):,} of them, be more exact"
        if found
        else f"there is no {what} {wanted!r} in {namespace}"
    )


def _facts(root: str, place: Place, beat: Beat) -> dict[str, Any]:
    beat()
    path = os.path.join(root, place.path)
    try:
        os.stat(path, follow_symlinks=False)
        if place.path.endswith(SUFFIX):
            return {"kind": "chunk", "path": path} | _chunk(path)
        prefixes = listing.list_prefixes(root, place.namespace, beat)
        if "/" not in place.path:
            staging = dict(zip(("staging_files", "staging_bytes"), listing.staging_of(path), strict=True))
            return {"kind": "namespace", "path": path} | _namespace(path, prefixes) | staging | _xattrs(path)
        return {"kind": "prefix", "path": path} | _prefix(place, prefixes) | _xattrs(path)
    except FileNotFoundError as error:
        raise UsageError(f"there is no {place.path} in {root} (any more)") from error


def _chunk(path: str) -> dict[str, Any]:
    found = os.stat(path, follow_symlinks=False)
    facts = {"size_bytes": found.st_size, "stored_ns": found.st_mtime_ns, "last_used_ns": found.st_atime_ns}
    return facts | {"key": os.path.basename(path).removesuffix(SUFFIX)} | _xattrs(path)


def _xattrs(path: str) -> dict[str, Any]:
    """All of ours; numbers as numbers."""
    found: dict[str, Any] = {}
    for name in sorted(os.listxattr(path, follow_symlinks=False)):
        if name.startswith(_XATTR):
            text = os.getxattr(path, name, follow_symlinks=False).decode(errors="replace")
            is_number = text.isdecimal() and len(text) < 20
            found[name.removeprefix(_XATTR)] = int(text) if is_number else text
    return found


def _contents(total: Entry) -> dict[str, Any]:
    facts: dict[str, Any] = {"num_chunks": total.num_chunks, "size_bytes": total.size_bytes}
    if total.num_tokens is not None:
        facts["num_tokens"] = total.num_tokens
    if total.tiers is not None:
        facts["tiers"] = sorted(total.tiers, reverse=True)
    return facts | {"stored_ns": total.published_ns, "last_used_ns": total.last_used_ns}


def _prefix(place: Place, prefixes: list[Entry]) -> dict[str, Any]:
    wanted = place.path.split("/", 2)[2]
    entry = next((entry for entry in prefixes if entry.path == wanted), Entry(os.path.basename(wanted)))
    below = [other for other in prefixes if (other.path or "").startswith(wanted + "/")]
    return {"namespace": place.namespace, "first_key": entry.name, "num_prefixes": len(below)} | _contents(entry)


def _namespace(path: str, prefixes: list[Entry]) -> dict[str, Any]:
    namespace = namespaces.decode(Path(path, "namespace.json").read_bytes())
    identity = msgspec.to_builtins(namespace.identity)
    total = Entry(namespace.directory)
    for entry in prefixes:
        if not entry.depth:
            total.add(entry)
    full = geometry(namespace, namespace.identity.tokens_per_chunk)
    tensors = [
        f"{run.count} × {', '.join(f'{t.name} {t.dtype} {list(t.shape)}' for t in run.tensors)}"
        for run in namespace.layers
    ]
    return (
        {name: value for name, value in identity.items() if value != ""}
        | {"rank": namespace.rank, "num_ranks": namespace.num_ranks, "fingerprint": namespace.fingerprint_hex}
        | {"tensors": tensors, "full_chunk_bytes": full.file_bytes, "num_prefixes": len(prefixes)}
        | _contents(total)
    )


def _text(facts: dict[str, Any]) -> str:
    facts = dict(facts)
    lines = [f"{facts.pop('kind')} {facts.pop('path')}"]
    width = max(map(len, map(_label, facts)))
    lines += [f"  {_label(name).ljust(width)}  {_value(name, value)}" for name, value in facts.items()]
    return "\n".join(map(printable, lines))


def _label(name: str) -> str:
    return name.removesuffix("_ns").removesuffix("_bytes").removeprefix("num_").replace("_", " ")


def _value(name: str, value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "–"
    if name.endswith("_ns") and isinstance(value, int):
        if not value:
            return "–"
        when = datetime.fromtimestamp(value // 10**9, UTC).isoformat().replace("+00:00", "Z")
        return f"{when}, {format_duration(time.time() - value / 1e9)} ago"
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{format_size(value)} ({value:,} bytes)" if value >= 1024 else format_size(value)
    return f"{value:,}" if isinstance(value, int) else str(value)
