"""Who may what: the daemon's user, members of its group, and everybody else, each as a process of that user.

One test a line of the README's table. The users need not exist, but for the one who mounts.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import Daemon, Engine

OWNER = 65534  # nobody: fusermount3 wants a user that has a name
MEMBER, STRANGER, GROUP, NO_GROUP = 54322, 54323, 54330, 54331
DEADLINE_S = 60.0

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else"),
    pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse"),
]

Ask = Callable[..., dict[str, Any]]
Become = Callable[[int, int], list[str]]

ENGINE = f"""
import json, os, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from tests.e2e.conftest import Engine
engine = Engine(Path(sys.argv[1]))
"""
STORE_AND_LOAD = (
    ENGINE
    + """
statuses = [status.name for status in engine.try_store("abc")]
load = engine.client.load(engine.chains("abc"))
print(json.dumps({"stored": statuses, "loaded": load is not None and len(load.sources), "failures": engine.client.statistics.failures}))
"""
)
LOAD = (
    ENGINE
    + """
load = engine.client.load(engine.chains("abc"))
right = load is not None and bytes(load.layer(2, 0)) == b"c" * len(load.layer(2, 0))
print(json.dumps({"loaded": load is not None and len(load.sources), "right": right, "failures": engine.client.statistics.failures}))
"""
)
TRY = """
import errno, json, os, sys
said = {}
for words in json.loads(sys.argv[1]):
    name, *arguments = words
    try:
        getattr(os, name)(*arguments)
        said[" ".join(map(str, words))] = "done"
    except OSError as error:
        said[" ".join(map(str, words))] = errno.errorcode[error.errno]
print(json.dumps(said))
"""
SET = """
import json, sys
from kvfs.tools import set
try:
    set.set_setting("policy=lru", sys.argv[1])
    print(json.dumps({"said": "done"}))
except Exception as error:
    print(json.dumps({"said": str(error)}))
"""
WRITE = (
    ENGINE
    + """
import array, errno, mmap, socket
from kvfs import messages as m
from kvfs import namespace as namespaces
engine.try_store("abc")
session = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
session.connect(os.readlink(f"{sys.argv[1]}/.kvfs/session"))
session.send(m.encode(m.Hello(1, m.VERSION, namespaces.encode(engine.namespace), "test")))
_, fds, _, _ = socket.recv_fds(session, 1 << 16, 2)
found = {}
for name, given in zip(("arena", "volume"), fds, strict=True):
    for how in ("given", "again"):
        try:
            fd = given if how == "given" else os.open(f"/proc/self/fd/{given}", os.O_RDWR)
            mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            found[f"{name} {how}"] = "writable"
        except OSError as error:
            found[f"{name} {how}"] = errno.errorcode[error.errno]
print(json.dumps(found))
"""
)


@pytest.fixture
def become() -> Become:
    """What runs a command as another user, without capabilities and supplementary groups."""

    def become(uid: int, gid: int) -> list[str]:
        words = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--inh-caps=-all"]
        try:
            result = subprocess.run(
                [*words, sys.executable, "-c", "import kvfs.mount"], check=False, capture_output=True
            )
        except FileNotFoundError:
            pytest.skip("setpriv (util-linux) is needed")
        if result.returncode:
            pytest.skip(f"other users cannot run {sys.executable}: {result.stderr.decode()[-200:]}")
        return words

    return become


@pytest.fixture
def ask(become: Become) -> Ask:
    """Runs a script as another user; what it prints as JSON."""

    def ask(uid: int, gid: int, script: str, *arguments: object) -> dict[str, Any]:
        result = subprocess.run(
            [*become(uid, gid), sys.executable, "-c", script, *map(str, arguments)], stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=False, timeout=DEADLINE_S, cwd="/",
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer

    return ask


def open_the_way(path: Path) -> None:
    """Let other users pass through the directories above; the last ones are ours to change."""
    for directory in (path, *path.parents):
        if directory.stat().st_mode & 0o001 == 0:
            directory.chmod(directory.stat().st_mode | 0o055)


@pytest.fixture
def fuse_for_all() -> Iterator[None]:
    """The mode that udev gives /dev/fuse wherever it runs; some containers have no udev."""
    device = Path("/dev/fuse")
    mode = stat.S_IMODE(device.stat().st_mode)
    device.chmod(0o666)
    yield
    device.chmod(mode)


@pytest.fixture
def of_owner(daemon: Daemon, become: Become, fuse_for_all: None) -> Daemon:
    """A daemon that another user than root will start, in directories of that user's."""
    open_the_way(daemon.directory)
    for directory in (daemon.directory, daemon.run_directory):
        os.chown(directory, OWNER, GROUP)
    words = become(OWNER, GROUP)
    command = daemon.command
    daemon.command = lambda *flags, **sizes: [*words, *command(*flags, **sizes)]  # type: ignore[method-assign]
    return daemon


