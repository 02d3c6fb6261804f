"""Traces of requests, read from files: what was asked when, as chains of blocks that are the same where prompts are.

Two formats are told apart by their first line; both may be gzipped, one JSON object a line:

Mooncake  {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [block, …]}
sessions  {"block_size": tokens, "requests": [{"t": s, "in": tokens, "hash_ids": [block, …], "requests": […]}, …]}

The tokens of a Mooncake block are found out, unless its lines have a "block_size" too, as those of `kvfs record` do. A
session's times count from its own start, those of a request within another from that one's; ids are the session's
own. Where a file has sessions but not when they began, they begin at random, `start_gap_s` apart on average.
Lines may be out of order of time, as a log that several processes write is: they are played in order.

A trace may come from anybody: lines, the ids of a request and sessions within sessions are bounded, and what is wrong
is told with the number of its line.

A chunk of the result is a chain of blocks, not a block: equal ids after different beginnings are different chunks.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from kvfs.errors import UsageError

STDIN = Path("-")
"""Stands for the standard input."""

_MAX_LINE_BYTES = 32 << 20  # sessions of public traces have 4 MiB; what such a line becomes in memory fits anywhere
_MAX_IDS = 1 << 20  # of a request: a prompt of 16 million tokens, in small blocks
_MAX_DEPTH = 32  # requests within requests
_MAX_TOKENS = 1e12
_MAX_BLOCK = 1 << 16
_USUAL_BLOCKS = (512, 256, 128, 64, 32, 16)
_LOOKED_AT = 200


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
            number of the file it comes from; tokens: how many tokens it has.
        tokens_per_chunk: of a full one.
        num_out_of_order: lines that were earlier than the one before them.
    """

    requests: list[Request]
    parents: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    tokens_per_chunk: int = 0
    num_out_of_order: int = 0

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
    """

    tokens_per_chunk: int | None = None
    start_gap_s: float = 60.0
    seed: int = 0


class _Line(NamedTuple):
    """One object of a file; `place` says which, for messages."""

    place: str
    found: dict[str, Any]


class _Asked(NamedTuple):
    """A request as a file has it: when, which blocks, how many tokens, of which session (or -1)."""

    at_s: float
    ids: list[int]
    tokens: int
    session: int


def read(paths: Sequence[Path], reading: Reading, advance: Callable[[int], None] = lambda _: None) -> Trace:
    """The requests of all files, as one cache would get them. Raises UsageError for what is no trace.

    Each file begins at 0 and is a namespace of its own: ids of one file say nothing of those of another.
    """
    trace = Trace([])
    for source, path in enumerate(paths):
        try:
            _read_file(trace, source, path, reading, advance)
        except (OSError, EOFError, zlib.error) as error:
            raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
        except MemoryError as error:
            raise UsageError(f"{path} is too large for the memory of this machine") from error
    if not trace.requests:
        raise UsageError(f"there is no request in {', '.join(map(str, paths))}")
    trace.requests.sort(key=lambda request: request.at_s)
    return trace


def _read_file(trace: Trace, source: int, path: Path, reading: Reading, advance: Callable[[int], None]) -> None:
    with sys.stdin.buffer if path == STDIN else path.open("rb") as opened:
        raw = cast("io.BufferedReader", opened)
        is_gzipped = raw.peek(2)[:2] == b"\x1f\x8b"
        file = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if is_gzipped else raw
        lines = _lines(file, raw, path, advance)
        first = next(lines, None)
        if first is None:
            raise UsageError(f"{path} is empty")
        if "timestamp" in first.found and "hash_ids" in first.found:
            says_block = "block_size" in first.found
            asked, block = _mooncake(itertools.chain([first], lines), path)
            pairs = itertools.pairwise(asked)
            trace.num_out_of_order += sum(one.at_s < before.at_s for before, one in pairs)
        elif "requests" in first.found and "block_size" in first.found:
            says_block = False
            asked, block = _sessions(itertools.chain([first], lines), path, reading)
        else:
            raise UsageError(
                f"{path} is neither a Mooncake trace nor one of sessions: its first line has {sorted(first.found)[:8]}"
            )
    per_chunk = reading.tokens_per_chunk or (block if block > 64 or says_block else 256)
    if per_chunk % block:
        raise UsageError(f"a chunk of {per_chunk} tokens is no multiple of the blocks of {block} in {path}")
    if trace.tokens_per_chunk not in (0, per_chunk):
        raise UsageError(
            f"{path} has chunks of {per_chunk} tokens, the file before it {trace.tokens_per_chunk}: say --tokens-per-chunk"
        )
    trace.tokens_per_chunk = per_chunk
    _add(trace, source, asked, block, per_chunk)


def _lines(file: IO[bytes], raw: IO[bytes], path: Path, advance: Callable[[int], None]) -> Iterator[_Line]:
    before = 0
    can_tell = raw.seekable()
    for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES + 1), b""), 1):
        if can_tell:
            now = raw.tell()
            advance(now - before)
            before = now
        place = f"line {number} of {path}"
        if len(line) > _MAX_LINE_BYTES:
            raise UsageError(f"{place} is longer than {_MAX_LINE_BYTES >> 20} MiB")
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{place} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise UsageError(f"{place} is no JSON object")
        yield _Line(place, found)


def _mooncake(lines: Iterable[_Line], path: Path) -> tuple[list[_Asked], int]:
    asked: list[_Asked] = []
    places: list[str] = []
    said: set[int] = set()
    for place, found in lines:
        if "block_size" in found:
            said.add(_block_size(found, place))
        ids = _ids(found, place)
        at_s = _number(found, "timestamp", place) / 1000
        tokens = int(_number(found, "input_length", place, _MAX_TOKENS))
        if "output_length" in found:
            _number(found, "output_length", place, _MAX_TOKENS)
        if ids:
            asked.append(_Asked(at_s, ids, tokens, -1))
            places.append(place)
    looked_at = asked[:_LOOKED_AT]
    block = next((block for block in said or _USUAL_BLOCKS if all(_fits(one, block) for one in looked_at)), None)
    if block is None:
        raise UsageError(f"the blocks of {path} have no usual size: input_length does not fit the number of hash_ids")
    wrong = next((place for one, place in zip(asked, places, strict=True) if not _fits(one, block)), None)
    if wrong is not None:
        raise UsageError(f"{wrong} has an input_length that does not fit its hash_ids, of {block} tokens each")
    return asked, block


def _fits(asked: _Asked, block: int) -> bool:
    return -(-asked.tokens // block) == len(asked.ids)


def _sessions(lines: Iterable[_Line], path: Path, reading: Reading) -> tuple[list[_Asked], int]:
    clock = random.Random(reading.seed)
    start_s = 0.0
    asked: list[_Asked] = []
    block = 0

    def add(requests: object, begin_s: float, session: int, place: str, depth: int) -> None:
        if not isinstance(requests, list):
            raise UsageError(f"{place} has no list of requests")
        if depth > _MAX_DEPTH:
            raise UsageError(f"{place} has requests within requests more than {_MAX_DEPTH} deep")
        for found in requests:
            if not isinstance(found, dict):
                raise UsageError(f"{place} has a request that is no JSON object")
            at_s = begin_s + _number(found, "t", place)
            ids = _ids(found, place) if found.get("hash_ids") else []
            if ids:
                asked.append(_Asked(at_s, ids, int(_number(found, "in", place, _MAX_TOKENS)), session))
            if found.get("requests"):
                add(found["requests"], at_s, session, place, depth + 1)

    for session, (place, found) in enumerate(lines):
        size = _block_size(found, place)
        if block not in (0, size):
            raise UsageError(f"{place} has blocks of {size} tokens, those before it of {block}: they are different")
        block = size
        add(found.get("requests"), start_s, session, place, 1)
        start_s += clock.expovariate(1 / reading.start_gap_s) if reading.start_gap_s else 0.0
    return asked, block


def _block_size(found: dict[str, Any], place: str) -> int:
    size = int(_number(found, "block_size", place))
    if not 0 < size <= _MAX_BLOCK:
        raise UsageError(f"{place} has blocks of {size} tokens")
    return size


def _ids(found: dict[str, Any], place: str) -> list[int]:
    ids = found.get("hash_ids")
    if not isinstance(ids, list) or not all(type(id_) is int for id_ in ids):
        raise UsageError(f"{place} has no list of whole numbers as hash_ids")
    if len(ids) > _MAX_IDS:
        raise UsageError(f"{place} has {len(ids):,} hash_ids in one request: {_MAX_IDS:,} at most")
    return ids


def _number(found: dict[str, Any], name: str, place: str, most: float = 1e15) -> float:
    value = found.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < most:
        raise UsageError(f"{place} has no {name}, or one that cannot be")
    return value


def _add(trace: Trace, source: int, asked: list[_Asked], block: int, per_chunk: int) -> None:
    """Make chunks of blocks. Where a chunk has several blocks, a last one that is not full is left out."""
    known: dict[tuple[int, int, int], int] = {}
    step = per_chunk // block
    for at_s, ids, tokens, session in asked:
        above = -1
        chunks: list[int] = []
        for position in range(len(ids) // step):
            place = (session if above < 0 else -1, above, ids[(position + 1) * step - 1])
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
