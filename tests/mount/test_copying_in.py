"""What becomes of files and directories that are made in the mount, with a clock that the test moves."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from kvfs import namespace as namespaces
from kvfs.catalog import Chunk, ChunkTable
from kvfs.chunk import Facts, build_header, checksum, file_name, geometry
from kvfs.config import Settings
from kvfs.errors import CapacityError, UsageError
from kvfs.keys import ChainHash, Key, extend, key_of, root
from kvfs.mount.control import ControlFiles
from kvfs.mount.copying_in import MAX_AGE_S, CopyingIn
from kvfs.mount.errnos import Refused
from kvfs.mount.inodes import Inodes
from kvfs.mount.invalidation import Invalidations
from kvfs.mount.namespace_nodes import MAX_GONE
from kvfs.mount.nodes import Fixed, Node
from kvfs.mount.staged_names import FRESH_S, MAX_DRAFTS, QUIET_S, StagedFile
from kvfs.mount.tree import Tree
from kvfs.namespace import Namespace
from kvfs.opening import open_store
from kvfs.store import Store
from kvfs.system import System

COPIER = 4711  # the process that makes a draft


class Clock(System):
    """Time goes on when the test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


def chunk_file(
    namespace: Namespace, path: str, *, position: int | None = None, created_ns: int = 7
) -> tuple[Key, bytes]:
    """The key and the file of the chunk at the end of a path such as "ab"."""
    parent, chain = ChainHash(b""), root(namespace.identity.fingerprint())
    for letter in path:
        parent, chain = chain, extend(chain, letter.encode() * 64)
    geo = geometry(namespace, 16)
    payload = path[-1].encode() * geo.payload_bytes
    sums = tuple(
        checksum(payload[begin - geo.header_bytes : end - geo.header_bytes])
        for begin, end in map(geo.layer_range, range(namespace.num_layers))
    )
    facts = Facts(chain, key_of(parent), len(path) - 1 if position is None else position, 16, created_ns, sums)
    return key_of(chain), build_header(geo, facts) + payload + bytes(geo.pad_bytes)


class Mount:
    """The parts of a mount that decide, without FUSE."""

    def __init__(self, store: Store, clock: Clock, namespace: Namespace) -> None:
        self.store = store
        self.clock = clock
        self.namespace = namespace
        control = ControlFiles(store, "/mnt/x", "/run/x/session.sock")
        self.tree = Tree(store.catalog, control.size, 0, clock.monotonic)
        self.dropped: list[tuple[int, bytes]] = []
        invalidations = Invalidations(lambda *_: None)
        invalidations.put = self.dropped.append  # type: ignore[method-assign]
        self.inodes = Inodes()
        self.copying = CopyingIn(store, self.tree, self.inodes, invalidations)

    def find(self, path: str) -> Node | None:
        node: Node | None = self.tree.root
        for name in path.split("/"):
            assert node is not None
            node = self.tree.lookup(node, name.encode())
        return node

    def at(self, path: str) -> Node:
        found = self.find(path)
        assert found is not None, path
        return found

    async def write(self, directory: str, name: str, content: bytes) -> StagedFile:
        """What `cp` does; raises what close raises."""
        file = self.copying.create(self.at(directory), name.encode())
        try:
            await self.copying.write(file, 0, content)
            await self.copying.flush(file)
        finally:
            self.copying.release(file)
        return file

    def make_draft(self) -> str:
        self.copying.directories.make(self.tree.root, self.namespace.directory.encode())
        for name in (b"chunks", b"prefixes"):
            self.copying.directories.make(self.at(self.namespace.directory), name)
        return self.namespace.directory


@pytest.fixture
async def mount(tmp_path: Path, namespace: Namespace) -> AsyncIterator[Mount]:
    settings = Settings(mountpoint=str(tmp_path / "m"), ram_bytes=4 << 20, huge_pages="never")
    clock = Clock()
    async with open_store(settings, clock) as store:
        yield Mount(store, clock, namespace)
        assert store.statistics().counters["mount_errors"] == 0


@pytest.fixture
def table(mount: Mount) -> ChunkTable:
    return mount.store.attach(mount.namespace)


