"""Commands on real mounts: in the background and in the foreground, full, busy, stopped and dead."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios

import pytest

from kvfs import config
from kvfs.testing import DEADLINE_S, wait_until
from kvfs.testing.processes import is_alive

from .conftest import KVFS, NAMESPACE, Mount, kvfs, store

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse")


def kill(pid: int) -> None:
    """End a daemon, stopped or not, and wait until it is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(DEADLINE_S * 1000)
    finally:
        os.close(descriptor)


def test_a_life(mount: Mount) -> None:
    """Mount, store, look, unmount, mount again: the chunks are still there; `ls` and `status` say so."""
    pid = mount.start()
    assert kvfs("status", mount.path).returncode == 0
    assert mount.json("ls") == []
    keys = store(mount.path, list(range(48)))
    branch = store(mount.path, [*range(16), *range(100, 132)])
    assert branch[0] == keys[0]

    [namespace] = mount.json("ls")
    assert (namespace["name"], namespace["num_chunks"]) == (NAMESPACE.directory, 5)
    prefixes = mount.json("ls", NAMESPACE.directory)
    assert [(entry["name"], entry["depth"], entry["num_chunks"], entry["num_tokens"]) for entry in prefixes[:1]] == [
        (keys[0], 0, 5, 80)
    ]
    assert {entry["name"] for entry in prefixes[1:]} == {keys[1], branch[1]}
    chunks = mount.json("ls", "tiny", "--chunks", "--limit", "3")
    assert len(chunks) == 3
    assert {chunk["name"] for chunk in mount.json("ls", "tiny", "--chunks")} == set(keys + branch)
    shown = kvfs("ls", mount.path, "tiny").stdout
    assert all(word in shown for word in ("prefix", "tokens", f"{keys[0][:8]}* ", "ram", "KiB", " ago"))
    assert "5 chunks in 1 namespace" in kvfs("status", mount.path).stdout

    result = kvfs("umount", mount.path)
    assert (result.returncode, result.stdout) == (0, f"kvfs: {mount.path} is unmounted\n")
    assert not is_alive(pid)
    assert not mount.is_mounted

    mount.start()
    assert {chunk["name"] for chunk in mount.json("ls", "tiny", "--chunks")} == set(keys + branch)
    assert {tuple(chunk["tiers"]) for chunk in mount.json("ls", "tiny", "--chunks")} == {("nvme",)}
    assert kvfs("umount", mount.path).returncode == 0


def shell(command: str) -> None:
    subprocess.run(["sh", "-c", command], check=True, stdin=subprocess.DEVNULL, timeout=DEADLINE_S)


@pytest.mark.heavy
@pytest.mark.parametrize("flags", [[], ["--full"]])
def test_a_path_that_ls_prints_is_what_rm_takes(mount: Mount, flags: list[str]) -> None:
    """Nested prefixes too: the path is copied behind "prefixes/", and that prefix goes with all below it, no other."""
    mount.start()
    keys = store(mount.path, list(range(48)))
    branch = store(mount.path, [*range(16), *range(100, 132)])
    prefixes = f"{mount.path}/{NAMESPACE.directory}/prefixes"
    [json_path] = [entry["path"] for entry in mount.json("ls", "tiny") if entry["name"] == branch[1]]
    assert json_path == f"{keys[0]}/{branch[1]}"
    lines = kvfs("ls", mount.path, "tiny", *flags).stdout.splitlines()[1:]
    [path] = [line.split()[0] for line in lines if branch[1][:8] in line]
    assert path == (json_path if flags else f"{keys[0][:8]}*/{branch[1][:8]}*")
    shell(f"rm -rf {prefixes}/{path}")
    assert {chunk["name"] for chunk in mount.json("ls", "tiny", "--chunks")} == set(keys)
    assert branch[1] not in {entry["name"] for entry in mount.json("ls", "tiny")}
    [path] = [line.split()[0] for line in kvfs("ls", mount.path, "tiny").stdout.splitlines()[1:2]]
    shell(f"rm -rf {prefixes}/{path}")
    result = kvfs("ls", mount.path, "tiny")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "kvfs: nothing is stored here\n")
    assert kvfs("umount", mount.path).returncode == 0


