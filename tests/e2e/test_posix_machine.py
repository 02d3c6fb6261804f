"""A state machine of the mounted tree: plain system calls, while engines store and load, against what POSIX says.

The model is the set of chunks that were stored, with the bytes of each as they were first read. What a call returns, or
which errno it may fail with, follows from that and from DESIGN.md, section 2. After every step both views have to show
the same chunks, under names that agree with `stat`, and what was open has to read as before.

What other versions add is switched on at the top: until then those calls are expected to be refused.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

COPYING_IN = False
"""Whether chunk files may be written, renamed and linked into the mount, and modes and times set without effect."""
PINS = False
"""Whether user.kvfs.pin may be set."""

REFUSED = {errno.EROFS, errno.EPERM, errno.EACCES}
PATHS = ["a", "ab", "abc", "abcd", "abX", "abXY", "aZ", "Q", "QR", "QRS"]
SUFFIX = ".safetensors"
KEY = re.compile(r"[0-9a-f]{32}")
SOON_S = 0.9  # the kernel may believe a name or an attribute for a second; ours are taken back sooner
FACTS = ("dirty", "tier", "hits", "position", "tokens", "parent", "key", "checksum")  # what is clean stays clean

a_path = st.sampled_from(PATHS)
a_view = st.sampled_from(["flat", "deep"])
NAMES = [
    b".", b"..", b"", b"x", b"x" * 255, b"x" * 256, b"\xff\xfe", b"a\nb", b" ", b".hidden", "ü".encode(), b"chunks",
    b"0" * 32, b"0" * 32 + SUFFIX.encode(), b"0" * 31 + b"G" + SUFFIX.encode(), b"A" * 32 + SUFFIX.encode(),
    b"0" * 32 + SUFFIX.encode() + b"\n", b"-rf", b"*",
]  # fmt: skip
a_name = st.sampled_from(NAMES)
a_directory = st.sampled_from([".", ".kvfs", "NS", "NS/chunks", "NS/prefixes", "PREFIX"])
a_fixed_file = st.sampled_from(
    ["README.txt", ".kvfs/status.json", ".kvfs/metrics", ".kvfs/config.toml", "NS/namespace.json"]
)


@dataclass(eq=False)
class Held:
    """A file that is open, and what it holds."""

    fd: int
    content: bytes
    path: str


def errno_of(call: Callable[[], object]) -> int:
    """What a call fails with; 0 if it does not."""
    try:
        call()
    except OSError as error:
        return error.errno or -1
    return 0


def soon(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.002)


class PosixMachine(RuleBasedStateMachine):
    """See the module. `engine` and `root` are set by the test: one mount serves all runs."""

    engine: Any
    root: Path

    def __init__(self) -> None:
        super().__init__()
        self.there: dict[str, bytes] = {}
        self.files: dict[str, bytes] = {}  # of every chunk that was ever there: the bytes, as they were last read
        self.held: list[Held] = []

    def teardown(self) -> None:
        """Remove everything, what is open too: it is there to its last reader."""
        try:
            for path in list(self.there):
                self.unlink(path, "flat")
            self.all_is_consistent()
        finally:
            for held in self.held:
                os.close(held.fd)
        counters = json.loads((self.root / ".kvfs/status.json").read_bytes())["counters"]
        assert (counters["mount_errors"], counters["session_errors"], counters["corrupt"]) == (0, 0, 0)

    # names

    def flat(self, path: str) -> Path:
        file: Path = self.engine.file(path)
        return file

    def deep(self, path: str) -> Path | None:
        """The name in the prefix view, wherever it is now."""
        name = self.flat(path).name
        for directory, _, names in os.walk(self.engine.prefixes):
            if name in names:
                return Path(directory, name)
        return None

    def name(self, path: str, view: str) -> Path:
        """A name of a chunk; where there is none, one that there might be."""
        deep = self.deep(path) if view == "deep" else self.flat(path)
        return deep or self.engine.prefixes / self.flat(path).name

    def directory(self, which: str) -> Path:
        if which == "PREFIX":
            found = [Path(entry.path) for entry in os.scandir(self.engine.prefixes)]
            return found[0] if found else self.engine.prefixes
        namespace: Path = self.engine.directory
        return self.root / which.replace("NS", namespace.name)

    # engines

    @rule(path=a_path)
    def store(self, path: str) -> None:
        self.engine.store(path)
        for length in range(1, len(path) + 1):
            part = path[:length]
            if part not in self.there:
                self.there[part] = self.files[part] = self.flat(part).read_bytes()

    @rule(path=a_path)
    def load(self, path: str) -> None:
        """An engine finds the longest prefix that is there."""
        parts = [path[:length] for length in range(1, len(path) + 1)]
        count = next((number for number, part in enumerate(parts) if part not in self.there), len(parts))
        assert self.engine.client.match(self.engine.chains(path)).count == count
        if count:
            self.engine.load(path[:count])

    # looking

    @rule(path=a_path, view=a_view)
    def look(self, path: str, view: str) -> None:
        name = self.name(path, view)
        if path not in self.there:
            assert errno_of(lambda: os.stat(name)) == errno.ENOENT
            assert not os.path.lexists(name)
            return
        for almost in (f"{name}\n", f"{name}x", str(name.with_name(name.name.upper())), str(name)[:-1]):
            assert errno_of(lambda a=almost: os.stat(a)) == errno.ENOENT
        found = os.stat(name)
        assert stat.S_ISREG(found.st_mode)
        assert stat.S_IMODE(found.st_mode) & 0o137 == 0  # nobody writes, executes, nor reads but owner and group
        assert (found.st_nlink, found.st_size) == (2, len(self.there[path]))
        assert found.st_blocks * 512 >= found.st_size
        assert found.st_ino == os.lstat(self.name(path, "flat")).st_ino == os.stat(self.name(path, "deep")).st_ino

    @rule(path=a_path, view=a_view, offset=st.integers(0, 9000), size=st.integers(0, 9000))
    def read_it(self, path: str, view: str, offset: int, size: int) -> None:
        name = self.name(path, view)
        if path not in self.there:
            assert errno_of(lambda: os.open(name, os.O_RDONLY)) == errno.ENOENT
            return
        fd = os.open(name, os.O_RDONLY)
        try:
            assert os.pread(fd, size, offset) == self.there[path][offset : offset + size]
            assert os.lseek(fd, 0, os.SEEK_END) == len(self.there[path])
            assert os.read(fd, 10) == b""
            assert errno_of(lambda: os.write(fd, b"x")) == errno.EBADF
            assert errno_of(lambda: os.lseek(fd, -1, os.SEEK_SET)) == errno.EINVAL
            assert errno_of(lambda: os.fsync(fd)) in (0, errno.EINVAL, errno.EROFS)
        finally:
            os.close(fd)

    @rule(path=a_path, view=a_view, is_shared=st.booleans())
    def map_it(self, path: str, view: str, is_shared: bool) -> None:
        if path not in self.there:
            return
        with open(self.name(path, view), "rb") as file:
            flags = mmap.MAP_SHARED if is_shared else mmap.MAP_PRIVATE
            with mmap.mmap(file.fileno(), 0, flags, mmap.PROT_READ) as mapped:
                assert mapped[:] == self.there[path]
            if is_shared:
                wanted = mmap.PROT_READ | mmap.PROT_WRITE
                assert errno_of(lambda: mmap.mmap(file.fileno(), 0, flags, wanted)) == errno.EACCES

    @rule(path=a_path, view=a_view, flags=st.sampled_from([0, os.O_DIRECT]))
    def hold(self, path: str, view: str, flags: int) -> None:
        """Open it, and leave it open; with O_DIRECT the kernel has no copy of what was read before."""
        if path in self.there and len(self.held) < 20:
            fd = os.open(self.name(path, view), os.O_RDONLY | os.O_CLOEXEC | flags)
            self.held.append(Held(fd, self.there[path], path))

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 20))
    def let_go(self, number: int) -> None:
        os.close(self.held.pop(number % len(self.held)).fd)

    @rule(which=a_directory)
    def list_it(self, which: str) -> None:
        """Each entry is what `stat` says, once; `.` and `..` lead where they should."""
        directory = self.directory(which)
        entries = list(os.scandir(directory))
        assert len({entry.name for entry in entries}) == len(entries)
        for entry in entries:
            found = os.lstat(entry.path)
            assert entry.inode() == found.st_ino
            assert entry.is_dir(follow_symlinks=False) == stat.S_ISDIR(found.st_mode)
            assert entry.is_symlink() == stat.S_ISLNK(found.st_mode)
        assert os.stat(directory / ".").st_ino == os.stat(directory).st_ino
        assert os.stat(f"{directory}/").st_ino == os.stat(directory).st_ino
        if directory != self.root:
            assert os.stat(f"{directory}/..").st_ino == os.stat(directory.parent).st_ino
        assert errno_of(lambda: os.open(directory, os.O_WRONLY)) == errno.EISDIR
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            assert errno_of(lambda: os.read(fd, 10)) == errno.EISDIR
            assert set(os.listdir(fd)) == {entry.name for entry in entries}
        finally:
            os.close(fd)

    @rule(which=a_directory, name=a_name)
    def look_up_what_is_not_there(self, which: str, name: bytes) -> None:
        directory = self.directory(which)
        names = {os.fsencode(entry) for entry in os.listdir(directory)} | {b".", b"..", b""}
        expected = 0 if name in names else errno.ENAMETOOLONG if len(name) > 255 else errno.ENOENT
        path = os.fsencode(directory) + b"/" + name
        assert errno_of(lambda: os.stat(path)) == expected
        if expected:
            assert errno_of(lambda: os.unlink(path)) == expected
            assert errno_of(lambda: os.rmdir(path)) == expected
            assert errno_of(lambda: os.stat(path + b"/below")) == expected
            assert errno_of(lambda: os.getxattr(path, "user.kvfs.tier")) == expected

    @rule(file=a_fixed_file)
    def read_a_fixed_file(self, file: str) -> None:
        name = self.directory(file)
        assert len(name.read_bytes()) > 0
        assert os.stat(name).st_nlink == 1
        assert errno_of(lambda: os.stat(f"{name}/")) == errno.ENOTDIR
        assert errno_of(lambda: os.listdir(name)) == errno.ENOTDIR
        assert errno_of(lambda: os.readlink(name)) == errno.EINVAL
        assert errno_of(lambda: os.unlink(name)) in REFUSED

    @rule()
    def look_at_the_link(self) -> None:
        link = self.root / ".kvfs/session"
        assert stat.S_ISLNK(os.lstat(link).st_mode)
        assert os.lstat(link).st_size == len(os.readlink(link))
        assert stat.S_ISSOCK(os.stat(link).st_mode)
        assert errno_of(lambda: os.open(link, os.O_RDONLY | os.O_NOFOLLOW)) == errno.ELOOP
        assert errno_of(lambda: os.unlink(link)) in REFUSED

    @rule()
    def look_at_the_room(self) -> None:
        found = os.statvfs(self.root)
        assert found.f_namemax == 255
        assert found.f_frsize == 4096
        assert 0 <= found.f_bavail <= found.f_bfree <= found.f_blocks
        assert 0 < found.f_blocks * found.f_frsize <= 16 << 20
        assert found.f_files - found.f_ffree >= len(self.there)

    @rule(path=a_path, view=a_view)
    def look_at_attributes(self, path: str, view: str) -> None:
        name = self.name(path, view)
        if path not in self.there:
            assert errno_of(lambda: os.listxattr(name)) == errno.ENOENT
            return
        names = os.listxattr(name)
        assert {f"user.kvfs.{fact}" for fact in FACTS} <= set(names)
        values = {fact: os.getxattr(name, f"user.kvfs.{fact}").decode() for fact in FACTS}
        assert values["position"] == str(len(path) - 1)
        assert values["key"] == self.engine.key(path)
        assert len(path) == 1 or values["parent"] == self.engine.key(path[:-1])
        assert values["dirty"] in "01"
        assert values["dirty"] == "1" or "nvme" in values["tier"]
        for unknown, expected in (
            ("user.nothing", {errno.ENODATA}), ("user.kvfs.nothing", {errno.ENODATA}),
            ("security.nothing", {errno.ENODATA, errno.ENOTSUP}), ("trusted.x", {errno.ENODATA, errno.ENOTSUP}),
            ("nothing", {errno.ENOTSUP}), ("user." + "x" * 251, {errno.ERANGE, errno.ENODATA}), ("user.", {errno.EINVAL, errno.ENODATA}),
        ):  # fmt: skip
            assert errno_of(lambda n=unknown: os.getxattr(name, n)) in expected, unknown

    # removing

    @rule(path=a_path, view=a_view)
    def unlink(self, path: str, view: str) -> None:
        """Either name takes both, at once."""
        name = self.name(path, view)
        if path not in self.there:
            assert errno_of(lambda: os.unlink(name)) == errno.ENOENT
            return
        os.unlink(name)
        del self.there[path]
        assert not os.path.lexists(name)
        soon(lambda: self.deep(path) is None and not os.path.lexists(self.flat(path)), "the other name goes")

    @rule(path=a_path)
    def remove_a_tree(self, path: str) -> None:
        """`rm -r` of the directory that a chunk is in, leaves first, as the listing gives them."""
        deep = self.deep(path)
        if deep is None or deep.parent == self.engine.prefixes:
            return
        gone = set()
        for directory, _, names in os.walk(deep.parent, topdown=False):
            for name in names:
                os.unlink(os.path.join(directory, name))
                gone.add(name)
            os.rmdir(directory)
        assert errno_of(lambda: os.stat(deep.parent)) == errno.ENOENT
        self.there = {part: content for part, content in self.there.items() if self.flat(part).name not in gone}
        assert not gone.intersection(os.listdir(self.engine.chunks))
        soon(lambda: not any(os.path.lexists(self.engine.chunks / name) for name in gone), "the flat names go")

    @rule(which=a_directory)
    def remove_what_stays(self, which: str) -> None:
        directory = self.directory(which)
        assert errno_of(lambda: os.unlink(directory)) in {errno.EISDIR, errno.EPERM}
        if which != "PREFIX":
            expected = REFUSED | {errno.ENOTEMPTY, errno.EBUSY}
            assert errno_of(lambda: os.rmdir(directory)) in expected
        elif os.listdir(directory):
            assert errno_of(lambda: os.rmdir(directory)) in {errno.ENOTEMPTY, errno.EPERM}
        assert errno_of(lambda: os.rmdir(f"{directory}/.")) == errno.EINVAL
        assert os.path.isdir(directory)

    @rule(path=a_path, view=a_view)
    def take_a_file_for_a_directory(self, path: str, view: str) -> None:
        name = self.name(path, view)
        expected = errno.ENOTDIR if path in self.there else errno.ENOENT
        for call in (
            lambda: os.rmdir(name), lambda: os.listdir(name), lambda: os.stat(name / "x"), lambda: os.unlink(name / "x"),
            lambda: os.stat(f"{name}/"), lambda: os.stat(f"{name}/.."), lambda: os.open(name, os.O_RDONLY | os.O_DIRECTORY),
        ):  # fmt: skip
            assert errno_of(call) == expected

    # what is refused

    @rule(
        path=a_path, view=a_view, access=st.sampled_from([os.O_RDONLY, os.O_WRONLY, os.O_RDWR]),
        flags=st.sets(st.sampled_from([os.O_CREAT, os.O_EXCL, os.O_TRUNC, os.O_APPEND, os.O_NOFOLLOW, os.O_NONBLOCK])),
    )  # fmt: skip
    def open_with_flags(self, path: str, view: str, access: int, flags: set[int]) -> None:
        """With any flags: nothing that is there changes."""
        name = self.name(path, view)
        number = errno_of(lambda: os.close(os.open(name, access | sum(flags), 0o600)))
        writes = access != os.O_RDONLY or os.O_TRUNC in flags
        if path not in self.there:
            if os.O_CREAT not in flags:
                assert number == errno.ENOENT
            else:
                assert number in (REFUSED | {0} if COPYING_IN else REFUSED)
        elif {os.O_CREAT, os.O_EXCL} <= flags:
            assert number == errno.EEXIST
        elif writes:
            assert number in (REFUSED | {0} if COPYING_IN else REFUSED)
        else:
            assert number in (0, *(REFUSED if os.O_APPEND in flags else ()))

    @rule(path=a_path, view=a_view)
    def change(self, path: str, view: str) -> None:
        """Modes, owners and times of a chunk are ours; its bytes are nobody's to change."""
        name = self.name(path, view)
        before = os.stat(name) if path in self.there else None
        allowed = {errno.ENOENT} if before is None else REFUSED | ({0} if COPYING_IN else set())
        for call in (lambda: os.chmod(name, 0o600), lambda: os.chown(name, 0, 0), lambda: os.utime(name, (1, 1))):
            assert errno_of(call) in allowed
        assert errno_of(lambda: os.truncate(name, 10)) in (allowed - {0} | {errno.EINVAL})
        if before is not None:
            after = os.stat(name)
            assert (after.st_size, after.st_mode, after.st_mtime_ns) == (
                before.st_size,
                before.st_mode,
                before.st_mtime_ns,
            )
            for attribute in ("user.kvfs.tier", "user.kvfs.nothing", "user.mine", "trusted.x", "security.x"):
                number = errno_of(lambda a=attribute: os.setxattr(name, a, b"1"))
                assert number in {errno.ENOTSUP, errno.EPERM, errno.EACCES, errno.EROFS}
                assert errno_of(lambda a=attribute: os.removexattr(name, a)) in {
                    errno.ENOTSUP, errno.EPERM, errno.EACCES, errno.EROFS, errno.ENODATA,
                }  # fmt: skip
            assert (errno_of(lambda: os.setxattr(name, "user.kvfs.pin", b"1h")) == 0) == PINS
            if PINS:
                os.removexattr(name, "user.kvfs.pin")

    @rule(which=a_directory, name=st.sampled_from([name for name in NAMES if name.strip(b".")]))
    def make(self, which: str, name: bytes) -> None:
        """Directories, links, sockets and pipes of one's own."""
        path = os.fsencode(self.directory(which)) + b"/" + name
        allowed = {errno.ENAMETOOLONG} if len(name) > 255 else {errno.EEXIST} if os.path.lexists(path) else REFUSED
        assert errno_of(lambda: os.symlink(b"target", path)) in allowed
        assert errno_of(lambda: os.mkfifo(path)) in allowed | {errno.ENOTSUP}
        is_ours = COPYING_IN and (which == "." or KEY.fullmatch(name.decode("ascii", "replace")))
        if not is_ours:
            assert errno_of(lambda: os.mkdir(path)) in allowed | {errno.EINVAL}

    @rule(path=a_path, view=a_view, to=a_path, to_view=a_view)
    def rename_or_link(self, path: str, view: str, to: str, to_view: str) -> None:
        """Onto another name of itself nothing happens; else nothing either, and it says so."""
        old, new = self.name(path, view), self.name(to, to_view)
        number = errno_of(lambda: os.rename(old, new))
        if path not in self.there:
            assert number == errno.ENOENT
            assert errno_of(lambda: os.link(old, new)) == errno.ENOENT
            return
        assert number in ({0} if path == to else REFUSED | {errno.EXDEV, errno.EINVAL})
        expected = {errno.EEXIST} if to in self.there else REFUSED | {errno.EXDEV}
        assert errno_of(lambda: os.link(old, new)) in expected

    @rule(path=a_path, view=a_view, which=a_directory)
    def rename_across_kinds(self, path: str, view: str, which: str) -> None:
        if path not in self.there:
            return
        name, directory = self.name(path, view), self.directory(which)
        wrong = REFUSED | {errno.EBUSY, errno.ENOTEMPTY, errno.EXDEV, errno.EINVAL}
        assert errno_of(lambda: os.rename(name, directory)) in wrong | {errno.EISDIR}
        assert errno_of(lambda: os.rename(directory, name)) in wrong | {errno.ENOTDIR}
        assert errno_of(lambda: os.rename(directory, directory / "inside")) in wrong
        assert errno_of(lambda: os.link(directory, self.engine.prefixes / "new")) in wrong

    # copying in

    @rule(
        path=a_path, how=st.sampled_from(["renamed", "written", "bad", "short", "empty"]), view=st.sampled_from(["flat", "top"])
    )  # fmt: skip
    def copy_in(self, path: str, how: str, view: str) -> None:
        """A chunk file that was copied out before comes back; what does not prove itself is refused at close."""
        content = self.files.get(path)
        if content is None or path in self.there:
            return
        final = self.flat(path) if view == "flat" else self.engine.prefixes / self.flat(path).name
        name = final.with_name("." + final.name + ".tmp") if how == "renamed" else final
        data = {"bad": content[:-1] + bytes([content[-1] ^ 1]), "short": content[:5000], "empty": b""}.get(how, content)

        def write() -> None:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.write(fd, data)
                assert not os.path.lexists(final) or how != "renamed"
            finally:
                os.close(fd)
            if how == "renamed":
                os.rename(name, final)

        number = errno_of(write)
        if not COPYING_IN:
            assert number in REFUSED
        elif how in ("bad", "short"):
            assert number == errno.EINVAL
        else:
            assert number == 0
            if how != "empty":
                self.there[path] = content

    # after every step

    @invariant()
    def all_is_consistent(self) -> None:
        """Both views show the model, and what is open reads as ever."""
        expected = {self.flat(path).name: path for path in self.there}
        assert set(os.listdir(self.engine.chunks)) == set(expected)
        seen: dict[str, int] = {}
        for directory, entries in walk(self.engine.prefixes):
            for entry in entries:
                if entry.is_dir():
                    assert KEY.fullmatch(entry.name)
                else:
                    assert entry.name not in seen
                    seen[entry.name] = entry.inode()
            num_below = sum(entry.is_dir() for entry in entries)
            is_prefix = directory != str(self.engine.prefixes)
            if is_prefix:
                soon(lambda d=directory, n=num_below: os.stat(d).st_nlink == 2 + n, "links of a directory")
        assert set(seen) == set(expected)
        for name, inode in seen.items():
            found = os.stat(self.engine.chunks / name)
            assert (found.st_ino, found.st_nlink, found.st_size) == (inode, 2, len(self.there[expected[name]]))
        for held in self.held:
            assert os.pread(held.fd, len(held.content) + 1, 0) == held.content
            is_there = self.there.get(held.path) is held.content
            assert os.fstat(held.fd).st_nlink == (2 if is_there else 0)


def walk(top: Path) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """Every directory from `top` down, with its entries."""
    waiting = [str(top)]
    while waiting:
        directory = waiting.pop()
        with contextlib.closing(os.scandir(directory)) as found:
            entries = list(found)
        yield directory, entries
        waiting += [entry.path for entry in entries if entry.is_dir()]


COMMON = settings(
    deadline=None, print_blob=True, suppress_health_check=list(HealthCheck), phases=set(Phase) - {Phase.explain}
)


def play(engine: Any, root: Path, how: settings) -> None:
    class Machine(PosixMachine):
        pass

    Machine.engine, Machine.root = engine, root
    engine.client.attach()  # the namespace is there from now on
    run_state_machine_as_test(Machine, settings=how)


def test_the_mount_does_what_posix_says(mounted: Any, engine: Any) -> None:
    """The same steps at every run, 3,000 of them."""
    play(engine, mounted.path, settings(COMMON, max_examples=60, stateful_step_count=50, derandomize=True))


@pytest.mark.slow
def test_the_mount_does_what_posix_says_for_long(mounted: Any, engine: Any) -> None:
    """Others at every run; a failure prints what reproduces it."""
    play(engine, mounted.path, settings(COMMON, max_examples=1500, stateful_step_count=60))
