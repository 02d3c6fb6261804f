"""The policy in force, and how another one takes its place while the cache is in use: `kvfs set policy=…`.

Every tier gets a new order, made beside the one that goes on to say who goes (see `kvfs.policies.changing`): entries in
the order of their last use, what they are built on after them. No chunk is lost or moved by it; what is pinned, leased,
limited, or being copied in is no affair of a policy and stays so.

Concurrency: belongs to the event loop's thread. `change` works `_TURN_S` at a time and lets others go on in between; the
exchange itself happens between two awaits. The old order is taken apart in the same way: to free a million entries at
once takes as long as to free them one by one.
"""

from __future__ import annotations

import gc
import heapq
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import NamedTuple, TypeVar

import trio

from kvfs.catalog import NOWHERE, Chunk
from kvfs.config import NEEDS_THE_FUTURE, OPTIMUM
from kvfs.errors import UsageError
from kvfs.policies import Holding, Policy
from kvfs.policies import named as policies
from kvfs.policies.changing import Changing
from kvfs.policies.recovering import Recovering
from kvfs.remembering import name_of
from kvfs.residency import Residency
from kvfs.system import System

log = logging.getLogger(__name__)

_TURN_S = 0.001
_SHORT_TURN_S = 0.00025  # after a start somebody waits for the cache: a match among turns of a millisecond took 5 ms
_LOOK_EVERY = 8  # entries, at the clock
_RUN = 1024  # entries that are sorted at once
_PIECE = 4096
_TOLD_AT_ONCE = (
    8  # of what waits since the start: all parts of a policy's table grow at about the same time, 0.4 ms each
)
_NUM_PARTS = 256  # of a set of a million, which would stand still for 50 ms when it grows

T = TypeVar("T")


class PolicyInForce:
    """Who says what goes first.

    Attributes: name: of the policy; since_ns: the time, since the epoch, from which on it does; coming: the name of the
    one that is being made ready, "" for none.
    """

    def __init__(self, residency: Residency, name: str, system: System) -> None:
        self.name = name
        self.since_ns = system.time_ns()
        self.coming = ""
        self._residency = residency
        self._system = system
        self._lock = trio.Lock()
        self._learnt: dict[Holding[Chunk], bytes] = {}  # by the last one that learned in this tier

    async def change(self, name: str) -> None:
        """Evict by another built-in policy. Raises UsageError for one that there is not, or a user's class."""
        check(name)
        async with self._lock:
            if name == self.name:
                return
            self.coming = name
            try:
                await self._exchange(name)
            finally:
                self.coming = ""

    async def _exchange(self, name: str) -> None:
        residency, turns = self._residency, _Turns(self._system)
        orders = [residency.ram.policy, *(stripe.tier.policy for stripe in residency.nvme or ())]
        changing = [Changing(order.order, self._made(name, order)) for order in orders]
        with _without_collections():
            try:
                for order, both in zip(orders, changing, strict=True):
                    order.order = both
                seen, pieces = await _newest_first(residency, turns)
                await _carry(orders, changing, pieces, self._system.time_ns(), turns)
                late = _passed_over(residency, changing, seen)
                now_ns = self._system.time_ns()
                await _carry(orders, changing, [_Piece(late, [now_ns] * len(late))], now_ns, turns)
                await _tell(changing, turns)
                for order, both in zip(orders, changing, strict=True):
                    order.order = both.new
                before, self.name, self.since_ns = self.name, name, self._system.time_ns()
                self.coming = ""
            finally:
                for order, both in zip(orders, changing, strict=True):
                    if order.order is both:
                        order.order = both.old
            log.info("the policy is %s from now on, and was %s", name, before)
            residency.events.append("policy", policy=name, before=before)
            await _take_apart([both.old for both in changing], seen, pieces, turns)

    async def tell_recovered(self) -> None:
        """Tell the policies what the start has found and left waiting, a few at a time; nothing else is changed meanwhile."""
        async with self._lock:
            turns = _Turns(self._system, _SHORT_TURN_S)
            for stripe in self._residency.nvme or ():
                order = stripe.tier.policy
                waiting = order.order
                if not isinstance(waiting, Recovering):
                    continue
                with _without_collections():
                    while not waiting.is_over:
                        waiting.tell(_TOLD_AT_ONCE, self._system.time_ns())
                        await turns.rest()
                order.order = waiting.policy

    def _made(self, name: str, order: Holding[Chunk]) -> Policy[Chunk]:
        """The new policy of a tier; what was learned there before it goes on with, if it can."""
        learnt = order.learnt(name_of)
        if learnt is not None:
            self._learnt[order] = learnt
        made = policies.maker(name)(self._system.monotonic)
        recall = getattr(made, "recall", None)
        if recall is not None and order in self._learnt:
            try:
                recall(self._learnt[order], self._residency.catalog.tables.get)
            except UsageError as error:
                log.debug("%s begins anew: %s", name, error)
        return made


def check(name: str) -> None:
    """Raise UsageError for what cannot be set while the cache is mounted."""
    if name == OPTIMUM:
        raise UsageError(NEEDS_THE_FUTURE)
    if ":" in name:
        raise UsageError(f"a class of your own is taken at the start only: kvfs mount … --policy {name}")
    policies.maker(name)


