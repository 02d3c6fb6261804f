"""`kvfs pin` and `kvfs unpin` on real mounts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from .conftest import NAMESPACE, Mount, assert_refused, kvfs, store, store_three

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse")


def pinned(mount: Mount, keys: list[str]) -> list[str]:
    """The pins of chunks, "" for none."""
    found = []
    for key in keys:
        path = Path(mount.path, NAMESPACE.directory, "chunks", f"{key}.safetensors")
        has_pin = "user.kvfs.pin" in os.listxattr(path)
        found.append(os.getxattr(path, "user.kvfs.pin").decode() if has_pin else "")
    return found


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["pin", "/nowhere", "tiny"], "say for how long: --for 2h, or --for forever"),
        (
            ["pin", "/nowhere", "tiny", "--for=2"],
            "--for: '2' is not a duration: write 90s, 15min, 12h or 3d, or forever",
        ),
        (["pin", "/nowhere", "tiny", "--for=0"], "--for: '0' is no time: say 2h, or forever"),
        (["pin", "/nowhere", "tiny", "--for=0.0h"], "--for: '0.0h' is no time: say 2h, or forever"),
        (["pin", "/nowhere", "tiny", "--for=no"], "--for: 'no' is no time: say 2h, or forever; `kvfs unpin` ends pins"),
        (["pin", "/nowhere", "tiny", "--for="], "an argument is empty"),
        (["pin", "/nowhere", "tiny", "--for"], "option '--for' requires an argument; `kvfs pin --help`"),
        (["pin", "/nowhere", "tiny", "../x", "--for=2h"], "'../x' is not the PATH of a prefix"),
        (["pin", "/nowhere", "tiny", "--for=2h"], "kvfs is not mounted on /nowhere"),
        (["unpin", "/nowhere", "tiny", "../x"], "'../x' is not the PATH of a prefix"),
    ],
)
def test_mistakes_end_with_one_sentence(arguments: list[str], sentence: str) -> None:
    assert_refused(kvfs(*arguments), sentence)


def test_prefixes_and_namespaces(mount: Mount) -> None:
    """By the PATHs of `kvfs ls`, with all that is built on them; counted before, told after."""
    mount.start()
    keys, branch, other = store_three(mount.path)
    lines = kvfs("ls", mount.path, "tiny").stdout.splitlines()
    [path] = [line.split()[0] for line in lines if branch[1][:8] in line]

    dry = mount.json("pin", "tiny", path, "--for=2h", "--dry-run")
    assert (dry["chunks"], dry["bytes"], dry["dry_run"]) == (2, 16384, True)
    assert pinned(mount, branch) == [""] * 3
    result = kvfs("pin", mount.path, "tiny", path, "--for", "forever")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "kvfs: pinned 2 chunks, 16.0 KiB, forever\n"
    assert pinned(mount, branch) == ["", "forever", "forever"]
    result = kvfs("pin", mount.path, "tiny", "0123*", "--for", "2h")
    assert (result.stdout, result.returncode) == ("", 2)
    assert result.stderr == "kvfs: no prefix is named 0123* (any more)\n"
    status = mount.json("status")
    assert (status["num_pinned"], status["held_bytes"]) == (2, 3 * 8192)
    shown = kvfs("status", mount.path).stdout.replace("│", " ")  # its lines are broken, sooner where numbers are long
    assert "2 pinned" in " ".join(shown.split())
    pins = {chunk["name"]: chunk.get("pinned_until") for chunk in mount.json("ls", "tiny", "--chunks")}
    assert [pins[key] for key in branch] == [None, "forever", "forever"]
    assert kvfs("ls", mount.path, "tiny", "--chunks").stdout.count("forever") == 2

    done = mount.json("pin", "tiny", "--for=2h")
    assert (done["chunks"], done["namespace"], done["interrupted"]) == (8, NAMESPACE.directory, False)
    assert all(7000 < int(pin.removesuffix("s")) <= 7200 for pin in pinned(mount, [*keys, *branch, *other]))
    ends = [chunk["pinned_until"] for chunk in mount.json("ls", "tiny", "--chunks")]
    assert all(7000e9 < end - time.time_ns() <= 7201e9 for end in ends)
    assert "1 h more" in kvfs("ls", mount.path, "tiny", "--chunks").stdout
    assert mount.json("unpin", "tiny", keys[0], path)["chunks"] == 6
    assert [pin != "" for pin in pinned(mount, [*keys, *other])] == [False] * 4 + [True] * 2
    assert mount.json("unpin", "tiny", "--dry-run")["chunks"] == 2
    result = kvfs("unpin", mount.path, "tiny")
    assert result.stdout == "kvfs: unpinned 2 chunks, 16.0 KiB\n"
    assert mount.json("status")["num_pinned"] == 0
    assert kvfs("umount", mount.path).returncode == 0


def test_more_than_pins_may_hold(mount: Mount) -> None:
    """One sentence, and what was pinned before."""
    mount.flags[:2] = ["--ram=1MiB"]
    mount.start()
    for number in range(12):
        store(mount.path, list(range(1000 * number, 1000 * number + 160)))
    result = kvfs("pin", mount.path, "tiny", "--for=1h")
    assert (result.returncode, result.stdout) == (1, "")
    done, reason = result.stderr.splitlines()
    assert done.startswith("kvfs: pinned 90 chunks, 720.0 KiB, until ")
    assert reason.startswith("kvfs: there is no room for more pins: they may hold three quarters of the lowest tier")
    assert mount.json("status")["num_pinned"] == 90
    assert kvfs("umount", mount.path).returncode == 0
