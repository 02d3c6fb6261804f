"""The directory of the session socket and its lock."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.errors import UsageError
from kvfs.mount.sockets import directory_for, socket_directory
from kvfs.testing import DEADLINE_S


def test_it_is_made_and_removed(tmp_path: Path) -> None:
    parent = tmp_path / "run"
    with socket_directory("/mnt/a", str(parent), is_shared=False) as path:
        directory = Path(path).parent
        assert str(directory) == directory_for("/mnt/a", str(parent))
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        Path(path).touch()  # stands for the socket
    assert list(parent.iterdir()) == []


def test_the_group_may_enter_if_others_may_use_the_mount(tmp_path: Path) -> None:
    with socket_directory("/mnt/a", str(tmp_path), is_shared=True) as path:
        assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o750


def test_one_daemon_for_one_mount_point(tmp_path: Path) -> None:
    with socket_directory("/mnt/a", str(tmp_path), is_shared=False):
        with socket_directory("/mnt/b", str(tmp_path), is_shared=False):
            pass
        again = socket_directory("/mnt/a", str(tmp_path), is_shared=False)
        with pytest.raises(UsageError, match="cannot mount on /mnt/a: another kvfs daemon serves it"), again:
            pass
    with socket_directory("/mnt/a", str(tmp_path), is_shared=False):
        pass


def test_what_a_killed_daemon_left_is_taken_over(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from kvfs.mount.sockets import socket_directory
with socket_directory("/mnt/a", sys.argv[1], is_shared=False) as path:
    open(path, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, timeout=DEADLINE_S)
    assert ended.returncode == -9
    left = Path(directory_for("/mnt/a", str(tmp_path)))
    assert (left / "session.sock").exists()
    with socket_directory("/mnt/a", str(tmp_path), is_shared=False) as path:
        assert not os.path.exists(path)
    assert not left.exists()


def test_a_parent_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    below_a_file = socket_directory("/mnt/a", str(tmp_path / "file" / "x"), is_shared=False)
    with pytest.raises(UsageError, match="cannot make"), below_a_file:
        pass


def test_a_path_that_no_socket_can_have(tmp_path: Path) -> None:
    too_long = socket_directory("/mnt/a", str(tmp_path / ("x" * 100)), is_shared=False)
    with pytest.raises(UsageError, match="too long for a socket"), too_long:
        pass


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    """In a shared parent somebody else may have been there first."""
    (tmp_path / "elsewhere").mkdir()
    Path(directory_for("/mnt/a", str(tmp_path))).symlink_to("elsewhere")
    with pytest.raises(UsageError, match="cannot make"), socket_directory("/mnt/a", str(tmp_path), is_shared=False):
        pass


@pytest.mark.parametrize("mode", [0o777, 0o757])
def test_a_parent_that_others_may_change(tmp_path: Path, mode: int) -> None:
    """Whoever may rename the directory of the socket can put a socket of their own in its place."""
    parent = tmp_path / "run"
    parent.mkdir()
    parent.chmod(mode)
    with (
        pytest.raises(UsageError, match="other users can change"),
        socket_directory("/mnt/a", str(parent), is_shared=False),
    ):
        pass
    parent.chmod(mode | stat.S_ISVTX)  # as /tmp: there only the owner renames
    with socket_directory("/mnt/a", str(parent), is_shared=False):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("whose", ["parent", "directory"])
def test_a_directory_of_another_user(tmp_path: Path, whose: str) -> None:
    """A directory that somebody made beforehand, where its name can be guessed, is not trusted."""
    parent = tmp_path / "run"
    directory = Path(directory_for("/mnt/a", str(parent)))
    directory.mkdir(parents=True)
    os.chown(parent if whose == "parent" else directory, 65534, 65534)
    with pytest.raises(UsageError, match="user"), socket_directory("/mnt/a", str(parent), is_shared=False):
        pass
    assert directory.exists()
