"""The index: a durable copy of the catalog's NVMe side, in SQLite beside the volume.

While kvfs runs the catalog in memory is the truth; the index is what a restart begins with. A `Batch` is one
transaction; the order of its parts does not matter. Two rules make a crash harmless, both kept by `kvfs.store`: a
chunk is put here only after its bytes are durable on the volume, and an extent is reused only after the batch that
deletes its chunk is committed. If the index is damaged or belongs to another volume it is set aside, never trusted.
What was written on the volume of a lost index is *unclaimed*: a fact of the new one, see `kvfs.unclaimed`.

Everything here blocks; it is called in one thread at a time.
"""

from __future__ import annotations

import logging
import sqlite3
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from kvfs.admission import Spent
from kvfs.errors import FormatError, UsageError

log = logging.getLogger(__name__)

VERSION = 1
_NO_PROOF = frozenset({
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOLFS, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PERM, sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_READONLY,
})  # fmt: skip
"""Primary result codes that say something of the system, and nothing of what is in the index."""
FILE_NAME = "index.sqlite"
_SCHEMA = f"""
CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE namespaces (number INTEGER PRIMARY KEY, directory TEXT UNIQUE, document BLOB, created_ns INTEGER);
CREATE TABLE chunks (
    namespace INTEGER, key BLOB, parent BLOB, position INTEGER, num_tokens INTEGER, offset INTEGER, length INTEGER,
    created_ns INTEGER, last_used_ns INTEGER, hits INTEGER, PRIMARY KEY (namespace, key)
) WITHOUT ROWID;
PRAGMA user_version = {VERSION};
"""
_ADDITIONS = """
CREATE TABLE IF NOT EXISTS pins (namespace INTEGER, key BLOB, until_ns INTEGER, PRIMARY KEY (namespace, key)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS limits (namespace INTEGER PRIMARY KEY, quota_bytes INTEGER, max_age_ns INTEGER);
"""
"""Tables that an index of an earlier kvfs lacks, and that an earlier kvfs does not look at: no new version."""
SET_ASIDE = FILE_NAME + ".set-aside"
_UNCLAIMED = "unclaimed"
_SPENT = "spent"
_MOST_SPENT = 1 << 62
_LEARNT = "learnt by the policy of "
_VOLUMES = "volumes"
_EXTENT = struct.Struct("<QQ")
_NAMESPACES = "SELECT number, directory, document, created_ns FROM namespaces"
_CHUNKS = (
    "SELECT namespace, key, parent, position, num_tokens, offset, length, created_ns, last_used_ns, hits"
    " FROM chunks ORDER BY position"
)
_NUMBERS = """WITH RECURSIVE numbers(number) AS (
    SELECT min(namespace) FROM chunks
    UNION ALL SELECT (SELECT min(namespace) FROM chunks WHERE namespace > number) FROM numbers WHERE number IS NOT NULL
) SELECT number FROM numbers WHERE typeof(number) = 'integer'"""
_HAS_KEYS = "typeof(key) = 'blob' AND length(key) = 16 AND typeof(parent) = 'blob' AND length(parent) = 16"
_SIZES = "SELECT DISTINCT num_tokens, length FROM chunks WHERE namespace = ? LIMIT 2"
_SOME_TIMES = "SELECT created_ns FROM chunks WHERE namespace = ? LIMIT ?"  # by key, so of any time
_PACKED = f"""SELECT CAST(group_concat(key, '') AS BLOB), CAST(group_concat(parent, '') AS BLOB), {{packed}}
    FROM (SELECT key, parent, {{names}} FROM chunks WHERE namespace = ? {{part}} AND {_HAS_KEYS} ORDER BY created_ns, position)"""
_A_PART = 65_536  # rows that are read at once, at least, and times that are looked at for each
_MOST_PARTS = 4
_NUM_READERS = 2
_TIMES_A_PART = 256
_PINS = "SELECT namespace, key, until_ns FROM pins"
_LIMITS = "SELECT namespace, quota_bytes, max_age_ns FROM limits"

_PUT_NAMESPACE = "INSERT OR REPLACE INTO namespaces VALUES (?, ?, ?, ?)"
_PUT_CHUNK = "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


