"""`kvfs import` of what somebody made to hang it, to break it, or to reach the terminal."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.testing import DEADLINE_S
from kvfs.tools.copying import MAX_NAMED, MAX_PATH, Copied

from .conftest import KVFS, NAMESPACE, Mount, kvfs, store

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse")
NAME = NAMESPACE.directory
KEY = "0123456789abcdef" * 2
CHUNK = f"{NAME}/chunks/{KEY}.safetensors"
TITLE = "\x1b]0;owned\x07"


@pytest.fixture
def target(mount: Mount) -> Iterator[Mount]:
    mount.start()
    yield mount
    assert kvfs("umount", mount.path).returncode == 0


def archive(path: Path, members: dict[str, bytes], **headers: str) -> Path:
    with tarfile.open(path, "w") as file:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.pax_headers = {key.replace("__", "."): value for key, value in headers.items()}
            file.addfile(member, io.BytesIO(content))
    return path


def ends(result: subprocess.CompletedProcess[str], code: int, sentence: str) -> None:
    assert result.returncode == code, result
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
    assert not any(ord(letter) < 32 and letter != "\n" for letter in result.stdout + result.stderr)


def test_what_was_refused_before_an_error_is_told_of(target: Mount, tmp_path: Path) -> None:
    """An archive that is cut, after a member that is no chunk: both are said, and how much came before."""
    path = archive(tmp_path / "x.tar", {f"{NAME}/namespace.json": b"{}", CHUNK: bytes(20_000)})
    path.write_bytes(path.read_bytes()[:6000])
    result = kvfs("import", target.path, path)
    ends(result, 2, "in the middle of a file")
    first, second, count, last = result.stderr.splitlines()
    assert first.startswith(f"{NAME}/namespace.json  ")
    assert second == f"{CHUNK}  no namespace.json of {NAME} came before it"
    assert count == "kvfs: imported 0 chunks, 0 B; 2 refused, before this:"
    assert "is no archive, or not whole" in last


def test_archives_that_lie(target: Mount, tmp_path: Path) -> None:
    """One sentence and an exit code, soon, for sizes beyond all, maps of holes that are none, and a cut."""
    began_s = time.monotonic()
    path = tmp_path / "x.tar"
    huge = archive(path, {CHUNK: b"1"}, size="99999999999999999999999")
    ends(kvfs("import", target.path, huge), 2, "an impossible size")
    ends(kvfs("import", target.path, archive(path, {CHUNK: b"1"}, size=str(1 << 62))), 2, "in the middle of a file")
    large = archive(path, {f"{NAME}/namespace.json": bytes(300_000)})
    ends(kvfs("import", target.path, large), 1, "it is too large")
    for headers in (
        {"GNU__sparse__map": "a,b"},
        {"GNU__sparse__size": "x"},
        {"GNU__sparse__major": "1", "GNU__sparse__minor": "0"},
    ):
        result = kvfs("import", target.path, archive(path, {CHUNK: b"1"}, **headers))
        ends(result, 1, f"{CHUNK}  it has holes: make the archive without --sparse")
    assert time.monotonic() - began_s < DEADLINE_S


def test_a_cut_between_two_members(target: Mount, tmp_path: Path) -> None:
    """What came before it is there, and said; the rest is not passed over in silence. From a stream likewise."""
    keys = store(target.path, list(range(16 * 3)))
    whole = tmp_path / "whole.tar"
    assert kvfs("export", target.path, "tiny", whole).returncode == 0
    assert kvfs("rm", target.path, "tiny", "--all").returncode == 0
    with tarfile.open(whole) as file:
        cut = whole.read_bytes()[: file.getmembers()[2].offset]
    path = tmp_path / "cut.tar"
    path.write_bytes(cut)
    result = kvfs("import", target.path, path)
    ends(result, 2, "without an end marker, as one that was cut")
    assert "imported 1 chunk" in result.stderr
    assert [name[:32] for name in os.listdir(target.path / NAME / "chunks")] == keys[:1]
    streamed = subprocess.run(
        [KVFS, "import", str(target.path), "-"], input=cut, capture_output=True, check=False, timeout=DEADLINE_S
    )
    assert (streamed.returncode, b"without an end marker" in streamed.stderr) == (2, True)


def test_files_that_are_none(target: Mount, tmp_path: Path) -> None:
    """FIFOs, devices, directories, broken links and files beyond all size are named; nothing waits for them."""
    store(target.path, list(range(16)))
    place = tmp_path / "plain"
    assert kvfs("export", target.path, "tiny", place).returncode == 0
    chunks = place / NAME / "chunks"
    fifo, link, device, large = (chunks / f"{digit * 32}.safetensors" for digit in "abcd")
    os.mkfifo(fifo)
    link.symlink_to("nowhere")
    device.symlink_to("/dev/zero")
    large.touch()
    os.truncate(large, 1 << 42)
    result = kvfs("import", target.path, place)
    ends(result, 1, f"{fifo}  it is no regular file\n")
    assert result.stdout == "kvfs: imported 0 chunks, 0 B; 1 was there already; 4 refused\n"
    for line in (f"{link}  No such file", f"{device}  it is no regular file\n", f"{large}  it is too large\n"):
        assert line in result.stderr
    json_path = place / NAME / "namespace.json"
    json_path.unlink()
    os.mkfifo(json_path)
    ends(kvfs("import", target.path, place), 1, f"{json_path}  it is no regular file\n")
    json_path.unlink()
    json_path.mkdir()
    ends(kvfs("import", target.path, place), 1, f"{json_path}  ")
    os.mkfifo(tmp_path / "fifo.tar")
    ends(kvfs("import", target.path, tmp_path / "fifo.tar"), 2, "it is no regular file")


def test_names_do_not_reach_the_terminal(target: Mount, tmp_path: Path) -> None:
    """Escape sequences and bytes that are no text are printed escaped, in JSON too."""
    path = archive(tmp_path / "x.tar", {f"{TITLE}\udcff/{CHUNK}": b"1"})
    result = kvfs("import", target.path, path)
    ends(result, 1, rf"\x1b]0;owned\x07\xff/{CHUNK}  ")
    result = kvfs("import", target.path, path, "--json")
    assert json.loads(result.stdout)["refused"][0]["path"].startswith(r"\x1b]0;owned\x07\xff/")
    place = tmp_path / TITLE
    place.mkdir()
    ends(kvfs("import", target.path, place), 2, r"\x1b]0;owned\x07")
    ends(kvfs("ls", target.path, TITLE), 2, r"\x1b]0;owned\x07")


def test_ctrl_c_in_a_member_without_end(target: Mount, tmp_path: Path) -> None:
    """The first one ends it."""
    head = archive(tmp_path / "x.tar", {"other": b""}, size=str(1 << 60)).read_bytes()[:1536]
    with subprocess.Popen([KVFS, "import", str(target.path), "-"], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(head + bytes(4 << 20))  # more than a pipe has room for: it reads
        process.stdin.flush()
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 130


def test_of_millions_of_refused_files_the_first_are_named() -> None:
    """An archive can name as many as it likes, in names as long as it likes; they cost no memory."""
    done = Copied()
    for number in range(5000):
        done.refuse(f"{number}" + "x" * 5000, "it is too large")
    assert done.num_refused == 5000
    assert len(done.refused) == MAX_NAMED
    assert done.sentence("imported").endswith("; 5,000 refused")
    assert all(len(refused.path) == MAX_PATH for refused in done.refused)