@pytest.fixture
def shared(daemon: Daemon) -> Daemon:
    """A mount of root's that the members of its group may use."""
    open_the_way(daemon.directory)
    daemon.run_directory.chmod(0o755)
    group, command = ["setpriv", f"--regid={GROUP}", "--clear-groups"], daemon.command
    daemon.command = lambda *flags, **sizes: [*group, *command(*flags, **sizes)]  # type: ignore[method-assign]
    daemon.start("--allow-other")
    return daemon


def test_a_user_mounts_without_root(of_owner: Daemon, ask: Ask) -> None:
    """Whoever has fusermount3 can run a cache of their own: stored, restarted, loaded, unmounted."""
    of_owner.start()
    answer = ask(OWNER, GROUP, STORE_AND_LOAD, of_owner.path)
    assert answer == {"stored": ["STORED"] * 3, "loaded": 3, "failures": 0}
    assert of_owner.stop() == 0
    of_owner.start()
    assert ask(OWNER, GROUP, LOAD, of_owner.path) == {"loaded": 3, "right": True, "failures": 0}
    assert of_owner.stop() == 0
    assert not os.path.ismount(of_owner.path)


def test_files_and_sockets_belong_to_the_daemons_user(of_owner: Daemon, ask: Ask) -> None:
    of_owner.start()
    ask(OWNER, GROUP, STORE_AND_LOAD, of_owner.path)
    script = """
import json, os, sys
found = set()
for top, directories, files in os.walk(sys.argv[1]):
    for name in (*directories, *files):
        status = os.lstat(os.path.join(top, name))
        found.add((status.st_uid, status.st_gid))
print(json.dumps({"owners": sorted(found)}))
"""
    assert ask(OWNER, GROUP, script, of_owner.path) == {"owners": [[OWNER, GROUP]]}
    (socket,) = of_owner.run_directory.glob("*/session.sock")
    assert (socket.stat().st_uid, stat.S_IMODE(socket.stat().st_mode)) == (OWNER, 0o600)
    assert (socket.parent.stat().st_uid, stat.S_IMODE(socket.parent.stat().st_mode)) == (OWNER, 0o700)


def test_nobody_else_enters_a_users_mount(of_owner: Daemon, ask: Ask) -> None:
    """Neither through the mount, root included, nor through the socket, nor by the volume's files."""
    of_owner.start()
    ask(OWNER, GROUP, STORE_AND_LOAD, of_owner.path)
    with pytest.raises(PermissionError):
        os.listdir(of_owner.path)
    (socket,) = of_owner.run_directory.glob("*/session.sock")
    tries = [["listdir", str(of_owner.path)], ["stat", str(socket)]]
    tries += [["open", str(path), os.O_RDONLY] for path in of_owner.directory.joinpath("volume").iterdir()]
    for uid, gid in ((MEMBER, GROUP), (STRANGER, NO_GROUP)):
        assert set(ask(uid, gid, TRY, json.dumps(tries)).values()) == {"EACCES"}


def test_a_user_cannot_let_others_in_without_the_systems_leave(of_owner: Daemon) -> None:
    """fuse.conf decides; the sentence names it."""
    with contextlib.suppress(FileNotFoundError):
        if any(line.strip() == "user_allow_other" for line in Path("/etc/fuse.conf").read_text().splitlines()):
            pytest.skip("/etc/fuse.conf has user_allow_other")
    assert "user_allow_other" in of_owner.refusal("--allow-other")