async def refused(waiting: object) -> int:
    with pytest.raises(Refused) as caught:
        await waiting  # type: ignore[misc]
    return caught.value.errno


def refused_by(call: Callable[[], object]) -> int:
    with pytest.raises(Refused) as caught:
        call()
    return caught.value.errno


async def test_a_chunk_keeps_the_inode_of_its_file(mount: Mount, table: ChunkTable) -> None:
    """And its time, while it counts as used now."""
    key, raw = chunk_file(mount.namespace, "a")
    file = await mount.write(f"{table.directory}/chunks", file_name(key), raw)
    chunk = table.chunks[key]
    assert chunk.inode == file.inode
    assert chunk.created_ns == 7
    assert chunk.last_used_ns > 7
    assert mount.find(f"{table.directory}/prefixes/{key.hex()}/{chunk.file_name}") is chunk
    assert mount.store.statistics().num_staging == 0
    assert bytes(await mount.store.read(chunk, 0, 1 << 20)) == raw


async def test_a_hidden_file_ages_out(mount: Mount, table: ChunkTable) -> None:
    """Ten minutes after the last write, and not while it is open."""
    chunks = mount.at(f"{table.directory}/chunks")
    await mount.write(f"{table.directory}/chunks", ".closed", b"x")
    open_file = mount.copying.create(chunks, b".open")
    await mount.copying.write(open_file, 0, b"x")
    mount.clock.now_s += MAX_AGE_S - 1
    await mount.copying.expire()
    assert mount.store.statistics().num_staging == 2
    again = mount.copying.open(mount.at(f"{table.directory}/chunks/.closed"))
    await mount.copying.write(again, 1, b"y")
    mount.copying.release(again)
    mount.clock.now_s += 2
    await mount.copying.expire()
    assert mount.store.statistics().num_staging == 2
    mount.clock.now_s += MAX_AGE_S
    await mount.copying.expire()
    assert mount.find(f"{table.directory}/chunks/.closed") is None
    assert mount.find(f"{table.directory}/chunks/.open") is not None
    mount.copying.release(open_file)
    await mount.copying.expire()
    statistics = mount.store.statistics()
    assert (statistics.num_staging, statistics.staging_bytes, statistics.ram.used_bytes) == (0, 0, 0)


async def test_a_draft_ages_out_with_all_that_waits_in_it(mount: Mount) -> None:
    name = mount.make_draft()
    key, raw = chunk_file(mount.namespace, "a")
    await mount.write(f"{name}/chunks", file_name(key), raw)
    mount.clock.now_s += MAX_AGE_S - 1
    await mount.copying.expire()
    directory = mount.copying.directories.make(mount.at(f"{name}/prefixes"), b"1" * 32)
    mount.clock.now_s += MAX_AGE_S - 1
    await mount.copying.expire()
    assert mount.find(f"{name}/prefixes/{'1' * 32}") is directory
    chunks = mount.at(f"{name}/chunks")
    mount.clock.now_s += 2
    await mount.copying.expire()
    assert mount.find(name) is None
    assert mount.store.statistics().num_staging == 0
    for place in (chunks, directory):  # whoever stands in it is told
        with pytest.raises(Refused) as caught:
            mount.copying.create(place, b".x")
        assert caught.value.errno == errno.ENOENT
    assert isinstance(chunks, Fixed)
    mount.make_draft()
    assert mount.at(f"{name}/chunks").inode == chunks.inode


async def test_what_waits_in_a_draft_is_proven_when_it_is_a_namespace(mount: Mount) -> None:
    """Parents first; what is wrong goes, and an event says so. It makes no difference whether an engine says what it is."""
    for by_engine in (False, True):
        if by_engine:
            table = mount.store.catalog.tables.pop(mount.namespace.directory)
            await mount.store.remove(list(table.chunks.values()))
        name = mount.make_draft()
        good = [chunk_file(mount.namespace, path) for path in ("abc", "ab", "a")]
        bad_key, bad = chunk_file(mount.namespace, "x")
        for key, raw in (*good, (bad_key, bad[:-1])):
            await mount.write(f"{name}/chunks", file_name(key), raw)
        assert mount.store.statistics().num_staging == 4
        inode = mount.at(f"{name}/chunks").inode
        if by_engine:
            mount.store.attach(mount.namespace)
            await mount.copying.expire()
        else:
            await mount.write(name, "namespace.json", namespaces.encode(mount.namespace))
        table = mount.store.catalog.tables[name]
        assert set(table.chunks) == {key for key, _ in good}
        assert list(table.prefixes.directories) == [good[-1][0].hex()]
        assert mount.store.statistics().num_staging == 0
        assert mount.at(f"{name}/chunks").inode == inode
        assert mount.store.events.read(0, 1 << 20).count(bad_key.hex().encode()) == 1 + by_engine
        mount.clock.now_s += QUIET_S + 1


