"""Copying into a real mount with the tools that people have: what proves itself is there, the rest leaves nothing."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import mmap
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .commands import run, succeeds


def status(mount: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((mount / ".kvfs/status.json").read_bytes())
    return found


def prefixes(namespace: Path) -> dict[str, set[str]]:
    """The chunks below each first key."""
    top = namespace / "prefixes"
    return {
        name: {file for _, _, files in os.walk(top / name) for file in files} for name in os.listdir(top)
    }  # fmt: skip


def heavy(*values: str) -> list[Any]:
    """Parameters for which a test is left to make test-heavy: each takes two mounts and many processes."""
    return [pytest.param(value, marks=pytest.mark.heavy) for value in values]


PATHS = ["abcd", "abxyz", "abx12", "q", "zyx"]


@pytest.fixture
def source(engine: Any, wait: Any) -> Any:
    """An engine that has stored several prompts in the first mount, where they are on NVMe."""
    for path in PATHS:
        engine.store(path)
    wait(
        lambda: all(os.getxattr(file, "user.kvfs.dirty") == b"0" for file in engine.chunks.iterdir()),
        "the chunks are clean",
    )
    return engine


@pytest.fixture
def target(daemon: Any, tmp_path: Path) -> Any:
    """A second mount, empty."""
    directory = tmp_path / "target"
    directory.mkdir()
    other = type(daemon)(directory, daemon.run_directory)
    other.start()
    yield other
    other.clean_up()


def is_copied(source: Any, target: Any) -> bool:
    """Whether the target has the chunks of the source, below the same first keys."""
    copied = target.path / source.directory.name
    if not (copied / "chunks").exists() or not (copied / "prefixes").exists():
        return False
    names = set(os.listdir(source.chunks))
    return set(os.listdir(copied / "chunks")) == names and prefixes(copied) == prefixes(source.directory)


def check_copy(source: Any, target: Any, engines: Any) -> None:
    """The target is the source's equal, an engine loads from it, and nothing is left in staging."""
    assert is_copied(source, target)
    copied = target.path / source.directory.name
    for name in os.listdir(source.chunks):
        one, other = copied / "chunks" / name, source.chunks / name
        assert one.read_bytes() == other.read_bytes()
        assert one.stat().st_mtime_ns == other.stat().st_mtime_ns
    client = engines(target.path)
    for path in PATHS:
        assert client.client.match(client.chains(path)).count == len(path)
        client.load(path)
    now = status(target.path)
    assert (now["num_staging"], now["staging_bytes"], now["counters"]["mount_errors"]) == (0, 0, 0)
    assert now["num_chunks"] == len(os.listdir(source.chunks))
    assert now["counters"]["copies_refused"] == 0


def test_cp_of_one_chunk(engine: Any, target: Any, engines: Any, wait: Any, tmp_path: Path) -> None:
    """Through a plain directory; it is there under both names, and after a restart."""
    engine.store("a")
    plain = tmp_path / engine.file("a").name
    succeeds("cp", engine.file("a"), plain)
    other = engines(target.path)
    other.client.match(other.chains("a"))  # the namespace is made when an engine first asks
    succeeds("cp", plain, other.chunks)
    names = [other.file("a"), other.prefixes / other.key("a") / plain.name]
    assert [name.read_bytes() for name in names] == [plain.read_bytes()] * 2
    assert names[0].stat().st_ino == names[1].stat().st_ino
    assert names[0].stat().st_mtime_ns == engine.file("a").stat().st_mtime_ns
    other.load("a")
    wait(lambda: os.getxattr(names[0], "user.kvfs.dirty") == b"0", "it is on NVMe")
    other.client.close()
    target.process.kill()
    target.ended()
    target.start()
    assert names[0].read_bytes() == plain.read_bytes()
    engines(target.path).load("a")


@pytest.mark.parametrize("flags", ["-a", "-r"])
def test_cp_of_a_namespace(source: Any, target: Any, engines: Any, wait: Any, flags: str) -> None:
    """Again when all is there, and also into a namespace that an engine has made."""
    succeeds("cp", flags, source.directory, target.path)
    if flags == "-a":  # setting the time of a directory ends it
        assert is_copied(source, target)
    wait(lambda: is_copied(source, target), "the copy is over")
    check_copy(source, target, engines)
    succeeds("cp", flags, source.directory, target.path)
    check_copy(source, target, engines)


def test_cp_into_an_empty_namespace(source: Any, target: Any, engines: Any) -> None:
    """Of a namespace that an engine has made already, and of one of its prefixes."""
    other = engines(target.path)
    other.client.match(other.chains("a"))
    top = source.prefixes / source.key("a")
    succeeds("cp", "-a", top, target.path / source.directory.name / "prefixes")
    assert prefixes(target.path / source.directory.name) == {top.name: prefixes(source.directory)[top.name]}
    succeeds("cp", "-a", source.directory, target.path)
    check_copy(source, target, engines)


