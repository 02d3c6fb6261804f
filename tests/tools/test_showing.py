"""What commands show, and how they look at a mount without hanging on it."""

from __future__ import annotations

import errno
import fnmatch
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
import typer
from rich.console import Console

from kvfs.config import Settings
from kvfs.errors import ConfigError, UnavailableError, UsageError
from kvfs.tools import background, faults, listing, ls, mounted, open_files, status
from kvfs.tools.mount import _sole_error
from kvfs.tools.words import format_duration, format_share


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (0, "0 s"), (59.9, "59 s"), (60, "1 min"), (3599, "59 min"), (7200, "2 h"), (86400 * 400, "400 d")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"), [(0, 0, "–"), (0, 9, "0 %"), (1, 1000, "< 1 %"), (1, 2, "50 %"), (9, 9, "100 %")]
)
def test_shares(part: int, whole: int, text: str) -> None:
    assert format_share(part, whole) == text


def test_a_mount_that_does_not_answer() -> None:
    """A look that never ends is given up, one that gets on is not."""
    never = threading.Event()
    with pytest.raises(UnavailableError, match=r"the kvfs daemon of /m has not answered for 0\.05 s"):
        mounted.ask("/m", lambda _: never.wait(), deadline_s=0.05)
    never.set()

    def slow(beat: mounted.Beat) -> str:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            beat()
        return "done"

    assert mounted.ask("/m", slow, deadline_s=1.0) == "done"


@pytest.mark.parametrize(
    ("number", "kind", "sentence"),
    [
        (errno.ENOTCONN, mounted.GoneError, "the kvfs daemon of /m is gone"),
        (errno.EACCES, UsageError, "you may not look into /m"),
        (errno.EIO, UnavailableError, "cannot read /m/x: Input/output error"),
    ],
)
def test_errors_of_the_mount_are_told_apart(number: int, kind: type[Exception], sentence: str) -> None:
    def fail(_: mounted.Beat) -> None:
        raise OSError(number, "Input/output error", "/m/x")

    with pytest.raises(kind, match=sentence):
        mounted.ask("/m", fail)


def test_defects_stay_defects() -> None:
    """Only what is raised on purpose becomes a sentence."""

    def fail(_: mounted.Beat) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        mounted.ask("/m", fail)


def test_a_group_of_one_is_that_one() -> None:
    """Nurseries wrap what goes wrong in the daemon; a person wants the sentence inside."""
    error = UsageError("sentence")
    assert _sole_error(BaseExceptionGroup("", [BaseExceptionGroup("", [error])])) is error
    several = BaseExceptionGroup("", [error, KeyboardInterrupt()])
    assert _sole_error(several) is several
    defect = BaseExceptionGroup("", [ZeroDivisionError()])
    assert _sole_error(defect) is defect


def shown(document: dict[str, object], path: str = "/mnt/kvfs") -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(status.panel(path, document))
    return capture.get()


def test_status_shows_what_matters() -> None:
    document = {
        "version": "9.9", "pid": 7, "uptime_s": 7200.5, "num_chunks": 1234, "num_namespaces": 1, "num_dirty": 3,
        "dirty_bytes": 3 << 20, "num_leases": 2,
        "ram": {"num_chunks": 10, "used_bytes": 1 << 30, "capacity_bytes": 4 << 30, "kind": "memfd"},
        "nvme": {"num_chunks": 9, "used_bytes": 0, "capacity_bytes": 64 << 30, "kind": "direct", "is_degraded": True},
        "counters": {"loads_ram": 5, "missed_chunks": 0, "loaded_bytes": 1 << 20},
    }  # fmt: skip
    text = shown(document)
    for part in (
        "kvfs 9.9 on /mnt/kvfs", "1,234 chunks in 1 namespace", "process 7, up 2 h", "2 in use",
        "3.0 MiB not yet on NVMe", "25 %", "64.0 GiB", "degraded", "loads ram", "1.0 MiB",
    ):  # fmt: skip
        assert part in text
    assert "chunks loaded that were in RAM" in text
    assert "missed chunks" not in text