async def test_a_copy_of_a_namespace_shows_what_was_made(mount: Mount) -> None:
    """Until nothing was done for a while, or the time of the directory is set, as cp and tar do at their end."""
    name = mount.namespace.directory
    for quiet in (False, True):
        mount.copying.directories.make(mount.tree.root, name.encode(), COPIER)
        await mount.write(name, "namespace.json", namespaces.encode(mount.namespace))
        assert mount.tree.lookup(mount.at(name), b"chunks", COPIER) is None
        assert mount.find(f"{name}/chunks") is not None
        mount.copying.directories.make(mount.at(name), b"chunks")
        key, raw = chunk_file(mount.namespace, "a")
        await mount.write(f"{name}/chunks", file_name(key), raw)
        assert mount.tree.lookup(mount.at(name), b"prefixes", COPIER) is None
        assert len(mount.tree.entries(mount.at(f"{name}/prefixes"))) == 1
        mount.copying.directories.make(mount.at(name), b"prefixes")
        assert mount.tree.entries(mount.at(f"{name}/prefixes")) == []
        made = mount.copying.directories.make(mount.at(f"{name}/prefixes"), key.hex().encode())
        chunk = mount.store.catalog.tables[name].chunks[key]
        assert mount.copying.link(chunk, made, chunk.file_name.encode()) is chunk
        assert mount.tree.entries(made) == [chunk]
        assert mount.tree.lookup(made, chunk.file_name.encode()) is chunk
        if quiet:
            mount.clock.now_s += QUIET_S + 1
        else:
            mount.copying.touched(mount.at(name), None)
        assert mount.find(f"{name}/prefixes/{key.hex()}") is chunk.directory
        table = mount.store.catalog.tables.pop(name)
        await mount.store.remove(list(table.chunks.values()))


async def test_a_namespace_without_prefixes_is_whole(mount: Mount) -> None:
    """What was exported has no prefixes/: all but whoever copies find it at once, and that one when the copy is over."""
    name = mount.namespace.directory
    mount.copying.directories.make(mount.tree.root, name.encode(), COPIER)
    assert mount.tree.entries(mount.at(name)) == []
    await mount.write(name, "namespace.json", namespaces.encode(mount.namespace))
    mount.copying.directories.make(mount.at(name), b"chunks", COPIER)
    key, raw = chunk_file(mount.namespace, "a")
    await mount.write(f"{name}/chunks", file_name(key), raw)
    chunk = mount.store.catalog.tables[name].chunks[key]

    def seen(viewer: int) -> list[bytes]:
        return [mount.tree.name(node) for node in mount.tree.entries(mount.at(name), viewer)]

    assert seen(1) == [b"namespace.json", b"chunks", b"prefixes"]
    assert seen(COPIER) == [b"namespace.json", b"chunks"]
    assert mount.find(f"{name}/prefixes/{key.hex()}/{chunk.file_name}") is chunk
    mount.clock.now_s += QUIET_S
    assert seen(COPIER) == [b"namespace.json", b"chunks", b"prefixes"]


