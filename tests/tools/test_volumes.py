"""`kvfs format`, `fsck` and `destroy` on volumes of real mounts: sentences, exit codes, and what is left."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path

import pytest

from kvfs.errors import UsageError
from kvfs.testing import DEADLINE_S
from kvfs.tools import destroy

from .conftest import KVFS, Mount, kvfs, store

pytestmark = pytest.mark.heavy

needs_fuse = pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse")


@pytest.fixture
def volume(mount: Mount) -> Path:
    """The directory of the volume of the mount."""
    return mount.path.parent / "volume"


def content(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


@needs_fuse
@pytest.mark.parametrize("fill", [[], ["--fill"]])
def test_a_formatted_volume_is_mounted_and_destroyed(mount: Mount, volume: Path, fill: list[str]) -> None:
    """Made beforehand, filled or not, it takes chunks and keeps them; destroyed, nothing is left, the directory neither."""
    result = kvfs("format", volume, "16MiB", *fill)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"kvfs: made a volume of 16.0 MiB in {volume}\n")
    assert ("filled 16.0 MiB" in result.stdout) == bool(fill)
    assert ("of the 600 TB" in result.stderr) == bool(fill)
    assert (volume / "volume").stat().st_blocks * 512 >= 16 << 20
    assert kvfs("fsck", volume).returncode == 0
    mount.start()
    store(mount.path, list(range(48)))
    assert kvfs("umount", mount.path).returncode == 0
    mount.start()
    assert kvfs("verify", mount.path).stdout == "kvfs: checked 3 chunks, 24.0 KiB: all good\n"
    result = kvfs("destroy", volume, "--yes")
    assert (result.returncode, result.stderr) == (2, f"kvfs: {volume} is in use by another kvfs daemon\n")
    assert kvfs("umount", mount.path).returncode == 0
    result = kvfs("destroy", volume)
    assert result.returncode == 2
    assert result.stderr.endswith("for good: say --yes\n")
    result = kvfs("destroy", volume, "--yes")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"kvfs: removed the volume of 16.0 MiB in {volume}, with its 3 chunks\n"
    assert not volume.exists()


def test_format_refuses_what_it_would_overwrite(tmp_path: Path) -> None:
    assert kvfs("format", tmp_path, "1MiB").returncode == 0
    before = {name: (tmp_path / name).read_bytes() for name in content(tmp_path)}
    result = kvfs("format", tmp_path, "2MiB", "--fill")
    assert result.returncode == 2
    assert result.stderr == f"kvfs: there is a volume in {tmp_path} already; `kvfs destroy {tmp_path}` removes it\n"
    assert {name: (tmp_path / name).read_bytes() for name in content(tmp_path)} == before


@pytest.mark.parametrize(
    ("place", "size", "sentence"),
    [
        ("v", "4GB", "'4GB' is not a size"),
        ("v", "4KiB", "a volume has 1.0 MiB to 1.0 PiB, not 4.0 KiB"),
        ("v", "900TiB", "there is no room for a volume of 900.0 TiB"),
        ("missing/v", "1MiB", "missing does not exist"),
    ],
)
def test_format_refuses_what_cannot_be(tmp_path: Path, place: str, size: str, sentence: str) -> None:
    result = kvfs("format", tmp_path / place, size)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / place).exists()


def test_destroy_leaves_what_is_not_ours(tmp_path: Path) -> None:
    """Other files stay, and with them the directory; a file of the volume's name that is none is refused."""
    assert kvfs("format", tmp_path / "v", "1MiB").returncode == 0
    (tmp_path / "v" / "namespaces").mkdir()
    for name in ("mine", "index.sqlite.set-aside", "namespaces/x.json", "namespaces/mine"):
        (tmp_path / "v" / name).touch()
    assert kvfs("destroy", tmp_path / "v", "--yes").returncode == 0
    assert content(tmp_path / "v") == {"mine", "namespaces", "namespaces/mine"}
    for raw in (b"", b"something else"):
        (tmp_path / "v" / "volume").write_bytes(raw)
        result = kvfs("destroy", tmp_path / "v", "--yes")
        assert (result.returncode, result.stderr.count("\n")) == (2, 1)
        assert "is not a kvfs volume" in result.stderr
    assert content(tmp_path / "v") == {"mine", "namespaces", "namespaces/mine", "volume"}
    result = kvfs("destroy", tmp_path, "--yes")
    assert (result.returncode, result.stderr) == (2, f"kvfs: there is no kvfs volume in {tmp_path}\n")


