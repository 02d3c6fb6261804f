"""`kvfs config`: what it prints is what is in force, and what `kvfs mount --config` takes."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest

from kvfs import config
from kvfs.tools import background
from kvfs.tools.config import commented, comments

from .conftest import Mount, kvfs


def test_every_setting_has_its_comment() -> None:
    assert list(comments()) == [name for name in comments() if name in config.NAMES]
    assert set(comments()) == set(config.NAMES)


def test_what_it_prints_is_a_file_of_settings(tmp_path: Path) -> None:
    """With comments, defaults included; read again it says the same."""
    path = tmp_path / "kvfs.toml"
    result = kvfs("config", "/mnt/kvfs", "--ram=4GiB", "--nvme=/data/kvfs:64GiB", "--io-threads=7", "--log-level=debug")
    assert (result.returncode, result.stderr) == (0, "")
    path.write_text(result.stdout)
    settings = config.load(path, {})
    assert (settings.ram_bytes, settings.nvme[0].directory, settings.io_threads) == (4 << 30, "/data/kvfs", 7)
    assert kvfs("config", "--config", path).stdout == result.stdout
    assert "# Threads that read and write a volume, for each.\nio_threads = 7\n" in result.stdout
    assert '# Most memory one engine may use to hand over chunks. The default.\nwindow = "64MiB"\n' in result.stdout
    assert "# log_file is not set\n" in result.stdout
    told = json.loads(kvfs("config", "--config", path, "--ram=1GiB", "--json").stdout)
    assert told == tomllib.loads(result.stdout) | {"ram": "1GiB"}


def test_a_setting_of_a_newer_daemon_is_shown() -> None:
    assert commented('mountpoint = "/m"\nmagic = 7\n', {"mountpoint": "/m", "magic": 7}).endswith("\n\nmagic = 7\n")


def test_mistakes() -> None:
    for arguments, sentence in [
        ([], "mountpoint is not set"),
        (["/mnt/kvfs"], "ram is not set"),
        (["/mnt/kvfs", "--ram=4GB"], "--ram: '4GB' is not a size"),
    ]:
        result = kvfs("config", *arguments)
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr.startswith(f"kvfs: {sentence}")
        assert result.stderr.count("\n") == 1


@pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse")
def test_of_a_mount(mount: Mount) -> None:
    """What the daemon runs with, though the command was given nothing."""
    mount.start()
    told = mount.json("config")
    assert (told["mountpoint"], told["ram"], told["huge_pages"]) == (str(mount.path), "16MiB", "never")
    assert tomllib.loads(kvfs("config", mount.path).stdout) == told
    assert kvfs("umount", mount.path).returncode == 0


def test_a_background_daemon_gets_the_settings_that_were_given() -> None:
    """Each of them, several volumes among them, as the flags that lead to the very same."""
    settings = config.load(
        None,
        {
            "mountpoint": "/mnt/x", "ram": "4GiB", "nvme": ["/disk 1/kvfs:64GiB", "/disk2/kvfs:1TiB"], "io_threads": 7,
            "policy": "learned", "allow_other": True, "access": "trusted", "write_budget": "10GiB",
        },
    )  # fmt: skip
    mountpoint, *words = background.flags(settings)
    told = kvfs("config", mountpoint, *words)
    assert (told.returncode, told.stderr) == (0, "")
    assert config.load(None, tomllib.loads(told.stdout)) == settings


@pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse")
def test_several_volumes_in_the_background(mount: Mount, tmp_path: Path) -> None:
    mount.flags.append(f"--nvme={tmp_path}/second:16MiB")
    mount.start()
    assert [Path(each["directory"]).name for each in mount.json("status")["volumes"]] == ["volume", "second"]
    assert kvfs("umount", mount.path).returncode == 0
    (tmp_path / "second").rename(tmp_path / "away")
    result = kvfs("mount", mount.path, *mount.flags, "--background")
    assert result.returncode == 0
    assert f"the volume in {tmp_path}/second is not there: the cache goes on without it" in result.stderr
    assert kvfs("umount", mount.path).returncode == 0