async def test_chunks_are_there_for_who_copies_when_it_copies_them(mount: Mount) -> None:
    """A copy that begins with prefixes/ finds its chunks/ empty, and in it what it has put there; others find all."""
    name = mount.namespace.directory
    mount.copying.directories.make(mount.tree.root, name.encode(), COPIER)
    await mount.write(name, "namespace.json", namespaces.encode(mount.namespace))
    prefixes = mount.copying.directories.make(mount.at(name), b"prefixes", COPIER)
    names = []
    for letter in "ab":
        key, raw = chunk_file(mount.namespace, letter)
        mount.copying.directories.make(prefixes, key.hex().encode(), COPIER)
        await mount.write(f"{name}/prefixes/{key.hex()}", file_name(key), raw)
        names.append(file_name(key).encode())
    made = mount.copying.directories.make(mount.at(name), b"chunks", COPIER)

    def found(viewer: int) -> list[bool]:
        listed = [mount.tree.name(node) for node in mount.tree.entries(made, viewer)]
        looked_up = [mount.tree.lookup(made, each, viewer) is not None for each in names]
        assert [each in listed for each in names] == looked_up
        return looked_up

    assert found(COPIER) == [False, False]
    assert found(1) == [True, True]
    await mount.write(f"{name}/chunks", names[0].decode(), chunk_file(mount.namespace, "a")[1])
    assert found(COPIER) == [True, False]
    mount.clock.now_s += QUIET_S
    made = mount.at(f"{name}/chunks")
    assert found(COPIER) == [True, True]


async def test_what_a_draft_shows_goes_with_its_chunk(mount: Mount) -> None:
    """So that its directories can be removed, as long as it takes; what was removed can be made again."""
    name = mount.namespace.directory
    mount.copying.directories.make(mount.tree.root, name.encode(), COPIER)
    await mount.write(name, "namespace.json", namespaces.encode(mount.namespace))
    prefixes = mount.copying.directories.make(mount.at(name), b"prefixes", COPIER)
    key, raw = chunk_file(mount.namespace, "a")
    made = mount.copying.directories.make(prefixes, key.hex().encode())
    await mount.write(f"{name}/prefixes/{key.hex()}", file_name(key), raw)
    chunk = mount.store.catalog.tables[name].chunks[key]
    assert mount.tree.entries(made) == [chunk]
    assert refused_by(lambda: mount.copying.directories.remove(prefixes, key.hex().encode())) == errno.ENOTEMPTY
    mount.clock.now_s += QUIET_S - 1
    assert not mount.copying.unlink(made, chunk.file_name.encode())
    await mount.store.remove([chunk], "rm")
    mount.clock.now_s += QUIET_S - 1
    assert mount.tree.entries(made) == []
    assert mount.copying.directories.remove(prefixes, key.hex().encode())
    assert mount.tree.entries(mount.at(f"{name}/prefixes")) == []
    for directory in (b"prefixes", b"chunks"):
        before = mount.at(f"{name}/{directory.decode()}")
        assert not mount.copying.directories.remove(mount.at(name), directory)
        assert mount.tree.remove_directory(mount.at(name), directory) is None
        assert mount.find(f"{name}/{directory.decode()}") is None
        again = mount.copying.directories.make(mount.at(name), directory)
        assert mount.at(f"{name}/{directory.decode()}") is again
        assert again.inode != before.inode  # the kernel does not look into what it saw removed
    mount.clock.now_s += QUIET_S
    assert mount.tree.remove_directory(mount.at(name), b"chunks") is None
    mount.copying.directories.make(mount.at(name), b"chunks")
    await mount.write(f"{name}/chunks", file_name(key), raw)
    with pytest.raises(Refused):
        mount.copying.directories.make(mount.at(name), b"chunks")


async def test_a_chunk_that_was_copied_in_shows_one_link_for_a_while(mount: Mount, table: ChunkTable) -> None:
    """Else `cp -a` would unlink it when it comes to its other name."""
    key, raw = chunk_file(mount.namespace, "a")
    await mount.write(f"{table.directory}/chunks", file_name(key), raw)
    chunk = table.chunks[key]
    assert mount.tree.attributes(chunk).links == 1
    assert mount.tree.attributes(chunk).timeout_s == 0  # the kernel asks again
    mount.clock.now_s += FRESH_S - 1
    waiting = mount.copying.create(mount.at(f"{table.directory}/chunks"), b".next")
    mount.clock.now_s += 100 * FRESH_S  # for room
    assert mount.tree.attributes(chunk).links == 1
    mount.copying.release(waiting)
    assert mount.tree.attributes(chunk).links == 1
    mount.clock.now_s += FRESH_S
    assert mount.tree.attributes(chunk).links == 2
    assert mount.copying.unlink(mount.at(f"{table.directory}/chunks"), b".next")


