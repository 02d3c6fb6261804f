"""What may be mounted on, and how mounts are read from the kernel. Real mounts are in tests/e2e."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfs.errors import UsageError
from kvfs.mount import mountpoint

MOUNTINFO = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 22 0:44 / /mnt/kv\\040fs\\134x rw,nosuid,nodev,noexec - fuse.kvfs kvfs rw,user_id=0,group_id=0
41 22 0:45 / /mnt/a rw shared:7 master:1 - tmpfs tmpfs rw
42 41 0:46 / /mnt/a rw - fuse.kvfs kvfs rw

not a line of mountinfo
"""


def test_mountinfo_is_read_with_its_escapes() -> None:
    mounts = mountpoint.parse_mountinfo(MOUNTINFO)
    assert [mount.path for mount in mounts] == ["/", "/mnt/kv fs\\x", "/mnt/a", "/mnt/a"]
    assert [mount.is_ours for mount in mounts] == [False, True, False, True]
    assert (mounts[1].device, mounts[1].source) == ("0:44", "kvfs")


@pytest.mark.parametrize("letter", ["\r", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029"])
def test_only_a_newline_ends_a_line_of_mountinfo(letter: str) -> None:
    """The kernel escapes no other character that Python takes for the end of a line."""
    (mount,) = mountpoint.parse_mountinfo(f"42 41 0:46 / /mnt/a{letter}b rw - fuse.kvfs kvfs rw\n")
    assert mount.path == f"/mnt/a{letter}b"


def test_a_link_is_followed_to_what_is_mounted_on(tmp_path: Path) -> None:
    """The kernel mounts on what a link leads to, and names that; a circle of links is left as it is."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "second").symlink_to(tmp_path / "link")
    for name in ("link", "second", "second/"):
        assert mountpoint.resolve(str(tmp_path / name)) == str(tmp_path.resolve() / "real")
    (tmp_path / "circle").symlink_to("circle")
    assert mountpoint.resolve(str(tmp_path / "circle")) == str(tmp_path.resolve() / "circle")


def test_links_are_followed_as_the_kernel_does(tmp_path: Path) -> None:
    """A ".." behind a link leaves what the link leads to; a link may be on the way, and lead on to others."""
    root = tmp_path.resolve()
    (root / "a" / "b").mkdir(parents=True)
    (root / "link").symlink_to("a/b")
    (root / "a" / "up").symlink_to("../link")
    (root / "absolute").symlink_to(root / "a")
    for path, expected in [
        ("link/..", "a"), ("link/../b/./c", "a/b/c"), ("absolute/up/x", "a/b/x"), ("absolute/up", "a/b"), ("a//b/", "a/b"),
    ]:  # fmt: skip
        assert mountpoint.resolve(f"{root}/{path}") == f"{root}/{expected}"
    assert mountpoint.resolve("/..") == mountpoint.resolve("/") == "/"


def test_this_machine_has_a_root() -> None:
    root = mountpoint.mount_at("/")
    assert root is not None
    assert not root.is_ours


def test_a_missing_directory_is_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    assert mountpoint.prepare(str(path)) == str(path.resolve())
    assert path.is_dir()


def test_an_empty_directory_is_taken_and_links_on_the_way_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "m").mkdir()
    assert mountpoint.prepare(str(tmp_path / "link" / "m")) == str(tmp_path.resolve() / "real" / "m")


@pytest.mark.parametrize("kind", ["file", "full", "dangling", "below a file"])
def test_what_cannot_be_mounted_on_is_said_in_one_sentence(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m"
    if kind == "file":
        path.write_text("x")
    elif kind == "full":
        path.mkdir()
        (path / "x").touch()
    elif kind == "dangling":
        path.symlink_to("nowhere")
    else:
        path.write_text("x")
        path /= "y"
    with pytest.raises(UsageError) as caught:
        mountpoint.prepare(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unmounting_what_is_not_mounted_is_no_error(tmp_path: Path) -> None:
    assert not mountpoint.unmount(str(tmp_path))
    assert not mountpoint.unmount(str(tmp_path), lazy=True)


def test_a_directory_answers(tmp_path: Path) -> None:
    assert mountpoint.answers(str(tmp_path))
