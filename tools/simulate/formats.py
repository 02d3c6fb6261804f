"""The formats of traces: lines of JSON, and what requests they are. See `traces`, which makes chunks of their blocks.

A trace may come from anybody: lines, the ids of a request and sessions within sessions are bounded, and what is wrong
is told with the number of its line.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, NamedTuple

from kvfs.errors import UsageError

_MAX_LINE_BYTES = 32 << 20  # sessions of public traces have 4 MiB; what such a line becomes in memory fits anywhere
_MAX_IDS = 1 << 20  # of a request: a prompt of 16 million tokens, in small blocks
_MAX_DEPTH = 32  # requests within requests
_MAX_TOKENS = 1e12
_MAX_BLOCK = 1 << 16
MAX_BYTES_PER_TOKEN = 1 << 28
_MAX_NAME = 256
_USUAL_BLOCKS = (512, 256, 128, 64, 32, 16)
_LOOKED_AT = 200


class Line(NamedTuple):
    """One object of a file; `place` says which, for messages."""

    place: str
    found: dict[str, Any]


class Asked(NamedTuple):
    """A request as a file has it: when, which blocks, how many tokens, of which session (or -1), in which namespace."""

    at_s: float
    ids: list[int]
    tokens: int
    session: int
    namespace: int = 0


class Blocks(NamedTuple):
    """What the blocks of a namespace are. Attributes: tokens: of one; bytes_per_token: None if it is not said."""

    tokens: int
    bytes_per_token: int | None = None


def lines(file: IO[bytes], raw: IO[bytes], name: str, advance: Callable[[int], None]) -> Iterator[Line]:
    """The objects of a file, or pipe, that is read through `raw`; `name` is for messages. Raises UsageError."""
    before = 0
    can_tell = raw.seekable()
    for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES + 1), b""), 1):
        if can_tell:
            now = raw.tell()
            advance(now - before)
            before = now
        place = f"line {number} of {name}"
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
        yield Line(place, found)


def mooncake(lines: Iterable[Line], name: str) -> tuple[list[Asked], list[Blocks]]:
    """The requests of such a trace, in its order, and the blocks of its namespaces. Raises UsageError.

    A line may name its namespace, and say what its blocks are, as those of `kvfs record` do; without it is all one.
    """
    asked: list[Asked] = []
    places: list[str] = []
    numbers: dict[str, int] = {}
    said: list[set[int]] = []
    sizes: list[set[int]] = []
    for place, found in lines:
        number = numbers.setdefault(_namespace(found, place), len(numbers))
        if number == len(said):
            said.append(set())
            sizes.append(set())
        if "block_size" in found:
            said[number].add(_block_size(found, place))
        if "bytes_per_token" in found:
            sizes[number].add(int(_number(found, "bytes_per_token", place, MAX_BYTES_PER_TOKEN + 1)) or 1)
        ids = _ids(found, place)
        at_s = _number(found, "timestamp", place) / 1000
        tokens = int(_number(found, "input_length", place, _MAX_TOKENS))
        if "output_length" in found:
            _number(found, "output_length", place, _MAX_TOKENS)
        if ids:
            asked.append(Asked(at_s, ids, tokens, -1, number))
            places.append(place)
    blocks = []
    for number in numbers.values():
        of_it = [one for one in asked if one.namespace == number] if len(numbers) > 1 else asked
        tokens = _block_tokens(of_it, said[number], name)
        blocks.append(Blocks(tokens, max(sizes[number], default=None)))
    pairs = zip(asked, places, strict=True)
    wrong = next(((one, place) for one, place in pairs if not _fits(one, blocks[one.namespace].tokens)), None)
    if wrong is not None:
        tokens = blocks[wrong[0].namespace].tokens
        raise UsageError(f"{wrong[1]} has an input_length that does not fit its hash_ids, of {tokens} tokens each")
    return asked, blocks


def _namespace(found: dict[str, Any], place: str) -> str:
    name = found.get("namespace", "")
    if not isinstance(name, str) or len(name) > _MAX_NAME:
        raise UsageError(f"{place} has a namespace that cannot be")
    return name


def _block_tokens(asked: list[Asked], said: set[int], name: str) -> int:
    """What the blocks of a namespace have, as its lines say, or as fits them. Raises UsageError."""
    looked_at = asked[:_LOOKED_AT]
    block = next((block for block in said or _USUAL_BLOCKS if all(_fits(one, block) for one in looked_at)), None)
    if block is None:
        raise UsageError(f"the blocks of {name} have no usual size: input_length does not fit the number of hash_ids")
    return block


def _fits(asked: Asked, block: int) -> bool:
    return -(-asked.tokens // block) == len(asked.ids)


def sessions(lines: Iterable[Line], start_gap_s: float, seed: int) -> tuple[list[Asked], list[Blocks]]:
    """The requests of such a trace, and its blocks. Raises UsageError."""
    clock = random.Random(seed)
    start_s = 0.0
    asked: list[Asked] = []
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
                asked.append(Asked(at_s, ids, int(_number(found, "in", place, _MAX_TOKENS)), session))
            if found.get("requests"):
                add(found["requests"], at_s, session, place, depth + 1)

    for session, (place, found) in enumerate(lines):
        size = _block_size(found, place)
        if block not in (0, size):
            raise UsageError(f"{place} has blocks of {size} tokens, those before it of {block}: they are different")
        block = size
        add(found.get("requests"), start_s, session, place, 1)
        start_s += clock.expovariate(1 / start_gap_s) if start_gap_s else 0.0
    return asked, [Blocks(block)]


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