async def test_a_copy_is_over_when_it_says_so(mount: Mount, table: ChunkTable) -> None:
    """By setting the time of the namespace, as its last step."""
    key, raw = chunk_file(mount.namespace, "a")
    await mount.write(f"{table.directory}/chunks", file_name(key), raw)
    assert mount.tree.attributes(table.chunks[key]).links == 1
    mount.copying.touched(mount.at(table.directory), None)
    assert mount.tree.attributes(table.chunks[key]).links == 2


async def test_a_namespace_that_is_removed_meanwhile(mount: Mount, table: ChunkTable) -> None:
    """What is written to it is refused, and leaves nothing; the same for what was given up while it was proven."""
    key, raw = chunk_file(mount.namespace, "a")
    chunks = mount.at(f"{table.directory}/chunks")
    file = mount.copying.create(chunks, file_name(key).encode())
    await mount.copying.write(file, 0, raw)
    del mount.store.catalog.tables[table.directory]
    assert await refused(mount.copying.flush(file)) == errno.EINVAL
    mount.copying.release(file)
    assert not table.chunks
    assert mount.store.statistics().ram.used_bytes == 0


@pytest.mark.parametrize(("position", "created_ns"), [(-1, 7), (1 << 32, 7), (0, 1 << 63)])
async def test_facts_that_the_index_could_not_hold(
    mount: Mount, table: ChunkTable, position: int, created_ns: int
) -> None:
    key, raw = chunk_file(mount.namespace, "a", position=position, created_ns=created_ns)
    assert await refused(mount.write(f"{table.directory}/chunks", file_name(key), raw)) == errno.EINVAL
    assert not table.chunks


async def test_a_position_that_contradicts_the_parent(mount: Mount, table: ChunkTable) -> None:
    key, raw = chunk_file(mount.namespace, "a")
    await mount.write(f"{table.directory}/chunks", file_name(key), raw)
    child, raw = chunk_file(mount.namespace, "ab", position=5)
    assert await refused(mount.write(f"{table.directory}/chunks", file_name(child), raw)) == errno.EINVAL
    assert list(table.chunks) == [key]


async def test_pieces_in_any_order(mount: Mount, table: ChunkTable) -> None:
    """Gaps are zeros until they are filled; what was longer can be cut."""
    key, raw = chunk_file(mount.namespace, "a")
    file = mount.copying.create(mount.at(f"{table.directory}/chunks"), b".x")
    await mount.copying.write(file, 5000, raw[5000:])
    assert mount.store.staging.read(file.staged, 0, 6000) == bytes(5000) + raw[5000:6000]
    await mount.copying.write(file, 0, raw[:5000])
    await mount.copying.truncate(file, 100)
    await mount.copying.truncate(file, len(raw))
    assert mount.store.staging.read(file.staged, 0, 200) == raw[:100] + bytes(100)
    await mount.copying.write(file, 100, raw[100:])
    for bad in (b"", b"x"):
        assert await refused(mount.copying.write(file, len(raw), b"x" + bad)) == errno.EFBIG
    chunks = mount.at(f"{table.directory}/chunks")
    await mount.copying.rename(chunks, b".x", chunks, file_name(key).encode(), 0)
    mount.copying.release(file)
    assert isinstance(mount.find(f"{table.directory}/chunks/{file_name(key)}"), Chunk)
    assert await refused(mount.copying.write(file, 0, b"x")) == errno.EPERM


