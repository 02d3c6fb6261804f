"""The state machine of the mounted tree, and what people make and remove there: copies, pins, limits, namespaces.

What proves itself is there when it is closed, or renamed; what does not leaves nothing. A part of a namespace that was
removed is out of sight until the namespace is used again. See `posix_machine` for the rest.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from kvfs import namespace as namespaces
from kvfs.testing import soon

from .posix_machine import (
    KEY,
    NAMES,
    PARTS,
    PATHS,
    REFUSED,
    SUFFIX,
    PosixMachine,
    a_directory,
    a_name,
    a_path,
    a_view,
    errno_of,
)

a_place = st.sampled_from(["flat", "deep", "top"])
FOREVER, TIMED = "forever", "timed"
PIN_VALUES = {b"forever": FOREVER, b"1h": TIMED, b"90s\n": TIMED, b"no": None, b"": None}
WRONG_VALUES = [b"-1h", b"later", b"1", b"nan", b"\xff", b"1h 2h", b"0x10"]
an_age = st.sampled_from(sorted(PIN_VALUES))
LIMITS = {"quota": [b"1GiB", b"20MiB"], "max_age": [b"3d", b"1h"]}


@dataclass(eq=False)
class Writer:
    """A file that somebody copies in, and has not closed yet.

    Attributes: fd; path: of the chunk; rest: what is still to be written; is_whole: whether it will prove itself.
    namespace: how often the namespace had been made when it was opened.
    """

    fd: int
    path: str
    rest: bytes
    is_whole: bool
    namespace: int


class Machine(PosixMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.pins: dict[str, str] = {}
        self.limits: dict[str, bytes] = {}
        self.writers: list[Writer] = []
        self.num_namespaces = 0  # that were made: a file belongs to the one it was opened in

    def begin(self) -> None:
        super().begin()
        for name in LIMITS:
            os.removexattr(self.engine.directory, f"user.kvfs.{name}")

    def teardown(self) -> None:
        try:
            for writer in self.writers:
                with suppress(OSError):
                    os.close(writer.fd)
        finally:
            super().teardown()
        assert (self.status()["num_staging"], self.status()["staging_bytes"]) == (0, 0)

    def gone(self, path: str) -> None:
        super().gone(path)
        self.pins.pop(path, None)

    def place(self, path: str, place: str) -> Path:
        """Where a file of this chunk can be made."""
        return self.engine.prefixes / self.flat(path).name if place == "top" else self.name(path, place)

    # copying in

    @rule(path=a_path, how=st.sampled_from(["whole", "bad", "short", "long", "empty", "other"]), place=a_place)
    def write_it(self, path: str, how: str, place: str) -> None:
        """Written under its own name: there when it is closed, or refused with EINVAL."""
        content = self.files.get(path)
        name = self.place(path, place)
        if content is None or not self.has("NS/chunks" if place == "flat" else "NS/prefixes"):
            return
        inode = os.stat(name).st_ino if os.path.lexists(name) else None
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        data = self.variant(path, how)
        assert errno_of(lambda: os.write(fd, data)) == (errno.EFBIG if how == "long" else 0)
        number = errno_of(lambda: os.close(fd))
        assert number == (0 if how in ("whole", "empty", "long") else errno.EINVAL), how
        if how == "whole":
            self.is_copied(path, is_new=path not in self.there)
        if inode is not None:
            assert os.stat(name).st_ino == inode

    @rule(
        path=a_path, how=st.sampled_from(["whole", "bad", "short", "empty", "other"]), place=a_place, other=a_place,
        is_linked=st.booleans(),
    )  # fmt: skip
    def rename_it(self, path: str, how: str, place: str, other: str, is_linked: bool) -> None:
        """Written under a name that begins with a dot, as rsync does, and renamed: EINVAL leaves it where it was."""
        if path not in self.files or not self.has("NS/chunks") or not self.has("NS/prefixes"):
            return
        final = self.place(path, place)
        name = self.place(path, other).with_name(f".{final.name}.Xy12")
        data = self.variant(path, how)
        name.write_bytes(data)
        found = os.stat(name)
        assert (found.st_nlink, found.st_size, found.st_mode & 0o777) == (1, len(data), 0o640)
        assert name.read_bytes() == data
        assert name.name not in os.listdir(name.parent)
        assert errno_of(lambda: os.rename(name, final.with_name("x"))) == errno.EINVAL
        assert errno_of(lambda: os.rename(name, self.engine.directory / "namespace.json")) == errno.EPERM
        assert errno_of(lambda: os.rename(name, self.root / final.name)) == errno.EROFS
        if is_linked:
            expected = errno.EEXIST if os.path.lexists(final) else errno.EPERM
            assert errno_of(lambda: os.link(name, final)) == expected
        number = errno_of(lambda: os.rename(name, final))
        assert number == (0 if how == "whole" else errno.EINVAL), how
        if number:
            os.unlink(name)
        else:
            assert not os.path.lexists(name)
            self.is_copied(path, is_new=path not in self.there)

    def variant(self, path: str, how: str) -> bytes:
        """The bytes of a chunk, or what looks like them."""
        content = self.files[path]
        others = [self.files[other] for other in PATHS if other in self.files and other != path]
        return {
            "bad": content[:-5000] + bytes([content[-5000] ^ 1]) + content[-4999:], "short": content[:-1],
            "long": content + b"\0", "empty": b"", "other": others[0] if others else b"x",
        }.get(how, content)  # fmt: skip

    @rule(path=a_path, place=a_place, is_whole=st.booleans())
    def begin_to_write(self, path: str, place: str, is_whole: bool) -> None:
        """Whatever happens before it is closed."""
        is_possible = path in self.files and self.has("NS/chunks" if place == "flat" else "NS/prefixes")
        if is_possible and len(self.writers) < 5:
            content = self.files[path]
            was_there = os.path.lexists(self.place(path, place))
            fd = os.open(self.place(path, place), os.O_RDWR | os.O_CREAT, 0o600)
            assert os.pwrite(fd, content[:5000], 0) == 5000
            assert os.pread(fd, 6000, 0) == content[: 6000 if was_there else 5000]
            rest = content[5000:] if is_whole else content[5000:-1]
            # What is written over a chunk begins with what that has, so that the last byte is there.
            self.writers.append(Writer(fd, path, rest, is_whole or was_there, self.num_namespaces))

    @precondition(lambda self: self.writers)
    @rule(number=st.integers(0, 5))
    def end_writing(self, number: int) -> None:
        writer = self.writers.pop(number % len(self.writers))
        assert os.pwrite(writer.fd, writer.rest, 5000) == len(writer.rest)
        is_good = writer.is_whole and self.is_there and writer.namespace == self.num_namespaces
        assert errno_of(lambda: os.close(writer.fd)) == (0 if is_good else errno.EINVAL)
        if is_good:
            self.hidden.clear() if writer.path not in self.there else None
            self.is_copied(writer.path, is_new=writer.path not in self.there)

    @rule(
        path=a_path,
        view=a_view,
        which=st.sampled_from(["NS/chunks", "NS/prefixes", "PREFIX"]),
        is_renamed=st.booleans(),
    )
    def link_it(self, path: str, view: str, which: str, is_renamed: bool) -> None:
        """A second name for a moment, as cp and rsync make one; its own name elsewhere is no name more."""
        if path not in self.there or not self.has(which) or (view == "deep" and not self.has("NS/prefixes")):
            return
        name, directory = self.name(path, view), self.directory(which)
        alias, final = directory / "CuAb12_-", directory / name.name
        is_own = os.path.lexists(final)
        os.link(name, alias)
        self.is_copied(path, is_new=False)
        assert os.stat(alias).st_ino == os.stat(name).st_ino
        assert alias.read_bytes() == self.there[path]
        assert errno_of(lambda: os.link(name, alias)) == errno.EEXIST
        assert errno_of(lambda: os.link(name, final)) == (errno.EEXIST if is_own else 0)
        if is_renamed:
            os.rename(alias, final)
        if is_own or not is_renamed:  # rename of one name of a file onto another does nothing, rename(2)
            os.unlink(alias)
        assert not os.path.lexists(alias)
        assert os.path.lexists(final) == is_own

    # names of one's own

    @rule(which=a_directory, name=st.sampled_from([name for name in NAMES if name.strip(b".")]))
    def make(self, which: str, name: bytes) -> None:
        """Links, sockets and pipes are nobody's; directories for chunks can be made in the prefix view."""
        if not self.has(which):
            return
        path = os.fsencode(self.directory(which)) + b"/" + name
        is_there = os.path.lexists(path)
        allowed = {errno.ENAMETOOLONG} if len(name) > 255 else {errno.EEXIST} if is_there else REFUSED
        assert errno_of(lambda: os.symlink(b"target", path)) in allowed
        assert errno_of(lambda: os.mkfifo(path)) in allowed | {errno.ENOTSUP}
        is_for_prefixes = which in ("NS/prefixes", "PREFIX")
        is_key = KEY.fullmatch(name.decode("ascii", "replace")) is not None
        number = errno_of(lambda: os.mkdir(path))
        if is_for_prefixes and is_key and not is_there:
            assert number == 0
            assert os.listdir(path) == []
            assert name in os.listdir(os.path.dirname(path))
            assert errno_of(lambda: os.mkdir(path)) == errno.EEXIST
            os.rmdir(path)
            assert not os.path.lexists(path)
        elif allowed == REFUSED:
            assert number == {".": errno.EINVAL, ".kvfs": errno.EROFS}.get(
                which, errno.EINVAL if is_for_prefixes else errno.EPERM
            )
        else:
            assert number in allowed

    @rule(which=a_directory, name=a_name)
    def create(self, which: str, name: bytes) -> None:
        """Files have the name of a chunk, or begin with a dot; those that are empty and no chunk leave nothing."""
        if not self.has(which) or not name.strip(b"."):
            return
        path = os.fsencode(self.directory(which)) + b"/" + name
        is_there, is_hidden = os.path.lexists(path), name.startswith(b".")
        number = errno_of(lambda: os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)))
        is_for_chunks = which in ("NS/chunks", "NS/prefixes", "PREFIX")
        if len(name) > 255 or is_there:
            assert number == (errno.EEXIST if is_there else errno.ENAMETOOLONG)
        elif which in (".", ".kvfs"):
            assert number == errno.EROFS
        elif is_hidden or (is_for_chunks and name == b"0" * 32 + SUFFIX.encode()):
            assert number == 0
            assert os.path.lexists(path) == is_hidden
            if is_hidden:
                os.unlink(path)
        else:
            assert number == (errno.EINVAL if is_for_chunks else errno.EPERM)
        assert os.path.lexists(path) == is_there

    @rule(path=a_path, where=a_path)
    def make_a_directory(self, path: str, where: str) -> None:
        """For a chunk that may come: in a directory, or at the top; the tree decides where the chunk is shown."""
        if self.has("NS/prefixes"):
            deep = self.deep(where)
            directory = (deep.parent if deep else self.engine.prefixes) / self.engine.key(path)
            number = errno_of(lambda: os.mkdir(directory))
            assert number == 0 or os.path.isdir(directory)

    # attributes

    @rule(path=a_path, view=a_view, value=an_age)
    def pin_it(self, path: str, view: str, value: bytes) -> None:
        """A chunk is kept, or not any more; what it says of that can be set again."""
        name = self.name(path, view)
        number = errno_of(lambda: os.setxattr(name, "user.kvfs.pin", value))
        assert number == (0 if path in self.there else errno.ENOENT)
        if path in self.there:
            self.pinned([path], value)
            self.pins_are_right(name, [path])

    @rule(which=st.sampled_from(["NS", "PREFIX"]), value=an_age)
    def pin_all(self, which: str, value: bytes) -> None:
        """All that a directory holds now."""
        directory = self.directory(which)
        if not self.has(which) or directory == self.engine.prefixes:
            return
        if which == "NS":
            paths = list(self.there)
        else:
            names = {file for _, _, files in os.walk(directory) for file in files}
            paths = [path for path in self.there if self.flat(path).name in names]
        os.setxattr(directory, "user.kvfs.pin", value)
        self.pinned(paths, value)
        self.pins_are_right(directory, paths)

    def pinned(self, paths: list[str], value: bytes) -> None:
        for path in paths:
            until = PIN_VALUES[value]
            if until is None:
                self.pins.pop(path, None)
            else:
                self.pins[path] = until

    def pins_are_right(self, name: Path, paths: list[str]) -> None:
        """What is pinned as a whole says so, and nothing else."""
        names = {"user.kvfs.pin", "user.kvfs.pinned_until"}
        if not paths or not all(path in self.pins for path in paths):
            assert not names.intersection(os.listxattr(name))
            for attribute in names:
                assert errno_of(lambda a=attribute: os.getxattr(name, a)) == errno.ENODATA
            return
        assert names <= set(os.listxattr(name))
        value, until = (os.getxattr(name, f"user.kvfs.{attribute}").decode() for attribute in ("pin", "pinned_until"))
        if all(self.pins[path] == FOREVER for path in paths):
            assert (value, until) == ("forever", "forever")
        else:
            assert re.fullmatch(r"[0-9]+s", value)
            assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", until)

    @rule(path=a_path, view=a_view)
    def look_at_pins(self, path: str, view: str) -> None:
        if path in self.there:
            name = self.name(path, view)
            self.pins_are_right(name, [path])
            expected = 0 if path in self.pins else errno.ENODATA
            assert errno_of(lambda: os.removexattr(name, "user.kvfs.pin")) == expected
            self.pins.pop(path, None)

    @rule(which=st.sampled_from(["NS", "PREFIX", "CHUNK"]), value=st.sampled_from(WRONG_VALUES), path=a_path)
    def set_what_is_wrong(self, which: str, value: bytes, path: str) -> None:
        """EINVAL for a value that means nothing, EPERM for what is only told: nothing changes."""
        if not self.has(which) or (which == "CHUNK" and path not in self.there):
            return
        name = self.name(path, "flat") if which == "CHUNK" else self.directory(which)
        if name == self.engine.prefixes:
            return
        assert errno_of(lambda: os.setxattr(name, "user.kvfs.pin", value)) == errno.EINVAL
        for attribute in ("pinned_until", "stored_bytes") if which != "CHUNK" or path not in self.copied else ():
            assert errno_of(lambda a=attribute: os.setxattr(name, f"user.kvfs.{a}", b"1")) == errno.EPERM
        for attribute in LIMITS:
            number = errno_of(lambda a=attribute: os.setxattr(name, f"user.kvfs.{a}", value))
            is_size = attribute == "quota" and value == b"1"
            if which == "NS" and not is_size:
                assert number == errno.EINVAL
            elif which != "NS":
                assert number == errno.ENOTSUP
            else:
                os.removexattr(name, "user.kvfs.quota")
                self.limits.pop("quota", None)
                self.there = {path: self.there[path] for path in self.there if os.path.lexists(self.flat(path))}

    @rule(attribute=st.sampled_from(sorted(LIMITS)), number=st.integers(0, 3))
    def limit(self, attribute: str, number: int) -> None:
        """A limit of the namespace, which nothing here reaches; "none" or nothing is none."""
        name, directory = f"user.kvfs.{attribute}", self.engine.directory
        value = [*LIMITS[attribute], b"none", b""][number]
        if not self.is_there:
            assert errno_of(lambda: os.setxattr(directory, name, value)) == errno.ENOENT
            return
        os.setxattr(directory, name, value)
        self.limits.pop(attribute, None)
        if number < 2:
            self.limits[attribute] = value
        for each in LIMITS:
            assert os.getxattr(directory, f"user.kvfs.{each}") == self.limits.get(each, b"none")
        shown = {f"user.kvfs.{each}" for each in self.limits}
        assert {each for each in os.listxattr(directory) if "pin" not in each} == shown
        stored = sum(os.stat(self.flat(path)).st_size for path in self.there) if self.has("NS/chunks") else 0
        assert os.getxattr(directory, "user.kvfs.stored_bytes").decode() == str(stored)

    # namespaces

    @rule(chance=st.integers(0, 1))
    def leave(self, chance: int) -> None:
        """The engine goes, now and then."""
        if not chance:
            self.detach()

    @rule(part=st.sampled_from(PARTS))
    def hide(self, part: str) -> None:
        """What the mount makes of a namespace can be removed, while nobody uses it; chunks have to go before."""
        name = self.engine.directory / part
        number = errno_of(lambda: os.unlink(name) if part == "namespace.json" else os.rmdir(name))
        if not self.has(f"NS/{part}"):
            assert number == errno.ENOENT
        elif self.there and part != "namespace.json":
            assert number == errno.ENOTEMPTY
        elif self.is_attached:
            assert number == errno.EBUSY
        else:
            assert number == 0
            self.hidden.add(part)

    @rule()
    def remove_the_namespace(self) -> None:
        """Rmdir, where there are no chunks and nobody uses it."""
        number = errno_of(lambda: os.rmdir(self.engine.directory))
        if not self.is_there:
            assert number == errno.ENOENT
        elif self.there or self.is_attached:
            assert number == (errno.ENOTEMPTY if self.there else errno.EBUSY)
        else:
            assert number == 0
            self.is_there = False
            self.limits.clear()
            self.num_namespaces += 1

    @rule(chance=st.integers(0, 3))
    def remove_all(self, chance: int) -> None:
        """`rm -rf` of the namespace, as rm goes about it; now and then."""
        if chance:
            return
        self.detach()
        if self.is_there:
            for directory, _, names in os.walk(self.engine.directory, topdown=False):
                for name in names:
                    with suppress(FileNotFoundError):  # the other name has gone with it
                        os.unlink(os.path.join(directory, name))
                with suppress(FileNotFoundError):
                    os.rmdir(directory)
            for path in list(self.there):
                self.gone(path)
            self.is_there = False
            self.limits.clear()
            self.num_namespaces += 1
        assert not os.path.lexists(self.engine.directory)

    @rule(
        paths=st.lists(a_path, max_size=4, unique=True), is_json_first=st.booleans(), into=st.sampled_from(["chunks", "prefixes"]),
        bad=st.none() | a_path, is_given_up=st.booleans(),
    )  # fmt: skip
    def copy_the_namespace(
        self, paths: list[str], is_json_first: bool, into: str, bad: str | None, is_given_up: bool
    ) -> None:
        """A directory and its namespace.json, and chunks before or after it, which wait or are proven at once."""
        if self.is_there:
            return
        directory = self.engine.directory
        os.mkdir(directory)
        assert os.listdir(directory) == []
        assert directory.name not in os.listdir(self.root)  # before it is a namespace it is found by name only
        assert errno_of(lambda: os.mkdir(directory)) == errno.EEXIST
        if is_json_first and not is_given_up:
            self.write_json()
        os.mkdir(directory / into)
        paths = [path for path in paths if path in self.files]
        made = directory / into
        for path in paths:
            name = made / self.flat(path).name
            content = self.variant(path, "bad") if path == bad else self.files[path]
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
            os.write(fd, content)
            is_refused = path == bad and is_json_first and not is_given_up
            assert errno_of(lambda fd=fd: os.close(fd)) == (errno.EINVAL if is_refused else 0)
        if is_given_up:
            for path in paths:
                os.unlink(made / self.flat(path).name)
            os.rmdir(directory / into)
            os.rmdir(directory)
            return
        if not is_json_first:
            self.write_json()
        os.utime(directory, (5, 5))
        self.is_there = True
        self.hidden.clear()
        for path in paths:
            if path != bad:
                self.is_copied(path, is_new=True)
        self.copied = dict.fromkeys(self.copied, False)  # the time of the directory says that the copy is over

    def write_json(self) -> None:
        """The namespace.json by hand: wrong ones are refused."""
        name, raw = self.engine.directory / "namespace.json", namespaces.encode(self.engine.namespace)
        for wrong in (raw[:-10], raw.replace(b"tests/tiny", b"tests/TINY"), b"{}"):
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
            os.write(fd, wrong)
            assert errno_of(lambda fd=fd: os.close(fd)) == errno.EINVAL
            assert not os.path.lexists(name)
        name.write_bytes(raw)

    @rule(is_right=st.booleans())
    def write_the_json_again(self, is_right: bool) -> None:
        """What it says already is taken, and shows what was hidden; anything else is not."""
        if not self.is_there:
            return
        raw = namespaces.encode(self.engine.namespace)
        fd = os.open(self.engine.directory / "namespace.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640)
        os.write(fd, raw if is_right else raw.replace(b"tests/tiny", b"tests/TINY"))
        assert errno_of(lambda: os.close(fd)) == (0 if is_right else errno.EINVAL)
        if is_right:
            self.hidden.clear()
            soon(lambda: set(os.listdir(self.engine.directory)) == set(PARTS), "all of it shows again")


COMMON = settings(
    deadline=None, print_blob=True, suppress_health_check=list(HealthCheck), phases=set(Phase) - {Phase.explain}
)


def play(engine: Any, root: Path, how: settings) -> None:
    class Played(Machine):
        pass

    Played.engine, Played.root = engine, root
    run_state_machine_as_test(Played, settings=how)


@pytest.mark.parametrize("max_examples", [15, pytest.param(60, marks=pytest.mark.heavy)])
def test_the_mount_does_what_posix_says(mounted: Any, engine: Any, max_examples: int) -> None:
    """The same steps at every run. A failure is not made smaller: that would take longer than to read it."""
    play(
        engine,
        mounted.path,
        settings(COMMON, max_examples=max_examples, stateful_step_count=50, derandomize=True, phases=[Phase.generate]),
    )


@pytest.mark.slow
def test_the_mount_does_what_posix_says_for_long(mounted: Any, engine: Any) -> None:
    """Others at every run; a failure prints what reproduces it."""
    play(engine, mounted.path, settings(COMMON, max_examples=1500, stateful_step_count=60, derandomize=False))