def test_destroy_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    """The volume goes last: until then it says that the rest is ours."""
    assert kvfs("format", tmp_path / "v", "1MiB").returncode == 0
    (tmp_path / "v" / "index.sqlite").unlink()
    result = kvfs("destroy", tmp_path / "v", "--yes")
    assert (result.returncode, result.stderr) == (0, "")
    assert not (tmp_path / "v").exists()


def test_destroy_of_what_a_lost_volume_left(tmp_path: Path) -> None:
    assert kvfs("format", tmp_path / "v", "1MiB").returncode == 0
    (tmp_path / "v" / "volume").unlink()
    result = kvfs("destroy", tmp_path / "v", "--yes")
    assert (result.returncode, result.stdout) == (0, f"kvfs: removed what was left of a volume in {tmp_path}/v\n")
    assert not (tmp_path / "v").exists()


def test_a_superblock_that_was_written_over_is_to_be_mended(tmp_path: Path) -> None:
    """Its index says that it was a volume: nobody is told first to remove it."""
    place = tmp_path / "v"
    assert kvfs("format", place, "1MiB").returncode == 0
    with (place / "volume").open("r+b") as file:
        file.write(bytes(4096))
    mending = f"kvfs fsck {place} --rebuild"
    mount = kvfs("mount", tmp_path / "m", "--ram=1MiB", f"--nvme={place}:1MiB", f"--socket-directory={tmp_path}/run")
    for result in (mount, kvfs("destroy", place, "--yes")):
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr.startswith(f"kvfs: the superblock of {place}/volume is damaged")
        assert mending in result.stderr


@pytest.mark.parametrize(("answer", "is_gone"), [(b"y\n", True), (b"n\n", False), (b"\n", False)])
def test_destroy_asks_at_a_terminal(tmp_path: Path, answer: bytes, is_gone: bool) -> None:
    """Only a yes removes anything."""
    assert kvfs("format", tmp_path / "v", "1MiB").returncode == 0
    ours, theirs = pty.openpty()
    try:
        command = [KVFS, "destroy", str(tmp_path / "v")]
        with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            os.write(ours, answer)
            _, told = process.communicate(timeout=DEADLINE_S)
    finally:
        os.close(ours)
        os.close(theirs)
    assert b"for good? [y/N]" in told
    assert (process.returncode, not (tmp_path / "v").exists()) == (0 if is_gone else 1, is_gone)


def test_a_volume_of_a_newer_kvfs_can_be_destroyed(tmp_path: Path) -> None:
    """Its begin shows that it is ours, though not what is in it."""
    assert kvfs("format", tmp_path / "v", "1MiB").returncode == 0
    with (tmp_path / "v" / "volume").open("r+b") as file:
        file.seek(8)
        file.write(b"\x09")
    result = kvfs("fsck", tmp_path / "v")
    assert (result.returncode, result.stdout) == (8, "")
    assert result.stderr.endswith("has volume format 9, this kvfs reads 1; use the kvfs that made it\n")
    assert kvfs("destroy", tmp_path / "v", "--yes").returncode == 0


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no kvfs volume in"):
        destroy.destroy(str(tmp_path / "missing"), yes=True)


# fsck