@pytest.mark.heavy
def test_cp_of_more_than_ram(daemon: Any, engines: Any, tmp_path: Path) -> None:
    """A copy that is faster than the volume waits for it."""
    daemon.start(ram="1MiB", nvme="16MiB")
    engine = engines(daemon.path)
    paths = [chr(0x1000 + number) for number in range(400)]  # 3.2 MiB
    for path in paths:
        while [status.name for status in engine.try_store(path)] == ["REFUSED"]:
            pass
    succeeds("cp", "-a", engine.directory, tmp_path / "plain")
    succeeds("rm", "-rf", *engine.prefixes.iterdir())
    assert os.listdir(engine.chunks) == []
    succeeds("cp", "-a", tmp_path / "plain/chunks", engine.directory)
    assert len(os.listdir(engine.chunks)) == len(paths)
    for path in paths:
        engine.load(path)


def test_rsync(source: Any, target: Any, engines: Any, wait: Any) -> None:
    """The second time nothing is transferred."""
    if shutil.which("rsync") is None:
        pytest.skip("there is no rsync")
    command = ["rsync", "-a", "--stats", source.directory, target.path]
    first = succeeds(*command)
    assert "Number of regular files transferred: 0" not in first
    wait(lambda: is_copied(source, target), "the copy is over")
    check_copy(source, target, engines)
    assert "Number of regular files transferred: 0" in succeeds(*command)
    assert "Number of regular files transferred: 0" in succeeds(*command, "-H")


def rsync_with_attributes(flags: str, *places: Path) -> None:
    """To rsync it is an error if an attribute becomes longer while it reads it, as tier does; it is to run again then."""
    for attempt in range(5):
        result = run("rsync", flags, *places)
        is_over = result.returncode != 23 or "Numerical result out of range" not in result.stderr
        if is_over or attempt == 4:
            break
    assert (result.returncode, result.stderr) == (0, "")


def occupied(path: Path) -> int:
    return int(succeeds("du", "-s", "--block-size=1", path).split()[0])


def exported(source: Any, to: Path) -> Path:
    """The namespace in a directory, without a prefix view."""
    succeeds(sys.executable, "-m", "kvfs.tools.cli", "export", source.directory.parent, source.directory.name, to)
    return to / source.directory.name


def test_a_namespace_that_was_exported(source: Any, target: Any, engines: Any, wait: Any, tmp_path: Path) -> None:
    """`cp -r` makes no prefixes/ then; it is there all the same, for everybody else at once."""
    plain = exported(source, tmp_path / "exported")
    assert sorted(os.listdir(plain)) == ["chunks", "namespace.json"]
    succeeds("cp", "-r", plain, target.path)
    assert is_copied(source, target)
    made = target.path / plain.name
    assert sorted(os.listdir(made)) == ["chunks", "namespace.json", "prefixes"]
    tree = succeeds(sys.executable, "-m", "kvfs.tools.cli", "tree", target.path)
    assert source.key("q")[:8] in tree
    check_copy(source, target, engines)


