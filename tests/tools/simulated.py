"""Traces that are made up, and replays of them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kvfs.admission import Admission
from kvfs.chunk import geometry
from kvfs.policies.named import maker
from kvfs.tools.simulate.cache import Cache
from kvfs.tools.simulate.replay import Replay
from kvfs.tools.simulate.stand_ins import namespace_of
from kvfs.tools.simulate.tally import Tally
from kvfs.tools.simulate.traces import Request, Trace

BYTES_PER_TOKEN = 8
CHUNK_BYTES = geometry(namespace_of(0, 16, BYTES_PER_TOKEN), 16).file_bytes


def trace_of(prompts: Sequence[Sequence[object]], step_s: float = 1.0) -> Trace:
    """A trace of prompts, each a sequence of blocks of 16 tokens."""
    trace = Trace([], tokens_per_chunk=16)
    known: dict[tuple[object, ...], int] = {}
    for index, prompt in enumerate(prompts):
        chunks = []
        for end in range(1, len(prompt) + 1):
            place = tuple(prompt[:end])
            if place not in known:
                known[place] = len(trace.parents)
                trace.parents.append(known.get(place[:-1], -1))
                trace.positions.append(end - 1)
                trace.sources.append(0)
                trace.tokens.append(16)
            chunks.append(known[place])
        trace.requests.append(Request(index * step_s, chunks, 16 * len(chunks)))
    return trace


def chats(seed: int, num_requests: int, num_open: int = 20) -> Trace:
    """Prompts that grow and branch."""
    chance = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(num_requests):
        begin = list(chance.choice(prompts[-num_open:])) if prompts and chance.random() < 0.7 else []
        begin = begin[: chance.randrange(len(begin) + 1)] if chance.random() < 0.2 else begin
        prompts.append([*begin, *(chance.randrange(1 << 30) for _ in range(chance.randrange(1, 5)))])
    return trace_of(prompts)


def replay_of(
    trace: Trace,
    policy: str,
    num_ram: int,
    num_nvme: int = 0,
    *,
    has_ghosts: bool = True,
    admission: Admission | None = None,
    has_tree: bool = False,
) -> Replay:
    """A replay that nothing was played to yet."""
    cache = Cache(
        trace, maker(policy), BYTES_PER_TOKEN, num_ram * CHUNK_BYTES, num_nvme * CHUNK_BYTES, Tally(),
        has_ghosts=has_ghosts, admission=admission, has_tree=has_tree,
    )  # fmt: skip
    return Replay(cache)


def play(
    trace: Trace,
    policy: str,
    num_ram: int,
    num_nvme: int = 0,
    *,
    has_ghosts: bool = True,
    admission: Admission | None = None,
) -> Tally:
    """What comes of it."""
    replay = replay_of(trace, policy, num_ram, num_nvme, has_ghosts=has_ghosts, admission=admission)
    for request in trace.requests:
        replay.request(request)
    return replay.tally


def kvfs(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvfs.tools.cli", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def write_mooncake(trace: Trace, path: Path) -> None:
    """The trace as a file."""
    lines = [
        {"timestamp": 1000 * request.at_s, "input_length": 512 * len(request.chunks), "hash_ids": list(request.chunks)}
        for request in trace.requests
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
