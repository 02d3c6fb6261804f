"""`kvfs mount`: be the daemon of a mount, or start one in the background (see `background`)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from logging.handlers import WatchedFileHandler
from typing import Annotated

import msgspec
import typer

from kvfs import config
from kvfs.config import Settings, exact_size, format_size
from kvfs.errors import ConfigError, KvfsError, UsageError
from kvfs.tools import background as in_background
from kvfs.tools.background import Report
from kvfs.tools.words import printable

EXAMPLES = """
kvfs mount /mnt/kvfs --ram 4GiB --nvme /data/kvfs:64GiB

RAM in front of a volume of 64 GiB in the directory /data/kvfs. Ctrl-C unmounts.

kvfs mount /mnt/kvfs --ram 4GiB --nvme /disk1/kvfs:1TiB --nvme /disk2/kvfs:1TiB

Two volumes, on a drive each: chunks are spread over both, and if one fails the other goes on.

kvfs mount /mnt/kvfs --ram 4GiB --background

A RAM cache. The command returns when the mount answers; `kvfs umount /mnt/kvfs` ends it.

kvfs mount --config /etc/kvfs.toml --ram 8GiB

Settings from a TOML file, with the names of the flags and underscores. Flags win.
"""

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

Flag = typer.Option
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Settings)}


def mount(
    mountpoint: Annotated[str | None, typer.Argument(help="Directory to mount on; made if it is missing.")] = None,
    ram: Annotated[str | None, Flag(metavar="SIZE", help="Size of the RAM tier, such as 4GiB.")] = None,
    nvme: Annotated[
        list[str] | None,
        Flag(
            metavar="DIR:SIZE",
            help="Directory and size of the volume on NVMe; again for each further volume, over which chunks are spread. "
            "The directory is made, its parents are not. None: a RAM cache.",
        ),
    ] = None,
    config_file: Annotated[
        str | None,
        Flag("--config", metavar="FILE", help="TOML file with settings named like these flags, with underscores."),
    ] = None,
    background: Annotated[bool, Flag("--background", help="Return once the mount answers.")] = False,
    allow_other: Annotated[
        bool | None,
        Flag(
            "--allow-other/--no-allow-other",
            show_default="no-allow-other",
            help="Let other users in as far as modes allow: members of the daemon's group may read and use the cache.",
        ),
    ] = None,
    access: Annotated[
        str | None,
        Flag(
            metavar="isolated|trusted",
            show_default=str(_DEFAULTS["access"]),
            help="trusted: engines of your own user store in place, one copy less; none can be kept from the others.",
        ),
    ] = None,
    huge_pages: Annotated[
        str | None,
        Flag(
            metavar="auto|never",
            show_default=str(_DEFAULTS["huge_pages"]),
            help="Whether RAM comes in huge pages where possible.",
        ),
    ] = None,
    window: Annotated[
        str | None,
        Flag(
            metavar="SIZE",
            show_default=exact_size(_DEFAULTS["window_bytes"]),
            help="Most memory one engine may use to hand over chunks.",
        ),
    ] = None,
    io_threads: Annotated[
        int | None,
        Flag(
            metavar="N",
            show_default=str(_DEFAULTS["io_threads"]),
            help="Threads that read and write a volume, for each.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        Flag(
            metavar="NAME",
            show_default=str(_DEFAULTS["policy"]),
            help="Who goes first when a tier is full: "
            + ", ".join(config.POLICIES)
            + ", or package.module:Class. `kvfs simulate` tells them apart, `kvfs set` changes it while mounted.",
        ),
    ] = None,
    admission: Annotated[
        str | None,
        Flag(
            metavar="always|second-use",
            show_default=str(_DEFAULTS["admission"]),
            help="Which chunks are written to NVMe; the rest is in RAM only, until it is used again.",
        ),
    ] = None,
    write_budget: Annotated[
        str | None,
        Flag(metavar="SIZE", show_default="no bound", help="Most that is written to NVMe a day (UTC), such as 500GiB."),
    ] = None,
    socket_directory: Annotated[
        str | None,
        Flag(metavar="DIR", show_default=config.default_socket_directory(), help="Where the sockets for engines lie."),
    ] = None,
    log_level: Annotated[
        str | None,
        Flag(metavar="LEVEL", show_default=str(_DEFAULTS["log_level"]), help="debug, info, warning or error."),
    ] = None,
    log_file: Annotated[
        str | None,
        Flag(
            metavar="FILE",
            show_default="stderr; with --background beside the sockets",
            help="Where to log.",
        ),
    ] = None,
    report_fd: Annotated[int | None, Flag(hidden=True)] = None,
) -> None:
    """Mount a cache and serve it until Ctrl-C or `kvfs umount`."""
    with Report(report_fd) as report:
        settings = config.load(
            config_file,
            {
                "mountpoint": mountpoint, "ram": ram, "nvme": nvme or None, "allow_other": allow_other,
                "access": access, "huge_pages": huge_pages, "window": window, "io_threads": io_threads,
                "policy": policy, "admission": admission, "write_budget": write_budget,
                "socket_directory": socket_directory, "log_level": log_level, "log_file": log_file,
            },
        )  # fmt: skip
        if background:
            daemon = in_background.start(settings)
            typer.echo(f"kvfs: mounted on {settings.mountpoint}, {describe(settings)}")
            typer.echo(f"kvfs: process {daemon.pid}, log in {daemon.log_file}")
            _tell(daemon.notices)
        else:
            run(settings, report)


def _tell(notices: Sequence[str]) -> None:
    for notice in notices:
        typer.echo(f"kvfs: {printable(notice)}", err=True)


def describe(settings: Settings) -> str:
    """The tiers in half a sentence."""
    ram = f"{format_size(settings.ram_bytes)} of RAM"
    volumes = [f"{format_size(each.size_bytes)} in {each.directory}" for each in settings.nvme]
    return " and ".join([ram, *volumes])


def run(settings: Settings, report: Report) -> None:
    """Be the daemon. Returns when the mount has ended and everything is written; raises what the daemon raises."""
    from kvfs.mount import daemon

    configure_logging(settings)

    is_up = False

    def ready(notices: Sequence[str]) -> None:
        nonlocal is_up
        is_up = True
        if not report.ready(notices):
            typer.echo(f"kvfs: mounted on {settings.mountpoint}, {describe(settings)}; Ctrl-C unmounts", err=True)
            if settings.log_file is not None:  # else the log has said it here
                _tell(notices)

    try:
        daemon.run(settings, ready)
    except BaseExceptionGroup as group:
        raise _sole_error(group) from group
    except OSError as error:
        if is_up:
            raise
        logging.getLogger(__name__).debug("the start failed", exc_info=error)
        where = f" ({error.filename})" if error.filename else ""
        raise UsageError(f"cannot mount on {settings.mountpoint}: {error.strerror or error}{where}") from error


def _sole_error(group: BaseExceptionGroup) -> BaseException:
    """The error in a group that nurseries wrapped around it, if it is only one and raised on purpose."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error if isinstance(error, KvfsError | KeyboardInterrupt) else group


def configure_logging(settings: Settings) -> None:
    """Send log records to stderr or the log file; raises ConfigError if that cannot be written.

    The file is opened anew when it was moved away, so that logrotate needs nothing special.
    """
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if settings.log_file is not None:
        try:
            handler = WatchedFileHandler(settings.log_file)
        except OSError as error:
            raise ConfigError(f"cannot write the log to {settings.log_file}: {error.strerror}") from error
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
