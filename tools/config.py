"""`kvfs config`: the settings in force, each with what it means, as a file that `kvfs mount --config` takes."""

from __future__ import annotations

import inspect
import json
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from kvfs import config
from kvfs.config import Settings
from kvfs.errors import ConfigError
from kvfs.mount import mountpoint as mountpoints
from kvfs.tools import mount as mount_command
from kvfs.tools import mounted

EXAMPLES = """
kvfs config /mnt/kvfs

With what settings the cache on /mnt/kvfs runs.

kvfs config /mnt/kvfs --ram 4GiB --nvme /data/kvfs:64GiB > kvfs.toml

Checks these settings, and writes them to a file, with the defaults of all others and a comment each. If a cache is mounted
there, name no flags to see its settings.

kvfs config --config kvfs.toml --json

What is in force with this file, for programs.
"""

_NOT_SETTINGS = ("background", "report_fd")
_WIDTH = 100


def _show(config_file: str | None, as_json: bool, given: dict[str, object]) -> None:
    """Show settings: those of a mounted cache, or what flags and file come to."""
    named = given.get("mountpoint")
    others = {name: value for name, value in given.items() if name != "mountpoint" and value not in (None, [])}
    if isinstance(named, str) and config_file is None and not others and _is_mounted(named):
        text = mounted.ask(named, lambda _: Path(mounted.find(named), ".kvfs/config.toml").read_text())
    else:
        text = config.to_toml(config.load(config_file, given))
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the settings of {named} cannot be understood: {error}") from error
    typer.echo(json.dumps(values, indent=2, ensure_ascii=False) if as_json else commented(text, values), nl=as_json)


def _is_mounted(path: str) -> bool:
    mount = mountpoints.mount_at(mountpoints.resolve(path))
    return mount is not None and mount.is_ours


def commented(text: str, values: dict[str, Any]) -> str:
    """Settings in TOML, a line each, with a comment over each; those that are not set are comments."""
    lines = {line.split(" = ", 1)[0]: line for line in text.splitlines()}
    parts, defaults = [], _defaults()
    for name, comment in comments().items():
        line = lines.pop(name, None) or f"# {name} is not set"
        is_default = defaults.get(name, ...) == values.get(name)
        comment += " The default." if is_default and name in values else ""
        parts.append("\n".join([*(f"# {row}" for row in textwrap.wrap(comment, _WIDTH)), line]))
    parts += lines.values()  # of a newer daemon
    return "\n\n".join(parts) + "\n"


def comments() -> dict[str, str]:
    """What each setting means, as `kvfs mount --help` says it."""
    hints = get_type_hints(mount_command.mount, include_extras=True)
    return {
        name: hints[name].__metadata__[0].help
        for name in inspect.signature(mount_command.mount).parameters
        if name in config.NAMES
    }


def _defaults() -> dict[str, object]:
    """What holds where nothing is said."""
    least = Settings(mountpoint="/mnt", ram_bytes=config.MIN_TIER_BYTES)
    return {
        name: value for name, value in tomllib.loads(config.to_toml(least)).items() if name not in ("mountpoint", "ram")
    }


def _like_mount() -> Callable[..., None]:
    """The command, which takes the settings that `kvfs mount` takes."""
    signature = inspect.signature(mount_command.mount)
    hints = get_type_hints(mount_command.mount, include_extras=True)
    parameters = [parameter for name, parameter in signature.parameters.items() if name not in _NOT_SETTINGS]
    json_hint = Annotated[bool, typer.Option("--json", help="For programs.")]
    as_json = inspect.Parameter("as_json", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=False, annotation=json_hint)

    def show(**given: Any) -> None:
        file, is_json = given.pop("config_file"), given.pop("as_json")
        _show(file, is_json, given)

    show.__doc__ = _show.__doc__
    show.__dict__["__signature__"] = signature.replace(
        parameters=[*(each.replace(annotation=hints[each.name]) for each in parameters), as_json]
    )
    show.__annotations__ = {each.name: hints[each.name] for each in parameters} | {"as_json": json_hint, "return": None}
    return show


show_settings = _like_mount()