def copy_as_cp_does(source: Path, target: Path, order: Callable[[Path], Any]) -> None:
    """What `cp -r` does in a directory that it has made: it takes for granted that nothing is there."""
    target.mkdir()
    for path in sorted(source.iterdir(), key=order):
        if path.is_dir():
            copy_as_cp_does(path, target / path.name, order)
        else:
            descriptor = os.open(target / path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                os.write(descriptor, path.read_bytes())
            finally:
                os.close(descriptor)


@pytest.mark.parametrize("order", ["".join(order) for order in itertools.permutations("cnp")])
def test_cp_in_any_order(source: Any, target: Any, engines: Any, tmp_path: Path, order: str) -> None:
    """Of chunks/, namespace.json and prefixes/: cp goes by their inodes, which are as the disk had them free."""
    plain = tmp_path / source.directory.name
    succeeds("cp", "-r", source.directory, plain)
    copy_as_cp_does(plain, target.path / plain.name, lambda path: (order.find(path.name[0]), path.name))
    os.utime(target.path / plain.name)  # the copy is over
    check_copy(source, target, engines)


@pytest.mark.parametrize("tool", ["cp -r", "rsync -aH", *heavy("cp -a", "rsync -a", "tar", "import")])
def test_removal_right_after_a_copy(source: Any, target: Any, engines: Any, tmp_path: Path, tool: str) -> None:
    """Of a prefix first, then of the chunks, so that half a namespace is left; then of all. Each can be copied again."""
    if tool.startswith("rsync") and shutil.which("rsync") is None:
        pytest.skip("there is no rsync")
    plain = tmp_path / source.directory.name
    succeeds("cp", "-a", source.directory, tmp_path / "plain")
    os.rename(tmp_path / "plain", plain)
    made = target.path / plain.name

    def copy() -> None:
        if tool == "import":
            command = [sys.executable, "-m", "kvfs.tools.cli", "import", str(target.path), str(plain)]
            assert run(*command).returncode == 0
        elif tool == "tar":
            with subprocess.Popen(["tar", "-C", plain.parent, "-c", plain.name], stdout=subprocess.PIPE) as tar:
                succeeds("tar", "-C", target.path, "-x", "--overwrite", stdin=tar.stdout)
        else:
            succeeds(*tool.split(), plain, target.path)
        assert is_copied(source, target)

    copy()
    top = made / "prefixes" / source.key("a")
    below = {name for _, _, names in os.walk(top) for name in names}
    succeeds("rm", "-rf", top)
    assert set(os.listdir(made / "chunks")) == set(os.listdir(source.chunks)) - below
    copy()
    succeeds("rm", "-rf", made / "chunks")
    assert not (made / "chunks").exists()
    copy()
    for _ in range(2):
        succeeds("rm", "-rf", made)
        assert not made.exists()
        assert status(target.path)["num_chunks"] == 0
        copy()
    check_copy(source, target, engines)


@pytest.mark.parametrize("tool", ["cp -a", "rsync -a", *heavy("cp -r", "tar", "import")])
def test_what_a_copy_occupies(source: Any, target: Any, wait: Any, tmp_path: Path, tool: str) -> None:
    """Each chunk counts once, as soon as the copy is over: at once if it says so, seconds later if it does not."""
    if tool.startswith("rsync") and shutil.which("rsync") is None:
        pytest.skip("there is no rsync")
    made = target.path / source.directory.name
    if tool == "import":
        plain = exported(source, tmp_path / "exported")
        assert run(sys.executable, "-m", "kvfs.tools.cli", "import", target.path, plain).returncode == 0
    elif tool == "tar":
        with subprocess.Popen(
            ["tar", "-C", source.directory.parent, "-c", source.directory.name], stdout=subprocess.PIPE
        ) as tar:
            succeeds("tar", "-C", target.path, "-x", stdin=tar.stdout)
    else:
        succeeds(*tool.split(), source.directory, target.path)
    if tool in ("cp -r", "rsync -a"):
        wait(lambda: occupied(made) == occupied(source.directory), "the copy is over")
    assert occupied(made) == occupied(source.directory)


def test_a_namespace_by_hand(source: Any, target: Any, engines: Any) -> None:
    """Its directory, its namespace.json, and chunks one by one; nothing else has to be made."""
    made = target.path / source.directory.name
    succeeds("mkdir", made)
    succeeds("cp", source.directory / "namespace.json", f"{made}/")
    for file in sorted(source.chunks.iterdir()):
        succeeds("cp", file, f"{made}/chunks/")
    assert is_copied(source, target)
    check_copy(source, target, engines)


def test_rsync_with_links(source: Any, target: Any, engines: Any, wait: Any) -> None:
    """Pins and limits come along."""
    if shutil.which("rsync") is None:
        pytest.skip("there is no rsync")
    pinned = min(source.chunks.iterdir())
    os.setxattr(pinned, "user.kvfs.pin", b"forever")
    os.setxattr(source.directory, "user.kvfs.quota", b"1GiB")
    rsync_with_attributes("-aHX", source.directory, target.path)
    wait(lambda: is_copied(source, target), "the copy is over")
    check_copy(source, target, engines)
    copy = target.path / source.directory.name
    assert os.getxattr(copy / "chunks" / pinned.name, "user.kvfs.pin") == b"forever"
    assert os.getxattr(copy, "user.kvfs.quota") == b"1GiB"


@pytest.mark.parametrize("tool", ["rsync -aX", "cp -a"])
def test_a_namespace_of_which_all_is_pinned(source: Any, target: Any, engines: Any, wait: Any, tool: str) -> None:
    """So each of its directories says that it is, and the copy takes that, too."""
    if tool.startswith("rsync") and shutil.which("rsync") is None:
        pytest.skip("there is no rsync")
    os.setxattr(source.directory, "user.kvfs.pin", b"forever")
    assert os.getxattr(source.prefixes / source.key("q"), "user.kvfs.pin") == b"forever"
    if tool == "cp -a":
        succeeds(*tool.split(), source.directory, target.path)
    else:
        rsync_with_attributes("-aX", source.directory, target.path)
    wait(lambda: is_copied(source, target), "the copy is over")
    check_copy(source, target, engines)
    copied = target.path / source.directory.name
    assert os.getxattr(copied, "user.kvfs.pin") == b"forever"
    assert os.getxattr(copied / "chunks" / source.file("abcd").name, "user.kvfs.pin") == b"forever"


def test_tar(source: Any, target: Any, engines: Any, wait: Any) -> None:
    """Through a pipe; over what is there with --overwrite, as tar would remove first what it replaces."""
    for flags in ([], ["--overwrite"]):
        with subprocess.Popen(
            ["tar", "-C", source.directory.parent, "-c", source.directory.name], stdout=subprocess.PIPE
        ) as tar:
            succeeds("tar", "-C", target.path, "-x", *flags, stdin=tar.stdout)
        wait(lambda: is_copied(source, target), "the copy is over")
        check_copy(source, target, engines)


def test_the_worst_order(source: Any, target: Any, engines: Any, tmp_path: Path, wait: Any) -> None:
    """Leaves first, namespace.json last: what comes early waits, and joins what it was built on."""
    plain = tmp_path / "plain"
    succeeds("cp", "-r", source.directory, plain)
    made = target.path / source.directory.name
    made.mkdir()
    (made / "chunks").mkdir()
    by_position = sorted(
        source.chunks.iterdir(), key=lambda path: int(os.getxattr(path, "user.kvfs.position")), reverse=True
    )
    for path in by_position:
        succeeds("cp", plain / "chunks" / path.name, made / "chunks")
    assert status(target.path)["num_staging"] == len(by_position)
    assert source.directory.name not in os.listdir(target.path)
    succeeds("cp", plain / "namespace.json", made)
    assert status(target.path)["num_staging"] == 0
    os.utime(made)  # as tar and cp -a do at their end
    wait(lambda: is_copied(source, target), "the copy is over")
    check_copy(source, target, engines)
    tops = os.listdir(made / "prefixes")
    assert sorted(tops) == sorted({source.key(path[0]) for path in PATHS})


def test_a_stream(engine: Any, target: Any, engines: Any) -> None:
    """What comes through a pipe in small pieces is proven at the last close."""
    engine.store("a")
    other = engines(target.path)
    other.client.match(other.chains("a"))  # the namespace is made when an engine first asks
    command = 'dd bs=1000 status=none < "$1" | cat > "$2"'
    succeeds("sh", "-c", command, "sh", engine.file("a"), other.file("a"))
    other.load("a")


def refusal(write: Callable[[], Any]) -> int | None:
    try:
        write()
    except OSError as error:
        return error.errno
    return None


def refusals(mount: Path) -> dict[str, set[str]]:
    """The reasons that events give, by path."""
    found: dict[str, set[str]] = {}
    for line in (mount / ".kvfs/events").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "refused":
            found.setdefault(event["path"], set()).add(event["reason"])
    return found


def test_what_can_have_no_name_here_is_told(engine: Any, mounted: Any) -> None:
    """An event names the path, and says which names there can be."""
    engine.store("a")
    top = engine.directory.name
    raw = engine.file("a").read_bytes()
    assert refusal(lambda: (engine.chunks / "KEY.bin").write_bytes(raw)) == errno.EINVAL
    (engine.chunks / ".tmp").write_bytes(raw)
    assert refusal(lambda: os.rename(engine.chunks / ".tmp", engine.chunks / "KEY")) == errno.EINVAL
    assert refusal(lambda: os.mkdir(engine.prefixes / "KEY")) == errno.EINVAL
    assert refusal(lambda: os.mkdir(mounted.path / "KEY")) == errno.EINVAL
    assert refusal(lambda: (engine.directory / "README").write_bytes(raw)) == errno.EPERM
    assert set(refusals(mounted.path)) == {
        f"{top}/chunks/KEY.bin", f"{top}/chunks/KEY", f"{top}/prefixes/KEY", "KEY", f"{top}/README",
    }  # fmt: skip


def flipped(raw: bytes, place: int) -> bytes:
    return raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]


