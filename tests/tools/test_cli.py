"""The `kvfs` command in a process of its own: help, exit codes, one sentence for each mistake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvfs import config
from kvfs.tools import commands

KVFS = str(Path(sys.executable).parent / "kvfs")


def kvfs(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [KVFS, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=60)


def test_version() -> None:
    import kvfs as package

    result = kvfs("--version")
    assert (result.returncode, result.stdout) == (0, f"kvfs {package.__version__}\n")


@pytest.mark.parametrize(
    "command",
    ["mount", "umount", "status", "ls", "rm", "verify", "tree", "stat", "config", "format", "fsck", "destroy"],
)
def test_help_teaches_by_example(command: str) -> None:
    result = kvfs(command, "--help")
    assert result.returncode == 0
    place = "/data/kvfs" if command in ("format", "fsck", "destroy") else "/mnt/kvfs"
    assert f"kvfs {command} {place}" in result.stdout
    assert "[bold]" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_help_names_the_commands() -> None:
    result = kvfs("--help")
    assert all(f" {command} " in result.stdout for command in ("mount", "umount", "status", "ls", "rm", "verify"))


@pytest.mark.parametrize("background", [[], pytest.param(["--background"], marks=pytest.mark.heavy)])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["mount"], "mountpoint is not set"),
        (["mount", "/nowhere"], "ram is not set"),
        (["mount", "/nowhere", "--ram", "4GB"], "--ram: '4GB' is not a size: write 4GiB\n"),
        (
            ["mount", "/nowhere", "--ram=1GiB", "--nvme=/data"],
            "--nvme is '/data'; write a directory, a colon and a size",
        ),
        (["mount", "/nowhere", "--ram=1GiB", "--config=/nowhere/kvfs.toml"], "cannot read the settings in /nowhere"),
        (["mount", "/nowhere", "--ram=1GiB", "--huge-pages=2M"], "--huge-pages is '2M'; it must be auto or never"),
    ],
)
def test_mistakes_end_with_one_sentence(arguments: list[str], sentence: str, background: list[str]) -> None:
    result = kvfs(*arguments, *background)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"kvfs: {sentence}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--rma"], "no such option: --rma"),
        (["mount", "--rma=1GiB"], "no such option: --rma"),
        (["mount", "--io-threads=many"], "invalid value for '--io-threads'"),
        (["ls"], "missing argument"),
        (["ls", "a", "b", "c"], "got unexpected extra argument"),
        (["nonsense"], "no such command 'nonsense'"),
    ],
)
def test_a_mistyped_command_line_is_one_sentence_too(arguments: list[str], sentence: str) -> None:
    """No box around it, and where to look."""
    result = kvfs(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"kvfs: {sentence}")
    assert "--help` shows what there is" in result.stderr
    assert result.stderr.count("\n") == 1


def test_no_arguments_show_the_help() -> None:
    result = kvfs()
    assert result.returncode == 2
    assert result.stdout.startswith("Usage: kvfs")
    assert result.stderr == ""


def test_help_shows_every_setting_and_its_default() -> None:
    """What can stand in the file can be given as a flag of the same name."""
    text = " ".join(kvfs("mount", "--help").stdout.split())
    flags = {f"--{name.replace('_', '-')} " for name in config.NAMES if name != "mountpoint"}
    assert [flag for flag in flags if flag not in text] == []
    assert all(f"({default})" in text for default in ("64MiB", "4", "auto", "info", "isolated", "no-allow-other"))


@pytest.mark.parametrize("background", [[], pytest.param(["--background"], marks=pytest.mark.heavy)])
@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("/dev/null", "it is not a directory"),
        ("/proc", "no file can be made there"),
        ("file", "it is not a directory"),
        ("file/below", "Not a directory"),
        ("missing/below", "missing does not exist"),
    ],
)
def test_a_volume_where_none_can_be(place: str, said: str, background: list[str], tmp_path: Path) -> None:
    """One sentence for each ordinary mistake, in the foreground and in the background alike; nothing is left."""
    (tmp_path / "file").touch()
    result = kvfs(
        "mount", tmp_path / "mnt", "--ram=16MiB", f"--nvme={tmp_path / place}:16MiB", "--huge-pages=never",
        "--socket-directory", tmp_path / "run", *background,
    )  # fmt: skip
    assert result.returncode == 2
    assert result.stderr.startswith(f"kvfs: cannot open the volume in {tmp_path / place}: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "missing").exists()


def test_more_ram_than_the_machine_has(tmp_path: Path) -> None:
    """It is refused at once, before a byte is taken."""
    result = kvfs("mount", tmp_path / "mnt", "--ram=1024TiB", "--socket-directory", tmp_path / "run")
    assert result.returncode == 2
    assert result.stderr.startswith("kvfs: ram is 1.0 PiB, but only ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["umount", "status", "ls"])
def test_a_directory_that_is_no_mount(command: str, tmp_path: Path) -> None:
    result = kvfs(command, tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith(f"kvfs: kvfs is not mounted on {tmp_path}")


@pytest.mark.parametrize(
    "place", ["kvfs.tools.commands", "kvfs.tools.mounted.find"], ids=["it is imported", "it looks"]
)
def test_ctrl_c_in_the_first_second(place: str) -> None:
    """No traceback, and the exit code says it, whatever is interrupted."""
    script = (
        "import os, signal, sys\n"
        "from kvfs.tools import cli\n"
        "def interrupt(*_): os.kill(os.getpid(), signal.SIGINT)\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, *_):\n"
        "        if name == sys.argv[1]: interrupt()\n"
        "if sys.argv[1].endswith('find'):\n"
        "    from kvfs.tools import mounted\n"
        "    mounted.find = interrupt\n"
        "sys.meta_path.insert(0, Finder)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.argv[1:] = ['status', '/nowhere'] if 'find' in sys.argv[1] else [sys.argv[1]]\n"
        "cli.main()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, place], capture_output=True, text=True, check=False, timeout=60
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_a_mount_of_something_else() -> None:
    result = kvfs("status", "/proc")
    assert (result.returncode, result.stderr) == (2, "kvfs: what is mounted on /proc is not kvfs but proc\n")


def test_a_mount_point_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = kvfs("mount", tmp_path / "file", "--ram=16MiB", "--socket-directory", tmp_path / "run")
    assert result.returncode == 2
    assert "is not a directory" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_daemons_sentence_reaches_the_caller(tmp_path: Path) -> None:
    """What a background daemon dies of is told by the command that started it."""
    (tmp_path / "mnt").mkdir()
    (tmp_path / "mnt" / "file").touch()
    log = tmp_path / "kvfs.log"
    result = kvfs(
        "mount", tmp_path / "mnt", "--ram=16MiB", "--background", "--log-file", log,
        "--socket-directory", tmp_path / "run",
    )  # fmt: skip
    assert result.returncode == 2
    assert "is not empty" in result.stderr
    assert result.stderr.count("\n") == 1
    assert "is not empty" in log.read_text()


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    result = kvfs("mount", tmp_path / "mnt", "--ram=16MiB", "--background", "--log-file", tmp_path)
    assert result.returncode == 2
    assert result.stderr == f"kvfs: cannot write the log to {tmp_path}: Is a directory\n"


@pytest.mark.parametrize("background", [[], ["--background"]])
def test_nothing_is_written_where_others_could_put_something_else(tmp_path: Path, background: list[str]) -> None:
    """A socket directory that anybody may change is refused before a log is opened in it."""
    run = tmp_path / "run"
    run.mkdir()
    run.chmod(0o777)
    result = kvfs("mount", tmp_path / "mnt", "--ram=16MiB", "--socket-directory", run, *background)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"kvfs: other users can change {run}")
    assert list(run.iterdir()) == []


EMPTY = [
    *(["rm", *rest] for rest in (["/m", "", "--all"], ["/m", "x", ""], ["", "--all"], ["/m", "--namespace", ""])),
    ["rm", "/m", "--older-than", ""], ["ls", "/m", ""], ["ls", ""], ["tree", "/m", ""], ["stat", "/m", "x", ""],
    ["pin", "/m", "", "--for=2h"], ["unpin", "/m", ""], ["quota", "/m", "", "5GiB"], ["quota", "/m", "x", ""],
    ["verify", ""], ["verify", "/m", ""], ["export", "/m", "", "/x"], ["export", "/m", "x", ""], ["import", "/m", ""],
    ["hint", "", "--closed"], ["hint", "/m/x", "--expect="],
    ["mount", ""], ["umount", ""], ["status", ""], ["sync", ""], ["config", ""], ["format", "", "1GiB"], ["fsck", ""],
    ["set", "policy=lru", ""], ["set", "", "/m"], ["destroy", "", "--yes"], ["bench", "--dir", ""], ["simulate", "", "--ram", "5%"], ["doctor", ""],
    ["why", "/m", "", "x"], ["record", "/m", ""], ["warm", ""], ["warm", "/m", ""],
]  # fmt: skip


@pytest.mark.parametrize("arguments", EMPTY, ids=" ".join)
def test_an_empty_argument_means_nothing(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """And never everything: a variable that is not set ends each command before it looks at anything."""
    assert commands.run(arguments) == commands.EXIT_USAGE
    assert capsys.readouterr().err == "kvfs: an argument is empty: was a variable meant that is not set?\n"


def test_no_command_is_without_that_check() -> None:
    assert set(commands.COMMANDS) == {arguments[0] for arguments in EMPTY}
