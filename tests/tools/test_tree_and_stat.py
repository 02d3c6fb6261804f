"""`kvfs tree` and `kvfs stat` on real mounts: what is drawn and told is what is there."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from kvfs.tools.tree import branches

from .conftest import NAMESPACE, Mount, kvfs, store

pytestmark = pytest.mark.heavy

needs_fuse = pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse")


def test_branches() -> None:
    assert branches([]) == []
    assert branches([0, 1, 2, 2, 1, 0]) == ["├── ", "│   ├── ", "│   │   ├── ", "│   │   └── ", "│   └── ", "└── "]
    assert branches([0, 1, 2]) == ["└── ", "    └── ", "        └── "]


@pytest.fixture
def keys(mount: Mount) -> dict[str, list[str]]:
    """A mount with a prompt of four chunks, two branches behind its second, and another prompt."""
    mount.start()
    return {
        "trunk": store(mount.path, list(range(64))),
        "branch": store(mount.path, [*range(32), *range(500, 548)])[2:],
        "other": store(mount.path, list(range(900, 916))),
    }


@needs_fuse
def test_a_tree(mount: Mount, keys: dict[str, list[str]]) -> None:
    """Branches below what they are built on, each with all that hangs on it; PATHs of `kvfs ls` lead there."""
    result = kvfs("tree", mount.path, "--full")
    assert result.returncode == 0
    name, heading, *lines = result.stdout.splitlines()
    assert (name, heading.split()[0]) == (NAMESPACE.directory, "prefix")
    counts = {line.split("── ")[1].split()[0]: line.split("── ")[1].split()[1] for line in lines}
    assert counts == {
        keys["trunk"][0]: "7", keys["trunk"][2]: "2", keys["branch"][0]: "3", keys["other"][0]: "1",
    }  # fmt: skip
    [top] = [line for line in lines if keys["trunk"][0] in line]
    [below] = [line for line in lines if keys["branch"][0] in line]
    assert below.index("─") == top.index("─") + 4
    assert len(kvfs("tree", mount.path, "tiny", "--depth=1").stdout.splitlines()) == 2 + 2
    limited = kvfs("tree", mount.path, "--limit=1")
    assert len(limited.stdout.splitlines()) == 2 + 1
    assert limited.stderr == "kvfs: 3 more lines; --limit 4 shows all\n"
    [nested] = mount.json("tree").values()
    [trunk] = [each for each in nested if each["name"] == keys["trunk"][0]]
    assert {each["name"]: each["num_chunks"] for each in trunk["prefixes"]} == {
        keys["trunk"][2]: 2,
        keys["branch"][0]: 3,
    }
    assert kvfs("umount", mount.path).returncode == 0


@needs_fuse
def test_an_empty_mount(mount: Mount) -> None:
    mount.start()
    result = kvfs("tree", mount.path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "kvfs: nothing is stored here\n")
    assert kvfs("umount", mount.path).returncode == 0


def told(*arguments: str | Path) -> list[dict[str, object]]:
    result = kvfs("stat", *arguments, "--json")
    assert result.returncode == 0, result.stderr
    found: list[dict[str, object]] = json.loads(result.stdout)
    return found


@needs_fuse
def test_stat(mount: Mount, keys: dict[str, list[str]]) -> None:
    """Chunks by key, by its beginning and by name; prefixes by PATH and by name; a namespace; several at once."""
    root = mount.path / NAMESPACE.directory
    key, branch = keys["trunk"][1], f"{keys['trunk'][0]}/{keys['branch'][0]}"
    chunk = root / "chunks" / f"{key}.safetensors"
    by_name = told(chunk)
    [facts] = by_name
    assert facts["key"] == key
    assert (facts["kind"], facts["position"], facts["parent"]) == ("chunk", 1, keys["trunk"][0])
    assert (facts["stored_ns"], facts["size_bytes"]) == (chunk.stat().st_mtime_ns, chunk.stat().st_size)
    assert set(facts) >= {"tier", "hits", "tokens", "checksum", "dirty", "last_used_ns"}
    stable = {name: value for name, value in facts.items() if name not in ("dirty", "tier")}
    for arguments in ([key], [key[:12]], [f"{key}.safetensors"]):
        [found] = told(mount.path, "tiny", *arguments)
        assert found | stable == found

    [prefix] = told(root / "prefixes" / branch)
    assert (prefix["kind"], prefix["num_chunks"], prefix["num_tokens"]) == ("prefix", 3, 48)
    pattern = f"{keys['trunk'][0][:8]}*/{keys['branch'][0][:8]}*"
    assert [each["path"] for each in told(mount.path, "tiny", pattern, branch)] == [prefix["path"]] * 2

    [namespace] = told(root)
    assert (namespace["kind"], namespace["model"], namespace["num_chunks"]) == ("namespace", "tests/tiny", 8)
    assert namespace["fingerprint"] == NAMESPACE.fingerprint_hex
    shown = kvfs("stat", mount.path, "tiny", key).stdout
    assert shown.startswith(f"chunk {chunk}\n")
    assert "8.0 KiB (8,192 bytes)" in shown
    assert kvfs("umount", mount.path).returncode == 0


@needs_fuse
def test_what_stat_cannot_find(mount: Mount, keys: dict[str, list[str]]) -> None:
    """One sentence each, exit code 2."""
    gone = mount.path / NAMESPACE.directory / "chunks" / f"{'0' * 32}.safetensors"
    for arguments, sentence in [
        ([mount.path], "say of what: kvfs stat"),
        ([mount.path, "nonsense"], "there is no namespace 'nonsense'"),
        ([mount.path, "tiny", "0" * 32], "there is no chunk"),
        ([mount.path, "tiny", "*"], "fits 2 of them, be more exact"),
        ([mount.path, "tiny", "nothing*"], "there is no prefix 'nothing*'"),
        ([mount.path / ".kvfs" / "status.json"], ".kvfs/status.json is neither a chunk nor a prefix nor a namespace"),
        ([gone], f"there is no {NAMESPACE.directory}/chunks/{gone.name} in {mount.path} (any more)"),
        ([mount.path / NAMESPACE.directory, "/etc"], "not all of these are names in the mount"),
    ]:
        result = kvfs("stat", *arguments)
        assert (result.returncode, result.stdout) == (2, ""), arguments
        assert sentence in result.stderr
        assert result.stderr.count("\n") == 1
    assert kvfs("umount", mount.path).returncode == 0


@needs_fuse
@pytest.mark.parametrize("command", ["tree", "stat"])
def test_a_stopped_daemon_is_told_of(mount: Mount, command: str) -> None:
    pid = mount.start()
    store(mount.path, list(range(48)))
    os.kill(pid, signal.SIGSTOP)
    try:
        result = kvfs(command, mount.path, "tiny")
        assert (result.returncode, result.stdout) == (1, "")
        assert f"the kvfs daemon of {mount.path} has not answered" in result.stderr
        assert result.stderr.count("\n") == 1
    finally:
        os.kill(pid, signal.SIGCONT)
    assert kvfs("umount", mount.path).returncode == 0