class _Turns:
    """When others are to have their turn."""

    def __init__(self, system: System, turn_s: float = _TURN_S) -> None:
        self._system = system
        self._turn_s = turn_s
        self._ends_s = system.monotonic() + turn_s

    async def rest(self) -> None:
        """Let others go on, if it is time."""
        if self._system.monotonic() >= self._ends_s:
            await trio.lowlevel.checkpoint()
            self._ends_s = self._system.monotonic() + self._turn_s


class _Piece(NamedTuple):
    """A few thousand chunks: a list of a million is copied as it grows. And when each was last needed."""

    chunks: list[Chunk]
    needed_ns: list[int]


class _Seen:
    """A set of chunks."""

    def __init__(self) -> None:
        self._parts: list[set[Chunk]] = [set() for _ in range(_NUM_PARTS)]

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk in self._parts[hash(chunk) % _NUM_PARTS]

    def add(self, chunk: Chunk) -> None:
        """Put one in."""
        self._parts[hash(chunk) % _NUM_PARTS].add(chunk)

    async def clear(self, turns: _Turns) -> None:
        """Let go of all."""
        while self._parts:
            self._parts.pop()
            await turns.rest()


@contextmanager
def _without_collections() -> Iterator[None]:
    """A million small objects are made, none of them garbage; where what was there is frozen, they are afterwards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count():
            gc.freeze()
        if was_enabled:
            gc.enable()


async def _newest_first(residency: Residency, turns: _Turns) -> tuple[_Seen, list[_Piece]]:
    """All chunks by last use, each after what it is built on, as a set and in pieces."""
    runs: list[list[Chunk]] = []
    run: list[Chunk] = []
    for table in list(residency.catalog.tables.values()):
        waiting = list(table.prefixes.directories.values())
        while waiting:
            directory = waiting.pop()
            run.extend(directory.chunks())
            waiting.extend(directory.subdirectories.values())
            if len(run) >= _RUN:
                runs.append(_sorted(run))
                run = []
            await turns.rest()
    runs.append(_sorted(run))
    seen, pieces = _Seen(), [_Piece([], [])]
    merged = heapq.merge(*map(_taken, runs), key=attrgetter("last_used_ns"), reverse=True)
    for number, chunk in enumerate(merged):
        path: list[Chunk] = []
        each: Chunk | None = chunk
        while each is not None and each not in seen:
            seen.add(each)
            path.append(each)
            each = each.above()
        if len(pieces[-1].chunks) >= _PIECE:
            pieces.append(_Piece([], []))
        pieces[-1].chunks.extend(reversed(path))
        pieces[-1].needed_ns.extend([chunk.last_used_ns] * len(path))
        if path or not number % _LOOK_EVERY:
            await turns.rest()
    return seen, pieces


def _sorted(run: list[Chunk]) -> list[Chunk]:
    """The one used last at the end."""
    run.sort(key=attrgetter("last_used_ns"))
    return run


def _taken(run: list[T]) -> Iterator[T]:
    """What is in a list, from its end; the list is empty then."""
    while run:
        yield run.pop()


async def _carry(
    orders: Sequence[Holding[Chunk]],
    changing: Sequence[Changing[Chunk]],
    pieces: Sequence[_Piece],
    now_ns: int,
    turns: _Turns,
) -> None:
    """Carry over, from the end, what is in a tier and in its order."""
    last_ns = 0
    for chunks, needed_ns in reversed(pieces):
        for index in range(len(chunks) - 1, -1, -1):
            chunk = chunks[index]
            if not index % _LOOK_EVERY:
                await turns.rest()
            if chunk.is_removed:
                continue
            last_ns = max(last_ns, needed_ns[index])  # what was used meanwhile stands where it was, and has a note
            for number, offset in ((0, chunk.ram), (1 + chunk.volume, chunk.nvme)):
                if offset != NOWHERE and not orders[number].is_set_aside(chunk):
                    changing[number].carry(chunk, (now_ns - last_ns) / 1e9)


def _passed_over(residency: Residency, changing: Sequence[Changing[Chunk]], seen: _Seen) -> list[Chunk]:
    """What the walk through the directories did not meet, since it moved to one that was left behind; rarely anything."""
    if all(len(both.new) + both.num_to_come == len(both.old) for both in changing):
        return []
    return [chunk for chunk in residency.catalog.chunks() if chunk not in seen]


async def _tell(changing: Sequence[Changing[Chunk]], turns: _Turns) -> None:
    """Tell the new policies what happened meanwhile; when this returns, they know all."""
    while any(both.has_notes for both in changing):
        for both in changing:
            while both.has_notes:
                both.tell_one()
                await turns.rest()


async def _take_apart(olds: Sequence[Policy[Chunk]], seen: _Seen, pieces: list[_Piece], turns: _Turns) -> None:
    """Empty the old orders, what is built on after what it is built on: so nothing becomes a leaf of them."""
    await seen.clear(turns)
    for piece in _taken(pieces[::-1]):
        for number, chunk in enumerate(piece.chunks):
            for old in olds:
                old.remove(chunk)
            if not number % _LOOK_EVERY:
                await turns.rest()
