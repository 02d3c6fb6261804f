"""What the policies have learned goes on over a restart: it stands in the index, as of ten minutes ago at worst.

Without an index, in a RAM cache, nothing is kept: there is nothing to go on with. What cannot be understood, of another
policy or a later version, is forgotten; it costs hits for a while, and no chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator

import trio

from kvfs.catalog import Chunk, ChunkTable
from kvfs.commits import Commits
from kvfs.errors import UnavailableError, UsageError
from kvfs.index import Index
from kvfs.policies import Holding
from kvfs.residency import Residency

log = logging.getLogger(__name__)

_EVERY_S = 600.0
_AT_THE_END_S = 5.0


def recall(residency: Residency, index: Index) -> None:
    """Let the policies go on where they were; called before any chunk came, when the namespaces are known."""
    for tier, policy in _policies(residency):
        learnt = index.learnt(tier)
        if learnt is None:
            continue
        try:
            policy.recall(learnt, residency.catalog.tables.get)
        except UsageError as error:
            log.info("the policy of %s begins anew: %s", tier, error)


def remember(residency: Residency, commits: Commits) -> None:
    """Have what was learned written with the next transaction."""
    for tier, policy in _policies(residency):
        learnt = policy.learnt(_name)
        if learnt is not None:
            commits.learnt(tier, learnt)


async def keep(residency: Residency, commits: Commits) -> None:
    """Do so every ten minutes, for ever."""
    while True:
        await trio.sleep(_EVERY_S)
        remember(residency, commits)


async def at_the_end(residency: Residency, commits: Commits) -> None:
    """Do so, and wait until it is durable, if the index can be written; for a few seconds."""
    remember(residency, commits)
    with trio.move_on_after(_AT_THE_END_S):
        try:
            await commits.flush()
        except UnavailableError as error:
            log.warning("what the policies have learned is lost: %s", error)


def _policies(residency: Residency) -> Iterator[tuple[str, Holding[Chunk]]]:
    yield "ram", residency.ram.policy
    if residency.nvme is not None:
        yield "nvme", residency.nvme.policy


def _name(table: Hashable) -> str:
    assert isinstance(table, ChunkTable)
    return table.directory
