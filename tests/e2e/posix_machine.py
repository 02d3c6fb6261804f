"""A state machine of the mounted tree: plain system calls, while engines store and load, against what POSIX says.

The model is the set of chunks that were stored, with the bytes of each as they were first read, and whether their
namespace is there and what of it was removed. What a call returns, or which errno it may fail with, follows from that.
After every step both views have to show the same chunks, under names that agree with `stat`, and what was open has to
read as before. What people make and remove beside chunks is in `test_posix_machine`.
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

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvfs.client import Client
from kvfs.testing import DEADLINE_S, soon, wait_until

REFUSED = {errno.EROFS, errno.EPERM, errno.EACCES}
PATHS = ["a", "ab", "abc", "abcd", "abX", "abXY", "aZ", "Q", "QR", "QRS"]
SUFFIX = ".safetensors"
PARTS = ("namespace.json", "chunks", "prefixes")
KEY = re.compile(r"[0-9a-f]{32}")
FRESH_S = 1.5  # what was copied in shows one link for three seconds after the last copy
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


class PosixMachine(RuleBasedStateMachine):
    """See the module. `engine` and `root` are set by the test: one mount serves all runs."""

    engine: Any
    root: Path
    there: dict[str, bytes]
    is_there: bool

    def __init__(self) -> None:
        super().__init__()
        self.there = {}
        self.files: dict[str, bytes] = {}  # of every chunk that was ever there: the bytes, as they were last read
        self.held: list[Held] = []
        self.is_there = True  # the namespace
        self.is_attached = True
        self.hidden: set[str] = set()  # parts of the namespace that were removed
        self.copied: dict[str, bool] = {}  # of chunks that were copied in: whether it is sure that they are fresh
        self.step_s = time.monotonic()  # when this step began, or before
        self.copied_s = 0.0  # of the last copy, or before
        self.begin()

    def begin(self) -> None:
        """Whatever the last run left when it failed is gone."""
        self.attach()
        for name in os.listdir(self.engine.chunks):
            os.unlink(self.engine.chunks / name)
        for directory, _ in reversed([*walk(self.engine.prefixes)][1:]):
            os.rmdir(directory)

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

    # what the model says

    def attach(self) -> None:
        """An engine uses the namespace from now on; all of it is there."""
        self.engine.client.attach()
        self.is_there = self.is_attached = True
        self.hidden.clear()

    def detach(self) -> None:
        """No engine uses it any more."""
        if self.is_attached:
            self.engine.client.close()
            self.engine.client = Client(self.root, self.engine.namespace, deadline_s=DEADLINE_S, window_bytes=1 << 20)
            wait_until(lambda: self.status()["num_sessions"] == 0, "the session ends")
        self.is_attached = False

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.root / ".kvfs/status.json").read_bytes())
        return found

    def gone(self, path: str) -> None:
        """A chunk was removed."""
        del self.there[path]
        self.copied.pop(path, None)

    def is_copied(self, path: str, *, is_new: bool) -> None:
        """A chunk was copied in, or was there already."""
        if self.copied and time.monotonic() - self.copied_s > FRESH_S:
            self.copied = dict.fromkeys(self.copied, False)
        self.copied_s = self.step_s
        self.copied[path] = self.copied.get(path, is_new) and is_new
        if is_new:
            self.there[path] = self.files[path] = bytes(
                bytearray(self.files[path])
            )  # another than who has it open holds

    def links(self, path: str) -> set[int]:
        """What st_nlink may be."""
        if path not in self.copied:
            return {2}
        return {1} if self.copied[path] and time.monotonic() - self.copied_s < FRESH_S else {1, 2}

    def has(self, which: str) -> bool:
        """Whether there is such a directory, or file."""
        first, _, second = which.replace("PREFIX", "NS/prefixes").partition("/")
        return first != "NS" or (self.is_there and second not in self.hidden)

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
            found = [Path(entry.path) for entry in os.scandir(self.engine.prefixes)] if self.has(which) else []
            return found[0] if found else self.engine.prefixes
        namespace: Path = self.engine.directory
        return self.root / which.replace("NS", namespace.name)

    # engines

    @rule(path=a_path)
    def store(self, path: str) -> None:
        self.attach()
        self.engine.store(path)
        for length in range(1, len(path) + 1):
            part = path[:length]
            if part not in self.there:
                self.there[part] = self.files[part] = self.flat(part).read_bytes()
                self.copied.pop(part, None)

    @rule(path=a_path)
    def load(self, path: str) -> None:
        """An engine finds the longest prefix that is there."""
        self.attach()
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
        assert stat.S_IMODE(found.st_mode) == 0o640
        assert found.st_nlink in self.links(path)
        assert found.st_size == len(self.there[path])
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
        if not self.has(which):
            assert errno_of(lambda: os.listdir(directory)) == errno.ENOENT
            return
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
        if not self.has(which):
            assert errno_of(lambda: os.listdir(directory)) == errno.ENOENT
            return
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
        if not self.has(file):
            assert errno_of(lambda: os.stat(name)) == errno.ENOENT
            return
        assert len(name.read_bytes()) > 0
        assert os.stat(name).st_nlink == 1
        assert errno_of(lambda: os.stat(f"{name}/")) == errno.ENOTDIR
        assert errno_of(lambda: os.listdir(name)) == errno.ENOTDIR
        assert errno_of(lambda: os.readlink(name)) == errno.EINVAL
        if not file.startswith("NS"):
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
        self.gone(path)
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
        for part in [part for part in self.there if self.flat(part).name in gone]:
            self.gone(part)
        assert not gone.intersection(os.listdir(self.engine.chunks))
        soon(lambda: not any(os.path.lexists(self.engine.chunks / name) for name in gone), "the flat names go")

    @rule(which=a_directory)
    def remove_what_stays(self, which: str) -> None:
        directory = self.directory(which)
        if not self.has(which):
            assert errno_of(lambda: os.listdir(directory)) == errno.ENOENT
            return
        assert errno_of(lambda: os.unlink(directory)) in {errno.EISDIR, errno.EPERM}
        if which not in ("PREFIX", "NS", "NS/chunks", "NS/prefixes"):
            expected = REFUSED | {errno.ENOTEMPTY, errno.EBUSY}
            assert errno_of(lambda: os.rmdir(directory)) in expected
        elif self.there and os.listdir(directory):
            assert errno_of(lambda: os.rmdir(directory)) == errno.ENOTEMPTY
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
        """With any flags: nothing that is there changes, and nothing is left of what nobody wrote to."""
        name = self.name(path, view)
        number = errno_of(lambda: os.close(os.open(name, access | sum(flags), 0o600)))
        if path not in self.there:
            can_be_made = os.O_CREAT in flags and self.has("NS/chunks" if view == "flat" else "NS/prefixes")
            assert number == (0 if can_be_made else errno.ENOENT)
            assert not os.path.lexists(name)
        else:
            assert number == (errno.EEXIST if {os.O_CREAT, os.O_EXCL} <= flags else 0)

    @rule(path=a_path, view=a_view)
    def change(self, path: str, view: str) -> None:
        """Modes, owners and times of a chunk are ours, setting them has no effect; its bytes are nobody's to change."""
        name = self.name(path, view)
        before = os.stat(name) if path in self.there else None
        expected = errno.ENOENT if before is None else 0
        for call in (lambda: os.chmod(name, 0o600), lambda: os.chown(name, 0, 0), lambda: os.utime(name, (1, 1))):
            assert errno_of(call) == expected
        assert errno_of(lambda: os.truncate(name, 10)) == (expected or errno.EPERM)
        if before is None:
            return
        after = os.stat(name)
        assert (after.st_size, after.st_mode, after.st_uid) == (before.st_size, before.st_mode, before.st_uid)
        assert after.st_mtime_ns == before.st_mtime_ns
        for attribute in ("user.kvfs.tier", "user.kvfs.nothing", "user.mine", "trusted.x", "security.x"):
            number = errno_of(lambda a=attribute: os.setxattr(name, a, b"1"))
            is_copied = path in self.copied and attribute == "user.kvfs.tier"  # rsync -X brings them
            assert number in {errno.ENOTSUP, errno.EPERM} | ({0} if is_copied else set())
            assert errno_of(lambda a=attribute: os.removexattr(name, a)) in {errno.ENOTSUP, errno.EPERM}

    @rule(path=a_path, view=a_view, to=a_path, to_view=a_view)
    def rename_or_link(self, path: str, view: str, to: str, to_view: str) -> None:
        """Onto another name of itself nothing happens; else nothing either, and it says so."""
        old, new = self.name(path, view), self.name(to, to_view)
        number = errno_of(lambda: os.rename(old, new))
        if path not in self.there:
            assert number == errno.ENOENT
            assert errno_of(lambda: os.link(old, new)) == errno.ENOENT
            return
        assert number == (0 if path == to else errno.EPERM)
        assert errno_of(lambda: os.link(old, new)) == (errno.EEXIST if to in self.there else errno.EPERM)

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

    # after every step

    @invariant()
    def all_is_consistent(self) -> None:
        """Both views show the model, and what is open reads as ever."""
        self.the_namespace_is_right()
        expected = {self.flat(path).name: path for path in self.there}
        if self.has("NS/chunks"):
            assert set(os.listdir(self.engine.chunks)) == set(expected)
        if self.has("NS/prefixes"):
            self.prefixes_are_right(expected)
        for held in self.held:
            assert os.pread(held.fd, len(held.content) + 1, 0) == held.content
            is_there = self.there.get(held.path) is held.content
            assert os.fstat(held.fd).st_nlink in (self.links(held.path) if is_there else {0})
        self.step_s = time.monotonic()

    def the_namespace_is_right(self) -> None:
        """What it shows is what was not removed of it."""
        assert (self.engine.directory.name in os.listdir(self.root)) == self.is_there
        for part in PARTS:
            assert os.path.lexists(self.engine.directory / part) == self.has(f"NS/{part}")
        if self.is_there:
            assert set(os.listdir(self.engine.directory)) == set(PARTS) - self.hidden

    def prefixes_are_right(self, expected: dict[str, str]) -> None:
        """The prefix view has the same chunks, each once."""
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
            assert (found.st_ino, found.st_size) == (inode, len(self.there[expected[name]]))
            assert found.st_nlink in self.links(expected[name])


def walk(top: Path) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """Every directory from `top` down, with its entries."""
    waiting = [str(top)]
    while waiting:
        directory = waiting.pop()
        with contextlib.closing(os.scandir(directory)) as found:
            entries = list(found)
        yield directory, entries
        waiting += [entry.path for entry in entries if entry.is_dir()]
