"""Documents: what each namespace on a volume is, as files beside it, for the day on which the index is lost.

A chunk's header names the fingerprint of its namespace and no more, so that a scan of the volume could not tell what
its chunks are made of. ``namespaces/<directory>.json`` can. It is durable before the first row of its namespace is.

    {"format": "kvfs-document/1", "created_ns": 1700000000000000000, "xxh3_64": "…", "namespace": {…}}

`namespace` is what the mount shows as namespace.json; the checksum is of `created_ns` and that. A namespace.json as the
mount shows it, copied here by a person, is taken too. Everything here blocks and is called in threads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from kvfs import namespace as namespaces
from kvfs.errors import FormatError, UsageError
from kvfs.namespace import Namespace

DIRECTORY = "namespaces"
FORMAT = "kvfs-document/1"
_SUFFIX = ".json"
_UNFINISHED = ".unfinished"
_MAX_BYTES = 2 * namespaces.MAX_NAMESPACE_JSON_BYTES


@dataclass(frozen=True, slots=True)
class Document:
    """A namespace, and when it was first seen, in nanoseconds since the epoch; whether a checksum covers both."""

    namespace: Namespace
    created_ns: int
    is_covered: bool = True


@dataclass(frozen=True, slots=True)
class Found:
    """What the directory holds.

    Attributes: by_directory: the documents by the name of the namespace's directory; bad: what is wrong with the files that
    cannot be read, by their name.
    """

    by_directory: Mapping[str, Document] = field(default_factory=dict)
    bad: Mapping[str, str] = field(default_factory=dict)


class Documents:
    """The documents beside the volume in `volume_directory`; `path` is where they lie. Methods raise OSError."""

    def __init__(self, volume_directory: Path) -> None:
        self.path = volume_directory / DIRECTORY

    def write(self, document: Document) -> None:
        """Make a document durable. One that is there already, and the same, is left alone."""
        raw = encode(document)
        name = document.namespace.directory + _SUFFIX
        with contextlib.suppress(OSError):
            if self.path.joinpath(name).read_bytes() == raw:
                return
        if not self.path.is_dir():
            self.path.mkdir(mode=0o700)
            _sync_directory(self.path.parent)
        unfinished = self.path / (name + _UNFINISHED)
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(self.path / name)
        _sync_directory(self.path)

    def read(self) -> Found:
        """All documents. What is no document is told of and does no harm."""
        found: dict[str, Document] = {}
        bad: dict[str, str] = {}
        for path in self._files():
            if not path.name.endswith(_SUFFIX):
                continue
            try:
                document = decode(_read_bounded(path), path.stat().st_mtime_ns)
                if path.name != document.namespace.directory + _SUFFIX:
                    raise FormatError(f"it is of the namespace {document.namespace.directory}")
            except (FormatError, UsageError, OSError) as error:
                bad[path.name] = str(error)
            else:
                found[document.namespace.directory] = document
        return Found(found, bad)

    def remove(self, directory: str) -> None:
        """Forget a namespace that was removed; durable when this returns. One that is not there is fine."""
        self.path.joinpath(directory + _SUFFIX).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            _sync_directory(self.path)

    def destroy(self) -> None:
        """Remove every document, and the directory if nothing else is in it."""
        for path in self._files():
            if path.name.endswith((_SUFFIX, _SUFFIX + _UNFINISHED)):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _files(self) -> list[Path]:
        try:
            return sorted(self.path.iterdir())
        except FileNotFoundError:
            return []


def encode(document: Document) -> bytes:
    """The content of a document's file: the same bytes for the same document."""
    raw = namespaces.encode(document.namespace)
    content = {
        "format": FORMAT,
        "created_ns": document.created_ns,
        "xxh3_64": _checksum(document.created_ns, raw),
        "namespace": msgspec.Raw(raw.strip()),
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


def decode(raw: bytes, default_created_ns: int) -> Document:
    """The document in a file, or in a bare namespace.json, which knows no time of its own.

    Raises FormatError for what is not one, and UsageError for a namespace that contradicts itself.
    """
    try:
        content = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"it is no document of a namespace: {error}") from error
    if "identity" in content:
        return Document(namespaces.decode(raw), default_created_ns, is_covered=False)
    if content.get("format") != FORMAT:
        raise FormatError(f"its format is {content.get('format')!r}, this kvfs reads {FORMAT!r}")
    namespace = namespaces.decode(msgspec.json.encode(content.get("namespace")))
    created_ns = content.get("created_ns")
    if not isinstance(created_ns, int):
        raise FormatError("created_ns is no number")
    if content.get("xxh3_64") != _checksum(created_ns, namespaces.encode(namespace)):
        raise FormatError("it does not have its checksum")
    return Document(namespace, created_ns)


def _checksum(created_ns: int, raw: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(f"{created_ns} ".encode() + raw)


def _read_bounded(path: Path) -> bytes:
    with path.open("rb") as file:
        raw = file.read(_MAX_BYTES + 1)
    if len(raw) > _MAX_BYTES:
        raise FormatError("it is too large")
    return raw


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