class NamespaceRow(NamedTuple):
    """A namespace as the index knows it; `document` is its namespace.json."""

    number: int
    directory: str
    document: bytes
    created_ns: int


class ChunkRow(NamedTuple):
    """A clean chunk; `offset` counts bytes from the start of the volume."""

    namespace: int
    key: bytes
    parent: bytes
    position: int
    num_tokens: int
    offset: int
    length: int
    created_ns: int
    last_used_ns: int
    hits: int


class PackedRows(NamedTuple):
    """Rows of chunks with one number of a namespace, each column in one piece.

    Attributes:
        keys, parents: one behind the other.
        numbers: the other columns by name, as decimal numbers with a comma between them.
        size: num_tokens and length, if they are the same in all rows; else both are among `numbers`.
    """

    keys: bytes
    parents: bytes
    numbers: dict[str, str]
    size: tuple[Any, Any] | None


class PinRow(NamedTuple):
    """A pinned chunk, and when the pin ends in nanoseconds since the epoch."""

    namespace: int
    key: bytes
    until_ns: int


class LimitRow(NamedTuple):
    """What a namespace may be: bytes, and nanoseconds since the last use of its chunks; None: without limit."""

    namespace: int
    quota_bytes: int | None
    max_age_ns: int | None


@dataclass(slots=True)
class Batch:
    """What one transaction changes.

    Attributes:
        put: chunks that became clean; delete: (namespace, key) of chunks that are gone.
        used: (last_used_ns, hits, namespace, key) of chunks that were loaded.
        namespaces: new ones; removed: the directories of those that are gone, by number.
        pins: by (namespace, key) when the chunk's pin ends, nanoseconds since the epoch; None: it has none any more.
        limits: by namespace.
        spent: what was admitted to NVMe today.
    """

    put: list[ChunkRow] = field(default_factory=list)
    delete: list[tuple[int, bytes]] = field(default_factory=list)
    used: list[tuple[int, int, int, bytes]] = field(default_factory=list)
    namespaces: list[NamespaceRow] = field(default_factory=list)
    removed: dict[int, str] = field(default_factory=dict)
    pins: dict[tuple[int, bytes], int | None] = field(default_factory=dict)
    limits: dict[int, LimitRow] = field(default_factory=dict)
    spent: Spent | None = None
    learnt: dict[str, bytes] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__slots__)


