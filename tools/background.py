"""A daemon in the background: `kvfs mount` once more, in a session of its own.

The daemon says through a pipe how its start went: "ready", and in further lines what is to be known of it; or the sentence
that the command prints in its stead. Its stdout and stderr go to its log.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
import typer

from kvfs import config
from kvfs.config import Settings
from kvfs.errors import ConfigError, KvfsError, UnavailableError, UsageError
from kvfs.mount import mountpoint, sockets
from kvfs.tools.tied import tied
from kvfs.tools.words import printable

READY = b"ready"
MAX_SENTENCE_BYTES = 4096  # a pipe takes as much in one piece, pipe(7)
LOG_MODE = 0o640


class Daemon(NamedTuple):
    """A daemon that came up. Attributes: notices: what it has to say of its start."""

    pid: int
    log_file: str
    notices: tuple[str, ...] = ()


class Report:
    """The daemon's end of the pipe; a context that passes on the sentence of an error that ends it.

    With `fd` None, in the foreground, nobody is told anything.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        if fd is not None:
            os.set_inheritable(fd, False)  # else the pipe would outlive us in a process that we start

    def ready(self, notices: Sequence[str] = ()) -> bool:
        """Say that the mount answers, and what is to be known of the start; False if nobody listens."""
        return self._say(b"\n".join([READY, *(notice.encode() for notice in notices)])[:MAX_SENTENCE_BYTES])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, KvfsError):
            self._say(str(error).encode()[:MAX_SENTENCE_BYTES])

    def _say(self, word: bytes) -> bool:
        if self._fd is None:
            return False
        with contextlib.suppress(BrokenPipeError):  # whoever started us may have been interrupted
            os.write(self._fd, word)
        os.close(self._fd)
        self._fd = None
        return True


def start(settings: Settings) -> Daemon:
    """Start a daemon and return when its mount answers.

    Ends the command, with the daemon's own sentence and exit code, if it does not come up; raises ConfigError if its
    log cannot be written. An interrupt ends the daemon as well.
    """
    if settings.log_file is None:
        _check_place(settings.socket_directory)
    log_file = settings.log_file or default_log_file(settings)
    settings = msgspec.structs.replace(settings, log_file=log_file)
    read_fd, write_fd = os.pipe()
    try:
        log_fd = _open_log(log_file)
        try:
            process = subprocess.Popen(
                _command(settings, write_fd),
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                pass_fds=[write_fd],
                start_new_session=True,
                cwd="/",
            )
        finally:
            os.close(log_fd)
            os.close(write_fd)
        with _ended_by_failure(process):
            notices = _await_ready(process, read_fd, settings)
    finally:
        os.close(read_fd)
    process.returncode = 0  # it is to outlive us: nobody waits for it, and nothing shall warn of that
    return Daemon(process.pid, log_file, notices)


def start_tied(settings: Settings, lock: str = "") -> subprocess.Popen[bytes]:
    """Start a daemon that ends with this process, however that ends, see `tied`; returns when its mount answers.

    Raises UsageError, with the daemon's own sentence, if it does not come up. An interrupt ends the daemon as well.
    """
    read_fd, write_fd = os.pipe()
    try:
        try:
            process = subprocess.Popen(
                tied(_command(settings, write_fd), signal.SIGTERM, lock),
                stdin=subprocess.DEVNULL,
                pass_fds=[write_fd],
                start_new_session=True,
            )
        finally:
            os.close(write_fd)
        with _ended_by_failure(process):
            word = os.read(read_fd, MAX_SENTENCE_BYTES)
            if word.partition(b"\n")[0] != READY:
                raise UsageError(word.decode(errors="replace") or f"the daemon on {settings.mountpoint} did not start")
    finally:
        os.close(read_fd)
    return process


@contextlib.contextmanager
def _ended_by_failure(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """What fails here, an interrupt too, ends the daemon."""
    try:
        yield
    except BaseException:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise


def _command(settings: Settings, report_fd: int) -> list[str]:
    return [sys.executable, "-m", "kvfs.tools.cli", "mount", *flags(settings), f"--report-fd={report_fd}"]


def _await_ready(process: subprocess.Popen[bytes], read_fd: int, settings: Settings) -> tuple[str, ...]:
    """What the daemon has to say of its start; ends the command if it did not come up."""
    word = os.read(read_fd, MAX_SENTENCE_BYTES)
    ready, *notices = word.split(b"\n")
    if ready != READY:
        code = process.wait()
        sentence = word.decode(errors="replace") or (
            f"the daemon ended with exit code {code} before the mount answered; see {settings.log_file}"
        )
        typer.echo(f"kvfs: {printable(sentence)}", err=True)
        raise typer.Exit(code if code > 0 else 1)
    if not mountpoint.answers(mountpoint.resolve(settings.mountpoint)):
        raise UnavailableError(f"{settings.mountpoint} is mounted but does not answer; see {settings.log_file}")
    return tuple(notice.decode(errors="replace") for notice in notices)


def flags(settings: Settings) -> list[str]:
    """The arguments of `kvfs mount` that lead to exactly these settings."""
    named = tomllib.loads(config.to_toml(settings))
    arguments = [named.pop("mountpoint")]
    for name, value in named.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            arguments += [f"--{flag}={each}" for each in (value if isinstance(value, list) else [value])]
    return arguments


def default_log_file(settings: Settings) -> str:
    """Where a background daemon logs unless told otherwise: beside the sockets, named like the mount."""
    name = settings.mountpoint.strip("/").replace("/", "-") or "root"
    end = os.fsencode(name)[-200:].decode(errors="ignore")  # a file's name has 255 bytes at most
    return str(Path(settings.socket_directory, f"{end}.log"))


def _check_place(socket_directory: str) -> None:
    """Before anything is written beside the sockets: others must not be able to put a file there in the place of ours."""
    try:
        sockets.make_parent(socket_directory)
    except OSError as error:
        raise ConfigError(f"cannot write the log in {socket_directory}: {error.strerror}") from error


def _open_log(path: str) -> int:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, LOG_MODE)
    except OSError as error:
        raise ConfigError(f"cannot write the log to {path}: {error.strerror}") from error