async def test_a_file_of_unknown_length_grows(mount: Mount) -> None:
    """In a draft nobody knows how large chunks are; growing keeps what is there, and gives back what it leaves."""
    name = mount.make_draft()
    file = mount.copying.create(mount.at(f"{name}/chunks"), b".x")
    content = bytes(range(256)) * 2048
    for begin in range(0, len(content), 10_000):
        await mount.copying.write(file, begin, content[begin : begin + 10_000])
    assert mount.store.staging.read(file.staged, 0, 1 << 20) == content
    statistics = mount.store.statistics()
    assert statistics.staging_bytes == statistics.ram.used_bytes < 2 * len(content)
    with pytest.raises(CapacityError):
        await mount.copying.write(file, 3 << 20, b"x")
    assert b"half of the RAM tier" in mount.store.events.read(0, 1 << 20)
    mount.copying.release(file)
    assert mount.store.statistics().staging_bytes == len(content)  # while it waits it has no more than it needs
    assert mount.store.staging.read(file.staged, 0, 1 << 20) == content
    assert mount.copying.unlink(mount.at(f"{name}/chunks"), b".x")
    assert mount.store.statistics().ram.used_bytes == 0


async def test_a_file_that_is_dropped_while_it_is_held(mount: Mount) -> None:
    """Its extent stays until nobody looks at it any more."""
    staging = mount.store.staging
    staged = staging.create(1 << 30, 1 << 20, 4096)
    await staging.write(staged, 0, b"x")
    async with trio.open_nursery() as nursery:
        async with staging.holding(staged):
            staging.drop(staged)
            assert staging.size_bytes == 4096
            waiting = nursery.start_soon
            failures: list[UsageError] = []

            async def write() -> None:
                try:
                    await staging.write(staged, 0, b"y")
                except UsageError as error:
                    failures.append(error)

            waiting(write)
            await trio.testing.wait_all_tasks_blocked()
        assert staging.size_bytes == 0
    assert len(failures) == 1
    assert (staging.num_files, mount.store.statistics().ram.used_bytes) == (0, 0)


async def test_drafts_are_bounded(mount: Mount) -> None:
    for number in range(MAX_DRAFTS):
        mount.copying.directories.make(mount.tree.root, f"tiny-f32-r0of1-{number:012x}".encode())
    with pytest.raises(CapacityError):
        mount.copying.directories.make(mount.tree.root, b"tiny-f32-r0of1-ffffffffffff")


async def test_an_empty_prefix_directory_is_forgotten(mount: Mount, table: ChunkTable) -> None:
    """One that was made and not used is dropped from the kernel, so that it can go."""
    prefixes = mount.at(f"{table.directory}/prefixes")
    made = mount.copying.directories.make(prefixes, b"1" * 32)
    mount.inodes.remember(made)  # type: ignore[arg-type]
    mount.clock.now_s += MAX_AGE_S + 1
    await mount.copying.expire()
    assert mount.dropped == [(prefixes.inode, b"1" * 32)]


async def test_the_place_of_a_chunk_is_known_from_its_first_bytes(mount: Mount, table: ChunkTable) -> None:
    """So that making room for the rest spares what it is built on; less than a header says nothing."""
    key, raw = chunk_file(mount.namespace, "abc")
    file = mount.copying.create(mount.at(f"{table.directory}/chunks"), file_name(key).encode())
    await mount.copying.write(file, 0, raw[:100])
    assert file.staged.position is None
    await mount.copying.write(file, 0, raw[:5000])
    assert file.staged.position == 2
    mount.copying.release(file)


async def test_names_of_drafts_that_were_given_up_cost_nothing(mount: Mount) -> None:
    """Made and removed thousands of times; who stands in one of the last sees it as it is, empty and without a name."""
    inodes = []
    for number in range(3000):
        name = f"{mount.namespace.directory[:-12]}{number:012x}".encode()
        inodes.append(mount.copying.directories.make(mount.tree.root, name).inode)
        assert mount.copying.directories.remove(mount.tree.root, name)
    assert len(mount.tree.namespaces._tables) == 1
    assert len(mount.tree.namespaces._fixed) <= MAX_GONE + 100
    last = mount.tree.fixed(inodes[-1])
    assert last is not None
    assert mount.tree.attributes(last).links == 0
    assert mount.tree.fixed(inodes[0]) is None