@needs_fuse
def test_a_lost_index_is_brought_back(mount: Mount, volume: Path) -> None:
    """The whole way: the index goes, fsck says so, the mount says so, fsck brings it back, every byte is right."""
    mount.start()
    keys = store(mount.path, list(range(48)))
    result = kvfs("fsck", volume)
    assert (result.returncode, result.stderr) == (8, f"kvfs: {volume} is in use by another kvfs daemon\n")
    assert kvfs("umount", mount.path).returncode == 0
    result = kvfs("fsck", volume)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"kvfs: {volume}: 3 good chunks, 24.0 KiB of 16.0 MiB, in 1 namespace (headers checked)\n"

    (volume / "index.sqlite").unlink()
    result = kvfs("fsck", volume)
    assert result.returncode == 4
    assert result.stdout.endswith(f"kvfs: to mend it: kvfs fsck {volume} --rebuild\n")
    mount.start()
    assert mount.json("ls") == []
    assert f"kvfs fsck {volume} --rebuild" in Path(mount.path.parent, "log").read_text()
    others = store(mount.path, list(range(900, 916)))
    assert kvfs("umount", mount.path).returncode == 0

    told = json.loads(kvfs("fsck", volume, "--payload", "--json").stdout)
    assert (told["num_chunks"], told["num_unclaimed"], told["findings"]) == (1, 3, [])
    result = kvfs("fsck", volume, "--rebuild")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == (
        f"kvfs: {volume}: the new index has 4 chunks, 32.0 KiB, in 1 namespace; 3 of them came back\n"
        f"kvfs: the old index is {volume}/index.sqlite.set-aside\n"
    )
    mount.start()
    assert {chunk["name"] for chunk in mount.json("ls", "tiny", "--chunks")} == set(keys + others)
    assert kvfs("verify", mount.path).stdout == "kvfs: checked 4 chunks, 32.0 KiB: all good\n"
    [prefix, _] = sorted(mount.json("ls", "tiny"), key=lambda entry: -entry["num_chunks"])
    assert (prefix["name"], prefix["num_chunks"]) == (keys[0], 3)
    assert kvfs("umount", mount.path).returncode == 0


@needs_fuse
def test_what_is_bad_is_told_and_dropped_by_a_rebuild(mount: Mount, volume: Path) -> None:
    mount.start()
    keys = store(mount.path, list(range(48)))
    assert kvfs("umount", mount.path).returncode == 0
    raw = (volume / "volume").read_bytes()
    begin = raw.index(f'"key":"{keys[1]}"'.encode()) // 4096 * 4096
    with (volume / "volume").open("r+b") as file:
        file.seek(begin + 4096)
        file.write(b"\1")
    assert kvfs("fsck", volume).returncode == 0
    result = kvfs("fsck", volume, "--payload")
    assert result.returncode == 4
    line, summary, remedy = result.stdout.splitlines()
    assert line == f"chunk       chunk {keys[1]} at {begin} is bad: its bytes are not those of the chunk"
    assert "2 good chunks, 16.0 KiB" in summary
    assert remedy == (
        f"kvfs: what is bad is never given out: a load or kvfs verify drops it; kvfs fsck {volume} --rebuild does now"
    )
    result = kvfs("fsck", volume, "--rebuild")
    assert "1 chunk of the old index had not their bytes, and are gone" in result.stdout
    assert kvfs("fsck", volume, "--payload").returncode == 0


def test_fsck_where_there_is_nothing(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "missing", Path("/dev/null")):
        for flags in ([], ["--rebuild"]):
            result = kvfs("fsck", place, *flags)
            assert (result.returncode, result.stderr) == (8, f"kvfs: there is no kvfs volume in {place}\n")


def test_ctrl_c_during_a_rebuild(tmp_path: Path) -> None:
    """The exit code is 130, and the sentence says that nothing was changed."""
    assert kvfs("format", tmp_path / "v", "1MiB").returncode == 0
    script = (
        "import os, signal, sys\n"
        "from kvfs.tools import cli, offline\n"
        "offline.Bar.begin = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['kvfs', 'fsck', sys.argv[1], '--rebuild']\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "cli.main()\n"
    )
    before = {name: (tmp_path / "v" / name).read_bytes() for name in content(tmp_path / "v")}
    command = [os.path.join(os.path.dirname(KVFS), "python"), "-c", script, str(tmp_path / "v")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert (result.returncode, result.stderr) == (130, f"kvfs: interrupted; {tmp_path}/v is as it was\n")
    assert {name: (tmp_path / "v" / name).read_bytes() for name in content(tmp_path / "v")} == before