def test_what_does_not_prove_itself_is_refused(source: Any, mounted: Any, tmp_path: Path) -> None:
    """With EINVAL at close, or at rename; nothing is left, and an event says why."""
    raw = source.file("ab").read_bytes()
    name = source.file("ab").name
    foreign = raw.replace(source.namespace.fingerprint_hex.encode(), b"0" * 64)
    os.unlink(source.file("ab"))
    before = set(os.listdir(source.chunks))
    wrong = {
        "another name": (source.file("q").name, raw),
        "an impossible name": ("0" * 32 + ".safetensors", raw),
        "a flipped byte of a layer": (name, flipped(raw, 5000)),
        "a flipped byte of the header": (name, flipped(raw, 300)),
        "a flipped byte of the spaces": (name, flipped(raw, 4090)),
        "a flipped last byte": (name, flipped(raw, len(raw) - 1)),
        "truncated": (name, raw[:-1]),
        "truncated to the header": (name, raw[:4096]),
        "another namespace": (name, foreign),
        "no chunk": (name, b"hello\n"),
    }
    for what, (file, content) in wrong.items():
        for directory in (source.chunks, source.prefixes, source.prefixes / source.key("a")):
            assert refusal(lambda: (directory / file).write_bytes(content)) == errno.EINVAL, what  # noqa: B023
        staging = source.chunks / f".{file}.Ab12Cd"
        staging.write_bytes(content)
        if file == source.file("q").name:
            assert source.file("q").exists()
        assert refusal(lambda: os.rename(staging, source.chunks / file)) == errno.EINVAL, what  # noqa: B023
        assert staging.read_bytes() == content
        os.unlink(staging)
        assert not staging.exists()
        assert set(os.listdir(source.chunks)) == before
    assert refusal(lambda: source.file("ab").write_bytes(raw + b"x")) == errno.EFBIG
    plain = tmp_path / name
    plain.write_bytes(flipped(raw, 5000))
    result = run("cp", plain, source.chunks)
    assert result.returncode == 1
    assert "Invalid argument" in result.stderr
    result = run("sh", "-c", 'cat "$1" > "$2"', "sh", plain, source.file("ab"))
    assert result.returncode != 0
    now = status(mounted.path)
    assert (now["num_staging"], now["staging_bytes"], now["counters"]["mount_errors"]) == (0, 0, 0)
    assert now["counters"]["copies_refused"] >= 2 * len(wrong)
    assert refusals(mounted.path)[f"{source.directory.name}/chunks/{name}"] >= {
        "layer 0 does not have its checksum",
        "it is of another namespace: its fingerprint begins with 000000000000",
        f"it has {len(raw) - 1} bytes instead of {len(raw)}",
        "it has 6 bytes, fewer than any chunk's header",
        f"a chunk here has at most {len(raw)} bytes",
    }
    source.file("ab").write_bytes(raw)
    source.load("abcd")


