"""Hostile input, from a corpus that is kept: an error each time, never a crash, in bounded time and memory.

``tests/corpus/<target>/`` holds inputs that are whole, inputs that were made by hand to hurt, and whatever was found: a
failure says how to keep its input there. Each is played as it is; then they are cut, spliced and changed, KVFS_FUZZ
times a target (fewer in make test), the same at every run unless KVFS_FUZZ is set.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import socket
import sqlite3
import struct
import tempfile
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyfuse3 import FUSEError

from kvfs import config
from kvfs import messages as m
from kvfs import namespace as namespaces
from kvfs.chunk import MAX_CHUNK_BYTES, geometry, parse_file_name, parse_header, verify_payload
from kvfs.errors import ConfigError, CorruptChunk, FormatError, KvfsError, ProtocolError, UsageError
from kvfs.index import FILE_NAME as INDEX
from kvfs.mount.control import ControlFiles
from kvfs.mount.errnos import Faults
from kvfs.mount.nodes import Fixed, is_directory
from kvfs.mount.operations import Operations
from kvfs.mount.session import serve_sessions
from kvfs.mount.tree import Tree
from kvfs.opening import open_store
from kvfs.staging import prove
from kvfs.testing import chain_of, open_table, settings_in, socket_path, store_chain, tiny_namespace
from kvfs.tools.copying import Copied
from kvfs.tools.import_ import _from_tar

CORPUS = Path(__file__).parents[1] / "corpus"
NUM_MUTATED = int(os.environ.get("KVFS_FUZZ", "60"))
NUM_MUTATED_OFTEN = 15
MAX_CPU_S = 5.0  # on a slow machine; what a hostile input can make long takes minutes
MAX_BYTES = 64 << 20
NS = tiny_namespace()

Target = Callable[[bytes], None]


@contextlib.contextmanager
def bounded() -> Any:
    """What happens inside takes little of this thread's time and little memory."""
    tracemalloc.start()
    begin = time.thread_time()
    try:
        yield
        took_s, (_, peak) = time.thread_time() - begin, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert took_s < MAX_CPU_S, f"it took {took_s:.1f} s"
    assert peak < MAX_BYTES, f"it took {peak >> 20} MiB"


# the targets


def message(raw: bytes) -> None:
    """One packet, in both directions; what is taken comes out again as it is."""
    for decode in (m.decode_request, m.decode_reply):
        with contextlib.suppress(ProtocolError):
            found = decode(raw)
            assert decode(m.encode(found)) == found


def session(raw: bytes) -> None:
    """Packets (u32 length, bytes) of one client: each is answered, and another client is served as ever."""
    packets = []
    while len(raw) > 4 and len(packets) < 50:
        length = min(struct.unpack("<I", raw[:4])[0], len(raw) - 4, m.MAX_MESSAGE_BYTES + 1)
        if length:
            packets.append(raw[4 : 4 + length])
        raw = raw[4 + length :]
    with tempfile.TemporaryDirectory(prefix=f"kvfs-{os.getpid()}-") as directory:
        trio.run(_play_session, Path(directory), packets)


async def _play_session(directory: Path, packets: list[bytes]) -> None:
    settings = settings_in(directory, ram=1 << 20, nvme=None)
    async with open_store(settings) as store, trio.open_nursery() as nursery:
        await nursery.start(serve_sessions, store, socket_path(directory))
        with trio.fail_after(60):
            hostile, other = [await _connected(directory) for _ in range(2)]
            with hostile, other:
                await hostile.send(m.encode(m.Hello(1, m.VERSION, namespaces.encode(NS), "fuzz")))
                await hostile.recv(m.MAX_MESSAGE_BYTES)
                for packet in packets:
                    await hostile.send(packet)
                    reply = m.decode_reply(await hostile.recv(m.MAX_MESSAGE_BYTES))
                    assert isinstance(reply, m.Reply)
                await other.send(m.encode(m.Hello(1, m.VERSION, namespaces.encode(NS), "other")))
                assert isinstance(m.decode_reply(await other.recv(m.MAX_MESSAGE_BYTES)), m.Welcome)
                await other.send(m.encode(m.Match(2, bytes(16))))
                assert isinstance(m.decode_reply(await other.recv(m.MAX_MESSAGE_BYTES)), m.Matched)
            assert store.counters.session_errors == 0
            while store.statistics().num_leases:  # noqa: ASYNC110 - until the daemon has seen that it is gone
                await trio.sleep(0.001)
        nursery.cancel_scope.cancel()


async def _connected(directory: Path) -> trio.socket.SocketType:
    client = trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    await client.connect(socket_path(directory))
    return client


