"""`kvfs hint`, and the attributes that it sets, on a real mount."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from .conftest import NAMESPACE, Mount, kvfs, store

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse")


def hints_of(path: Path) -> dict[str, str]:
    names = [name.removeprefix("user.kvfs.") for name in os.listxattr(path)]
    return {
        name: os.getxattr(path, f"user.kvfs.{name}").decode() for name in names if name in ("class", "expect", "closed")
    }


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["hint", "/nowhere"], "say what is known: --closed, --expect 2m, --class 3; or --clear"),
        (["hint", "/nowhere", "--closed"], "/nowhere lies in no mount of kvfs: name a chunk file, or a directory"),
        (["hint", "/nowhere", "--closed", "--clear"], "--clear takes back what was said: give it alone"),
        (["hint", "/nowhere", "--closed", "--expect=2m"], "what is closed is not expected to be used: say one of them"),
        (["hint", "/nowhere", "--class=256"], "a class is a number from 0 to 255, not 256"),
        (["hint", "/nowhere", "--expect=2"], "--expect: '2' is not a duration: write 90s, 15min, 12h or 3d"),
        (["hint", "/nowhere", "--expect=2d"], "a use is expected within 0 to 86400 s, not 172800.0"),
        (["hint", "--closed"], "missing argument 'PREFIX|FILE...'; `kvfs hint --help` shows what there is"),
    ],
)
def test_mistakes_end_with_one_sentence(arguments: list[str], sentence: str) -> None:
    result = kvfs(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"kvfs: {sentence}")
    assert result.stderr.count("\n") == 1


def test_a_prefix_and_a_file(mount: Mount) -> None:
    """What was said is shown, of a directory what is true of all in it; and can be taken back."""
    mount.flags.append("--policy=learned")
    mount.start()
    keys = store(mount.path, list(range(64)))
    branch = store(mount.path, [*range(32), *range(100, 132)])
    chunks = mount.path / NAMESPACE.directory / "chunks"
    files = {key: chunks / f"{key}.safetensors" for key in (*keys, *branch)}
    top = mount.path / NAMESPACE.directory / "prefixes" / keys[0]
    below = top / branch[2]

    result = kvfs("hint", below, "--closed", "--class=3")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"{below}: closed, class 3\n"
    assert hints_of(below) == {"closed": "1", "class": "3"}
    assert hints_of(top) == {}
    assert [hints_of(files[key]) for key in branch[2:]] == [{"closed": "1", "class": "3"}] * 2
    assert [hints_of(files[key]) for key in keys] == [{}] * 4

    result = kvfs("hint", files[keys[3]], "--expect=90s", "--json")
    assert re.search(r'"class_": 0,\s+"expect": "(90|[1-8]\d)s",\s+"closed": false', result.stdout)
    assert set(hints_of(files[keys[3]])) == {"expect"}

    os.setxattr(files[keys[0]], "user.kvfs.closed", b"1")
    assert hints_of(top)["closed"] == "1", "what is built on it is closed too, and expected no more"
    os.setxattr(files[keys[3]], "user.kvfs.expect", b"60s")
    assert [hints_of(files[key]).get("closed") for key in (*keys, *branch[2:])] == [None] * 4 + ["1"] * 2
    result = kvfs("hint", top, "--clear")
    assert result.stdout == f"{top}: nothing is said of it\n"
    assert [hints_of(path) for path in files.values()] == [{}] * 6

    result = kvfs("hint", mount.path / NAMESPACE.directory, "--closed")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "is neither a chunk nor a directory below prefixes" in result.stderr
    result = kvfs("hint", top / "none", "--closed")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "there is no " in result.stderr
    for value in (b"2", b"maybe", b"\xff"):
        with pytest.raises(OSError, match="Invalid argument"):
            os.setxattr(top, "user.kvfs.closed", value)
    with pytest.raises(OSError, match="No data available"):
        os.removexattr(top, "user.kvfs.class")


def test_a_policy_that_does_not_heed_a_hint_is_told(mount: Mount) -> None:
    mount.flags.append("--policy=lru")
    mount.start()
    keys = store(mount.path, list(range(32)))
    path = mount.path / NAMESPACE.directory / "prefixes" / keys[0]
    result = kvfs("hint", path, "--expect=1m", "--class=2")
    assert result.returncode == 0
    assert result.stderr == f"kvfs: the policy of {mount.path}, lru, does not heed class and expect\n"
    assert kvfs("hint", path, "--closed").stderr == ""
