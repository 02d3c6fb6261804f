"""Planting: the prefix tree of many chunks at once, and when each was last needed, run by run.

A *run* are chunks of one chain of which each is the only one that is built on the one before. Chunks come in whatever
order; where a chain stands together, as it was stored, it is cut into runs without a step of Python for each chunk.

No I/O, no waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, compress, count, islice, pairwise
from operator import attrgetter, itemgetter, ne, or_

from kvfs.catalog import Chunk, ChunkTable
from kvfs.keys import Key

_PARENT, _POSITION = attrgetter("parent"), attrgetter("position")
_LAST_USED = attrgetter("last_used_ns")

Run = list[Chunk]


def runs(table: ChunkTable) -> list[Run]:
    """The chunks of a namespace as runs, the longest there are, in order of the position of their first."""
    chunks = [*table.chunks.values()]
    keys, parents, positions = [*table.chunks], [*map(_PARENT, chunks)], [*map(_POSITION, chunks)]
    is_apart = map(ne, islice(parents, 1, None), keys)
    is_elsewhere = map(ne, islice(positions, 1, None), map((1).__add__, positions))
    heads = [0, *compress(count(1), map(or_, is_apart, is_elsewhere))] if chunks else []
    branched = {parents[head] for head in heads}
    starts = sorted({*heads, *compress(count(1), map(branched.__contains__, keys))} - {len(chunks)})
    pieces = sorted(pairwise([*starts, len(chunks)]), key=lambda piece: positions[piece[0]])
    num_branches = Counter([parents[start] for start in starts])
    found: list[Run] = []
    by_tail: dict[Key, Run] = {}
    for start, stop in pieces:
        run = by_tail.pop(parents[start], None) if num_branches[parents[start]] == 1 else None
        if run is None or run[-1].position + 1 != positions[start]:
            found.append(run := [])
        run += chunks[start:stop]
        by_tail[keys[stop - 1]] = run
    return found


def plant(table: ChunkTable, found: Iterable[Run]) -> None:
    """Give the runs of a namespace, all that is in it, their places in the prefix tree."""
    for run in found:
        table.prefixes.add_run(run)


def _first_position(run: Run) -> int:
    return run[0].position


def by_need(tables: Iterable[Sequence[Run]]) -> tuple[list[Chunk], list[int]]:
    """The chunks of all namespaces, those first that were needed longest ago, and when each was.

    A chunk was needed when it, or anything that is built on it, was last used. So leaves come first.
    """
    chunks: list[Chunk] = []
    needed_ns: list[int] = []
    for found in tables:
        below: dict[Key, int] = {}  # when the last use was of what continues a chunk
        for run in sorted(
            found, key=_first_position, reverse=True
        ):  # of equal ones the first: sorting them takes no time
            since_ns = accumulate(map(_LAST_USED, reversed(run)), max, initial=below.get(run[-1].key, 0))
            needed_ns += islice(since_ns, 1, None)
            chunks += reversed(run)
            below[run[0].parent] = max(below.get(run[0].parent, 0), needed_ns[-1])
    order = sorted(range(len(chunks)), key=needed_ns.__getitem__)
    return [*itemgetter(*order)(chunks)] if len(order) > 1 else chunks, sorted(needed_ns)
