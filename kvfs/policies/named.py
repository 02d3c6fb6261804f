"""The policies by the names that settings know them by, and those of users by where they are imported from."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from kvfs.errors import UsageError
from kvfs.policies import arc, cost, fifo, learned, lfu, lru, s3fifo
from kvfs.policies.base import Clock, Policy
from kvfs.policies.checked import Checked

NAMES: dict[str, tuple[Callable[[Clock], Policy[Any]], str]] = {
    "learned": (learned.Learned, "learns when what is used again, leaf first; the default"),
    "lru": (lambda _: lru.LeafFirstLRU(), "least recently used, leaf first"),
    "arc": (lambda _: arc.ARC(), "used once and used often, with a border that adapts"),
    "s3fifo": (lambda _: s3fifo.S3FIFO(), "three queues; good where the cache is tiny"),
    "lfu": (lfu.LFU, "least frequently used; bad for agents"),
    "lfu-ttl": (lambda clock: lfu.LFU(clock, lfu.MAX_IDLE_S), "the same, but what is idle for 10 minutes goes first"),
    "cost": (
        cost.make,
        "as learned, weighed by the prefill that a byte saves: for models of unequal size in one cache",
    ),
    "fifo": (lambda _: fifo.FIFO(), "first in, first out: a yardstick"),
}
"""How each is made, and what it is, in half a line."""
BLIND_TO_USES = frozenset({"lru", "arc", "s3fifo", "fifo"})
"""Those that never look at `hits` and `returns`: a simulation need not remember them for what went."""
_METHODS = ("insert", "touch", "built_on", "bypassed", "remove", "victims", "__len__")


def maker(name: str) -> Callable[[Clock], Policy[Any]]:
    """What makes the policy of this name, one for each tier: one of `NAMES`, or ``package.module:Class``.

    A user's class is called with the clock. Raises UsageError.
    """
    if name in NAMES:
        return NAMES[name][0]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UsageError(f"there is no policy {name!r}: it must be one of {', '.join(NAMES)}, or package.module:Class")
    try:
        made = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever a user's module raises, it is his mistake
        raise UsageError(f"policy {name!r} cannot be imported: {error}") from error
    missing = [method for method in _METHODS if not callable(getattr(made, method, None))]
    if not callable(made) or missing:
        raise UsageError(f"{name!r} is no policy: it has no {' and no '.join(missing)} (see kvfs.policies.base.Policy)")

    def make(clock: Clock) -> Policy[Any]:
        try:
            policy: Policy[Any] = made(clock)
        except Exception as error:  # as above
            raise UsageError(f"policy {name!r} cannot be made: {error}") from error
        return Checked(policy, name)

    return make
