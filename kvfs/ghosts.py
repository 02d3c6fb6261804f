"""Ghosts: what is remembered of chunks that went, bounded in number.

A ghost says when a chunk went, why, and how often it had been used, so that a chunk that comes back goes on where it
was, and so that "it was here, why is it gone?" has an answer. No I/O, no waiting.

There are several times as many of them as chunks, so each takes 23 bytes (some 29 with all around it), in buckets of
a few dozen; a bucket more is made by splitting one, so that no call takes long (linear hashing). In a bucket the oldest
is first. A chunk is known by 64 bits of its key and namespace: two that share them are taken for one, and a count of
uses is wrong.

`Refusals` are what was asked for and not done, by the store or by an engine: far fewer, and of no use to policies.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

MAX_GHOSTS = 65_536
"""As many there are at most while there are few chunks."""

MAX_REFUSALS = 16_384
"""4 MB at most."""

MARK_BYTES = 8
FACTS = struct.Struct("<QHBBeB")  # when, hits, returns, why and cause, minutes unused, share of the room in use
_MOST_HITS, _MOST_RETURNS = 0xFFFF, 0xFF
_MOST_MINUTES, _MOST_FULL = 65_504.0, 0xFF
_WHYS = ("evict", "rm", "corrupt", "expire", "bypass")
CAUSES = ("", "policy", "quota", "unreachable", "not_admitted", "no_room")
"""Of an eviction: whose doing it was. "unreachable": what the chunk was built on had gone before; "not_admitted": it was in
RAM only, since admission kept it from NVMe; "no_room": nothing on NVMe was worth less than it."""
_WHY_BITS = 4
_WHY_MASK = (1 << _WHY_BITS) - 1
_REASONS = {
    (why, cause): number | causes << _WHY_BITS
    for number, why in enumerate(_WHYS)
    for causes, cause in enumerate(CAUSES)
}
_REASON_AT, _EXPONENT_AT = 11, 13  # in the facts; the latter is the upper half of the minutes
_NO_NUMBER, _MINUS = 0x7C, 0x80
_BUCKET_SIZE = 48  # on average, at most


class Ghost(NamedTuple):
    """A chunk that went: when (nanoseconds since the epoch), why ("evict", "rm", "corrupt"), its hits and returns.

    `cause` is one of `CAUSES`, `unused_min` for how many minutes it had not been used, `full` the per cent of the room (of
    the tier it left, or of its namespace's quota) that were in use.
    """

    gone_ns: int
    why: str
    hits: int
    returns: int = 0
    cause: str = ""
    unused_min: float = 0.0
    full: int = 0


class _Bucket:
    """Marks and facts, in the same order, the oldest first."""

    __slots__ = ("facts", "marks")

    def __init__(self) -> None:
        self.marks = bytearray()
        self.facts = bytearray()

    def find(self, mark: bytes) -> int:
        """The place of a mark, or -1."""
        position = self.marks.find(mark)
        while position % MARK_BYTES and position >= 0:  # the end of one and the begin of the next
            position = self.marks.find(mark, position + 1)
        return position // MARK_BYTES

    def delete(self, place: int) -> None:
        """Forget the ghost at a place."""
        del self.marks[place * MARK_BYTES : (place + 1) * MARK_BYTES]
        del self.facts[place * FACTS.size : (place + 1) * FACTS.size]


class Ghosts:
    """The chunks that went last, by namespace directory and key.

    Attributes: limit: how many are kept. Above it the oldest of the bucket that grows makes room; while there is one
    bucket that is the oldest of all. forgotten_ns: everything that went after this is remembered, unless it came back.
    uncertain_ns: of what went before this only the uses can be relied on: it may have come back, and gone again.
    """

    def __init__(self, limit: int = MAX_GHOSTS, forgotten_ns: int = 0) -> None:
        self.limit = limit
        self.forgotten_ns = forgotten_ns
        self.uncertain_ns = 0
        self._num_ghosts = 0
        self._buckets = [_Bucket()]
        self._mask = 0  # of the buckets of this round
        self._next_split = 0

    def __len__(self) -> int:
        return self._num_ghosts

    def add(self, directory: str, key: bytes, ghost: Ghost) -> None:
        """Remember a chunk; the oldest make room."""
        bucket, mark = self._find(directory, key)
        place = bucket.find(mark)
        if place >= 0:
            bucket.delete(place)
            self._num_ghosts -= 1
        gone_ns, why, hits, returns, cause, unused_min, full = ghost
        if hits > _MOST_HITS:
            hits = _MOST_HITS
        if returns > _MOST_RETURNS:
            returns = _MOST_RETURNS
        bucket.marks += mark
        if not 0.0 <= unused_min <= _MOST_MINUTES:
            unused_min = min(max(unused_min, 0.0), _MOST_MINUTES)
        if full > _MOST_FULL:
            full = _MOST_FULL
        bucket.facts += FACTS.pack(gone_ns, hits, returns, _REASONS[why, cause], unused_min, full)
        self._num_ghosts += 1
        while self._num_ghosts > self.limit and len(bucket.marks) > MARK_BYTES:
            self.forgotten_ns = max(self.forgotten_ns, FACTS.unpack_from(bucket.facts)[0])
            bucket.delete(0)
            self._num_ghosts -= 1
        if self._num_ghosts > _BUCKET_SIZE * len(self._buckets):
            self._split()

    def get(self, directory: str, key: bytes) -> Ghost | None:
        """What is remembered of a chunk."""
        bucket, mark = self._find(directory, key)
        place = bucket.find(mark)
        return _ghost(bucket, place) if place >= 0 else None

    def pop(self, directory: str, key: bytes) -> Ghost | None:
        """The same, and forget it: the chunk came back."""
        bucket, mark = self._find(directory, key)
        place = bucket.find(mark)
        if place < 0:
            return None
        ghost = _ghost(bucket, place)
        bucket.delete(place)
        self._num_ghosts -= 1
        return ghost

    # for the next start

    @property
    def num_buckets(self) -> int:
        """How many buckets there are."""
        return len(self._buckets)

    def bucket(self, number: int) -> tuple[bytearray, bytearray]:
        """The marks and facts of a bucket, the oldest first; for reading."""
        return self._buckets[number].marks, self._buckets[number].facts

    def restore(self, buckets: Sequence[tuple[bytes, bytes]]) -> None:
        """Begin with these, of which there is at least one, in place of what there is."""
        self._buckets = []
        for marks, facts in buckets:
            bucket = _Bucket()
            bucket.marks += marks
            bucket.facts += facts
            self._buckets.append(bucket)
        self._num_ghosts = sum(len(marks) for marks, _ in buckets) // MARK_BYTES
        self._mask = (1 << (len(buckets).bit_length() - 1)) - 1
        self._next_split = len(buckets) - self._mask - 1

    def _find(self, directory: str, key: bytes) -> tuple[_Bucket, bytes]:
        """The bucket that a chunk belongs to, and its mark there."""
        number = int.from_bytes(key[:MARK_BYTES], "little") ^ _salt(directory)
        place = number & self._mask
        if place < self._next_split:  # that one was split already in this round
            place = number & (2 * self._mask + 1)
        return self._buckets[place], number.to_bytes(MARK_BYTES, "little")

    def _split(self) -> None:
        """Move what belongs there from the next bucket into a new one."""
        old, left, right = self._buckets[self._next_split], _Bucket(), _Bucket()
        bit = self._mask + 1
        for place in range(len(old.marks) // MARK_BYTES):
            mark = old.marks[place * MARK_BYTES : (place + 1) * MARK_BYTES]
            side = right if int.from_bytes(mark, "little") & bit else left
            side.marks += mark
            side.facts += old.facts[place * FACTS.size : (place + 1) * FACTS.size]
        self._buckets[self._next_split] = left
        self._buckets.append(right)
        self._next_split += 1
        if self._next_split > self._mask:
            self._mask = 2 * self._mask + 1
            self._next_split = 0


def _ghost(bucket: _Bucket, place: int) -> Ghost:
    gone_ns, hits, returns, reason, unused_min, full = FACTS.unpack_from(bucket.facts, place * FACTS.size)
    cause = CAUSES[reason >> _WHY_BITS]
    return Ghost(gone_ns, _WHYS[reason & _WHY_MASK], hits, returns, cause, unused_min, full)


def are_facts(raw: memoryview) -> bool:
    """Whether this can be the facts of ghosts."""
    reasons, exponents = set(raw[_REASON_AT :: FACTS.size]), set(raw[_EXPONENT_AT :: FACTS.size])
    return (
        not len(raw) % FACTS.size
        and all(reason >> _WHY_BITS < len(CAUSES) and reason & _WHY_MASK < len(_WHYS) for reason in reasons)
        and all(exponent & _NO_NUMBER != _NO_NUMBER and not exponent & _MINUS for exponent in exponents)
    )


class Refusal(NamedTuple):
    """What was not done with a chunk: when last (nanoseconds since the epoch), why, and how often since it is remembered.

    Reasons: "pressure" (RAM was full of what may not go), "quota", "too_large", and "declined": an engine found it cheaper to
    compute it than to load it.
    """

    last_ns: int
    why: str
    times: int


class Refusals:
    """The refusals of the last chunks that had any, `limit` at most. Attributes: forgotten_ns: see `Ghosts`."""

    def __init__(self, limit: int = MAX_REFUSALS) -> None:
        self._limit = limit
        self._last: OrderedDict[tuple[str, bytes], Refusal] = OrderedDict()
        self.forgotten_ns = 0

    def __len__(self) -> int:
        return len(self._last)

    def add(self, directory: str, key: bytes, now_ns: int, why: str) -> None:
        """Remember one; the oldest make room."""
        before = self._last.pop((directory, key), None)
        times = before.times + 1 if before is not None and before.why == why else 1
        self._last[directory, key] = Refusal(now_ns, why, times)
        if len(self._last) > self._limit:
            self.forgotten_ns = self._last.popitem(last=False)[1].last_ns

    def get(self, directory: str, key: bytes) -> Refusal | None:
        """What is remembered of a chunk."""
        return self._last.get((directory, key))


@functools.lru_cache(maxsize=4096)
def _salt(directory: str) -> int:
    return int.from_bytes(hashlib.blake2b(directory.encode(), digest_size=MARK_BYTES).digest(), "little")