def test_members_of_the_group_load_and_look(shared: Daemon, ask: Ask, engines: Callable[[Path], Engine]) -> None:
    engine = engines(shared.path)
    engine.store("abc")
    assert ask(MEMBER, GROUP, LOAD, shared.path) == {"loaded": 3, "right": True, "failures": 0}
    looks = [
        ["listdir", str(shared.path)], ["listdir", str(engine.chunks)], ["listdir", str(engine.prefixes)],
        ["open", str(engine.file("abc")), os.O_RDONLY], ["getxattr", str(engine.file("abc")), "user.kvfs.tier"],
        ["statvfs", str(shared.path)], ["open", str(shared.path / ".kvfs/status.json"), os.O_RDONLY],
    ]  # fmt: skip
    assert set(ask(MEMBER, GROUP, TRY, json.dumps(looks)).values()) == {"done"}


def test_members_of_the_group_store(shared: Daemon, ask: Ask) -> None:
    """Through a window: their engines are the ones that the cache is for."""
    assert ask(MEMBER, GROUP, STORE_AND_LOAD, shared.path) == {"stored": ["STORED"] * 3, "loaded": 3, "failures": 0}


def test_members_of_the_group_remove_nothing(shared: Daemon, ask: Ask, engines: Callable[[Path], Engine]) -> None:
    engine = engines(shared.path)
    engine.store("abc")
    tries = [
        ["unlink", str(engine.file("abc"))], ["rmdir", str(engine.prefixes / engine.key("a"))],
        ["open", str(engine.chunks / ".new"), os.O_CREAT | os.O_WRONLY], ["mkdir", str(shared.path / "other")],
        ["chmod", str(engine.file("abc")), 0o666], ["truncate", str(engine.file("abc")), 0],
    ]  # fmt: skip
    answers = ask(MEMBER, GROUP, TRY, json.dumps(tries))
    assert set(answers.values()) <= {"EACCES", "EPERM"}, answers
    assert engine.file("abc").exists()
    assert stat.S_IMODE(engine.file("abc").stat().st_mode) == 0o640


def test_members_of_the_group_change_no_setting(shared: Daemon, ask: Ask) -> None:
    said = ask(MEMBER, GROUP, SET, shared.path)["said"]
    assert said == f"you may not change settings of {shared.path}: ask root, or whoever mounted it"
    assert os.getxattr(shared.path, "user.kvfs.policy") == b"learned"


def test_strangers_see_nothing_of_a_shared_mount(shared: Daemon, ask: Ask, engines: Callable[[Path], Engine]) -> None:
    """Letting the group in lets nobody else in."""
    engine = engines(shared.path)
    engine.store("abc")
    (socket,) = shared.run_directory.glob("*/session.sock")
    tries = [
        ["listdir", str(shared.path)], ["stat", str(engine.file("abc"))], ["stat", str(socket)],
        ["open", str(engine.file("abc")), os.O_RDONLY],
    ]  # fmt: skip
    assert set(ask(STRANGER, NO_GROUP, TRY, json.dumps(tries)).values()) == {"EACCES"}


def test_no_mode_lets_others_in(shared: Daemon, engines: Callable[[Path], Engine]) -> None:
    """Whatever holds prompts in some form, in the mount or beside it, is closed to others and to the group's writes."""
    engines(shared.path).store("abc")
    places = [shared.path, shared.directory / "volume", *shared.run_directory.iterdir()]
    for place in places:
        for path in (place, *place.rglob("*")):
            status = path.lstat()
            if not stat.S_ISLNK(status.st_mode) and not stat.S_ISSOCK(status.st_mode):
                assert status.st_mode & 0o027 == 0, (path, oct(status.st_mode))


@pytest.mark.parametrize("access", ["isolated", "trusted"])
def test_other_users_engines_cannot_write_what_others_read(daemon: Daemon, ask: Ask, access: str) -> None:
    """Under both settings: trust goes to the daemon's own user only."""
    open_the_way(daemon.directory)
    daemon.run_directory.chmod(0o755)
    group, command = ["setpriv", f"--regid={GROUP}", "--clear-groups"], daemon.command
    daemon.command = lambda *flags, **sizes: [*group, *command(*flags, **sizes)]  # type: ignore[method-assign]
    daemon.start("--allow-other", f"--access={access}")
    found = ask(MEMBER, GROUP, WRITE, daemon.path)
    assert set(found) == {"arena given", "arena again", "volume given", "volume again"}
    assert set(found.values()) <= {"EACCES", "EPERM"}, found