def chunk(raw: bytes) -> None:
    """A chunk file: the header is the only one that its facts can have, and the payload has its checksums."""
    with contextlib.suppress(CorruptChunk):
        geo, facts = parse_header(NS, raw)
        padded = memoryview(raw + bytes(max(0, geo.file_bytes - len(raw))))
        verify_payload(geo, facts, padded)


def namespace(raw: bytes) -> None:
    """A namespace.json; what is taken is written out as something that is taken for the same."""
    with contextlib.suppress(FormatError, UsageError):
        found = namespaces.decode(raw)
        assert namespaces.decode(namespaces.encode(found)) == found
        assert namespaces.is_directory_name(found.directory)
        assert geometry(found, found.identity.tokens_per_chunk).payload_bytes <= MAX_CHUNK_BYTES


def settings_file(raw: bytes) -> None:
    """A TOML file; settings that are taken are written out as the same."""
    with tempfile.TemporaryDirectory(prefix=f"kvfs-{os.getpid()}-") as directory:
        path = Path(directory, "kvfs.toml")
        path.write_bytes(raw)
        with contextlib.suppress(ConfigError):
            found = config.load(path, {})
            path.write_text(config.to_toml(found), "utf-8")
            assert config.load(path, {}) == found


class _Mount:
    """The handlers of a mount, over a store with two chunks, in a thread of its own. One for all inputs."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._directory = tempfile.TemporaryDirectory(prefix=f"kvfs-{os.getpid()}-")
        self._thread = threading.Thread(target=lambda: trio.run(self._live))
        self._thread.start()
        self._ready.wait()

    async def _live(self) -> None:
        directory = Path(self._directory.name)
        self._token = trio.lowlevel.current_trio_token()
        self._end = trio.Event()
        async with open_table(directory, NS, ram=1 << 20, nvme=None) as (store, table), trio.open_nursery() as nursery:
            await store_chain(store, table, chain_of(NS, 2))
            control = ControlFiles(store, "/mnt", "/socket")
            tree = Tree(store.catalog, control.size, 0)
            self.operations = Operations(store, tree, control, Faults(store.counters), nursery)
            self.store = store
            self._ready.set()
            await self._end.wait()

    def run(self, work: Callable[[Operations], Any]) -> None:
        trio.from_thread.run(work, self.operations, trio_token=self._token)
        assert self.store.counters.mount_errors == 0
        assert self.store.catalog.num_chunks == 2

    def close(self) -> None:
        trio.from_thread.run_sync(self._end.set, trio_token=self._token)
        self._thread.join()
        self._directory.cleanup()


mount: _Mount
CONTEXT: Any = SimpleNamespace(pid=1)


def name(raw: bytes) -> None:
    """A name, in every kind of directory, for every handler that takes one; nothing is removed, as no name is right."""
    is_right = parse_file_name(raw.decode("ascii", "surrogateescape")) is not None  # it would remove a chunk
    if is_right or b"/" in raw or b"\0" in raw:  # the kernel hands over no such names
        return
    found: Any = raw

    async def work(operations: Operations) -> None:
        for node in _nodes(operations):
            inode: Any = node.inode
            for call in (operations.lookup, operations.unlink, operations.rmdir):
                with contextlib.suppress(FUSEError):
                    await call(inode, found, CONTEXT)
            with contextlib.suppress(FUSEError):
                await operations.mkdir(inode, found, 0o777, CONTEXT)  # type: ignore[arg-type]
            await _write(operations, inode, found, b"x")
            with contextlib.suppress(FUSEError):
                await operations.symlink(inode, found, found, CONTEXT)
            with contextlib.suppress(FUSEError):
                await operations.rename(inode, found, inode, found, 0, CONTEXT)  # type: ignore[arg-type]
            if node.inode != operations.tree.root.inode:
                await _write(operations, inode, b".staged", b"x")
                with contextlib.suppress(FUSEError):
                    await operations.rename(inode, b".staged", inode, found, 0, CONTEXT)  # type: ignore[arg-type]
            for call in (operations.unlink, operations.rmdir):
                for left in (found, b".staged"):
                    with contextlib.suppress(FUSEError):
                        await call(inode, left, CONTEXT)  # type: ignore[arg-type]

    mount.run(work)


async def _write(operations: Operations, parent: Any, name: Any, content: bytes) -> None:
    """Make a file, write it and close it."""
    try:
        info, _ = await operations.create(parent, name, 0o640, os.O_RDWR, CONTEXT)  # type: ignore[arg-type]
    except FUSEError:
        return
    with contextlib.suppress(FUSEError):
        await operations.write(info.fh, 0, content)
        await operations.flush(info.fh)
    await operations.release(info.fh)


def written_by_hand(raw: bytes) -> None:
    """The namespace.json of a namespace to come, and of one that is there: nothing becomes what it is not."""
    wanted, present = (tiny_namespace(model).directory.encode() for model in ("tests/other", "tests/tiny"))

    async def work(operations: Operations) -> None:
        root: Any = operations.tree.root.inode
        for name in (wanted, present):
            with contextlib.suppress(FUSEError):
                await operations.mkdir(root, name, 0o750, CONTEXT)  # type: ignore[arg-type]
            parent = (await operations.lookup(root, name, CONTEXT)).st_ino  # type: ignore[arg-type]
            await _write(operations, parent, b"namespace.json", raw)
        tables = operations.tree.catalog.tables
        assert set(tables) <= {wanted.decode(), present.decode()}
        if wanted.decode() in tables:
            assert namespaces.decode(raw).directory == wanted.decode()
        await operations.rmdir(root, wanted, CONTEXT)  # type: ignore[arg-type]
        assert set(tables) == {present.decode()}
        assert operations.tree.lookup(operations.tree.root, wanted) is None

    mount.run(work)


class _Track:
    """Nobody watches, and nobody stops it."""

    is_stopping = False

    def begin(self, what: str, total: int) -> None:
        pass

    def advance(self, amount: int) -> None:
        pass


def tar(raw: bytes) -> None:
    """An archive that is imported: whatever its names say, only chunks that prove themselves are made, in their place."""
    with tempfile.TemporaryDirectory(prefix=f"kvfs-{os.getpid()}-") as directory:
        top = Path(directory, "outer", "mount")
        (top / NS.directory / "chunks").mkdir(parents=True)
        archive = Path(directory, "a.tar")
        archive.write_bytes(raw)
        with contextlib.suppress(KvfsError):
            _from_tar(str(top), str(archive), Copied(), set(), _Track())  # type: ignore[arg-type]
        for path in Path(directory).rglob("*"):
            if path.is_file() and path != archive:
                parts = path.relative_to(top).parts
                assert namespaces.is_directory_name(parts[0])
                found = namespaces.decode(path.parents[len(parts) - 2].joinpath("namespace.json").read_bytes())
                assert found.directory == parts[0]
                if parts[1:] != ("namespace.json",):
                    assert parts[1] == "chunks"
                    key = parse_file_name(parts[2])
                    assert key is not None
                    prove(found, key, memoryview(path.read_bytes()))


def _nodes(operations: Operations) -> list[Any]:
    """Every node of the mount, each known to the kernel as far as it has to be."""
    tree = operations.tree
    found: list[Any] = [tree.root]
    for node in found:
        if is_directory(node):
            found += tree.entries(node)
        if not isinstance(node, Fixed) and operations.inodes.get(node.inode) is None:
            operations.inodes.remember(node)
    return found


def attribute(raw: bytes) -> None:
    """Name, NUL, value of an extended attribute, on every kind of node."""
    word, _, value = raw.partition(b"\0")
    found: Any = word

    async def work(operations: Operations) -> None:
        for node in _nodes(operations):
            inode: Any = node.inode
            with contextlib.suppress(FUSEError):
                await operations.setxattr(inode, found, value, CONTEXT)
            with contextlib.suppress(FUSEError):
                await operations.getxattr(inode, found, CONTEXT)
            with contextlib.suppress(FUSEError):
                await operations.removexattr(inode, found, CONTEXT)

    mount.run(work)


def index_row(raw: bytes) -> None:
    """A row of the index, as msgpack: the table's name, then its columns. The store opens; the sound chunk stays."""
    try:
        table, *columns = msgspec.msgpack.decode(raw, type=list[Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError):
        return
    number = {"chunks": 10, "namespaces": 4, "facts": 2}.get(table if isinstance(table, str) else "", 0)
    if not number or len(columns) != number or not all(_is_for_sqlite(column) for column in columns):
        return
    with tempfile.TemporaryDirectory(prefix=f"kvfs-{os.getpid()}-") as directory:
        trio.run(_open_with_row, Path(directory), table, columns)


def _is_for_sqlite(value: object) -> bool:
    return value is None or isinstance(value, (bytes, float)) or (
        isinstance(value, int) and -(1 << 63) <= value < 1 << 63
    ) or (isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value))  # fmt: skip