@pytest.mark.heavy
def test_what_is_beyond_the_limit_is_counted(mount: Mount) -> None:
    """Of prefixes as of chunks as many as asked for are shown, and how many more there are is said."""
    mount.start()
    for first in range(3):
        store(mount.path, [first] * 16)
    for arguments in (["tiny"], ["tiny", "--chunks"]):
        result = kvfs("ls", mount.path, *arguments, "--limit=2")
        assert len(result.stdout.splitlines()) == 1 + 2
        assert result.stderr == "kvfs: 1 more; --limit 3 shows all\n"
        assert kvfs("ls", mount.path, *arguments, "--limit=3").stderr == ""
    assert len(mount.json("ls", "tiny", "--limit=2")) == 2
    assert kvfs("umount", mount.path).returncode == 0


def test_a_path_inside_the_mount(mount: Mount) -> None:
    """Each command says to name the mount; `kvfs ls` says how to name the namespace."""
    mount.start()
    store(mount.path, list(range(16)))
    path = mount.path / NAMESPACE.directory
    result = kvfs("ls", path)
    assert result.returncode == 2
    assert result.stderr == (f"kvfs: {path} lies inside the mount: say `kvfs ls {mount.path} {NAMESPACE.directory}`\n")
    for command in ("status", "umount"):
        result = kvfs(command, path)
        assert result.returncode == 2
        assert result.stderr == f"kvfs: {path} lies inside the mount on {mount.path}: name the mount itself\n"
    assert kvfs("umount", mount.path).returncode == 0


def test_a_narrow_terminal_folds_no_name(mount: Mount) -> None:
    """On 50 columns each line begins with a whole name and ends before the edge: other columns are left out."""
    mount.start()
    store(mount.path, list(range(16)))
    leader, follower = pty.openpty()
    try:
        termios.tcsetwinsize(follower, (24, 50))
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        command = [KVFS, "ls", str(mount.path)]
        subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=follower, env=environment, check=True, timeout=DEADLINE_S
        )
        text = re.sub(r"\x1b\[\d*m", "", os.read(leader, 1 << 16).decode())
    finally:
        os.close(leader)
        os.close(follower)
    heading, line = text.splitlines()
    assert heading.split() == ["namespace", "chunks", "size"]
    assert line.startswith(f"{NAMESPACE.directory}  ")
    assert len(line) <= 50
    assert kvfs("umount", mount.path).returncode == 0


def test_names_of_namespaces(mount: Mount) -> None:
    """The beginning of a name is enough if it is the only one; mistakes say what there is."""
    mount.start()
    result = kvfs("ls", mount.path, "tiny")
    assert result.returncode == 2
    assert "there is no namespace 'tiny'" in result.stderr
    assert kvfs("ls", mount.path, "--chunks").returncode == 2
    assert kvfs("ls", mount.path).stderr == "kvfs: nothing is stored here\n"
    assert kvfs("umount", mount.path).returncode == 0


def test_settings_reach_a_background_daemon(mount: Mount) -> None:
    """From a file and flags, through the command line of the daemon, to `.kvfs/config.toml`."""
    file = mount.path.parent / "kvfs.toml"
    file.write_text(f'mountpoint = "{mount.path}"\nram = "8MiB"\nwindow = "8MiB"\nio_threads = 3\n')
    flags = [*mount.flags, "--log-level=debug", "--window=3MiB", "--allow-other"]
    assert kvfs("mount", "--config", file, *flags, "--background").returncode == 0
    in_force = config.load(mount.path / ".kvfs" / "config.toml", {})
    assert (in_force.ram_bytes, in_force.window_bytes, in_force.io_threads) == (16 << 20, 3 << 20, 3)
    assert (in_force.allow_other, in_force.log_level, in_force.huge_pages) == (True, "debug", "never")
    assert in_force.log_file == str(mount.path.parent / "log")
    assert kvfs("umount", mount.path).returncode == 0


def test_a_second_mount_is_refused(mount: Mount) -> None:
    pid = mount.start()
    result = kvfs("mount", mount.path, *mount.flags, "--background")
    assert result.returncode == 2
    assert result.stderr == f"kvfs: kvfs is already mounted on {mount.path}\n"
    assert mount.pid() == pid
    assert kvfs("umount", mount.path).returncode == 0