@pytest.mark.parametrize(
    ("facts", "word", "advice"),
    [
        ({"kind": "missing", "fault": "missing"}, "missing", "`kvfs format /disk2/kvfs SIZE`"),
        ({"fault": "gone", "is_degraded": True}, "gone", "put them back where they were"),
        ({"fault": "disk_full", "is_disk_full": True}, "disk full", "free room beside /disk2/kvfs"),
        ({"fault": "device", "is_degraded": True}, "device fails", "see the daemon's log, and dmesg"),
        ({"kind": "missing"}, "missing", "`kvfs format"),
        ({"is_disk_full": True}, "disk full", "free room"),
        ({"is_degraded": True}, "device fails", "dmesg"),
    ],
)
def test_what_is_wrong_with_a_volume(facts: dict[str, object], word: str, advice: str) -> None:
    """By the word of the daemon, and of one of an earlier version by what it says; what works is not mentioned."""
    good, bad = {"directory": "/disk1/kvfs", "kind": "direct"}, {"directory": "/disk2/kvfs", "kind": "direct", **facts}
    [found] = faults.troubles({"volumes": [good, bad]})
    assert (found.directory, found.word) == ("/disk2/kvfs", word)
    assert advice in found.advice
    assert word in shown({"nvme": {"is_degraded": True}, "volumes": [good, bad]})


def test_what_a_volume_wants_beside_what_is_free(tmp_path: Path) -> None:
    """What it has not allocated yet, and room for its index."""
    with (tmp_path / "volume").open("wb") as file:
        file.truncate(1 << 43)
    free, missing = faults.missing_bytes(tmp_path)
    assert missing == (1 << 43) + faults.INDEX_ROOM_BYTES - free


def test_status_of_another_version_is_shown_as_far_as_it_goes() -> None:
    assert "0 chunks" in shown({"ram": None, "nvme": 3, "counters": []}, path="/mnt/[bold]")
    assert "/mnt/[bold]" in shown({}, path="/mnt/[bold]")


def test_entries_add_up() -> None:
    """What is not known of a part is not known of the whole."""
    total = listing.Entry("x")
    total.add(listing.Entry("a", num_chunks=1, size_bytes=10, num_tokens=16, tiers={"ram"}, last_used_ns=5))
    total.add(listing.Entry("b", num_chunks=2, size_bytes=20, num_tokens=32, tiers={"nvme"}, last_used_ns=3))
    assert (total.num_chunks, total.size_bytes, total.num_tokens, total.last_used_ns) == (3, 30, 48, 5)
    assert total.tiers == {"ram", "nvme"}
    total.add(listing.Entry("c", num_chunks=1, num_tokens=None, tiers=None))
    assert (total.num_chunks, total.num_tokens, total.tiers) == (4, None, None)


SECOND_NS = 10**9
PREFIXES = [
    listing.Entry("a" * 32, "a" * 32, "aaaaaaaa*", 0, 12, 1 << 30, 3000, {"ram", "nvme"}, SECOND_NS, SECOND_NS),
    listing.Entry(
        "b" * 32, "/".join(["a" * 32, "b" * 32]), "aaaaaaaa*/bbbbbbbb*", 1, 2, 1 << 20, None, None, 0, SECOND_NS
    ),
]


def headings(width: int | None, kind: str = "prefix") -> list[str]:
    return ls.table(kind, PREFIXES, 9 * SECOND_NS, width=width)[0].replace("last used", "last_used").split()[1:]


def test_columns_that_matter_least_go_first() -> None:
    """How many chunks there are is the last to go, but for the name."""
    assert headings(None) == headings(80) == ["chunks", "tokens", "size", "tier", "last_used"]
    assert headings(60) == ["chunks", "tokens", "size", "last_used"]
    assert headings(40) == ["chunks", "size"]
    assert headings(10) == []