class Index:
    """An open index. Attributes: path."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection

    @classmethod
    def open(cls, path: Path, volume_identity: bytes) -> Index:
        """Open the index of this volume, or begin one.

        Raises UsageError for an index of another version, or one that the system does not let us open.
        """
        try:
            connection = _open_present(path, volume_identity) if path.exists() else None
            if connection is None:
                connection = _create(path, volume_identity)
        except sqlite3.Error as error:
            raise UsageError(f"cannot open the index {path}: {error}") from error
        return cls(path, connection)

    @classmethod
    def open_trusted(cls, path: Path, volume_identity: bytes | None) -> Index:
        """Open an index that is there, and set nothing aside. None: of whatever volume it is.

        Raises FormatError for one that cannot be trusted, or is not there, and UsageError as `open` does.
        """
        if not path.exists():
            raise FormatError("it is not there")
        try:
            return cls(path, _open_trusted(path, volume_identity))
        except sqlite3.Error as error:
            raise UsageError(f"cannot open the index {path}: {error}") from error

    def damage(self) -> list[str]:
        """What SQLite finds wrong in all of it, a line each; some hundred at most."""
        try:
            lines = [str(line) for (line,) in self._connection.execute("PRAGMA integrity_check")]
        except sqlite3.DatabaseError as error:
            return [str(error)]
        return [] if lines == ["ok"] else lines

    def volume_identity(self) -> bytes:
        """Of the volume that it was made for."""
        return bytes(self._connection.execute("SELECT value FROM facts WHERE name = 'volume'").fetchone()[0])

    def namespaces(self) -> list[NamespaceRow]:
        """All namespaces. SQLite stores any type in any column: who trusts a value has to look at it."""
        return [NamespaceRow(*row) for row in self._connection.execute(_NAMESPACES)]

    def chunks(self) -> list[ChunkRow]:
        """All chunks, parents before children. What is true of `namespaces` is true here."""
        return [ChunkRow(*row) for row in self._connection.execute(_CHUNKS)]

    def numbers(self) -> list[int]:
        """The numbers of namespaces that chunks bear; what is no integer is none."""
        return [number for (number,) in self._connection.execute(_NUMBERS)]

    def packed_chunks(self, number: int, num_rows: int) -> Iterator[PackedRows]:
        """The rows of one number, of which there are about so many, as they were stored: a chain mostly stands in order,
        whatever went since and wherever its chunks lie. What is true of `namespaces` is true of the numbers in it.

        SQLite writes them one behind the other, which takes it half as long as to hand them out one by one, and nothing in
        Python waits meanwhile. Where they are many, two threads read and sort parts of them by time, each by a connection
        of its own, while the caller looks at those before. A row without a time is in none.

        Raises sqlite3.Error, for what it cannot write so too. Nothing may be written meanwhile.
        """
        size, *others = self._connection.execute(_SIZES, (number,)).fetchall()
        names = ["position", "offset", "created_ns", "last_used_ns", "hits"]
        names += ["num_tokens", "length"] if others else []
        packed = ", ".join(f"group_concat({name})" for name in names)

        def read(connection: sqlite3.Connection, part: str) -> PackedRows:
            query = _PACKED.format(packed=packed, names=", ".join(names), part=part)
            keys, parents, *numbers = connection.execute(query, (number,)).fetchone()
            columns = dict(zip(names, numbers, strict=True))
            return PackedRows(keys or b"", parents or b"", columns, None if others else size)

        parts = self._parts(number, num_rows)
        if len(parts) == 1:
            yield read(self._connection, parts[0])
            return
        with ExitStack() as stack:
            idle = [stack.enter_context(closing(_connect(self.path))) for _ in range(_NUM_READERS)]

            def read_beside(part: str) -> PackedRows:
                connection = idle.pop()
                try:
                    return read(connection, part)
                finally:
                    idle.append(connection)

            yield from stack.enter_context(ThreadPoolExecutor(_NUM_READERS, "kvfs-index")).map(read_beside, parts)

    def _parts(self, number: int, num_rows: int) -> list[str]:
        """Conditions that share the rows of one number, about evenly and in order of time, among some queries."""
        num_parts = max(1, min(_MOST_PARTS, num_rows // _A_PART))
        some = (
            self._connection.execute(_SOME_TIMES, (number, num_parts * _TIMES_A_PART)).fetchall()
            if num_parts > 1
            else []
        )
        times = sorted(time for (time,) in some if isinstance(time, int))
        bounds = sorted({times[len(times) * part // num_parts] for part in range(1, num_parts)}) if times else []
        if not bounds:
            return [""]
        between = [f"AND created_ns >= {begin} AND created_ns < {end}" for begin, end in pairwise(bounds)]
        return [f"AND created_ns < {bounds[0]}", *between, f"AND created_ns >= {bounds[-1]}"]

    def num_chunks(self, number: int) -> int:
        """How many rows of one number there are."""
        count: int = self._connection.execute("SELECT count(*) FROM chunks WHERE namespace = ?", (number,)).fetchone()[
            0
        ]
        return count

    def chunks_of(self, number: int) -> list[ChunkRow]:
        """The same rows as `packed_chunks`, and those whose keys are none."""
        query = _CHUNKS.replace("ORDER BY", "WHERE namespace = ? ORDER BY created_ns,")
        return [ChunkRow(*row) for row in self._connection.execute(query, (number,))]

    def misnumbered(self) -> list[ChunkRow]:
        """The rows of chunks that bear no integer in the place of a number."""
        query = _CHUNKS.replace("ORDER BY", "WHERE typeof(namespace) != 'integer' ORDER BY")
        return [ChunkRow(*row) for row in self._connection.execute(query)]

    def pins(self) -> list[PinRow]:
        """All pins, those that ended meanwhile too. What is true of `namespaces` is true here."""
        return [PinRow(*row) for row in self._connection.execute(_PINS)]

    def limits(self) -> list[LimitRow]:
        """The limits of all namespaces. What is true of `namespaces` is true here."""
        return [LimitRow(*row) for row in self._connection.execute(_LIMITS)]

    def commit(self, batch: Batch) -> None:
        """Carry out a batch; durable when it returns. Raises sqlite3.Error, and then nothing of it was done."""
        connection = self._connection
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            removed = [(number,) for number in batch.removed]
            connection.executemany("DELETE FROM namespaces WHERE number = ?", removed)
            for table in ("chunks", "pins", "limits"):
                connection.executemany(f"DELETE FROM {table} WHERE namespace = ?", removed)
            connection.executemany(_PUT_NAMESPACE, batch.namespaces)
            connection.executemany("DELETE FROM chunks WHERE namespace = ? AND key = ?", batch.delete)
            connection.executemany(_PUT_CHUNK, batch.put)
            connection.executemany(
                "UPDATE chunks SET last_used_ns = ?, hits = ? WHERE namespace = ? AND key = ?", batch.used
            )
            ended = [place for place, until_ns in batch.pins.items() if until_ns is None]
            connection.executemany("DELETE FROM pins WHERE namespace = ? AND key = ?", ended)
            pins = [(*place, until_ns) for place, until_ns in batch.pins.items() if until_ns is not None]
            connection.executemany("INSERT OR REPLACE INTO pins VALUES (?, ?, ?)", pins)
            connection.executemany("INSERT OR REPLACE INTO limits VALUES (?, ?, ?)", batch.limits.values())
            if batch.spent is not None:
                packed = _EXTENT.pack(batch.spent.day, batch.spent.num_bytes)
                connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (_SPENT, packed))
            learnt = [(_LEARNT + tier, value) for tier, value in batch.learnt.items()]
            connection.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", learnt)

    def learnt(self, tier: str) -> bytes | None:
        """What the policy of a tier had learned when it was last asked; None if nothing is known of it."""
        row = self._connection.execute("SELECT value FROM facts WHERE name = ?", (_LEARNT + tier,)).fetchone()
        return row[0] if row is not None and isinstance(row[0], bytes) else None

    def spent(self) -> Spent | None:
        """What was admitted to NVMe, on the last day on which something was; None if nothing is known of it, or it cannot be."""
        row = self._connection.execute("SELECT value FROM facts WHERE name = ?", (_SPENT,)).fetchone()
        if row is None or not isinstance(row[0], bytes) or len(row[0]) != _EXTENT.size:
            return None
        spent = Spent(*_EXTENT.unpack(row[0]))
        return spent if spent.num_bytes < _MOST_SPENT else None

    @property
    def is_new(self) -> bool:
        """Whether nothing is in it, and nobody has said yet what on the volume is unclaimed."""
        if self._connection.execute("SELECT 1 FROM facts WHERE name = ?", (_UNCLAIMED,)).fetchone():
            return False
        return self._connection.execute("SELECT 1 FROM chunks").fetchone() is None

    def unclaimed(self) -> list[tuple[int, int]]:
        """What was kept with `keep_unclaimed`: (offset, length) of extents of the volume."""
        row = self._connection.execute("SELECT value FROM facts WHERE name = ?", (_UNCLAIMED,)).fetchone()
        if row is None or not isinstance(row[0], bytes) or len(row[0]) % _EXTENT.size:
            return []
        return list(_EXTENT.iter_unpack(row[0]))

    def keep_unclaimed(self, extents: Iterable[tuple[int, int]]) -> None:
        """Remember which extents hold what no chunk of the index claims; durable when it returns."""
        packed = b"".join(_EXTENT.pack(*extent) for extent in extents)
        self._connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (_UNCLAIMED, packed))

    def volumes(self) -> list[str]:
        """The directories of all volumes of the cache when it was last open, as far as that is known."""
        row = self._connection.execute("SELECT value FROM facts WHERE name = ?", (_VOLUMES,)).fetchone()
        return (
            row[0].decode("utf-8", "surrogateescape").split("\0")
            if row is not None and isinstance(row[0], bytes)
            else []
        )

    def keep_volumes(self, directories: Iterable[str]) -> None:
        """Remember them; durable when it returns."""
        packed = "\0".join(directories).encode("utf-8", "surrogateescape")
        self._connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (_VOLUMES, packed))

    def copy(self, path: Path) -> None:
        """Write a copy of all of it to `path`, which must not exist; not durable yet. Raises sqlite3.Error."""
        target = sqlite3.connect(path, isolation_level=None)
        try:
            path.chmod(0o600)
            self._connection.backup(target)
        finally:
            target.close()

    def replace_chunks(
        self, rows: Iterable[ChunkRow], namespaces: Iterable[NamespaceRow], unclaimed: Iterable[tuple[int, int]]
    ) -> None:
        """Let these be all chunks, and all that is unclaimed; `namespaces` are added. Durable when it returns."""
        packed = b"".join(_EXTENT.pack(*extent) for extent in unclaimed)
        with self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (_UNCLAIMED, packed))
            connection.execute("DELETE FROM chunks")
            connection.executemany(_PUT_NAMESPACE, namespaces)
            connection.executemany(_PUT_CHUNK, rows)

    def close(self) -> None:
        """Close it."""
        self._connection.close()


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    # A flipped bit makes a blob a text that is no UTF-8, which must not end the start.
    connection.text_factory = lambda raw: raw.decode("utf-8", "backslashreplace")
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
    except (sqlite3.Error, UnicodeDecodeError):
        connection.close()
        raise
    return connection


def _create(path: Path, volume_identity: bytes) -> sqlite3.Connection:
    connection = _connect(path)
    path.chmod(0o600)
    connection.executescript("BEGIN;" + _SCHEMA + _ADDITIONS + "COMMIT;")
    connection.execute("INSERT INTO facts VALUES ('volume', ?)", (volume_identity,))
    return connection


def _open_trusted(path: Path, volume_identity: bytes | None) -> sqlite3.Connection:
    """The connection to an index that can be trusted.

    Raises FormatError for one that is proven bad, UsageError for a newer one, and sqlite3.Error for what proves nothing.
    """
    connection = None
    try:
        connection = _connect(path)
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise UsageError(f"{path} has index format {version}, this kvfs reads {VERSION}; use the kvfs that made it")
        if version != VERSION or connection.execute("PRAGMA quick_check").fetchone()[0] != "ok":
            raise FormatError("it is damaged or was never finished")
        row = connection.execute("SELECT value FROM facts WHERE name = 'volume'").fetchone()
        if row is None or row[0] != (row[0] if volume_identity is None else volume_identity):
            raise FormatError("it belongs to another volume")
        connection.executescript(_ADDITIONS)
        for query in (_NAMESPACES, _CHUNKS, _PINS, _LIMITS):
            # A damaged schema may lack a column. In no order: to sort a million rows takes half a second.
            connection.execute(query.partition(" ORDER BY ")[0]).fetchone()
        return connection
    except (sqlite3.DatabaseError, FormatError, UsageError, UnicodeDecodeError) as error:
        if connection is not None:
            connection.close()
        if isinstance(error, FormatError | UsageError):
            raise
        if isinstance(error, sqlite3.DatabaseError) and not _proves_damage(error):
            raise
        raise FormatError(str(error)) from error  # messages quote the schema, whatever it is


def _open_present(path: Path, volume_identity: bytes) -> sqlite3.Connection | None:
    """The connection to an index that can be trusted; one that cannot is set aside and None is returned."""
    try:
        return _open_trusted(path, volume_identity)
    except FormatError as error:
        log.error("the index %s cannot be trusted (%s): moved to %s, the cache begins empty", path, error, SET_ASIDE)
    path.rename(path.with_name(SET_ASIDE))
    remove_logs(path)
    return None


def remove_logs(path: Path) -> None:
    """Remove what SQLite keeps beside an index: with another index in its place it would be taken for its log."""
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _proves_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether the content is to blame. A full disk, or a lock that somebody holds, costs no cache."""
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return code & 0xFF not in _NO_PROOF
