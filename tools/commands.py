"""The `kvfs` command: its subcommands, and what becomes of errors.

a mistyped command  one sentence on stderr, exit code 2
UsageError          one sentence on stderr, exit code 2
other KvfsError     one sentence on stderr, exit code 1
Ctrl-C              exit code 130
any other exception a defect: the traceback is shown
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Annotated, Any

import typer

import kvfs
from kvfs.errors import KvfsError, UsageError
from kvfs.tools.cli import EXIT_INTERRUPTED
from kvfs.tools.words import printable

# click's ClickException: typer brings click, or a copy of it, and shows neither.
_Mistyped: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
EXIT_FAILURE = 1
EXIT_USAGE = 2

app = typer.Typer(
    name="kvfs",
    rich_markup_mode=None,  # boxes cut the names of options on 80 columns
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def exit_code(error: KvfsError) -> int:
    """The exit code for an error: whose fault it was."""
    return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILURE


def tells_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command end with one sentence and an exit code where it raises on purpose."""

    @functools.wraps(command)
    def told(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KvfsError as error:
            typer.echo(f"kvfs: {printable(str(error))}", err=True)
            raise typer.Exit(exit_code(error)) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(EXIT_INTERRUPTED) from error

    return told


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvfs {kvfs.__version__}")
        raise typer.Exit


@app.callback(epilog="Example: kvfs mount /mnt/kvfs --ram 4GiB --nvme /data/kvfs:64GiB")
def main_options(
    version: Annotated[
        bool, typer.Option("--version", help="Say which version this is.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Keep the KV cache of LLM inference engines in RAM and on NVMe, and show it as files.

    Engines are pointed at the mount; you look after it with ls, du, getfattr, cp and rm.
    """


# Of each command, in the order of --help: the module in kvfs.tools, its function, and the examples below its help.
COMMANDS = {
    "mount": ("mount", "mount", "EXAMPLES"),
    "umount": ("umount", "umount", "EXAMPLES"),
    "status": ("status", "status", "EXAMPLES"),
    "sync": ("sync", "sync", "EXAMPLES"),
    "ls": ("ls", "list_cache", "EXAMPLES"),
    "tree": ("tree", "tree", "EXAMPLES"),
    "stat": ("stat", "stat", "EXAMPLES"),
    "why": ("why", "why", "EXAMPLES"),
    "rm": ("rm", "remove", "EXAMPLES"),
    "pin": ("pin", "pin", "PIN_EXAMPLES"),
    "unpin": ("pin", "unpin", "UNPIN_EXAMPLES"),
    "hint": ("hint", "hint", "EXAMPLES"),
    "warm": ("warm", "warm", "EXAMPLES"),
    "quota": ("quota", "quota", "EXAMPLES"),
    "set": ("set", "set_setting", "EXAMPLES"),
    "verify": ("verify", "verify", "EXAMPLES"),
    "doctor": ("doctor.command", "doctor", "EXAMPLES"),
    "config": ("config", "show_settings", "EXAMPLES"),
    "format": ("format", "make_volume", "EXAMPLES"),
    "fsck": ("fsck", "fsck", "EXAMPLES"),
    "destroy": ("destroy", "destroy", "EXAMPLES"),
    "export": ("export", "export", "EXAMPLES"),
    "import": ("import_", "import_", "EXAMPLES"),
    "simulate": ("simulate.command", "simulate", "EXAMPLES"),
    "record": ("record", "record", "EXAMPLES"),
    "bench": ("bench.command", "bench", "EXAMPLES"),
}
_BELOW = {
    "bench": {
        "vllm": ("bench_vllm.command", "bench_vllm", "EXAMPLES"),
        "peers": ("bench_peers.command", "bench_peers", "EXAMPLES"),
        "million": ("bench.million", "bench_million", "EXAMPLES"),
    }
}
"""Commands of two words, by the first, which is a command as well."""


def _register(arguments: list[str]) -> None:
    """Make the command known that is called, or all of them: most of what a short one would take is imports of others."""
    wanted = [name for name in arguments[:1] if name in COMMANDS]
    for name in wanted or COMMANDS:
        work, epilog = _found(*COMMANDS[name])
        if name in _BELOW:
            group = typer.Typer(rich_markup_mode=None, invoke_without_command=True)
            group.callback(epilog=epilog)(work)
            for below, place in _BELOW[name].items():
                work, epilog = _found(*place)
                group.command(below, epilog=epilog)(work)
            app.add_typer(group, name=name)
        else:
            app.command(name, epilog=epilog)(work)


def _found(place: str, function: str, examples: str) -> tuple[Callable[..., None], str]:
    """A command's function, made to tell errors, and its examples."""
    module = importlib.import_module(f"kvfs.tools.{place}")
    return tells_errors(getattr(module, function)), str(getattr(module, examples))


def run(arguments: list[str]) -> int:
    """Run a command line; its exit code."""
    if any(not argument or (argument.startswith("--") and argument.endswith("=")) for argument in arguments):
        # Whatever it is for: an option that takes a directory would take this one.
        typer.echo("kvfs: an argument is empty: was a variable meant that is not set?", err=True)
        return EXIT_USAGE
    _register(arguments)
    try:
        code = app(arguments or ["--help"], standalone_mode=False)
    except _Mistyped as error:
        typer.echo(f"kvfs: {printable(_sentence(error, arguments))}", err=True)
        code = EXIT_USAGE
    except typer.Abort:  # Ctrl-C at a question, or between two steps of typer's
        code = EXIT_INTERRUPTED
    return code or (0 if arguments else EXIT_USAGE)


def _sentence(error: Any, arguments: list[str]) -> str:
    """What is wrong with a command line, in one line, and where to look."""
    said = " ".join(error.format_message().split()).removesuffix(".")
    if getattr(error, "ctx", None) is not None:
        command = error.ctx.command_path
    else:  # an option without its argument
        command = f"kvfs {arguments[0]}" if arguments and arguments[0] in COMMANDS else "kvfs"
    return f"{said[:1].lower()}{said[1:]}; `{command} --help` shows what there is"