async def test_names_of_removed_namespaces_cost_nothing(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfs.mount.namespace_nodes.MAX_GONE", 8)
    before = len(mount.tree.namespaces._fixed)
    for _ in range(10):
        table = mount.store.attach(mount.namespace)
        mount.at(table.directory)
        assert mount.tree.remove_directory(mount.tree.root, table.directory.encode()) is table
        mount.store.remove_namespace(table)
    assert len(mount.tree.namespaces._fixed) <= before + 8


async def test_empty_prefixes_that_people_make_are_bounded(
    mount: Mount, table: ChunkTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that got a chunk, or are gone, do not count."""
    monkeypatch.setattr("kvfs.mount.made_directories.MAX_EMPTY_DIRECTORIES", 2)
    prefixes = f"{table.directory}/prefixes"
    keys = [chunk_file(mount.namespace, letter) for letter in "abcd"]
    made = [mount.copying.directories.make(mount.at(prefixes), key.hex().encode()) for key, _ in keys[:2]]
    with pytest.raises(CapacityError):
        mount.copying.directories.make(mount.at(prefixes), keys[2][0].hex().encode())
    key, raw = keys[0]
    await mount.write(f"{prefixes}/{key.hex()}", file_name(key), raw)
    made.append(mount.copying.directories.make(mount.at(prefixes), keys[2][0].hex().encode()))
    with pytest.raises(CapacityError):
        mount.copying.directories.make(mount.at(prefixes), keys[3][0].hex().encode())
    mount.tree.remove_directory(mount.at(prefixes), keys[2][0].hex().encode())
    mount.copying.directories.make(mount.at(prefixes), keys[3][0].hex().encode())


async def test_a_file_that_is_written_anew_while_namespace_json_comes(mount: Mount) -> None:
    """It is proven when it is closed, as all that comes later; one that is closed empty leaves nothing."""
    top = mount.make_draft()
    (key, raw), (other, other_raw) = chunk_file(mount.namespace, "a"), chunk_file(mount.namespace, "b")
    await mount.write(f"{top}/chunks", file_name(key), raw)
    await mount.write(f"{top}/chunks", file_name(other), other_raw)
    opened = [mount.copying.open(mount.at(f"{top}/chunks/{file_name(each)}")) for each in (key, other)]
    for file in opened:
        await mount.copying.truncate(file, 0)
    await mount.copying.write(opened[0], 0, raw[:5000])
    await mount.write(top, "namespace.json", namespaces.encode(mount.namespace))
    table = mount.store.catalog.tables[top]
    assert not table.chunks
    await mount.copying.write(opened[0], 5000, raw[5000:])
    for file in opened:
        await mount.copying.flush(file)
        mount.copying.release(file)
    assert set(table.chunks) == {key}
    assert mount.store.statistics().num_staging == 0
    assert not mount.tree.staged.files
    assert mount.store.counters.copies_refused == 0


async def test_two_names_of_a_file_that_waits(mount: Mount) -> None:
    """Either can be moved and removed; neither gets another name, which the other would lose its file by."""
    top = mount.make_draft()
    key, raw = chunk_file(mount.namespace, "a")
    name = file_name(key).encode()
    await mount.write(f"{top}/chunks", file_name(key), raw)
    chunks, prefixes = mount.at(f"{top}/chunks"), mount.at(f"{top}/prefixes")
    first, second = (mount.copying.directories.make(prefixes, digit * 32) for digit in (b"1", b"2"))
    file = mount.at(f"{top}/chunks/{file_name(key)}")
    assert mount.copying.link(file, first, name) is file
    assert await refused(mount.copying.rename(chunks, name, chunks, b".x", 0)) == errno.EPERM
    await mount.copying.rename(chunks, name, first, name, 0)  # two names of one file: nothing happens
    assert mount.tree.lookup(chunks, name) is mount.tree.lookup(first, name) is file
    await mount.copying.rename(first, name, second, name, 0)
    assert mount.tree.lookup(first, name) is None
    assert mount.tree.lookup(chunks, name) is mount.tree.lookup(second, name) is file
    mount.copying.unlink(second, name)
    await mount.copying.rename(chunks, name, chunks, b".x", 0)
    assert mount.tree.lookup(chunks, b".x") is file
    await mount.copying.rename(chunks, b".x", chunks, name, 0)
    await mount.write(top, "namespace.json", namespaces.encode(mount.namespace))
    assert set(mount.store.catalog.tables[top].chunks) == {key}
