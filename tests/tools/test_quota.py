"""`kvfs quota` on real mounts."""

from __future__ import annotations

import json
import os

import msgspec
import pytest

from .conftest import NAMESPACE, Mount, assert_refused, kvfs, store

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse")

OTHER = msgspec.structs.replace(
    NAMESPACE, identity=msgspec.structs.replace(NAMESPACE.identity, model="tests/other", revision="2")
)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--max-age=3d"], "say whose --max-age"),
        (["tiny", "20B"], "kvfs is not mounted on /nowhere"),
        (["tiny", "5"], "a quota of 5 what? Write 5GiB, or another unit"),
        (["tiny", "0"], "a quota of 0 what?"),
        (["tiny", "0GiB"], "a quota of nothing would remove everything: `none` ends a quota"),
        (["tiny", "20GB"], "'20GB' is not a size: write 20GiB"),
        (["tiny", "--max-age=3"], "--max-age: '3' is not a duration"),
    ],
)
def test_mistakes_end_with_one_sentence(arguments: list[str], sentence: str) -> None:
    assert_refused(kvfs("quota", "/nowhere", *arguments), sentence)


def test_limits_are_set_and_shown(mount: Mount) -> None:
    """A table of all, or of one namespace as it is after it was set."""
    mount.start()
    store(mount.path, list(range(64)))
    store(mount.path, list(range(32)), OTHER)
    first, second = sorted([NAMESPACE.directory, OTHER.directory])
    lines = [line.split() for line in kvfs("quota", mount.path).stdout.splitlines()]
    assert lines[0] == ["namespace", "stored", "quota", "full", "max", "age"]
    assert {line[0]: line[1:] for line in lines[1:]} == {
        NAMESPACE.directory: ["32.0", "KiB", "none", "–", "none"],
        OTHER.directory: ["16.0", "KiB", "none", "–", "none"],
    }
    assert [line[0] for line in lines[1:]] == [first, second]

    [now] = mount.json("quota", "tiny", "64KiB", "--max-age", "3d")
    assert now == {
        "namespace": NAMESPACE.directory, "stored_bytes": 32768, "quota_bytes": 65536, "max_age_s": 259200.0,
        "evicted_chunks": 0, "evicted_bytes": 0,
    }  # fmt: skip
    result = kvfs("quota", mount.path, "tiny")
    assert result.stdout.splitlines()[1].split()[1:] == ["32.0", "KiB", "64.0", "KiB", "50", "%", "3d"]
    mount_age = mount.json("quota", "tiny", "--max-age=90s")[0]
    assert (mount_age["quota_bytes"], mount_age["max_age_s"]) == (65536, 90.0)
    result = kvfs("quota", mount.path, "tiny", "20KiB")
    assert result.stdout.splitlines()[-1] == f"kvfs: 2 chunks, 16.0 KiB, of {NAMESPACE.directory} went for it"
    assert os.getxattr(mount.path / NAMESPACE.directory, "user.kvfs.evicted_chunks") == b"2"
    os.setxattr(mount.path / NAMESPACE.directory, "user.kvfs.pin", b"forever")
    [over] = mount.json("quota", "tiny", "8KiB")
    assert (over["evicted_chunks"], over["evicted_bytes"], over["stored_bytes"]) == (0, 0, 16384)
    result = kvfs("quota", mount.path, "tiny", "8KiB")
    assert "8.0 KiB too much are pinned or in use" in result.stdout.splitlines()[-1]
    os.setxattr(mount.path / NAMESPACE.directory, "user.kvfs.pin", b"no")
    events = [json.loads(line) for line in (mount.path / ".kvfs" / "events").read_text().splitlines()]
    limits = [event for event in events if event["event"] == "limits"]
    assert {(event["evicted_chunks"], event["evicted_bytes"]) for event in limits} == {(0, 0), (2, 16384)}
    cleared = mount.json("quota", "tiny", "none", "--max-age=none")[0]
    assert (cleared["quota_bytes"], cleared["max_age_s"]) == (None, None)
    result = kvfs("quota", mount.path, "nobody")
    assert (result.returncode, result.stdout) == (2, "")
    assert "there is no namespace 'nobody'" in result.stderr
    assert kvfs("umount", mount.path).returncode == 0
