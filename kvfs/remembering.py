"""What the policies have learned goes on over a restart: it stands in the index, as of ten minutes ago at worst.

Without an index, in a RAM cache, nothing is kept: there is nothing to go on with. What cannot be understood, of another
policy or a later version, is forgotten; it costs hits for a while, and no chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import trio

from kvfs.catalog import Chunk, ChunkTable
from kvfs.errors import UnavailableError, UsageError
from kvfs.index import Index
from kvfs.policies import Holding
from kvfs.residency import Residency

log = logging.getLogger(__name__)

_EVERY_S = 600.0
_AT_THE_END_S = 5.0


class Learnt(NamedTuple):
    """What stands in one index: by the policy of RAM, and of that volume."""

    ram: bytes | None
    nvme: bytes | None


def remembered(index: Index) -> Learnt:
    """What an index has. Raises sqlite3.Error."""
    return Learnt(index.learnt("ram"), index.learnt("nvme"))


def recall(residency: Residency, learnt: Sequence[Learnt]) -> None:
    """Let the policies go on where they were; called before any chunk came, when the namespaces are known.

    `learnt` has what stands in the index of each volume. What RAM's learned stands in all, and counts from the first.
    """
    _recall(residency, residency.ram.policy, next((each.ram for each in learnt if each.ram is not None), None))
    for stripe, each in zip(residency.nvme or (), learnt, strict=True):
        _recall(residency, stripe.tier.policy, each.nvme)


def _recall(residency: Residency, policy: Holding[Chunk], learnt: bytes | None) -> None:
    if learnt is None:
        return
    try:
        policy.recall(learnt, residency.catalog.tables.get)
    except UsageError as error:
        log.info("a policy begins anew: %s", error)


def remember(residency: Residency) -> None:
    """Have what was learned written with the next transaction of each index."""
    ram = residency.ram.policy.learnt(name_of)
    for stripe in residency.nvme or ():
        for tier, learnt in (("ram", ram), ("nvme", stripe.tier.policy.learnt(name_of))):
            if learnt is not None:
                stripe.commits.learnt(tier, learnt)


async def keep(residency: Residency) -> None:
    """Do so every ten minutes, for ever."""
    while True:
        await trio.sleep(_EVERY_S)
        remember(residency)


async def at_the_end(residency: Residency) -> None:
    """Do so, and wait until it is durable, where an index can be written; for a few seconds."""
    remember(residency)
    with trio.move_on_after(_AT_THE_END_S):
        for stripe in residency.nvme or ():
            try:
                await stripe.commits.flush()
            except UnavailableError as error:
                log.warning("what the policies have learned is lost: %s", error)


def name_of(table: Hashable) -> str:
    """A namespace as it is called where what was learned is written down."""
    assert isinstance(table, ChunkTable)
    return table.directory
