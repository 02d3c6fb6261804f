"""`kvfs umount`: end a mount and wait until its daemon has written what is dirty and gone."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from kvfs import kept
from kvfs.config import format_size
from kvfs.errors import KvfsError, UnavailableError, UsageError
from kvfs.mount import last_words
from kvfs.mount import mountpoint as mountpoints
from kvfs.tools import daemons, mounted
from kvfs.tools.open_files import described, users_of

EXAMPLES = """
kvfs umount /mnt/kvfs

Returns when everything is on NVMe. What was a RAM cache is gone. What could not be written is said, with exit code 1.

kvfs umount /mnt/kvfs --force

Takes the mount away even if it is busy or its daemon is stopped, and does not wait.

kvfs umount /mnt/kvfs --keep-ram

For an upgrade or other settings: what is in RAM stays there, for the next `kvfs mount` at the same place on this boot.
`kvfs umount /mnt/kvfs` once more, with nothing mounted, gives that memory back; so it does after a daemon was killed. If it
has what could not be written to NVMe, that takes --force.
"""

PATIENCE_S = 1.0
_LOOK_EVERY_S = 0.5
_LAST_MOMENT_S = 5.0
_NOT_ALLOWED = "you may not unmount {}: ask root, or whoever mounted it"


def umount(
    mountpoint: Annotated[str, typer.Argument(help="Where the cache is mounted.")],
    force: Annotated[
        bool, typer.Option("--force", help="Do it even if the mount is busy or does not answer; do not wait.")
    ] = False,
    keep_ram: Annotated[
        bool,
        typer.Option("--keep-ram", help="Leave the RAM tier where it is, for the next mount (daemons of root only)."),
    ] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="How long to wait for the daemon to write and end.")
    ] = 300.0,
) -> None:
    """Unmount a cache; its daemon writes what is dirty and ends."""
    if force and keep_ram:
        raise UsageError(
            "--force does not wait for the daemon, so nothing says what it keeps: leave out one of the two"
        )
    try:
        path = mounted.find(mountpoint)
    except UsageError:
        path = mountpoints.resolve(mountpoint)
        if (daemon := daemons.of_mountpoint(path)) is not None and daemon.left is not None and not force:
            _await_ending(path, daemon, keep_ram=keep_ram, timeout_s=timeout_s)
        elif not _give_back(path, is_forced=force):
            raise
        return
    if force:
        _unmount(path, lazy=True)
        typer.echo(f"kvfs: {path} is unmounted; its daemon ends when the last file in it is closed")
        return
    try:
        pid = mounted.read_status(path).get("pid")
    except mounted.GoneError:
        _unmount(path, lazy=True)
        typer.echo(f"kvfs: {path} is unmounted; its daemon was dead already")
        _give_back(path, is_forced=True)
        return
    except UnavailableError as error:
        raise UnavailableError(f"{error}; `kvfs umount --force` takes the mount away all the same") from error
    if os.geteuid() and mounted.ask(path, lambda _: os.stat(path).st_uid) != os.geteuid():
        raise UsageError(_NOT_ALLOWED.format(path))
    daemon_fd = _open_process(pid)
    socket_path = mounted.ask(path, lambda _: os.readlink(os.path.join(path, ".kvfs/session")))
    place = _keep(path, socket_path) if keep_ram else None
    try:
        try:
            _unmount(path, lazy=False)
        except BaseException:
            if place is not None:
                (place / kept.KEEP).unlink(missing_ok=True)
            raise
        if daemon_fd is not None:
            _await_end(path, socket_path, daemon_fd, timeout_s)
    finally:
        if daemon_fd is not None:
            os.close(daemon_fd)
    _say_the_end(path, socket_path, place)


def _await_ending(path: str, daemon: daemons.Unmounted, *, keep_ram: bool, timeout_s: float) -> None:
    """One that was unmounted already, and still writes: wait for it, as whoever unmounted it does."""
    place = _keep(path, daemon.socket_path) if keep_ram else None
    daemon_fd = _open_process(daemon.pid)
    if daemon_fd is not None:
        typer.echo(f"kvfs: {daemon.sentence(path)}; waiting for it", err=True)
        try:
            _await_end(path, daemon.socket_path, daemon_fd, timeout_s)
        finally:
            os.close(daemon_fd)
    _say_the_end(path, daemon.socket_path, place)


def _say_the_end(path: str, socket_path: str, place: Path | None) -> None:
    """What became of a daemon that has ended. Raises KvfsError if it could not write everything."""
    unwritten = last_words.take(socket_path)
    if unwritten is not None and (place is None or not unwritten.is_kept):
        raise KvfsError(f"{path} is unmounted, but {unwritten.sentence}")
    typer.echo(f"kvfs: {path} is unmounted")
    if unwritten is not None:
        typer.echo(f"kvfs: {unwritten.sentence}")
    if place is not None and (facts := kept.read_facts(place)) is not None:
        typer.echo(f"kvfs: {facts.sentence}")


def _keep(path: str, socket_path: str) -> Path:
    """Tell the daemon to leave its arena; where that is. Raises UsageError if it has none that could stay."""
    place = Path(socket_path).with_name(kept.DIRECTORY_NAME)
    if not kept.is_mounted(place):
        raise UsageError(
            f'the RAM tier of {path} cannot outlive its daemon: that takes a daemon of root, and huge_pages not "never"'
        )
    try:
        (place / kept.KEEP).touch(mode=0o600)
    except OSError as error:
        raise KvfsError(f"cannot tell the daemon of {path} to keep its RAM tier: {error.strerror}") from error
    return place


def _give_back(path: str, *, is_forced: bool) -> bool:
    """Give back the memory that a daemon that is gone left for the next mount; returns whether there was any.

    Raises UsageError if that daemon said that it has what is nowhere else, unless `is_forced`.
    """
    found = False
    for place, facts in list(kept.kept_for(path)):
        unwritten = last_words.said(place.parent)
        if unwritten is not None and not is_forced:
            raise UsageError(
                f"the RAM kept for the next mount on {path} has {unwritten.what} that NVMe does not have: mount it again to "
                "have that written, or give it up with `kvfs umount --force`"
            )
        try:
            is_removed = kept.remove_if_left(place)
        except OSError as error:
            raise KvfsError(f"cannot give back the RAM tier that was kept in {place}: {error.strerror}") from error
        if is_removed:
            found = True
            typer.echo(
                f"kvfs: {format_size(facts.size_bytes)} of RAM, kept for the next mount on {path}, are given back"
            )
    return found


def _unmount(path: str, *, lazy: bool) -> None:
    if mountpoints.unmount(path, lazy=lazy):
        return
    if lazy:
        raise UsageError(_NOT_ALLOWED.format(path))
    users = users_of(path)
    who = f"in use by {described(users)}" if users else "something is open in it"
    raise UsageError(f"{path} is busy: {who}; end that, or use `kvfs umount --force`")


def _open_process(pid: object) -> int | None:
    """A descriptor that says when the daemon is gone; None if it is gone or not to be seen from here."""
    if not isinstance(pid, int):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _await_end(path: str, socket_path: str, daemon_fd: int, timeout_s: float) -> None:
    poll = select.poll()
    poll.register(daemon_fd, select.POLLIN)
    if poll.poll(min(PATIENCE_S, timeout_s) * 1000):
        return
    typer.echo(f"kvfs: {path} is unmounted; waiting for its daemon to write what is dirty", err=True)
    # A container that was started while the mount was there has a copy of it, and keeps the daemon from noticing.
    with contextlib.suppress(OSError):
        signal.pidfd_send_signal(daemon_fd, signal.SIGTERM)
    give_up_s = time.monotonic() + timeout_s - PATIENCE_S
    while not poll.poll(max(0.0, min(_LOOK_EVERY_S, give_up_s - time.monotonic())) * 1000):
        if last_words.has_said(socket_path):  # one whose device hangs may never be gone
            poll.poll(_LAST_MOMENT_S * 1000)
            return
        if time.monotonic() < give_up_s:
            continue
        raise KvfsError(f"the daemon of {path} has not ended after {timeout_s:g} s; its log says what it does")