def test_a_busy_mount_stays(mount: Mount) -> None:
    """Without --force nobody's files are taken away; the sentence names who has them open."""
    pid = mount.start()
    with open(mount.path / "README.txt"):
        result = kvfs("umount", mount.path)
        assert result.returncode == 2
        assert f"{mount.path} is busy: in use by " in result.stderr
        assert f"({os.getpid()})" in result.stderr
        assert result.stderr.count("\n") == 1
        assert mount.pid() == pid
    assert kvfs("umount", mount.path).returncode == 0
    assert not is_alive(pid)


@pytest.mark.heavy
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes mount namespaces")
def test_a_container_does_not_keep_the_daemon(mount: Mount) -> None:
    """One that was started while the mount was there has a copy of it, so that the kernel does not end the file system."""
    pid = mount.start()
    command = ["unshare", "--mount", "--propagation=private", sys.executable, "-c"]
    container = subprocess.Popen(
        [*command, f"print('up', flush=True); import time; time.sleep({DEADLINE_S})"], stdout=subprocess.PIPE
    )
    try:
        assert container.stdout is not None
        if container.stdout.readline() != b"up\n":
            pytest.skip("mount namespaces cannot be made here")
        result = kvfs("umount", mount.path)
        assert result.returncode == 0, result.stderr
        assert not is_alive(pid)
    finally:
        container.kill()
        container.communicate()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes mount namespaces")
def test_status_without_a_mount_point_finds_what_is_mounted(mount: Mount) -> None:
    """One mount is shown, several have a line each, none is one sentence; in a namespace without other tests' mounts and kept RAM."""
    other = Mount(mount.path.parent / "other", [flag.replace("/volume", "/volume2") for flag in mount.flags])
    script = """
        kvfs=$1 one=$2 two=$3
        for path in $(awk '$8 == "fuse.kvfs" || $9 == "kvfs-arena" {print $5}' /proc/self/mountinfo); do
            [ "$path" = "$one" ] || [ "$path" = "$two" ] || umount --lazy "$(printf %b "$path")"
        done
        $kvfs status; $kvfs status --json; umount --lazy "$two"
        $kvfs status; $kvfs status --json; umount --lazy "$one"
        $kvfs status; true
    """
    mount.start()
    other.start()
    try:
        command = ["unshare", "--mount", "--propagation=private", "sh", "-c", script, "sh", KVFS]
        found = subprocess.run(
            [*command, str(mount.path), str(other.path)], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            check=False, timeout=DEADLINE_S, env={**os.environ, "COLUMNS": "200"},
        )  # fmt: skip
        if "unshare" in found.stderr:
            pytest.skip("mount namespaces cannot be made here")
    finally:
        assert kvfs("umount", other.path).returncode == 0
        assert kvfs("umount", mount.path).returncode == 0
    several, _, one = found.stdout.partition("╭")
    assert several.splitlines()[0].split() == ["mounted", "on", "chunks", "ram", "nvme"]
    assert [line.split()[:2] for line in several.splitlines()[1:]] == [[str(mount.path), "0"], [str(other.path), "0"]]
    panel, _, document = one.partition("╯")
    assert f"on {mount.path}" in panel
    assert json.loads(document)["num_chunks"] == 0
    refusal, nothing = found.stderr.splitlines()
    assert refusal == f"kvfs: kvfs is mounted on {mount.path}, {other.path}: say which"
    assert nothing.startswith("kvfs: kvfs is mounted nowhere")


def test_a_forced_unmount_leaves_open_files(mount: Mount) -> None:
    """What is open can be read to its end; then the daemon goes."""
    pid = mount.start()
    with open(mount.path / "README.txt") as file:
        assert kvfs("umount", mount.path, "--force").returncode == 0
        assert not mount.is_mounted
        assert file.read().startswith("This is kvfs")
    wait_until(lambda: not is_alive(pid), "the daemon ends when the last file is closed")


