"""Traces of requests, read from files: what was asked when, as chains of blocks that are the same where prompts are.

Two formats are told apart by their first line; both may be gzipped, one JSON object a line:

Mooncake  {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [block, …]}
sessions  {"block_size": tokens, "requests": [{"t": s, "in": tokens, "hash_ids": [block, …], "requests": […]}, …]}

A session's times count from its own start, those of a request within another from that one's; ids are the session's
own. Where a file has sessions but not when they began, they begin at random, `start_gap_s` apart on average.

A chunk of the result is a chain of blocks, not a block: equal ids after different beginnings are different chunks.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from kvfs.errors import UsageError

_MAX_LINE_BYTES = 256 << 20
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
    """

    requests: list[Request]
    parents: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    tokens_per_chunk: int = 0

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


_Id = tuple[int, int]  # of a block: the session, or -1, and its id
_Asked = tuple[float, list[_Id], int, int]  # when, which blocks, tokens, session


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
    if not trace.requests:
        raise UsageError(f"there is no request in {', '.join(map(str, paths))}")
    trace.requests.sort(key=lambda request: request.at_s)
    return trace


def _read_file(trace: Trace, source: int, path: Path, reading: Reading, advance: Callable[[int], None]) -> None:
    with path.open("rb") as raw:
        is_gzipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        file = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if is_gzipped else raw
        lines = _objects(file, raw, path, advance)
        first = next(lines, None)
        if first is None:
            raise UsageError(f"{path} is empty")
        if "timestamp" in first and "hash_ids" in first:
            asked, block = _mooncake([first, *lines], path)
        elif "requests" in first and "block_size" in first:
            asked, block = _sessions([first, *lines], path, reading)
        else:
            raise UsageError(
                f"{path} is neither a Mooncake trace nor one of sessions: its first line has {sorted(first)[:8]}"
            )
    per_chunk = reading.tokens_per_chunk or (block if block > 64 else 256)
    if per_chunk % block:
        raise UsageError(f"a chunk of {per_chunk} tokens is no multiple of the blocks of {block} in {path}")
    if trace.tokens_per_chunk not in (0, per_chunk):
        raise UsageError(
            f"{path} has chunks of {per_chunk} tokens, the file before it {trace.tokens_per_chunk}: say --tokens-per-chunk"
        )
    trace.tokens_per_chunk = per_chunk
    _add(trace, source, asked, block, per_chunk)


def _objects(file: IO[bytes], raw: IO[bytes], path: Path, advance: Callable[[int], None]) -> Iterator[dict[str, Any]]:
    before = 0
    for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES), b""), 1):
        advance(raw.tell() - before)
        before = raw.tell()
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"line {number} of {path} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise UsageError(f"line {number} of {path} is no JSON object")
        yield found


def _mooncake(objects: list[dict[str, Any]], path: Path) -> tuple[list[_Asked], int]:
    asked: list[_Asked] = []
    for found in objects:
        ids = _ids(found, path)
        if ids:
            asked.append(
                (
                    _number(found, "timestamp", path) / 1000,
                    [(-1, id_) for id_ in ids],
                    int(_number(found, "input_length", path)),
                    -1,
                )
            )
    looked_at = [(len(ids), tokens) for _, ids, tokens, _ in asked[:_LOOKED_AT]]
    for block in _USUAL_BLOCKS:
        if all(-(-tokens // block) == num_ids for num_ids, tokens in looked_at):
            return asked, block
    raise UsageError(f"the blocks of {path} have no usual size: input_length does not fit the number of hash_ids")


def _sessions(objects: list[dict[str, Any]], path: Path, reading: Reading) -> tuple[list[_Asked], int]:
    clock = random.Random(reading.seed)
    start_s = 0.0
    asked: list[_Asked] = []
    blocks = {int(_number(found, "block_size", path)) for found in objects}
    if len(blocks) != 1:
        raise UsageError(f"the sessions of {path} have blocks of different sizes")
    block = blocks.pop()
    if block <= 0:
        raise UsageError(f"the blocks of {path} have {block} tokens")

    def add(requests: object, begin_s: float, session: int) -> None:
        if not isinstance(requests, list):
            raise UsageError(f"a session of {path} has no list of requests")
        for found in requests:
            if not isinstance(found, dict):
                raise UsageError(f"a request of {path} is no JSON object")
            at_s = begin_s + _number(found, "t", path)
            ids = _ids(found, path) if found.get("hash_ids") else []
            if ids:
                tokens = int(_number(found, "in", path))
                asked.append((at_s, [(session, id_) for id_ in ids], tokens, session))
            if found.get("requests"):
                add(found["requests"], at_s, session)

    for session, found in enumerate(objects):
        add(found["requests"], start_s, session)
        start_s += clock.expovariate(1 / reading.start_gap_s) if reading.start_gap_s else 0.0
    return asked, block


def _ids(found: dict[str, Any], path: Path) -> list[int]:
    ids = found.get("hash_ids")
    if not isinstance(ids, list) or not all(isinstance(id_, int) for id_ in ids):
        raise UsageError(f"a request of {path} has no list of whole numbers as hash_ids")
    return ids


def _number(found: dict[str, Any], name: str, path: Path) -> float:
    value = found.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e15:
        raise UsageError(f"a line of {path} has no {name}, or one that cannot be")
    return value


def _add(trace: Trace, source: int, asked: list[_Asked], block: int, per_chunk: int) -> None:
    """Make chunks of blocks. Where a chunk has several blocks, a last one that is not full is left out."""
    known: dict[tuple[int, _Id], int] = {}
    step = per_chunk // block
    for at_s, ids, tokens, session in asked:
        above = -1
        chunks: list[int] = []
        for position in range(len(ids) // step):
            place = (above, ids[(position + 1) * step - 1])
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
