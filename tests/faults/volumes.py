"""Volumes that a real store wrote: looking into them, damaging them, checking and rebuilding them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from kvfs.catalog import Chunk
from kvfs.checking import Report, check
from kvfs.chunk import Facts, build_header, geometry
from kvfs.index import FILE_NAME as INDEX
from kvfs.keys import KeyChain, key_of
from kvfs.namespace import Namespace
from kvfs.rebuilding import Rebuilt, rebuild
from kvfs.system import System
from kvfs.testing import (
    checksums_of,
    open_table,
    payload_of,
    read_all,
    sized_namespace,
    tiny_namespace,
)
from kvfs.volume import FILE_NAME as VOLUME
from kvfs.volume import Volume

NS = tiny_namespace()
MIB = sized_namespace(1 << 20)


class Silent:
    """A track that nobody watches."""

    def begin(self, what: str, total_bytes: int) -> None:
        pass

    def advance(self, num_bytes: int) -> None:
        pass


class Interrupting(Silent):
    """Ctrl-C at the `moment`-th sign of progress."""

    def __init__(self, moment: int) -> None:
        self.moment = moment

    def begin(self, what: str, total_bytes: int) -> None:
        self.advance(0)

    def advance(self, num_bytes: int) -> None:
        self.moment -= 1
        if not self.moment:
            raise KeyboardInterrupt


def checked(directory: Path, *, payload: bool = False, system: System | None = None) -> Report:
    with closing(Volume.open_present(directory / "nvme", system or System())) as volume:
        return check(volume, Silent(), read_payloads=payload)


def rebuilt(directory: Path, track: Silent | None = None, system: System | None = None) -> Rebuilt:
    with closing(Volume.open_present(directory / "nvme", system or System())) as volume:
        return rebuild(volume, track or Silent())


def kinds(report: Report) -> dict[str, int]:
    return dict(report.num_findings)


async def content(directory: Path) -> dict[str, list[tuple[bytes, int, int]]]:
    """What a store finds after a start, every byte of it right: key, position and hits by namespace."""
    found: dict[str, list[tuple[bytes, int, int]]] = {}
    async with open_table(directory, MIB) as (store, table):
        for each in (table, store.attach(NS)):
            for chunk in list(each.chunks.values()):
                await assert_right(store, chunk, each.namespace)
            found[each.directory] = sorted((chunk.key, chunk.position, chunk.hits) for chunk in each.chunks.values())
        assert store.counters.corrupt == 0
    return found


async def assert_right(store: object, chunk: Chunk, namespace: Namespace) -> None:
    raw = await read_all(store, chunk)  # type: ignore[arg-type]
    geo = geometry(namespace, chunk.num_tokens)
    chain = raw[: geo.header_bytes].split(b'"chain":"')[1][:64]
    assert raw[geo.header_bytes :][: geo.payload_bytes] == payload_of(bytes.fromhex(chain.decode()), geo)  # type: ignore[arg-type]


def rows(directory: Path) -> list[tuple[bytes, int, int]]:
    """Key, offset and length of each chunk in the index, by position."""
    with closing(sqlite3.connect(directory / "nvme" / INDEX)) as index:
        return index.execute("SELECT key, offset, length FROM chunks ORDER BY namespace, position, key").fetchall()


def edit_index(directory: Path, *statements: str) -> None:
    with closing(sqlite3.connect(directory / "nvme" / INDEX)) as index, index:
        for statement in statements:
            index.execute(statement)


def write(directory: Path, offset: int, raw: bytes) -> None:
    with (directory / "nvme" / VOLUME).open("r+b") as file:
        file.seek(offset)
        file.write(raw)


def flip(directory: Path, offset: int) -> None:
    with (directory / "nvme" / VOLUME).open("rb") as file:
        file.seek(offset)
        [byte] = file.read(1)
    write(directory, offset, bytes([byte ^ 1]))


def chunk_file(namespace: Namespace, chain: KeyChain, position: int, created_ns: int) -> bytes:
    """A whole chunk file."""
    geo = geometry(namespace, 16)
    payload = payload_of(chain.chains[position], geo)
    parent = key_of(chain.parent_of(position))
    facts = Facts(chain.chains[position], parent, position, 16, created_ns, checksums_of(payload, geo))
    return build_header(geo, facts) + payload + bytes(geo.pad_bytes)
