"""A digest of weight files, for models that have no revision to name them: every byte is read, once.

What was read is remembered in the user's cache directory by path, size, inode and time of change, so that the ranks and
restarts of an engine read it once. xxh3 runs at memory speed, and the engine has just read the same files.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
PIECE_BYTES = 8 << 20
THREADS = 4


def weight_files(model: Path) -> list[Path]:
    """The weight files of a model: of a directory, or the file itself."""
    if model.is_file():
        return [model]
    return sorted(path for path in model.rglob("*") if path.suffix in SUFFIXES and path.is_file())


def digest_files(paths: list[Path], base: Path) -> str:
    """32 hex digits over names (relative to `base`) and contents. Raises OSError."""
    facts = [_facts(path) for path in paths]
    record = _record(facts)
    known = _remembered(record)
    if known is not None:
        return known
    with ThreadPoolExecutor(THREADS) as executor:
        digests = list(executor.map(_digest_file, paths))
    digest = hashlib.sha256()
    for path, value in zip(paths, digests, strict=True):
        name = path.name if path == base else str(path.relative_to(base))
        digest.update(f"{len(name)}:{name}:".encode() + value)
    found = digest.hexdigest()[:32]
    if [_facts(path) for path in paths] == facts:  # nothing changed meanwhile
        _remember(record, found)
    return found


def _facts(path: Path) -> tuple[str, int, int, int, int]:
    found = path.stat()
    return str(path.resolve()), found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _digest_file(path: Path) -> bytes:
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.digest()


def _record(facts: list[tuple[str, int, int, int, int]]) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    return cache / "kvfs" / "digests" / name


def _remembered(record: Path) -> str | None:
    try:
        found = record.read_text()
    except OSError:
        return None
    return found if len(found) == 32 else None


def _remember(record: Path, digest: str) -> None:
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=record.parent, delete=False) as scratch:
            scratch.write(digest)
        os.replace(scratch.name, record)
    except OSError:  # a home that cannot be written: the files are read again next time
        return
