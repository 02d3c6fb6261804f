"""`kvfs hint`: tell the cache by hand what it cannot know: what is over, what is needed soon, what is of a kind.

It sets the attributes that `setfattr` sets too (see `kvfs.mount.hint_xattrs`), and reads back what is true then.
"""

from __future__ import annotations

import errno
import os
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvfs.durations import parse_duration
from kvfs.errors import UsageError
from kvfs.hints import Said
from kvfs.policies import Holding, named
from kvfs.tools import mounted

EXAMPLES = """
kvfs hint /mnt/kvfs/NAMESPACE/prefixes/KEY --closed

That conversation is over: it goes first when room is needed, and what it has in common with others stays.

kvfs hint /mnt/kvfs/NAMESPACE/chunks/KEY.safetensors --expect 2m

The chunk, and what it is built on, stays two minutes, as long as others of its namespace can go instead.

kvfs hint /mnt/kvfs/NAMESPACE/prefixes/KEY --class 3

All of it is of kind 3, whatever that means to you: when it is used again is learned apart from other kinds.

getfattr -d /mnt/kvfs/NAMESPACE/chunks/KEY.safetensors

What was said of a chunk, among its facts. Engines say it themselves: kv_transfer_params of a vLLM request, generate().
"""
_PREFIX = "user.kvfs."


@dataclass(frozen=True)
class Hinted:
    """What is true of a path now. `--json` shows it: class_ is 0, expect None and closed False if nothing was said."""

    path: str
    class_: int
    expect: str | None
    closed: bool


def hint(
    paths: Annotated[
        list[str], typer.Argument(metavar="PREFIX|FILE...", help="Directories below prefixes, or chunks.")
    ],
    closed: Annotated[bool, typer.Option("--closed", help="It is not used again, nor what is built on it.")] = False,
    expect: Annotated[
        str | None, typer.Option(metavar="TIME", help="It is used within this time: 90s, 2m, at most 1d.")
    ] = None,
    class_: Annotated[
        int | None, typer.Option("--class", metavar="N", help="What kind it is, a number of yours from 0 to 255.")
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Take back all that was said.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="What is true of each path now, for programs.")] = False,
) -> None:
    """Say what the cache cannot know of prefixes and chunks. It changes which chunks are evicted, and nothing else.

    A use ends --closed and --expect; all hints end with the daemon. A wrong one costs chunks of its own namespace.
    """
    wanted = _wanted(closed, expect, class_, clear)
    paths = [path if os.path.lexists(path) else path.rstrip("*") for path in paths]  # as `kvfs ls` shows them
    places = [(path, _mount_of(path)) for path in paths]
    found = [_ask(mount, path, wanted) for path, mount in places]
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        for each in found:
            typer.echo(f"{each.path}: {_sentence(each)}")
    for mount in sorted({mount for _, mount in places}):
        policy, unheeded = _unheeded(mount, wanted)
        if unheeded and not clear:
            typer.echo(f"kvfs: the policy of {mount}, {policy}, does not heed {' and '.join(unheeded)}", err=True)


def _wanted(closed: bool, expect: str | None, class_: int | None, clear: bool) -> dict[str, str | None]:
    """The attributes to set, or to remove (None). Raises UsageError."""
    said = Said(class_, None if expect is None else parse_duration(expect, "--expect"), closed or None)
    if clear:
        if said != Said():
            raise UsageError("--clear takes back what was said: give it alone")
        return {"class": None, "expect": None, "closed": None}
    if said == Said():
        raise UsageError("say what is known: --closed, --expect 2m, --class 3; or --clear")
    said.check()
    values = {"class": None if class_ is None else str(class_), "expect": expect, "closed": "1" if closed else None}
    return {name: value for name, value in values.items() if value is not None}


def _mount_of(path: str) -> str:
    place = mounted.inside(os.path.abspath(path))
    if place is None:
        raise UsageError(f"{path} lies in no mount of kvfs: name a chunk file, or a directory below prefixes")
    return place[0]


def _ask(mount: str, path: str, wanted: dict[str, str | None]) -> Hinted:
    return mounted.ask(mount, lambda _: _set(path, wanted))


def _set(path: str, wanted: dict[str, str | None]) -> Hinted:
    for name, value in wanted.items():
        try:
            if value is None:
                os.removexattr(path, _PREFIX + name)
            else:
                os.setxattr(path, _PREFIX + name, value.encode())
        except OSError as error:
            if error.errno == errno.ENODATA:
                continue
            raise _mistake(path, error) from error
    return Hinted(path, int(_get(path, "class") or 0), _get(path, "expect"), _get(path, "closed") == "1")


def _mistake(path: str, error: OSError) -> Exception:
    if error.errno == errno.ENOTSUP:
        return UsageError(f"{path} is neither a chunk nor a directory below prefixes")
    if error.errno == errno.ENOENT:
        return UsageError(f"there is no {path}; `kvfs ls` shows what there is")
    if error.errno in (errno.EACCES, errno.EPERM):
        return UsageError(f"you may not say anything of {path}: ask root, or whoever mounted it")
    return error


def _get(path: str, name: str) -> str | None:
    try:
        return os.getxattr(path, _PREFIX + name).decode()
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise _mistake(path, error) from error
        return None


def _sentence(hinted: Hinted) -> str:
    parts = ["closed"] if hinted.closed else []
    parts += [f"expected within {hinted.expect}"] if hinted.expect is not None else []
    parts += [f"class {hinted.class_}"] if hinted.class_ else []
    return ", ".join(parts) or "nothing is said of it"


def _unheeded(mount: str, wanted: dict[str, str | None]) -> tuple[str, list[str]]:
    """The policy of a mount, and what of this has no effect under it; nothing of a user's own, which is not asked."""
    text = mounted.ask(mount, lambda _: Path(mount, ".kvfs/config.toml").read_text("utf-8"))
    policy = str(tomllib.loads(text).get("policy", ""))
    if policy not in named.NAMES:
        return policy, []
    heeds = Holding(named.maker(policy)(time.monotonic)).heeds
    return policy, [name for name in wanted if name not in heeds]