async def _open_with_row(directory: Path, table: str, columns: list[Any]) -> None:
    chain = chain_of(NS, 1)
    async with open_table(directory, NS, ram=1 << 20, nvme=1 << 20) as (store, chunks):
        await store_chain(store, chunks, chain)
    with contextlib.closing(sqlite3.connect(directory / "nvme" / INDEX, isolation_level=None)) as connection:
        marks = ", ".join("?" * len(columns))
        connection.execute(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", columns)
    async with open_table(directory, NS, ram=1 << 20, nvme=1 << 20) as (store, chunks):
        claims = [(chunk.nvme, chunk.length) for chunk in store.catalog.chunks()]
        assert len({offset for offset, _ in claims}) == len(claims)
        for found in list(store.catalog.chunks()):
            await store.examine(found)
        assert chain.keys[0] in chunks.chunks
        await store.flush()


TARGETS: dict[str, Target] = {
    "message": message, "session": session, "chunk": chunk, "namespace": namespace, "config": settings_file,
    "name": name, "written": written_by_hand, "tar": tar, "xattr": attribute, "index": index_row,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _the_mount() -> Any:
    global mount
    mount = _Mount()
    yield
    mount.close()


# mutation

WORDS = [
    b"", b"\0", b"\xff", b"\x80", b"-1", b"0", b"9" * 40, b"\xc0\x80", b"\xed\xa0\x80", b"[" * 200, b"{" * 200,
    b"\x91" * 200, b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7),
    b"NaN", b"1e999", b"GiB", b"..", b"/", b'"', b"\n", b"user.kvfs.pin", b"forever", b"\xcb\x7f\xf8" + bytes(6),
]  # fmt: skip


@st.composite
def changed(draw: st.DrawFn, inputs: list[bytes]) -> bytes:
    """One of the inputs with a few edits: bytes replaced, cut out, doubled, words put in, another's tail."""
    raw = bytearray(draw(st.sampled_from(inputs)))
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(raw)))
        end = min(len(raw), begin + draw(st.sampled_from([0, 1, 1, 2, 4, 8, 16, 64, 1000])))
        match draw(st.integers(0, 4)):
            case 0 if begin < len(raw):
                raw[begin] ^= 1 << draw(st.integers(0, 7))
            case 1:
                raw[begin:end] = draw(st.binary(min_size=end - begin, max_size=end - begin))
            case 2:
                raw[begin:end] = draw(st.sampled_from(WORDS))
            case 3:
                raw[begin:begin] = raw[begin:end] * draw(st.integers(1, 20))
            case _:
                other = draw(st.sampled_from(inputs))
                raw[begin:] = other[draw(st.integers(0, len(other))) :]
    return bytes(raw[: 1 << 18])


