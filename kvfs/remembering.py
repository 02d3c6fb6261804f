"""What goes on over a restart: what the policies have learned, and ghosts. It stands in the index.

It is as of ten minutes ago at worst. Without an index, in a RAM cache, nothing is kept: there is nothing to go on with.
What cannot be understood, of another policy or a later version, is forgotten; it costs hits for a while, and no chunk.

Of ghosts the youngest are kept, bounded (see `packed_ghosts`). After an end in order they are all there is to know. After
any other, what went since they were written is not among them, and what is may have come back and gone again: they count as
uses then, and `kvfs why` begins anew. So a mark says that the end was in order, and a start takes it away before anything
can go.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import trio

from kvfs import packed_ghosts
from kvfs.catalog import Chunk, ChunkTable
from kvfs.errors import UnavailableError, UsageError
from kvfs.index import Index
from kvfs.packed_ghosts import Packed
from kvfs.policies import Holding
from kvfs.residency import Residency

log = logging.getLogger(__name__)

_EVERY_S = 600.0
_AT_THE_END_S = 5.0
_GHOSTS, _IN_ORDER = "all tiers: ghosts", "all tiers: ghosts as of an end in order"


class Learnt(NamedTuple):
    """What stands in one index: by the policy of RAM, and of that volume; the ghosts, and when they were the last ones."""

    ram: bytes | None
    nvme: bytes | None
    ghosts: bytes | None = None
    in_order: bytes | None = None


def remembered(index: Index) -> Learnt:
    """What an index has. Raises sqlite3.Error."""
    return Learnt(*(index.learnt(name) for name in ("ram", "nvme", _GHOSTS, _IN_ORDER)))


def recall(residency: Residency, learnt: Sequence[Learnt]) -> None:
    """Let policies and ghosts go on where they were; called before any chunk came, when the namespaces are known.

    `learnt` has what stands in the index of each volume. What RAM's learned stands in all, and counts from the first; of
    the ghosts those count that were written last.
    """
    _recall(residency, residency.ram.policy, next((each.ram for each in learnt if each.ram is not None), None))
    for stripe, each in zip(residency.nvme or (), learnt, strict=True):
        _recall(residency, stripe.tier.policy, each.nvme)
        stripe.commits.learnt(_IN_ORDER, b"")  # durable before anything goes: the start waits for a transaction
    found = [(packed, each.in_order) for each in learnt if (packed := _unpacked(each.ghosts)) is not None]
    if found:
        packed, in_order = max(found, key=lambda each: each[0].written_ns)
        _recall_ghosts(residency, packed, is_in_order=in_order == _mark(packed.written_ns))


def _recall(residency: Residency, policy: Holding[Chunk], learnt: bytes | None) -> None:
    if learnt is None:
        return
    try:
        policy.recall(learnt, residency.catalog.tables.get)
    except UsageError as error:
        log.info("a policy begins anew: %s", error)


def _unpacked(raw: bytes | None) -> Packed | None:
    if raw is None:
        return None
    try:
        return packed_ghosts.unpack(raw)
    except UsageError as error:
        log.info("what was remembered of chunks that went is forgotten: %s", error)
        return None


def _recall_ghosts(residency: Residency, packed: Packed, *, is_in_order: bool) -> None:
    ghosts = residency.ghosts
    ghosts.restore(packed.buckets)
    if is_in_order:
        ghosts.forgotten_ns = packed.forgotten_ns
    else:
        ghosts.uncertain_ns = ghosts.forgotten_ns  # which is when this daemon started


def _mark(written_ns: int) -> bytes:
    return str(written_ns).encode()


def remember(residency: Residency) -> None:
    """Have what was learned written with the next transaction of each index."""
    ram = residency.ram.policy.learnt(name_of)
    for stripe in residency.nvme or ():
        for tier, learnt in (("ram", ram), ("nvme", stripe.tier.policy.learnt(name_of))):
            if learnt is not None:
                stripe.commits.learnt(tier, learnt)


async def remember_ghosts(residency: Residency, now_ns: int) -> None:
    """The same for the ghosts, a step at a time."""
    for raw in packed_ghosts.pack(residency.ghosts, now_ns):
        if raw is None:
            await trio.lowlevel.checkpoint()
            continue
        for stripe in residency.nvme or ():
            stripe.commits.learnt(_GHOSTS, raw)


async def keep(residency: Residency) -> None:
    """Do so every ten minutes, for ever."""
    while residency.nvme is not None:
        await trio.sleep(_EVERY_S)
        remember(residency)
        await remember_ghosts(residency, residency.now_ns())


async def at_the_end(residency: Residency) -> None:
    """Do so, and wait until it is durable, where an index can be written; for a few seconds. Nothing may go any more."""
    remember(residency)
    with trio.move_on_after(_AT_THE_END_S):
        now_ns = residency.now_ns()
        await remember_ghosts(residency, now_ns)
        for stripe in residency.nvme or ():
            stripe.commits.learnt(_IN_ORDER, _mark(now_ns))
        for stripe in residency.nvme or ():
            try:
                await stripe.commits.flush()
            except UnavailableError as error:
                log.warning("what the policies have learned is lost: %s", error)


def name_of(table: Hashable) -> str:
    """A namespace as it is called where what was learned is written down."""
    assert isinstance(table, ChunkTable)
    return table.directory
