"""`kvfs rm` on real mounts: what it takes, what it leaves, and how it ends."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import threading
import time
from pathlib import Path

import msgspec
import pytest

from kvfs.client import Client
from kvfs.durations import parse_duration
from kvfs.errors import UsageError
from kvfs.keys import KeyChain, root
from kvfs.testing import DEADLINE_S, wait_until
from kvfs.tools import removing, rm

from .conftest import KVFS, NAMESPACE, Mount, assert_refused, kvfs, store, store_three

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse"),
]

OTHER = msgspec.structs.replace(
    NAMESPACE, identity=msgspec.structs.replace(NAMESPACE.identity, model="tests/other", revision="2")
)


def stored(mount: Mount) -> set[str]:
    """The keys of all chunks of the first namespace."""
    names = os.listdir(mount.path / NAMESPACE.directory / "chunks")
    return {name.removesuffix(".safetensors") for name in names}


def removed(mount: Mount) -> list[str]:
    """The keys of the chunks that were removed, in order."""
    events = [json.loads(line) for line in (mount.path / ".kvfs/events").read_text().splitlines()]
    return [event["key"] for event in events if event["event"] == "rm"]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15min", 900), ("15m", 900), ("1.5h", 5400), ("3d", 259_200), ("2 d", 172_800)]
)
def test_ages(text: str, seconds: float) -> None:
    assert parse_duration(text, "--older-than") == seconds


@pytest.mark.parametrize("text", ["", "3", "d", "-3d", "3w", "3D", "1e3s", "3d4h", "9" * 20 + "d"])
def test_what_is_no_age(text: str) -> None:
    with pytest.raises(UsageError, match=r"--older-than: .* is not a duration: write 90s, 15min, 12h or 3d"):
        parse_duration(text, "--older-than")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "say what to remove: a NAMESPACE, a PREFIX, or --all"),
        (["--older-than=3d"], "kvfs is not mounted on /nowhere"),
        (["--all", "--namespace=tiny"], "say either 'tiny' or --all, not both"),
        (["tiny", "0123*", "--all"], "say either '0123*' or --all, not both"),
        (["--namespace=tiny", "--older-than=3d"], "--namespace takes all of it"),
        ([""], "an argument is empty"),
        (["--namespace="], "an argument is empty"),
        (["--older-than="], "an argument is empty"),
        (["tiny", "--older-than=3"], "--older-than: '3' is not a duration"),
        (["tiny", "../chunks"], "'../chunks' is not the PATH of a prefix"),
        (["tiny", ""], "an argument is empty"),
        (["tiny", "/"], "'/' is not the PATH of a prefix"),
        (["tiny"], "kvfs is not mounted on /nowhere"),
    ],
)
def test_mistakes_end_with_one_sentence(arguments: list[str], sentence: str) -> None:
    """Without a word on what to remove nothing is removed."""
    assert_refused(kvfs("rm", "/nowhere", *arguments), sentence)


def test_prefixes_by_the_paths_that_ls_prints(mount: Mount) -> None:
    """Patterns and whole keys; each prefix goes with all that was built on it and nothing else, tails first."""
    mount.start()
    keys, branch, other = store_three(mount.path)
    lines = kvfs("ls", mount.path, "tiny").stdout.splitlines()
    [path] = [line.split()[0] for line in lines if branch[1][:8] in line]
    assert "*/" in path

    dry = mount.json("rm", "tiny", path, "--dry-run")
    assert (dry["chunks"], dry["dry_run"], dry["namespaces"]) == (2, True, [NAMESPACE.directory])
    assert stored(mount) == {*keys, *branch, *other}

    result = kvfs("rm", mount.path, "tiny", path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "kvfs: removed 2 chunks, 16.0 KiB\n"
    assert stored(mount) == {*keys, *other}
    result = kvfs("rm", mount.path, "tiny", path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"kvfs: no prefix is named {path} (any more)\n"

    inner = f"{keys[0]}/{keys[1]}"
    result = kvfs("rm", mount.path, "tiny", path, f"{other[0][:8]}", "--dry-run")
    assert result.stdout == "kvfs: would remove 2 chunks, 16.0 KiB\n"
    assert result.stderr == f"kvfs: no prefix is named {path} (any more)\n"
    done = mount.json("rm", "tiny", inner, keys[0], f"{keys[0]}/", "--older-than=0s")
    assert (done["chunks"], done["gone"], done["interrupted"]) == (4, 0, False)
    assert stored(mount) == {*other}
    assert removed(mount) == [*reversed(branch[1:]), *reversed(keys)]
    assert [entry["name"] for entry in mount.json("ls", "tiny")] == [other[0]]
    assert os.listdir(mount.path / NAMESPACE.directory / "prefixes") == [other[0]]
    assert kvfs("umount", mount.path).returncode == 0


def test_namespaces(mount: Mount) -> None:
    """One is emptied, or with --all every one; what is young stays where an age is said."""
    mount.start()
    store(mount.path, list(range(48)))
    store(mount.path, list(range(32)), OTHER)
    for arguments in (["tiny"], ["--all"]):
        assert mount.json("rm", *arguments, "--older-than", "1h")["chunks"] == 0
    assert mount.json("rm", "--all", "--dry-run")["chunks"] == 5
    result = kvfs("rm", mount.path, "tiny")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        f"kvfs: this is all of {NAMESPACE.directory}, 3 chunks: say kvfs rm {mount.path} {NAMESPACE.directory} --all\n"
    )
    assert kvfs("rm", mount.path, "tiny", "--dry-run").stdout == "kvfs: would remove 3 chunks, 24.0 KiB\n"
    assert mount.json("rm", "tiny", "--all")["chunks"] == 3
    assert stored(mount) == set()
    store(mount.path, list(range(48)))
    done = mount.json("rm", "--all")
    assert (done["chunks"], done["namespaces"]) == (5, sorted([NAMESPACE.directory, OTHER.directory]))
    assert kvfs("ls", mount.path).returncode == 0
    assert mount.json("status")["num_chunks"] == 0
    assert kvfs("umount", mount.path).returncode == 0


@pytest.mark.parametrize(("answer", "is_gone"), [(b"y\n", True), (b"\n", False)])
def test_a_whole_namespace_is_asked_for_at_a_terminal(mount: Mount, answer: bytes, is_gone: bool) -> None:
    """A pattern that the shell made nothing of does not empty it."""
    mount.start()
    store(mount.path, list(range(48)))
    ours, theirs = pty.openpty()
    try:
        command = [KVFS, "rm", str(mount.path), "tiny"]
        with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            os.write(ours, answer)
            _, told = process.communicate(timeout=DEADLINE_S)
    finally:
        os.close(ours)
        os.close(theirs)
    assert f"Remove all 3 chunks of {NAMESPACE.directory}, for good? [y/N]".encode() in told
    assert (process.returncode, stored(mount) == set()) == (0 if is_gone else 1, is_gone)
    assert kvfs("umount", mount.path).returncode == 0


def test_a_prefix_of_whichever_namespace(mount: Mount) -> None:
    """Without a namespace PATHs are looked for in all; what is neither is told of, and nothing is removed."""
    mount.start()
    keys = store(mount.path, list(range(48)))
    others = store(mount.path, list(range(32)), OTHER)
    alone = store(mount.path, list(range(900, 932)))
    result = kvfs("rm", mount.path, "0123abcd*")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "kvfs: no prefix is named 0123abcd* (any more)\n"
    for unclear, sentence in (
        (keys[0][:6], f"no prefix is named {keys[0][:6]} (any more); for all that begin so write '{keys[0][:6]}*'"),
        (keys[1], f"{keys[1]} is no prefix, but a chunk inside of one: {mount.path}"),
    ):
        result = kvfs("rm", mount.path, unclear)
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr.startswith(f"kvfs: {sentence}")
    result = kvfs("rm", mount.path, "nowhere")
    assert result.returncode == 2
    assert "there is no namespace 'nowhere'" in result.stderr
    assert mount.json("rm", f"{keys[0][:10]}*", f"{others[0][:8]}*")["chunks"] == 5
    assert stored(mount) == {*alone}
    assert mount.json("rm", "--older-than=0s")["chunks"] == 2
    assert mount.json("status")["num_namespaces"] == 2
    assert kvfs("umount", mount.path).returncode == 0


def test_a_namespace_and_its_directory(mount: Mount) -> None:
    """Emptied, and gone if nobody uses it; one that is in use stays, and that is said."""
    mount.start()
    store(mount.path, list(range(48)))
    store(mount.path, list(range(32)), OTHER)
    wait_until(lambda: mount.json("status")["num_sessions"] == 0, "the sessions end")
    with Client(mount.path, NAMESPACE, deadline_s=DEADLINE_S) as client:
        client.match([bytes(32)])  # type: ignore[list-item]
        result = kvfs("rm", mount.path, "--namespace=tiny")
        assert (result.returncode, result.stdout) == (1, "kvfs: removed 3 chunks, 24.0 KiB\n")
        assert result.stderr == f"kvfs: the namespace {NAMESPACE.directory} was emptied and stays: an engine uses it\n"
    wait_until(lambda: mount.json("status")["num_sessions"] == 0, "the session ends")
    dry = mount.json("rm", "--namespace=tiny", "--dry-run")
    assert (dry["chunks"], dry["removed_namespaces"]) == (0, [NAMESPACE.directory])
    result = kvfs("rm", mount.path, "--namespace=tiny")
    assert result.stdout == f"kvfs: removed 0 chunks, 0 B, and the namespace {NAMESPACE.directory}\n"
    assert mount.json("rm", "--namespace", "other")["removed_namespaces"] == [OTHER.directory]
    assert mount.json("status")["num_namespaces"] == 0
    assert kvfs("ls", mount.path).returncode == 0
    assert kvfs("umount", mount.path).returncode == 0


def test_a_chunk_is_as_young_as_what_was_built_on_it(mount: Mount) -> None:
    """A load of one branch keeps the chunk that both begin with; the other branch is old."""
    mount.start()
    keys = store(mount.path, list(range(48)))
    branch_tokens = [*range(16), *range(100, 132)]
    branch = store(mount.path, branch_tokens)
    then_ns = time.time_ns()
    chain = KeyChain(root(NAMESPACE.identity.fingerprint()), 16, branch_tokens)
    with Client(mount.path, NAMESPACE, deadline_s=DEADLINE_S) as client, client.load(chain.chains[2:]) as load:
        load.wait(NAMESPACE.num_layers)

    path = str(mount.path)
    selection = rm._select(path, [NAMESPACE.directory], [], lambda: None)
    selection.before_ns = then_ns
    assert rm._count(path, selection, lambda: None).chunks == 2
    victims = rm._victims(path, selection, lambda: None)
    assert [Path(victim.path).name.split(".")[0] for victim in victims] == [keys[2], keys[1]]
    assert branch[0] == keys[0]
    assert kvfs("umount", mount.path).returncode == 0


def test_many_branches_go_at_a_time(mount: Mount) -> None:
    """By several threads, and still each chunk after all that was built on it."""
    mount.start()
    for first in range(3):
        for second in range(4):
            store(
                mount.path, [*range(first * 1000, first * 1000 + 32), *range(9000 + 100 * second, 9064 + 100 * second)]
            )
    chunks = mount.path / NAMESPACE.directory / "chunks"
    parents = {path.stem: os.getxattr(path, "user.kvfs.parent").decode() for path in chunks.iterdir()}
    assert len(parents) == 3 * (2 + 4 * 4)
    assert mount.json("rm", "tiny", "--all")["chunks"] == len(parents)
    order = {key: place for place, key in enumerate(removed(mount))}
    assert all(order[key] < order[parent] for key, parent in parents.items() if parent in parents)
    assert os.listdir(mount.path / NAMESPACE.directory / "prefixes") == []
    assert kvfs("umount", mount.path).returncode == 0


def test_what_was_stored_before_its_beginning_goes_first(mount: Mount) -> None:
    """The second half of a prompt became visible before the first: it joined it when that came."""
    mount.start()
    keys = [*store(mount.path, list(range(96)), first=3), *store(mount.path, list(range(48)))]
    assert os.listdir(mount.path / NAMESPACE.directory / "prefixes") == [keys[3]]
    assert mount.json("rm", "tiny", "--all")["chunks"] == 6
    assert removed(mount) == [*reversed(keys[:3]), *reversed(keys[3:])]
    assert kvfs("umount", mount.path).returncode == 0


def test_what_others_remove_meanwhile_is_no_error(mount: Mount) -> None:
    """It is counted apart; a chunk that has moved to another prefix is found by its key."""
    mount.start()
    keys = store(mount.path, list(range(48)))
    names = [f"{key}.safetensors" for key in keys]
    chunks, prefix = (mount.path / NAMESPACE.directory / part for part in ("chunks", f"prefixes/{keys[0]}"))
    victims = [removing.Victim(str(prefix / name), str(chunks / name), 1) for name in names]
    store(mount.path, [*range(16), *range(100, 132)])
    assert not (prefix / names[2]).exists()
    assert removing.unlink(str(mount.path), victims[2])
    assert not removing.unlink(str(mount.path), victims[2])
    assert stored(mount).isdisjoint(keys[2:])

    store(mount.path, list(range(1000, 1000 + 16 * 100)))
    processes = [
        subprocess.Popen([KVFS, "rm", str(mount.path), "tiny", "--all", "--json"], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    done = [json.loads(process.communicate(timeout=DEADLINE_S)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum(one["chunks"] for one in done) == 104
    assert stored(mount) == set()
    assert kvfs("umount", mount.path).returncode == 0


def test_an_interrupt_ends_it_in_order(mount: Mount) -> None:
    """Ctrl-C: what was done is said and is all that was done; the tail went first, so what is left can be used."""
    mount.start()
    keys = store(mount.path, list(range(16 * 1000)))
    command = [KVFS, "rm", str(mount.path), "tiny", "--all", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        status = mount.path / ".kvfs/status.json"
        wait_until(lambda: json.loads(status.read_text())["num_chunks"] < len(keys), "it has begun")
        process.send_signal(signal.SIGINT)
        told, complaints = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, complaints) == (130, "")
    done = json.loads(told)
    assert done["interrupted"] is True
    assert 0 < done["chunks"] < len(keys)
    left = stored(mount)
    assert [place for place, key in enumerate(keys) if key in left] == [*range(len(keys) - done["chunks"])]
    assert kvfs("umount", mount.path).returncode == 0


def test_a_terminal_has_a_bar(mount: Mount) -> None:
    mount.start()
    store(mount.path, list(range(48)))
    leader, follower = pty.openpty()
    shown = bytearray()

    def read() -> None:
        try:
            while piece := os.read(leader, 1 << 16):
                shown.extend(piece)
        except OSError:  # EIO: the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    command = [KVFS, "rm", str(mount.path), "tiny", "--all"]
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=follower, env=environment, check=True, text=True, timeout=DEADLINE_S
    )
    os.close(follower)
    reader.join(DEADLINE_S)
    os.close(leader)
    assert result.stdout == "kvfs: removed 3 chunks, 24.0 KiB\n"
    assert b"removing" in shown
    assert b"3/3" in shown
    assert kvfs("umount", mount.path).returncode == 0


def test_a_stopped_daemon_is_told_of(mount: Mount) -> None:
    pid = mount.start()
    store(mount.path, list(range(48)))
    os.kill(pid, signal.SIGSTOP)
    try:
        result = kvfs("rm", mount.path, "--all")
        assert (result.returncode, result.stdout) == (1, "")
        assert f"the kvfs daemon of {mount.path} has not answered" in result.stderr
        assert result.stderr.count("\n") == 1
    finally:
        os.kill(pid, signal.SIGCONT)
    assert mount.json("status")["num_chunks"] == 3
    assert kvfs("umount", mount.path).returncode == 0
