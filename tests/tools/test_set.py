"""`kvfs set` on real mounts."""

from __future__ import annotations

import os
import tomllib

import pytest

from .conftest import NAMESPACE, Mount, kvfs, store

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["policy=lruu", "/nowhere"], "there is no policy 'lruu': it must be one of learned, lru, "),
        (["policy=opt", "/nowhere"], "opt needs to know every request to come, so it is for `kvfs simulate` only"),
        (["policy=my.module:Class", "/nowhere"], "a class of your own is taken at the start only: kvfs mount"),
        (["policy=", "/nowhere"], "say which: kvfs set policy=NAME MOUNTPOINT"),
        (["policy", "/nowhere"], "say which: kvfs set policy=NAME MOUNTPOINT"),
        (["ram=1GiB", "/nowhere"], "ram holds from start to end"),
        (["colour=blue", "/nowhere"], "there is no setting 'colour'"),
        (["policy=lru", "/nowhere"], "kvfs is not mounted on /nowhere"),
        (["/nowhere", "policy=lru"], "kvfs is not mounted on /nowhere"),
    ],
)
def test_mistakes_end_with_one_sentence(arguments: list[str], sentence: str) -> None:
    result = kvfs("set", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"kvfs: {sentence}")
    assert result.stderr.count("\n") == 1


def in_force(mount: Mount) -> str:
    return str(tomllib.loads((mount.path / ".kvfs" / "config.toml").read_text())["policy"])


def test_the_policy_is_changed_and_shown(mount: Mount) -> None:
    """In the status, the settings in force, the metrics, the events and the log, until the daemon ends; no chunk goes."""
    mount.start()
    keys = store(mount.path, list(range(64)))
    assert (in_force(mount), mount.json("status")["policy"]) == ("learned", "learned")
    result = kvfs("set", "policy=s3fifo", mount.path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"kvfs: the policy of {mount.path} is s3fifo, and was learned\n"
    assert (in_force(mount), mount.json("status")["policy"]) == ("s3fifo", "s3fifo")
    assert "policy s3fifo" in kvfs("status", mount.path).stdout.replace("\n", " ")
    assert os.getxattr(mount.path, "user.kvfs.policy") == b"s3fifo"
    assert 'kvfs_policy{policy="s3fifo"} 1' in (mount.path / ".kvfs" / "metrics").read_text()
    assert mount.json("config")["policy"] == "s3fifo"
    events = (mount.path / ".kvfs" / "events").read_text()
    assert '"event":"policy"' in events.replace(" ", "")
    assert "s3fifo" in events
    names = {f"{key}.safetensors" for key in keys}
    assert set(os.listdir(mount.path / NAMESPACE.directory / "chunks")) == names
    result = kvfs("set", mount.path, "policy=s3fifo")
    assert result.stdout == f"kvfs: the policy of {mount.path} is s3fifo already\n"
    assert kvfs("umount", mount.path).returncode == 0
    mount.start()
    assert in_force(mount) == "learned"
    assert set(os.listdir(mount.path / NAMESPACE.directory / "chunks")) == names
    assert kvfs("umount", mount.path).returncode == 0


def test_what_the_mount_refuses(mount: Mount) -> None:
    """A value that is none, and an attribute that is not to be set; who may set it is in e2e/test_mount_users."""
    mount.start()
    for value in (b"lruu", b"a.b:C", b"\xff"):
        with pytest.raises(OSError, match="Invalid argument"):
            os.setxattr(mount.path, "user.kvfs.policy", value)
    with pytest.raises(OSError, match="not supported"):
        os.removexattr(mount.path, "user.kvfs.policy")
    with pytest.raises(OSError, match="not supported"):
        os.setxattr(mount.path / ".kvfs", "user.kvfs.policy", b"lru")
    assert "user.kvfs.policy" not in os.listxattr(mount.path)
    assert in_force(mount) == "learned"
    assert kvfs("umount", mount.path).returncode == 0