def test_a_namespace_has_to_prove_itself(source: Any, target: Any) -> None:
    """Its name and its namespace.json belong together; until then it is a place where files wait."""
    good = (source.directory / "namespace.json").read_bytes()
    made = target.path / source.directory.name
    for name in ("x", "-rf", ".x", "README", "tiny-r0of1", "tiny-f32-r0of1-zzzzzzzzzzzz"):
        assert refusal(lambda: os.mkdir(target.path / name)) == errno.EINVAL, name  # noqa: B023
    made.mkdir()
    assert refusal(made.mkdir) == errno.EEXIST
    assert os.listdir(made) == []
    for content in (b"{}", b"\xff", good[:-20], good.replace(b"tests/tiny", b"tests/tinx"), b"[" * 10000):
        assert refusal(lambda: (made / "namespace.json").write_bytes(content)) == errno.EINVAL  # noqa: B023
    assert refusal(lambda: (made / "namespace.json").write_bytes(b" " * (256 << 10) + b"{}")) == errno.EFBIG
    assert refusal(lambda: (made / "other.json").write_bytes(good)) == errno.EPERM
    other = target.path / "tiny-f32-r0of1-000000000000"
    other.mkdir()
    assert refusal(lambda: (other / "namespace.json").write_bytes(good)) == errno.EINVAL
    other.rmdir()
    assert not other.exists()
    assert status(target.path)["num_namespaces"] == 0
    (made / "namespace.json").write_bytes(good)
    assert (made / "namespace.json").read_bytes() == good
    (made / "namespace.json").write_bytes(good)
    assert refusal(lambda: (made / "namespace.json").write_bytes(good.replace(b"tiny", b"tinx"))) == errno.EINVAL
    assert (made / "namespace.json").read_bytes() == good
    assert status(target.path)["num_namespaces"] == 1
    assert os.listdir(target.path).count(made.name) == 1