@pytest.mark.parametrize("kind", ["namespace", "prefix", "chunk"])
@pytest.mark.parametrize("width", [None, 1, 20, 30, 40, 50, 60, 70, 80, 200])
def test_names_are_whole_at_any_width(kind: str, width: int | None) -> None:
    """Each entry is one line that begins with its name; it fits unless the name alone does not."""
    lines = ls.table(kind, PREFIXES, 9 * SECOND_NS, width=width)
    assert len(lines) == 1 + len(PREFIXES)
    for line, entry in zip(lines[1:], PREFIXES, strict=True):
        assert line.split()[0] == entry.short_path
        assert width is None or len(line) <= max(width, len("aaaaaaaa*/bbbbbbbb*"))


def test_a_line_of_ls() -> None:
    lines = ls.table("prefix", PREFIXES, 9 * SECOND_NS, width=None, full=True)
    assert lines[1].split() == ["a" * 32, "12", "3,000", "1.0", "GiB", "ram+nvme", "8", "s", "ago"]
    assert lines[2].split() == [PREFIXES[1].path, "2", "–", "1.0", "MiB", "–", "–"]


def test_patterns_fit_one_name_each() -> None:
    """Eight digits as a rule, more where names begin alike; a name that another continues stays whole."""
    names = ["0" * 32, "0" * 20 + "1" * 12, "1" * 32, "abc", "1" * 32 + ".safetensors"]
    patterns = listing.short_names(names)
    assert patterns["0" * 32] == "0" * 21 + "*"
    assert patterns["1" * 32] == "1" * 32
    assert listing.short_names(["2" * 32]) == {"2" * 32: "2" * 8 + "*"}
    for name in names:
        assert fnmatch.filter(names, patterns[name]) == [name]


def test_who_has_files_open_is_found_in_proc(tmp_path: Path) -> None:
    """By working directory, open file or mapped file, removed ones too; not by names that only begin alike."""
    links = {
        "12/cwd": "/mnt/kvfs", "3/fd/7": "/mnt/kvfs/a/b", "40/map_files/1-2": "/mnt/kvfs/c (deleted)",
        "5/cwd": "/mnt/kvfs2", "6/root": "/",
    }  # fmt: skip
    for link, target in links.items():
        process = tmp_path / link.split("/")[0]
        process.mkdir()
        (process / "comm").write_text(f"p{process.name}\n")
        (tmp_path / link).parent.mkdir(exist_ok=True)
        (tmp_path / link).symlink_to(target)
    (tmp_path / "self").mkdir()
    users = open_files.users_of("/mnt/kvfs", tmp_path)
    assert users == ["p3 (3)", "p12 (12)", "p40 (40)"]
    assert open_files.described(users * 2) == "p3 (3), p12 (12), p40 (40), p3 (3), p12 (12) and 1 more"


def test_a_log_is_not_written_through_a_link(tmp_path: Path) -> None:
    """The directory of sockets may lie in /tmp, where others can put things."""
    (tmp_path / "log").symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="cannot write the log"):
        background._open_log(str(tmp_path / "log"))
    assert not (tmp_path / "target").exists()


def test_a_column_that_is_empty_is_left_out() -> None:
    """What is being copied in is shown where there is something."""
    entries = [listing.Entry("a"), listing.Entry("b", staging_files=2, staging_bytes=3 << 20)]
    heading, first, second = ls.table("namespace", entries, SECOND_NS, width=None)
    assert heading.endswith("copied in")
    assert first.endswith("–")
    assert second.endswith("2 files, 3.0 MiB")
    assert "copied in" not in ls.table("namespace", entries[:1], SECOND_NS, width=None)[0]


def test_the_sentence_of_a_daemon_is_made_fit_for_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """It may name files of others."""
    read_fd, write_fd = os.pipe()
    os.write(write_fd, b"cannot open \x1b]0;owned\x07\xff")
    os.close(write_fd)
    with subprocess.Popen(["true"]) as process, pytest.raises(typer.Exit):
        background._await_ready(process, read_fd, Settings(mountpoint="/m", ram_bytes=1 << 20))
    os.close(read_fd)
    assert capsys.readouterr().err == "kvfs: cannot open \\x1b]0;owned\\x07\ufffd\n"
