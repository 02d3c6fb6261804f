"""Traces of requests, read from files: what was asked when, as chains of blocks that are the same where prompts are.

Two formats are told apart by their first line; both may be gzipped, one JSON object a line:

Mooncake  {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [block, …]}
sessions  {"block_size": tokens, "requests": [{"t": s, "in": tokens, "hash_ids": [block, …], "requests": […]}, …]}

The tokens of a Mooncake block are found out, unless its lines have a "block_size" too, as those of `kvfs record` do, which
also have a "namespace" each and its "bytes_per_token". A session's times count from its own start, those of a request within another from that one's; ids are the session's
own. Where a file has sessions but not when they began, they begin at random, `start_gap_s` apart on average.
Lines may be out of order of time, as a log that several processes write is: they are played in order.

A chunk of the result is a chain of blocks, not a block: equal ids after different beginnings are different chunks.
"""

from __future__ import annotations

import gzip
import io
import itertools
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

from kvfs.errors import UsageError
from kvfs.tools.simulate.formats import Asked, Blocks, lines, mooncake, sessions

STDIN = Path("-")
"""Stands for the standard input."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request: when it came, in seconds, and the numbers of its prompt's chunks in `Trace`, head first.

    `tokens` are those of the whole prompt, `session` is what it belongs to, if that is known.
    """

    at_s: float
    chunks: Sequence[int]
    tokens: int
    session: int = -1


@dataclass(slots=True)
class Trace:
    """Requests in order of time, and the chunks that they name.

    Attributes:
        parents: for each chunk the one before it, -1 at a head; positions: how many are before it; sources: the
            number of the namespace it is of; tokens: how many tokens it has.
        tokens_per_chunk: of a full one, the most there are where namespaces differ.
        namespaces: what their chunks are, if that is known of each: tokens of a full one, bytes of a token.
        num_out_of_order: lines that were earlier than the one before them.
    """

    requests: list[Request]
    parents: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    tokens_per_chunk: int = 0
    num_out_of_order: int = 0
    namespaces: list[Blocks] = field(default_factory=list)

    def blocks(self, source: int, bytes_per_token: int) -> tuple[int, int]:
        """Tokens of a full chunk of a namespace, and bytes of a token; of those that do not say it these."""
        if not self.namespaces:
            return self.tokens_per_chunk, bytes_per_token
        tokens, said = self.namespaces[source]
        return tokens, said or bytes_per_token

    @property
    def is_uniform(self) -> bool:
        """Whether the chunks of all namespaces have one size."""
        return len(set(self.namespaces)) <= 1

    @property
    def num_chunks(self) -> int:
        """How many different ones there are."""
        return len(self.parents)

    @property
    def num_references(self) -> int:
        """How often any was asked for."""
        return sum(len(request.chunks) for request in self.requests)

    @property
    def seconds(self) -> float:
        """From the first request to the last."""
        return self.requests[-1].at_s - self.requests[0].at_s if self.requests else 0.0


@dataclass(frozen=True, slots=True)
class Reading:
    """How files are read.

    Attributes:
        tokens_per_chunk: None takes the blocks of Mooncake traces as they are, and 256 tokens for sessions. A multiple
            of the blocks of each file.
        start_gap_s, seed: when sessions begin.
        bytes_per_token: of all namespaces, whatever they say; None takes that.
    """

    tokens_per_chunk: int | None = None
    start_gap_s: float = 60.0
    seed: int = 0
    bytes_per_token: int | None = None


def read(paths: Sequence[Path], reading: Reading, advance: Callable[[int], None] = lambda _: None) -> Trace:
    """The requests of all files, as one cache would get them. Raises UsageError for what is no trace.

    Each file begins at 0 and is a namespace of its own, or several: ids of one say nothing of those of another.
    """
    trace = Trace([])
    for path in paths:
        try:
            _read_file(trace, path, reading, advance)
        except (OSError, EOFError, zlib.error) as error:
            raise UsageError(f"cannot read {name_of(path)}: {getattr(error, 'strerror', None) or error}") from error
        except MemoryError as error:
            raise UsageError(f"{name_of(path)} is too large for the memory of this machine") from error
    if not trace.requests:
        raise UsageError(f"there is no request in {', '.join(map(name_of, paths))}")
    trace.requests.sort(key=lambda request: request.at_s)
    return trace


def name_of(path: Path) -> str:
    """What messages call a file."""
    return "the standard input" if path == STDIN else str(path)


def _read_file(trace: Trace, path: Path, reading: Reading, advance: Callable[[int], None]) -> None:
    name = name_of(path)
    with sys.stdin.buffer if path == STDIN else path.open("rb") as opened:
        raw = cast("io.BufferedReader", opened)
        is_gzipped = raw.peek(2)[:2] == b"\x1f\x8b"
        file = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if is_gzipped else raw
        found = lines(file, raw, name, advance)
        first = next(found, None)
        if first is None:
            raise UsageError(f"{name} is empty")
        if "timestamp" in first.found and "hash_ids" in first.found:
            says_block = "block_size" in first.found
            asked, blocks = mooncake(itertools.chain([first], found), name)
            pairs = itertools.pairwise(asked)
            trace.num_out_of_order += sum(one.at_s < before.at_s for before, one in pairs)
        elif "requests" in first.found and "block_size" in first.found:
            says_block = False
            asked, blocks = sessions(itertools.chain([first], found), reading.start_gap_s, reading.seed)
        else:
            raise UsageError(
                f"{name} is neither a Mooncake trace nor one of sessions: its first line has {sorted(first.found)[:8]}"
            )
    first_source = len(trace.namespaces)
    for block, said in blocks:
        per_chunk = reading.tokens_per_chunk or (block if block > 64 or says_block else 256)
        if per_chunk % block:
            raise UsageError(f"a chunk of {per_chunk} tokens is no multiple of the blocks of {block} in {name}")
        trace.namespaces.append(Blocks(per_chunk, reading.bytes_per_token or said))
    trace.tokens_per_chunk = max(tokens for tokens, _ in trace.namespaces)
    _add(trace, first_source, asked, [block for block, _ in blocks])


def _add(trace: Trace, first_source: int, asked: list[Asked], blocks: list[int]) -> None:
    """Make chunks of blocks. Where a chunk has several blocks, a last one that is not full is left out."""
    known: dict[tuple[int, int, int, int], int] = {}
    for at_s, ids, tokens, session, namespace in asked:
        source = first_source + namespace
        per_chunk = trace.namespaces[source].tokens
        step = per_chunk // blocks[namespace]
        above = -1
        chunks: list[int] = []
        for position in range(len(ids) // step):
            place = (namespace, session if above < 0 else -1, above, ids[(position + 1) * step - 1])
            number = known.get(place)
            if number is None:
                number = known[place] = len(trace.parents)
                trace.parents.append(above)
                trace.positions.append(position)
                trace.sources.append(source)
                trace.tokens.append(min(per_chunk, max(1, tokens - position * per_chunk)))
            chunks.append(number)
            above = number
        if chunks:
            trace.requests.append(Request(at_s, chunks, tokens, session))