def attack(target: str, raw: bytes) -> None:
    try:
        if target in ("session", "index"):  # they take memory of their own; the store's is measured elsewhere
            TARGETS[target](raw)
        else:
            with bounded():
                TARGETS[target](raw)
    except BaseException as error:
        where = f"tests/corpus/{target}/found-{hashlib.sha256(raw).hexdigest()[:12]}"
        packed = base64.b85encode(zlib.compress(raw, 9))
        error.add_note(f"to keep it: open({where!r}, 'wb').write(zlib.decompress(base64.b85decode({packed!r})))")
        raise


def inputs_of(target: str) -> list[Path]:
    return sorted((CORPUS / target).iterdir())


LOG = pytest.mark.expect_log(
    "two chunks claim|was dropped|is not readable|cannot be trusted|a full chunk has|cannot be true|there is no index"
)


@LOG
@pytest.mark.parametrize(
    ("target", "path"), [(target, path) for target in TARGETS for path in inputs_of(target)],
    ids=lambda value: value.name if isinstance(value, Path) else value,
)  # fmt: skip
def test_corpus(target: str, path: Path) -> None:
    """Every input that is kept."""
    attack(target, path.read_bytes())


@LOG
@pytest.mark.parametrize("max_examples", [NUM_MUTATED_OFTEN, pytest.param(NUM_MUTATED, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("target", TARGETS)
def test_changed_inputs(target: str, max_examples: int) -> None:
    """The same, changed."""
    inputs = [path.read_bytes() for path in inputs_of(target)]

    @settings(
        max_examples=max_examples, deadline=None, derandomize="KVFS_FUZZ" not in os.environ, print_blob=True,
        suppress_health_check=list(HealthCheck), phases=set(Phase) - {Phase.explain}, database=None,
    )  # fmt: skip
    @given(changed(inputs))
    def attack_changed(raw: bytes) -> None:
        attack(target, raw)

    attack_changed()


@pytest.mark.parametrize("target", TARGETS)
def test_whole_inputs_are_taken(target: str) -> None:
    """The corpus has inputs that get all the way: names that begin with `whole` are no errors."""
    assert any(path.name.startswith("whole") for path in inputs_of(target))