@pytest.mark.heavy
def test_a_stopped_daemon_is_told_of(mount: Mount) -> None:
    """Commands do not hang on a daemon that does not answer, and --force takes its mount away."""
    pid = mount.start()
    os.kill(pid, signal.SIGSTOP)
    try:
        commands = [[KVFS, command, str(mount.path)] for command in ("status", "ls", "umount")]
        processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
        for process in processes:
            _, told = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 1
            assert f"the kvfs daemon of {mount.path} has not answered" in told
            assert told.count("\n") == 1
        assert kvfs("umount", mount.path, "--force").returncode == 0
        assert not mount.is_mounted
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not is_alive(pid), "the daemon ends when its mount is gone")


@pytest.mark.parametrize(
    "command",
    [
        "umount",
        "mount",
        *(pytest.param(name, marks=pytest.mark.heavy) for name in ("status", "ls", "verify", "config")),
    ],
)
def test_a_link_into_a_stopped_mount_hangs_nobody(mount: Mount, command: str) -> None:
    """Whatever leads below it: nothing in it is looked at to find out where a path leads."""
    pid = mount.start()
    link = mount.path.parent / "link"
    link.symlink_to(f"mnt/{NAMESPACE.directory}")
    flags = ["--ram=16MiB", "--huge-pages=never", f"--socket-directory={mount.path.parent.parent}/run"]
    os.kill(pid, signal.SIGSTOP)
    try:
        for path in (link / "chunks", link, mount.path / "a" / ".." / "b"):
            result = kvfs(command, path, *(flags if command in ("mount", "config") else []))
            if command == "config":
                assert result.returncode == 0
                continue
            assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
            assert ("does not answer" if command == "mount" else "lies inside the mount") in result.stderr
    finally:
        os.kill(pid, signal.SIGCONT)
    assert kvfs("umount", mount.path).returncode == 0


@pytest.mark.parametrize("clear", ["umount", "mount"])
def test_a_dead_daemon_leaves_nothing_that_stays(mount: Mount, clear: str) -> None:
    """Its mount is told of, and cleared by the next `kvfs umount` or `kvfs mount`."""
    kill(mount.start())
    assert mount.is_mounted
    for command in ("status", "ls"):
        result = kvfs(command, mount.path)
        assert result.returncode == 1
        assert f"the kvfs daemon of {mount.path} is gone" in result.stderr
    if clear == "mount":
        mount.start()
    assert kvfs("umount", mount.path).returncode == 0
    assert not mount.is_mounted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_foreground_mount(mount: Mount, number: signal.Signals) -> None:
    """Ctrl-C is how one ends it: a clean end, everything written, exit code 0."""
    command = [KVFS, "mount", str(mount.path), *mount.flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line == (
            f"kvfs: mounted on {mount.path}, 16.0 MiB of RAM and 16.0 MiB in {mount.path.parent}/volume; "
            "Ctrl-C unmounts\n"
        )
        store(mount.path, list(range(16)))
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == 0
        assert process.stderr.read() == ""
    assert not mount.is_mounted


def test_what_is_being_copied_in_is_told_of(mount: Mount) -> None:
    """Nobody lists it, so status, ls and stat say how much it is and where."""
    mount.start()
    store(mount.path, list(range(16)))
    top = mount.path / NAMESPACE.directory
    (top / "chunks" / ".one").write_bytes(b"x" * 5000)
    (top / "chunks" / ".two").write_bytes(b"x" * 100)
    [namespace] = mount.json("ls")
    [stat] = mount.json("stat", "tiny")
    status = mount.json("status")
    assert namespace["staging_files"] == stat["staging_files"] == status["num_staging"] == 2
    assert namespace["staging_bytes"] == stat["staging_bytes"] == status["staging_bytes"] == 8192 + 4096
    assert "2 files, 12.0 KiB" in kvfs("ls", mount.path).stdout
    assert "2 files, 12.0 KiB, being copied in" in " ".join(kvfs("status", mount.path).stdout.replace("│", " ").split())
    assert "user.kvfs.staging_bytes" not in os.listxattr(top)
    (top / "chunks" / ".one").unlink()
    (top / "chunks" / ".two").unlink()
    assert mount.json("ls")[0]["staging_files"] == 0
