"""Heeding hints: what was said of chunks stands in the chunks, and the policies of all tiers hear of it.

What the hints are is in `kvfs.hints`. They live as long as the chunk and the daemon.

Concurrency: belongs to the event loop's thread. Only `give` and `set_all` wait, so that others get their turn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from math import inf

import trio

from kvfs.catalog import Chunk, ChunkTable
from kvfs.hints import Said
from kvfs.keys import Key
from kvfs.metrics import Counters
from kvfs.policies import Clock, Holding
from kvfs.policies.hint import NOTHING, Hint
from kvfs.prefixes import PrefixDirectory

MAX_EXPECTED = 4096
"""So many chunks may be expected of a namespace at a time."""

_PURGE_EVERY_S = 1.0
_MAX_BRANCHES = 1024  # of a directory: with more of them what they hang on is taken to be in use
_AT_ONCE = 256  # chunks, some 0.3 ms


LookBelow = Callable[[Chunk], Collection[Chunk] | None]
"""Gives what is built on a chunk directly; None: too much to look at."""


class Hints:
    """All hints of a store, which stand in the chunks themselves. `policies` are those of all tiers."""

    def __init__(
        self,
        policies: Sequence[Holding[Chunk]],
        counters: Counters,
        now_s: Clock,
        look_below: Callable[[], LookBelow] | None = None,
    ) -> None:
        self._policies = policies
        self._counters = counters
        self._now_s = now_s
        self._look_below = look_below if look_below is not None else Below
        self._of_class: dict[int, Hint] = {0: NOTHING}  # shared by a million chunks
        self._expected: dict[ChunkTable, dict[Chunk, float]] = {}
        self._purged_at_s: dict[ChunkTable, float] = {}

    def forget(self, table: ChunkTable) -> None:
        """A namespace was removed."""
        self._expected.pop(table, None)
        self._purged_at_s.pop(table, None)

    # giving hints

    async def give(self, table: ChunkTable, keys: Sequence[Key], said: Said) -> int:
        """An engine says this of a chain, or of its end from the first of `keys` on; what stands before is left alone.

        It counts for the longest prefix of `keys` that is stored; returns the number of these chunks. Raises UsageError.
        """
        said.check()
        chunks: list[Chunk] = []
        for chunk in map(table.chunks.get, keys):
            if chunk is None or (chunks and chunk.parent != chunks[-1].key):
                break
            chunks.append(chunk)
        self._counters.hints += 1
        found = len(chunks)
        if said.class_ is not None:
            await self._set_all(chunks, Said(said.class_))
            chunks = [chunk for chunk in chunks if not chunk.is_removed]
        self.say(chunks, said)
        return found

    def say(self, chunks: Sequence[Chunk], said: Said) -> None:
        """What it says of the end of a chain, whose stored chunks these are, or the last of them: all but the class."""
        if not chunks:
            return
        if said.is_closed:
            self._set(own_tail(chunks, self._look_below()), Said(is_closed=True))
        elif said.is_closed is not None or said.expect_s:
            self._open(chunks[-1])
        if said.expect_s is not None:
            self._set(chunks[-1:], Said(expect_s=said.expect_s))

    async def set_all(self, chunks: Iterable[Chunk], said: Said) -> None:
        """Somebody says this of each of these chunks, and of all that is built on them; parents come first.

        Raises UsageError.
        """
        said.check()
        self._counters.hints += 1
        said = said._replace(is_closed=False) if said.expect_s else said
        found = list(chunks)
        await self._set_all(found, said)
        if found and said.is_closed is False and (above := found[0].above()) is not None:
            self._open(above)

    async def _set_all(self, chunks: list[Chunk], said: Said) -> None:
        """From the end on: what is built on a chunk is closed before it."""
        for end in range(len(chunks), 0, -_AT_ONCE):
            self._set([chunk for chunk in chunks[max(0, end - _AT_ONCE) : end] if not chunk.is_removed], said)
            if end > _AT_ONCE:
                await trio.lowlevel.checkpoint()

    def _set(self, chunks: Sequence[Chunk], said: Said) -> None:
        """`chunks`, parents first, get hints that say this too; the policies hear of it."""
        until_s = -inf if not said.expect_s else self._now_s() + said.expect_s
        for chunk in chunks:
            hint = chunk.hint or NOTHING
            if said.class_ is not None:
                hint = hint._replace(class_=said.class_)
            if said.expect_s is not None:
                hint = hint._replace(until_s=until_s if until_s > 0 and self._may_expect(chunk, until_s) else -inf)
            if said.is_closed is not None:
                self._counters.hints_closed += said.is_closed and not hint.is_closed
                hint = hint._replace(is_closed=said.is_closed, until_s=-inf if said.is_closed else hint.until_s)
            self._put(chunk, hint)
        self._tell(chunks)

    def _put(self, chunk: Chunk, hint: Hint) -> None:
        if not hint.is_closed and hint.until_s == -inf:
            hint = self._of_class.setdefault(hint.class_, hint)
        chunk.hint = None if hint == NOTHING else hint

    def _tell(self, chunks: Sequence[Chunk]) -> None:
        for policy in self._policies:
            policy.hinted(chunks)

    def _may_expect(self, chunk: Chunk, until_s: float) -> bool:
        """Whether a namespace may expect one more; chunks that were used, or went, are not counted."""
        expected = self._expected.setdefault(chunk.table, {})
        now_s = self._now_s()
        if len(expected) >= MAX_EXPECTED and now_s - self._purged_at_s.get(chunk.table, -inf) >= _PURGE_EVERY_S:
            self._purged_at_s[chunk.table] = now_s
            for one in [one for one in expected if one.is_removed or not one.hint or one.hint.until_s <= now_s]:
                del expected[one]
        if len(expected) >= MAX_EXPECTED and chunk not in expected:
            self._counters.hints_refused += 1
            return False
        expected[chunk] = until_s
        return True

    # what ends them

    def used(self, chunks: Iterable[Chunk]) -> None:
        """An engine loaded these chunks of one chain. Call it before the policies hear of that."""
        now_s = self._now_s()
        for chunk in chunks:
            hint = chunk.hint
            if hint is None or not (hint.is_closed or hint.until_s != -inf):
                continue
            self._counters.hints_closed_used += hint.is_closed
            self._counters.hints_expect_met += hint.until_s > now_s
            if hint.until_s != -inf:
                self._expected.get(chunk.table, {}).pop(chunk, None)
            self._put(chunk, Hint(hint.class_))
            if hint.is_closed and (above := chunk.above()) is not None:
                self._open(above)

    def continued(self, chunks: Iterable[Chunk]) -> None:
        """These chunks are new. What they are built on is closed no more, unless they are."""
        for chunk in chunks:
            above = chunk.above()
            if above is not None and is_closed(above) and not is_closed(chunk):
                self._counters.hints_closed_used += self._open(above)

    def _open(self, chunk: Chunk) -> int:
        """A chunk, and so what it is built on, is not closed; returns how many were."""
        opened: list[Chunk] = []
        above: Chunk | None = chunk
        while above is not None and is_closed(above):
            opened.append(above)
            above = above.above()
        self._set(opened[::-1], Said(is_closed=False))
        return len(opened)


def is_closed(chunk: Chunk) -> bool:
    """Whether a hint says that a chunk is not used again."""
    return chunk.hint is not None and chunk.hint.is_closed


def own_tail(chain: Sequence[Chunk], below: LookBelow) -> list[Chunk]:
    """The end of a chain that nothing else is built on but closed chunks; parents first.

    Chunks that are not full go along: they are ends of what the chain once was, on which nothing can be built.
    """
    found: list[Chunk] = []
    behind: Chunk | None = None
    for chunk in reversed(chain):
        beside = below(chunk)
        if beside is None:
            break
        others = [other for other in beside if other is not behind and not is_closed(other)]
        if any(other.num_tokens == other.table.namespace.identity.tokens_per_chunk for other in others):
            break
        found += others
        found.append(chunk)
        behind = chunk
    return found[::-1]


class Below:
    """What is built on chunks directly, for one walk along a chain, which meets each directory once."""

    def __init__(self) -> None:
        self._directory: PrefixDirectory[Chunk] | None = None
        self._branches: dict[Key, list[Chunk]] = {}

    def __call__(self, chunk: Chunk) -> list[Chunk] | None:
        """See `LookBelow`."""
        directory = chunk.home
        if directory is None or len(directory.subdirectories) > _MAX_BRANCHES:
            return None
        if directory is not self._directory:
            self._directory, self._branches = directory, {}
            for branch in directory.branches():
                self._branches.setdefault(branch.parent, []).append(branch)
        return [*self._followers(chunk), *self._branches.get(chunk.key, ())]

    def _followers(self, chunk: Chunk) -> Iterator[Chunk]:
        follower = chunk.next
        if isinstance(follower, Chunk) and follower.parent == chunk.key:
            yield follower
