"""What a replay comes to: hit rates by tier, bytes moved, wear, and what that means for a user who waits.

The times are those of one request alone on one engine: bytes at the bandwidth of the tier they come from, then the
tokens that were not found at the prefill rate, one after the other. The wait before a request runs is left out, and so are
loads that overlap with compute; both make good hit rates worth more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvfs.prefetch import Reason
from kvfs.tools.simulate.tally import Tally
from kvfs.tools.simulate.traces import Trace

_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Machine:
    """What times are predicted with: bytes a second of the tiers, tokens a second of prefill, and bytes of a token of a
    namespace that does not say it.
    """

    ram_bytes_s: float
    nvme_bytes_s: float
    prefill_tokens_s: float
    bytes_per_token: int


class Unrestricted(msgspec.Struct, frozen=True, kw_only=True):
    """The same replay where everything is admitted to NVMe; for what these are see `Result`."""

    hit_rate: float
    token_hit_rate: float
    written_bytes: int
    written_bytes_a_day: float | None
    ttft_s: dict[str, float]
    input_tokens_s: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one trace. What does not apply is None.

    Attributes:
        requests, references: that were played, and chunks that they asked for.
        hit_rate: found chunks by asked ones; token_hit_rate: the same in tokens, ram_ and nvme_ the parts of it.
        stored_chunks, bypassed_chunks, written_chunks: into RAM; not worth it, or no room; onto NVMe.
        loaded_ram_bytes, loaded_nvme_bytes: KV that was moved; written_bytes, written_bytes_a_day: whole chunk files.
        not_admitted_unused, not_admitted_budget: how often a chunk was kept from NVMe, and why.
        always_admitted: what there would be without that, and what it costs in hits.
        prefetches_begun, _useful, _wasted, _dropped: chunks; useful were loaded, wasted left RAM before, dropped were not
            begun in time. read_aheads_…: the same of what was read because a chain goes on with it.
        ttft_s: predicted, mean and quantiles; input_tokens_s: of one engine that is never idle.
        references_per_s: how fast it was simulated.
        is_partial: it was interrupted.
        hints: that it was told and heeded, see `hints`.
    """

    policy: str
    requests: int
    references: int
    hit_rate: float
    token_hit_rate: float
    ram_token_hit_rate: float
    nvme_token_hit_rate: float
    stored_chunks: int | None
    bypassed_chunks: int | None
    written_chunks: int | None
    loaded_ram_bytes: int
    loaded_nvme_bytes: int
    written_bytes: int | None
    written_bytes_a_day: float | None
    not_admitted_unused: int | None = None
    not_admitted_budget: int | None = None
    always_admitted: Unrestricted | None = None
    prefetches_begun: int | None = None
    prefetches_useful: int | None = None
    prefetches_wasted: int | None = None
    prefetches_dropped: int | None = None
    read_aheads_begun: int | None = None
    read_aheads_useful: int | None = None
    read_aheads_wasted: int | None = None
    read_aheads_dropped: int | None = None
    ttft_s: dict[str, float]
    input_tokens_s: float
    references_per_s: float
    is_partial: bool
    hints: list[str] = []


def result(
    policy: str,
    trace: Trace,
    tally: Tally,
    machine: Machine,
    took_s: float,
    *,
    has_nvme: bool,
    is_optimum: bool,
    has_prefetch: bool = False,
) -> Result:
    """Sum up; of the optimum nobody knows how many bytes it would move."""
    num_requests = len(tally.ram)
    played = trace.requests[:num_requests]
    ram_tokens = nvme_tokens = ram_bytes = nvme_bytes = references = 0
    times: list[float] = []
    for request, ram, nvme in zip(played, tally.ram, tally.nvme, strict=True):
        per_chunk, bytes_per_token = trace.blocks(trace.sources[request.chunks[0]], machine.bytes_per_token)
        num_found = min((ram + nvme) * per_chunk, request.tokens)
        cold = min(nvme * per_chunk, num_found)
        ram_tokens += num_found - cold
        nvme_tokens += cold
        ram_bytes += (num_found - cold) * bytes_per_token
        nvme_bytes += cold * bytes_per_token
        references += len(request.chunks)
        times.append(
            bytes_per_token * ((num_found - cold) / machine.ram_bytes_s + cold / machine.nvme_bytes_s)
            + (request.tokens - num_found) / machine.prefill_tokens_s
        )
    tokens = sum(request.tokens for request in played)
    seconds = played[-1].at_s - played[0].at_s if played else 0.0
    written = tally.written_bytes
    found = Result(
        policy=policy,
        requests=num_requests,
        references=references,
        hit_rate=_share(tally.num_found, references),
        token_hit_rate=_share(ram_tokens + nvme_tokens, tokens),
        ram_token_hit_rate=_share(ram_tokens, tokens),
        nvme_token_hit_rate=_share(nvme_tokens, tokens),
        stored_chunks=None if is_optimum else tally.num_stored,
        bypassed_chunks=None if is_optimum else tally.num_bypassed,
        written_chunks=tally.num_written if has_nvme and not is_optimum else None,
        loaded_ram_bytes=ram_bytes,
        loaded_nvme_bytes=nvme_bytes,
        written_bytes=written if has_nvme and not is_optimum else None,
        written_bytes_a_day=written / seconds * _DAY_S if has_nvme and not is_optimum and seconds else None,
        ttft_s=_quantiles(times),
        input_tokens_s=_share(tokens, sum(times)),
        references_per_s=_share(references, took_s),
        is_partial=num_requests < len(trace.requests),
        hints=sorted(tally.hints),
    )
    return msgspec.structs.replace(found, **_prefetched(tally)) if has_prefetch else found


def _prefetched(tally: Tally) -> dict[str, int]:
    reasons = (Reason.REQUEST, Reason.CHAIN)
    names = [f"{reason.value}_{what}" for reason in reasons for what in ("begun", "useful", "wasted", "dropped")]
    return {name: getattr(tally.counters, name) for name in names}


def with_admission(restricted: Result, tally: Tally, always: Result) -> Result:
    """What a replay with a rule or a budget came to, with the one beside it that admits everything."""
    return msgspec.structs.replace(
        restricted,
        not_admitted_unused=tally.counters.not_admitted_unused,
        not_admitted_budget=tally.counters.not_admitted_budget,
        always_admitted=Unrestricted(
            hit_rate=always.hit_rate,
            token_hit_rate=always.token_hit_rate,
            written_bytes=always.written_bytes or 0,
            written_bytes_a_day=always.written_bytes_a_day,
            ttft_s=always.ttft_s,
            input_tokens_s=always.input_tokens_s,
        ),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _quantiles(times: Sequence[float]) -> dict[str, float]:
    if not times:
        return {}
    ordered = sorted(times)
    found = {"mean": sum(ordered) / len(ordered)}
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        found[name] = ordered[min(int(share * len(ordered)), len(ordered) - 1)]
    return found
