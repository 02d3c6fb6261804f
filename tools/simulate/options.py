"""What is wrong with the options of `kvfs simulate`, in one sentence each, and what they come to."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import get_args

from kvfs.admission import Rule
from kvfs.chunk import geometry
from kvfs.config import MAX_TIER_BYTES, MIN_TIER_BYTES, format_size, parse_size
from kvfs.durations import parse_duration
from kvfs.errors import UsageError
from kvfs.policies import named
from kvfs.tools.simulate.cache import MakePolicy
from kvfs.tools.simulate.comparing import OPTIMUM, Setting
from kvfs.tools.simulate.formats import MAX_BYTES_PER_TOKEN
from kvfs.tools.simulate.report import Machine
from kvfs.tools.simulate.sizes import tier_bytes
from kvfs.tools.simulate.stand_ins import namespace_of
from kvfs.tools.simulate.timed import Pace
from kvfs.tools.simulate.traces import Trace

Makers = dict[str, MakePolicy | None]
_MAX_TOKENS_PER_CHUNK = 1 << 16
_MAX_QUEUE_TIME_S = 86_400.0


def policies(text: str) -> Makers:
    """The policies to compare, each once, and what makes them; None makes the optimum. Raises UsageError."""
    names = [*dict.fromkeys(name for part in text.split(",") if (name := part.strip()))]
    choices = f"{', '.join(named.NAMES)}, {OPTIMUM}, or package.module:Class"
    if not names:
        raise UsageError(f"--policy names none: it is one or more, with commas between them, of {choices}")
    for name in names:
        if ":" not in name and name not in (*named.NAMES, OPTIMUM):
            raise UsageError(f"there is no policy {name!r}: it must be one of {choices}")
    return {name: None if name == OPTIMUM else named.maker(name) for name in names}


def check_numbers(prefill_rate: float, bytes_a_token: int | None, tokens_per_chunk: int | None) -> None:
    """Raise UsageError for what is no rate or size."""
    if not 0 < prefill_rate < inf:
        raise UsageError("--prefill-rate is a number of tokens above 0")
    if bytes_a_token is not None and not 0 < bytes_a_token <= MAX_BYTES_PER_TOKEN:
        raise UsageError(f"--bytes-per-token is between 1 and {MAX_BYTES_PER_TOKEN:,}")
    if tokens_per_chunk is not None and not 0 < tokens_per_chunk <= _MAX_TOKENS_PER_CHUNK:
        raise UsageError(f"--tokens-per-chunk is between 1 and {_MAX_TOKENS_PER_CHUNK:,}")


def admission(text: str, write_budget: str | None, nvme: str | None) -> tuple[Rule, int | None]:
    """The rule and the bytes a day of `--admission` and `--write-budget`. Raises UsageError."""
    rule: Rule | None = next((rule for rule in get_args(Rule) if rule == text), None)
    if rule is None:
        raise UsageError(f"--admission is {' or '.join(get_args(Rule))}, not {text!r}")
    budget_bytes = None if write_budget is None else _size("--write-budget", write_budget)
    if budget_bytes is not None and not MIN_TIER_BYTES <= budget_bytes <= MAX_TIER_BYTES:
        raise UsageError(f"--write-budget lies between {format_size(MIN_TIER_BYTES)} and {format_size(MAX_TIER_BYTES)}")
    if nvme is None and (rule != "always" or budget_bytes is not None):
        raise UsageError("--admission and --write-budget say what is written to NVMe: give --nvme too")
    return rule, budget_bytes


def pace(queue_time: str, load_chunks: int, nvme: str | None) -> Pace:
    """What `--queue-time` and `--load-chunks` come to. Raises UsageError."""
    found = Pace(parse_duration(queue_time, "--queue-time"), load_chunks)
    if found.queue_time_s > _MAX_QUEUE_TIME_S:
        raise UsageError("--queue-time is at most 1d")
    if load_chunks < 0:
        raise UsageError("--load-chunks is a number of chunks above 0")
    if found.prefetches and nvme is None:
        raise UsageError("what is prefetched comes from NVMe: with --queue-time or --load-chunks give --nvme too")
    return found


def for_trace(makers: Makers, trace: Trace) -> Makers:
    """Those that this trace can be asked for: the exact optimum is one of chunks of equal size. Raises UsageError if none is left."""
    if trace.is_uniform or OPTIMUM not in makers:
        return makers
    left = {name: maker for name, maker in makers.items() if name != OPTIMUM}
    if not left:
        raise UsageError(f"{OPTIMUM} is known for chunks of one size only, and the namespaces of this trace differ")
    return left


def setting(
    trace: Trace,
    machine: Machine,
    ram: str,
    nvme: str | None,
    rule: Rule,
    budget_bytes: int | None,
    pace: Pace,
    given: frozenset[str],
) -> Setting:
    """All of it, with the sizes of the tiers in bytes. Raises UsageError."""
    of_each = [_chunk_bytes(*trace.blocks(source, machine.bytes_per_token)) for source in range(max(trace.sources) + 1)]
    numbers = Counter(trace.sources)
    chunk_bytes = sum(of_each[source] * number for source, number in numbers.items()) // trace.num_chunks
    sizes = {}
    for name, text in (("ram", ram), ("nvme", nvme)):
        try:
            sizes[name] = size = tier_bytes(text, trace.num_chunks, chunk_bytes) if text is not None else 0
        except UsageError as error:
            raise UsageError(f"--{name}: {error}") from error
        if text is not None and not max(of_each) <= size <= MAX_TIER_BYTES:
            raise UsageError(
                f"--{name} is {format_size(size)}: it holds at least a chunk, {format_size(max(of_each))} here, and at most "
                f"{format_size(MAX_TIER_BYTES)}"
            )
    return Setting(
        trace, machine, sizes["ram"], sizes["nvme"], chunk_bytes, rule, budget_bytes, pace, given
    )  # fmt: skip


def _chunk_bytes(tokens_per_chunk: int, bytes_per_token: int) -> int:
    """Of a chunk file. Raises UsageError."""
    try:
        return geometry(namespace_of(0, tokens_per_chunk, bytes_per_token), tokens_per_chunk).file_bytes
    except UsageError as error:
        what = f"{tokens_per_chunk:,} tokens of {format_size(bytes_per_token)}"
        raise UsageError(f"a chunk of {what} cannot be: {error}; say --bytes-per-token") from error


def bandwidth(name: str, text: str) -> int:
    """Bytes a second. Raises UsageError, which says what it was given for."""
    size = _size(name, text)
    if not size:
        raise UsageError(f"{name} is above 0")
    return size


def _size(name: str, text: str) -> int:
    try:
        return parse_size(text)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from error
