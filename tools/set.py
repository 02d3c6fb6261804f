"""`kvfs set`: change a setting of a mounted cache. That is the policy; all others hold from start to end."""

from __future__ import annotations

import errno
import os
import time
from typing import Annotated, Any

import typer

from kvfs.config import NAMES, POLICIES
from kvfs.errors import KvfsError, UsageError
from kvfs.policy_change import check
from kvfs.tools import mounted
from kvfs.tools.progress import STEP_DEADLINE_S

EXAMPLES = f"""
kvfs set policy=lru /mnt/kvfs

From now on what was used longest ago goes first, in RAM and on NVMe. No chunk is lost by it; what is pinned, leased or limited
stays so, and the new policy begins with the order of last use. It holds until the daemon ends: `--policy`, or the file of settings,
says what the next one begins with.

Policies: {", ".join(POLICIES)}. `kvfs simulate` tells them apart. `kvfs status` and `kvfs config` show the one in force.
"""

POLICY = "policy"
_ATTRIBUTE = "user.kvfs.policy"
_LOOK_EVERY_S = 0.2


def set_setting(
    setting: Annotated[str, typer.Argument(metavar="policy=NAME", help="The setting, and what it is to be.")],
    mountpoint: Annotated[str, typer.Argument(help="Where the cache is mounted.")],
) -> None:
    """Change the policy of a mounted cache.

    Root, or whoever mounted it, may.
    """
    if _is_setting(mountpoint) and not _is_setting(setting):
        setting, mountpoint = mountpoint, setting
    name, equals, value = setting.partition("=")
    if name not in NAMES:
        raise UsageError(f"there is no setting {name!r}; {POLICY} can be changed while the cache is mounted")
    if name != POLICY:
        raise UsageError(
            f"{name} holds from start to end: unmount, and mount with another; only {POLICY} can be changed"
        )
    if not equals or not value:
        raise UsageError(f"say which: kvfs set {POLICY}=NAME MOUNTPOINT, one of {', '.join(POLICIES)}")
    check(value)
    path = mounted.find(mountpoint)
    before = mounted.read_status(path).get(POLICY)
    if before is None:
        raise UsageError(f"the daemon of {path} is of an earlier version: its policy holds until it ends")
    if before != value:
        mounted.ask(path, lambda _: _set(path, value), STEP_DEADLINE_S)
        _wait(path, value)
    typer.echo(f"kvfs: the policy of {path} is {value}" + (" already" if before == value else f", and was {before}"))


def _is_setting(text: str) -> bool:
    return text.partition("=")[0] in NAMES


def _set(path: str, policy: str) -> None:
    try:
        os.setxattr(path, _ATTRIBUTE, policy.encode())
    except PermissionError as error:
        raise UsageError(f"you may not change settings of {path}: ask root, or whoever mounted it") from error
    except OSError as error:
        if error.errno != errno.ETIMEDOUT:  # a million chunks on a busy machine: it goes on
            raise


def _wait(path: str, policy: str) -> None:
    """Return when the policy is in force."""
    while (status := mounted.read_status(path)).get(POLICY) != policy:
        if not _is_coming(status):
            raise KvfsError(
                f"the policy of {path} is {status.get(POLICY)}: another was set meanwhile, or the log says why"
            )
        time.sleep(_LOOK_EVERY_S)


def _is_coming(status: dict[str, Any]) -> bool:
    return bool(status.get("next_policy"))
