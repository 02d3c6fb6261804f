"""What cannot be done on a real mount ends with a clean errno, and harms nothing."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Attempt = Callable[[Path, Path], Any]

# Each gets a directory and a chunk in it, or another file that is always there. What the errnos are where chunks can be
# copied in is in test_copying_in.
ATTEMPTS: dict[str, tuple[set[int], Attempt]] = {
    "create": ({errno.EROFS, errno.EINVAL, errno.EPERM}, lambda directory, _: os.open(directory / "new", os.O_CREAT)),
    "mkdir": ({errno.EROFS, errno.EINVAL, errno.EPERM}, lambda directory, _: os.mkdir(directory / "new")),
    "mknod": ({errno.EROFS}, lambda directory, _: os.mknod(directory / "new")),
    "mkfifo": ({errno.EROFS}, lambda directory, _: os.mkfifo(directory / "new")),
    "symlink": ({errno.EROFS}, lambda directory, _: os.symlink("x", directory / "new")),
    "link": ({errno.EROFS, errno.EPERM}, lambda directory, file: os.link(file, directory / "new")),
    "rename": ({errno.EROFS, errno.EPERM}, lambda directory, file: os.rename(file, directory / "new")),
    "append": ({errno.EROFS, errno.EFBIG, errno.EINVAL}, lambda _, file: _write(file, os.O_WRONLY | os.O_APPEND)),
    "write": ({errno.EROFS, errno.EINVAL}, lambda _, file: _write(file, os.O_WRONLY)),
    "read and write": ({errno.EROFS, errno.EINVAL}, lambda _, file: _write(file, os.O_RDWR)),
    "open to truncate": ({errno.EROFS, errno.EINVAL}, lambda _, file: _write(file, os.O_RDWR | os.O_TRUNC)),
    "truncate": ({errno.EROFS, errno.EPERM}, lambda _, file: os.truncate(file, 0)),
    "setxattr": ({errno.EPERM}, lambda _, file: os.setxattr(file, "user.kvfs.tier", b"ram")),
    "setxattr of another kind": ({errno.ENOTSUP}, lambda _, file: os.setxattr(file, "user.kvfs.colour", b"red")),
    "setxattr to create": ({errno.ENOTSUP}, lambda _, file: os.setxattr(file, "user.x", b"1", os.XATTR_CREATE)),
    "removexattr": ({errno.EPERM}, lambda _, file: os.removexattr(file, "user.kvfs.tier")),
    "a file as a directory": ({errno.ENOTDIR}, lambda _, file: os.listdir(file)),
    "a name in a file": ({errno.ENOTDIR}, lambda _, file: os.stat(file / "x")),
    "a directory as a file": ({errno.EISDIR}, lambda directory, _: os.open(directory, os.O_WRONLY)),
    "unlink of a directory": ({errno.EISDIR}, lambda directory, _: os.unlink(directory)),
    "rmdir of a file": ({errno.ENOTDIR}, lambda _, file: os.rmdir(file)),
    "a name that is too long": ({errno.ENAMETOOLONG}, lambda directory, _: os.stat(directory / ("x" * 256))),
    "a new name that is too long": ({errno.ENAMETOOLONG}, lambda directory, _: os.mkdir(directory / ("x" * 256))),
    "a device ioctl": ({errno.ENOTTY}, lambda _, file: _ioctl(file)),
}


def _write(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.write(descriptor, b"x")
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)


def _ioctl(path: Path) -> None:
    import fcntl

    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, 0x1234)
    finally:
        os.close(descriptor)


def errno_of(attempt: Attempt, directory: Path, file: Path) -> int | None:
    try:
        attempt(directory, file)
    except OSError as error:
        return error.errno
    return None


def test_every_attempt_is_refused_everywhere(engine: Any, mounted: Any) -> None:
    engine.store("ab")
    flat = engine.file("ab")
    before = flat.read_bytes()
    places = {
        engine.chunks: flat,
        engine.prefixes / engine.key("a"): engine.prefixes / engine.key("a") / flat.name,
        engine.directory: engine.directory / "namespace.json",
        mounted.path: mounted.path / "README.txt",
        mounted.path / ".kvfs": mounted.path / ".kvfs" / "config.toml",
    }
    for directory, file in places.items():
        for what, (numbers, attempt) in ATTEMPTS.items():
            if what == "removexattr" and file != flat:
                continue
            assert errno_of(attempt, directory, file) in numbers, f"{what} in {directory}"
    for fixed in ("README.txt", ".kvfs/status.json", ".kvfs/session"):
        with pytest.raises(PermissionError) as refused:
            os.unlink(mounted.path / fixed)
        assert refused.value.errno == errno.EPERM
    for directory in (engine.chunks, engine.prefixes, engine.directory):
        with pytest.raises(OSError, match="Directory not empty"):
            os.rmdir(directory)
    with pytest.raises(PermissionError):
        os.rmdir(mounted.path / ".kvfs")
    assert flat.read_bytes() == before
    assert json.loads((mounted.path / ".kvfs/status.json").read_bytes())["counters"]["mount_errors"] == 0


HOSTILE = [
    b"\xff\xfe", b"\n", b" ", b"-rf", b"*", b"%s%n", b"...", b"~", b"$(id)", b"\x01\x7f", "ä".encode(), b"x" * 255,
    b"a\\b", b".safetensors", b"0" * 32, b"0" * 32 + b".safetensors", b"0" * 31 + b"/.safetensors",
    b"..%2f..%2fetc%2fpasswd", b".fuse_hidden0001",
]  # fmt: skip


def test_hostile_names_are_not_there(engine: Any, mounted: Any) -> None:
    engine.store("a")
    name = os.fsencode(engine.file("a").name)
    more = [name + b"\n", name.upper(), name + b" ", name[:-1], b" " + name]
    places = [engine.chunks, engine.prefixes, engine.prefixes / engine.key("a"), engine.directory, mounted.path]
    for place in places:
        for hostile in HOSTILE + more:
            with pytest.raises((FileNotFoundError, NotADirectoryError)):
                os.stat(os.path.join(os.fsencode(place), hostile))
    assert os.path.realpath(mounted.path / ".." / "mnt" / ".kvfs" / "..") == str(mounted.path)


def test_others_may_not_enter(engine: Any, mounted: Any) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    engine.store("a")
    for command in (["ls", str(mounted.path)], ["cat", str(engine.file("a"))]):
        result = subprocess.run(command, user=65534, group=65534, extra_groups=[], capture_output=True, check=False)
        assert result.returncode != 0
        assert b"Permission denied" in result.stderr


def test_shared_with_others_the_modes_still_hold(daemon: Any, engines: Any) -> None:
    """With --allow-other: the daemon's group may read, the rest of the world may not; nobody else may remove."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    daemon.start("--allow-other")
    engine = engines(daemon.path)
    engine.store("a")
    for path in (daemon.path, *daemon.path.parents):
        if path.stat().st_uid == 0 and path != daemon.path and path.stat().st_mode & 0o005 != 0o005:
            path.chmod(0o755)

    def as_nobody(*command: str | Path, group: int) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(command, user=65534, group=group, extra_groups=[], capture_output=True, check=False)

    assert as_nobody("cat", engine.file("a"), group=65534).returncode != 0
    assert as_nobody("cat", engine.file("a"), group=0).stdout == engine.file("a").read_bytes()
    assert as_nobody("rm", "-f", engine.file("a"), group=0).returncode != 0
    assert engine.file("a").exists()