def test_no_room(daemon: Any, engines: Any) -> None:
    """Half of the RAM tier may be staging, no more; what is given up is room again."""
    daemon.start(ram="1MiB", nvme=None)
    engine = engines(daemon.path)
    engine.store("ab")
    raw = engine.file("a").read_bytes()
    names = [engine.chunks / f".{number}" for number in range(512 // 8 + 1)]
    for name in names[:-1]:
        name.write_bytes(raw)
    assert status(daemon.path)["staging_bytes"] == 512 << 10
    assert refusal(lambda: names[-1].write_bytes(raw)) == errno.ENOSPC
    assert refusal(lambda: engine.file("a").write_bytes(raw)) == errno.ENOSPC
    assert engine.file("a").read_bytes() == raw
    for name in names:
        name.unlink()
    assert status(daemon.path)["staging_bytes"] == 0
    engine.file("a").write_bytes(raw)


def test_too_many_files(engine: Any, mounted: Any) -> None:
    engine.store("a")
    descriptors = [os.open(engine.chunks / f".{number}", os.O_CREAT | os.O_WRONLY) for number in range(1024)]
    assert refusal(lambda: os.open(engine.chunks / ".more", os.O_CREAT | os.O_WRONLY)) == errno.ENOSPC
    for number, descriptor in enumerate(descriptors):
        os.close(descriptor)
        os.unlink(engine.chunks / f".{number}")
    assert status(mounted.path)["num_staging"] == 0


def test_a_killed_writer_leaves_nothing(engine: Any, mounted: Any, wait: Any, reap: Any) -> None:
    engine.store("a")
    raw = engine.file("a").read_bytes()
    os.unlink(engine.file("a"))
    writes = "import sys, time; file = open(sys.argv[1], 'wb', buffering=0); file.write(sys.stdin.buffer.read(5000)); time.sleep(600)"
    writer = reap(subprocess.Popen([sys.executable, "-c", writes, engine.file("a")], stdin=subprocess.PIPE))
    writer.stdin.write(raw[:5000])
    writer.stdin.flush()
    wait(lambda: status(mounted.path)["staging_bytes"], "it has begun")
    assert not engine.file("a").exists()
    writer.kill()
    wait(lambda: status(mounted.path)["num_staging"] == 0, "its file is gone")
    assert os.listdir(engine.chunks) == []
    assert status(mounted.path)["staging_bytes"] == 0


def test_who_reads_the_old_file_is_not_disturbed(engine: Any) -> None:
    """Not by what is written, be it good or bad; and the name always shows the chunk that is there."""
    engine.store("a")
    file = engine.file("a")
    raw = file.read_bytes()
    with file.open("rb", buffering=0) as reader, mmap.mmap(reader.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert bytes(mapped) == raw
        writer = os.open(file, os.O_WRONLY | os.O_TRUNC)
        assert os.fstat(writer).st_size == len(raw)
        os.write(writer, b"x" * 5000)
        assert reader.read() == raw
        assert bytes(mapped) == raw
        assert file.read_bytes() == raw
        with pytest.raises(OSError, match="Invalid argument"):
            os.close(writer)
        assert bytes(mapped) == raw
        file.write_bytes(raw)
        assert bytes(mapped) == raw
    assert refusal(lambda: os.truncate(file, 5)) == errno.EPERM
    with pytest.raises(OSError, match="File too large"), file.open("ab") as appending:
        appending.write(b"x")
    file.touch()
    file.chmod(0o600)
    assert file.read_bytes() == raw
    engine.load("a")


def test_two_writers_of_one_chunk(engine: Any, mounted: Any) -> None:
    """Each writes a file of its own, and both succeed."""
    engine.store("a")
    raw = engine.file("a").read_bytes()
    os.unlink(engine.file("a"))
    descriptors = [os.open(engine.file("a"), os.O_CREAT | os.O_WRONLY) for _ in range(2)]
    for begin in range(0, len(raw), 1000):
        for descriptor in descriptors:
            os.write(descriptor, raw[begin : begin + 1000])
    threads = [threading.Thread(target=os.close, args=(descriptor,)) for descriptor in descriptors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.file("a").read_bytes() == raw
    counters = status(mounted.path)["counters"]
    assert (counters["copies_admitted"], counters["copies_existing"], counters["copies_refused"]) == (1, 1, 0)
    assert status(mounted.path)["num_staging"] == 0


def test_a_proven_file_is_closed_for_good(engine: Any) -> None:
    """A duplicate of its descriptor cannot change the chunk."""
    engine.store("a")
    raw = engine.file("a").read_bytes()
    os.unlink(engine.file("a"))
    descriptor = os.open(engine.file("a"), os.O_CREAT | os.O_RDWR)
    duplicate = os.dup(descriptor)
    os.close(os.dup(descriptor))  # empty: nothing happens yet
    assert os.write(descriptor, raw) == len(raw)
    assert os.pread(descriptor, 100, 4000) == raw[4000:4100]
    os.close(descriptor)
    assert refusal(lambda: os.pwrite(duplicate, b"x", 4096)) == errno.EPERM
    assert refusal(lambda: os.ftruncate(duplicate, 0)) == errno.EPERM
    os.close(duplicate)
    assert engine.file("a").read_bytes() == raw


def test_links(engine: Any, target: Any, engines: Any) -> None:
    """Only to a name of the same chunk, where the tree decides whether it is there; and those that cp makes on its way."""
    engine.store("ab")
    file, home = engine.file("ab"), engine.prefixes / engine.key("a")
    assert refusal(lambda: os.link(file, home / file.name)) == errno.EEXIST
    empty = engine.prefixes / ("1" * 32)
    empty.mkdir()
    os.link(file, empty / file.name)
    assert not (empty / file.name).exists()
    os.link(file, home / "CuAb12Cd")
    assert (home / "CuAb12Cd").stat().st_ino == file.stat().st_ino
    assert "CuAb12Cd" not in os.listdir(home)
    os.rename(home / "CuAb12Cd", home / file.name)
    os.unlink(home / "CuAb12Cd")
    assert not (home / "CuAb12Cd").exists()
    assert file.exists()
    for name in ("other", "0" * 32 + ".safetensors", engine.file("a").name + "x"):
        assert refusal(lambda: os.link(file, home / name)) == errno.EPERM, name  # noqa: B023
    assert refusal(lambda: os.link(file, engine.directory / file.name)) == errno.EPERM
    assert refusal(lambda: os.rename(file, engine.chunks / ("0" * 32 + ".safetensors"))) == errno.EPERM
    assert refusal(lambda: os.rename(home, engine.prefixes / ("2" * 32))) == errno.EPERM
    empty.rmdir()


HOSTILE = [
    b"\xff\xfe", b"\n", b" ", b"-rf", b"*", b"%s%n", b"~", b"\x01\x7f", b"x" * 255, b".safetensors"[1:], b"0" * 32,
    b"0" * 31 + b".safetensors", b"g" * 32 + b".safetensors", b"A" * 32 + b".safetensors", b"0" * 32 + b".safetensors\n",
]  # fmt: skip


def test_hostile_names(engine: Any, mounted: Any) -> None:
    """Nothing but a chunk's name or a hidden one is taken; a hidden one may be anything."""
    engine.store("a")
    for directory in (engine.chunks, engine.prefixes, engine.prefixes / engine.key("a")):
        for hostile in HOSTILE:
            path = os.path.join(os.fsencode(directory), hostile)
            assert refusal(lambda: os.open(path, os.O_CREAT | os.O_WRONLY)) == errno.EINVAL, path  # noqa: B023
            assert refusal(lambda: os.link(engine.file("a"), path)) == errno.EPERM, path  # noqa: B023
            if not (directory != engine.chunks and hostile == b"0" * 32):
                assert refusal(lambda: os.mkdir(path)) in (errno.EINVAL, errno.EPERM), path  # noqa: B023
            hidden = os.path.join(os.fsencode(directory), b"." + hostile[:254])
            Path(os.fsdecode(hidden)).write_bytes(b"x")
            os.rename(hidden, hidden[:-1] + b"-")
            assert refusal(lambda: os.rename(hidden[:-1] + b"-", path)) == errno.EINVAL, path  # noqa: B023
            os.unlink(hidden[:-1] + b"-")
    long = os.path.join(os.fsencode(engine.chunks), b"." + b"x" * 255)
    assert refusal(lambda: os.open(long, os.O_CREAT | os.O_WRONLY)) == errno.ENAMETOOLONG
    now = status(mounted.path)
    assert (now["num_staging"], now["counters"]["mount_errors"]) == (0, 0)
    assert os.listdir(engine.chunks) == [engine.file("a").name]


def test_staging_is_seen_by_name_only(engine: Any, mounted: Any) -> None:
    engine.store("a")
    raw = engine.file("a").read_bytes()
    os.unlink(engine.file("a"))
    staging = engine.chunks / ".partial"
    staging.write_bytes(raw[:100])
    with staging.open("ab") as file:
        file.write(raw[100:])
    assert staging.stat().st_size == len(raw)
    assert os.listdir(engine.chunks) == []
    assert status(mounted.path)["num_staging"] == 1
    os.setxattr(staging, "user.kvfs.position", b"0")
    assert refusal(lambda: os.setxattr(staging, "user.other", b"0")) == errno.ENOTSUP
    staging.chmod(0o600)
    os.utime(staging, (1, 1))
    os.rename(staging, engine.file("a"))
    assert engine.file("a").read_bytes() == raw
    assert engine.file("a").stat().st_nlink == 1  # for a minute: cp -a would remove it otherwise
    assert not staging.exists()
    engine.load("a")


def test_a_second_name_that_is_renamed_is_gone_at_once(engine: Any) -> None:
    """Whoever looked at it before: the kernel does not show the new name where the tree has none."""
    engine.store("ab")
    alias = engine.prefixes / "CuAbCdEf"
    os.link(engine.file("a"), alias)
    assert alias.read_bytes() == engine.file("a").read_bytes()
    alias.rename(engine.prefixes / engine.file("a").name)
    assert not os.path.lexists(engine.prefixes / engine.file("a").name)
    assert not os.path.lexists(alias)
    assert engine.file("a").exists()


def test_a_descriptor_of_what_was_renamed_reads_the_chunk(target: Any, engines: Any) -> None:
    """Its own bytes, and never those of whatever lies where its room was."""
    engine = engines(target.path)
    engine.store("abc")
    chunk = engine.file("ab")
    good = chunk.read_bytes()
    staged = engine.chunks / ".x"
    descriptor = os.open(staged, os.O_RDWR | os.O_CREAT)
    try:
        os.pwrite(descriptor, good, 0)
        os.rename(staged, chunk)
        assert os.pread(descriptor, len(good), 0) == good
        chunk.unlink()
        with pytest.raises(OSError, match="Stale"):
            os.pread(descriptor, len(good), 0)
    finally:
        os.close(descriptor)


def test_a_stored_chunk_comes_before_a_file_that_waits(target: Any, engines: Any) -> None:
    """What waits in a draft is unproven; an engine that stores the same chunk meanwhile is believed."""
    engine = engines(target.path)
    os.mkdir(engine.directory)
    if not engine.chunks.exists():
        os.mkdir(engine.chunks)
    engine.file("ab").write_bytes(b"GARBAGE" * 100)
    engine.store("ab")
    assert engine.file("ab").read_bytes()[8:].startswith(b'{"__metadata__"')
    engine.file("ab").unlink()
    assert not engine.file("ab").exists()


def test_a_refused_rename_while_an_engine_makes_the_namespace(target: Any, engines: Any) -> None:
    """Whoever makes a draft a namespace looks at names that a rename has just taken back."""
    engine = engines(target.path)
    os.mkdir(engine.directory)
    if not engine.chunks.exists():
        os.mkdir(engine.chunks)
    staged = engine.chunks / ".h"
    staged.write_bytes(b"x" * 8192)
    engine.store("a")
    for _ in range(50):
        with pytest.raises(OSError, match="Invalid argument"):
            os.rename(staged, engine.file("ab"))
    assert status(target.path)["counters"]["mount_errors"] == 0


def test_large_gaps_hold_up_nobody_else_and_leave_nothing(target: Any, engines: Any, wait: Any) -> None:
    """Room that was made for a file goes when it is cut and closed, or with its directory."""
    engine = engines(target.path)
    engine.store("a")
    hidden = engine.chunks / ".big"
    descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, 5000)
    os.ftruncate(descriptor, 0)
    os.close(descriptor)
    assert status(target.path)["staging_bytes"] == 0
    hidden.write_bytes(b"x" * 5000)
    engine.client.close()
    wait(lambda: status(target.path)["num_sessions"] == 0, "the session ends")
    succeeds("rm", "-rf", engine.directory)
    assert not engine.directory.exists()
    assert (status(target.path)["num_staging"], status(target.path)["staging_bytes"]) == (0, 0)


MAPPER = """
import hashlib, mmap, sys
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
    print(hashlib.sha256(mapped).hexdigest(), flush=True)
    for line in sys.stdin:
        print(hashlib.sha256(mapped).hexdigest(), flush=True)
"""


def hash_of(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


@pytest.mark.parametrize(
    "how", ["read", "written over", "read and mapped", "one byte", "one right byte", "cut and written"]
)
def test_a_chunk_that_is_opened_to_be_changed(engine: Any, how: str) -> None:
    """It reads as it is, whatever is written; who has it mapped is never disturbed, and sees nothing of that.

    Closing it is fine as long as it is that chunk then, so tools may write over parts of it.
    """
    engine.store("a")
    file = engine.file("a")
    raw = file.read_bytes()
    command = [sys.executable, "-c", MAPPER, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        try:
            assert reader.stdout.readline() == f"{hash_of(raw)}\n"
            descriptor = os.open(file, os.O_RDWR)
            assert os.fstat(descriptor).st_size == len(raw)
            assert os.read(descriptor, len(raw) + 1) == raw
            assert os.pread(descriptor, 100, len(raw)) == b""
            if how == "read and mapped":
                with pytest.raises(OSError, match="No such device"):  # direct I/O: what is written is not in pages
                    mmap.mmap(descriptor, 0)
            elif how == "written over":
                assert os.pwrite(descriptor, raw, 0) == len(raw)
            elif how == "one byte":
                os.pwrite(descriptor, b"?", 5000)
            elif how == "one right byte":
                os.pwrite(descriptor, raw[5000:5001], 5000)
            elif how == "cut and written":
                os.ftruncate(descriptor, 5000)
                os.pwrite(descriptor, raw[5000:], 5000)
            assert os.pread(descriptor, len(raw) + 1, 0) == raw
            with mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE) as mapped:
                assert bytes(mapped) == raw
            assert file.read_bytes() == raw
            if how == "one byte":
                with pytest.raises(OSError, match="Invalid argument"):
                    os.close(descriptor)
            else:
                os.close(descriptor)
            reader.stdin.write("again\n")
            reader.stdin.flush()
            assert reader.stdout.readline() == f"{hash_of(raw)}\n"
        finally:
            reader.stdin.close()
            reader.wait()
    assert reader.returncode == 0
    assert file.read_bytes() == raw
    engine.load("a")


def test_what_is_written_over_a_namespace_json_is_not_read(engine: Any) -> None:
    """Nor does it get into the pages of who reads it."""
    engine.store("a")
    file = engine.directory / "namespace.json"
    raw = file.read_bytes()
    descriptor = os.open(file, os.O_RDWR)
    os.pwrite(descriptor, b"x" * len(raw), 0)
    with mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE) as mapped:
        assert bytes(mapped) == raw
    assert file.read_bytes() == raw
    with pytest.raises(OSError, match="Invalid argument"):
        os.close(descriptor)
    assert file.read_bytes() == raw
