"""The `kvfs` command: its subcommands, and what becomes of errors.

a mistyped command  one sentence on stderr, exit code 2
UsageError          one sentence on stderr, exit code 2
other KvfsError     one sentence on stderr, exit code 1
Ctrl-C              exit code 130
any other exception a defect: the traceback is shown
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

import typer

import kvfs
from kvfs.errors import KvfsError, UsageError
from kvfs.tools import (
    config,
    destroy,
    export,
    fsck,
    import_,
    ls,
    mount,
    pin,
    quota,
    rm,
    stat,
    status,
    tree,
    umount,
    verify,
)
from kvfs.tools import format as format_
from kvfs.tools.bench import command as bench
from kvfs.tools.bench_vllm import command as bench_vllm
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
            for value in kwargs.values():
                if value == "" or (isinstance(value, list) and "" in value):
                    raise UsageError("an argument is empty: was a variable meant that is not set?")
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


app.command("mount", epilog=mount.EXAMPLES)(tells_errors(mount.mount))
app.command("umount", epilog=umount.EXAMPLES)(tells_errors(umount.umount))
app.command("status", epilog=status.EXAMPLES)(tells_errors(status.status))
app.command("ls", epilog=ls.EXAMPLES)(tells_errors(ls.list_cache))
app.command("tree", epilog=tree.EXAMPLES)(tells_errors(tree.tree))
app.command("stat", epilog=stat.EXAMPLES)(tells_errors(stat.stat))
app.command("rm", epilog=rm.EXAMPLES)(tells_errors(rm.remove))
app.command("pin", epilog=pin.PIN_EXAMPLES)(tells_errors(pin.pin))
app.command("unpin", epilog=pin.UNPIN_EXAMPLES)(tells_errors(pin.unpin))
app.command("quota", epilog=quota.EXAMPLES)(tells_errors(quota.quota))
app.command("verify", epilog=verify.EXAMPLES)(tells_errors(verify.verify))
app.command("config", epilog=config.EXAMPLES)(tells_errors(config.show_settings))
app.command("format", epilog=format_.EXAMPLES)(tells_errors(format_.make_volume))
app.command("fsck", epilog=fsck.EXAMPLES)(tells_errors(fsck.fsck))
app.command("destroy", epilog=destroy.EXAMPLES)(tells_errors(destroy.destroy))
app.command("export", epilog=export.EXAMPLES)(tells_errors(export.export))
app.command("import", epilog=import_.EXAMPLES)(tells_errors(import_.import_))
benches = typer.Typer(rich_markup_mode=None, invoke_without_command=True)
benches.callback(epilog=bench.EXAMPLES)(tells_errors(bench.bench))
benches.command("vllm", epilog=bench_vllm.EXAMPLES)(tells_errors(bench_vllm.bench_vllm))
app.add_typer(benches, name="bench")


def run(arguments: list[str]) -> int:
    """Run a command line; its exit code."""
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
        names = {command.name for command in app.registered_commands}
        names |= {group.name for group in app.registered_groups}
        command = f"kvfs {arguments[0]}" if arguments and arguments[0] in names else "kvfs"
    return f"{said[:1].lower()}{said[1:]}; `{command} --help` shows what there is"
