"""What is known of a key: where it is, or when and why it went, and what was not done with it.

What went is remembered, bounded, and over a restart if the end before it was in order: answers name the time from which on
that is whole. Looking changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvfs.catalog import Chunk, ChunkTable
from kvfs.departures import BYPASSED
from kvfs.keys import Key
from kvfs.messages import Explained, Known, Tier
from kvfs.policy_change import PolicyInForce
from kvfs.residency import Residency

BY_EARLIER_POLICY = "earlier_policy"
"""The cause of what a policy did before the one in force took its place, or before the daemon started."""
_MAX_STEPS = 1 << 16  # towards heads of chains, for all keys of a question together: 20 ms of the loop


def explain(id_: int, residency: Residency, directory: str, keys: Sequence[Key], policy: PolicyInForce) -> Explained:
    """The answer to `Why`."""
    table = residency.catalog.tables.get(directory)
    missing: dict[Key, bytes] = {}
    return Explained(
        id_,
        tuple([_known(residency, table, directory, key, missing, policy.since_ns) for key in keys]),
        residency.started_ns,
        residency.ghosts.forgotten_ns,
        max(residency.started_ns, residency.refusals.forgotten_ns),
        policy.name,
        table is not None,
    )


def _known(
    residency: Residency,
    table: ChunkTable | None,
    directory: str,
    key: Key,
    missing: dict[Key, bytes],
    policy_since_ns: int,
) -> Known:
    refusal = residency.refusals.get(directory, key)
    refused = (refusal.why, refusal.last_ns, refusal.times) if refusal is not None else ("", 0, 0)
    chunk = table.chunks.get(key) if table is not None else None
    if chunk is not None:
        return Known(
            chunk.tier, chunk.position, chunk.created_ns, chunk.last_used_ns, chunk.hits, _missing(chunk, missing),
            "", "", 0, 0.0, *refused,
        )  # fmt: skip
    ghost = residency.ghosts.get(directory, key)
    if ghost is None or ghost.gone_ns < residency.ghosts.uncertain_ns:
        return Known(Tier.NONE, 0, 0, 0, 0, b"", "", "", 0, 0.0, *refused)
    is_by_policy = ghost.cause == "policy" or ghost.why == BYPASSED
    cause = BY_EARLIER_POLICY if is_by_policy and ghost.gone_ns < policy_since_ns else ghost.cause
    return Known(
        Tier.NONE, 0, ghost.gone_ns, 0, ghost.hits, b"", ghost.why, cause, ghost.full, 60 * ghost.unused_min, *refused
    )  # fmt: skip


def _missing(chunk: Chunk, known: dict[Key, bytes]) -> bytes:
    """The nearest key before a chunk that is not stored, or nothing; `known` has what was found out before."""
    walked: list[Key] = []
    found = b""
    while chunk.position and len(known) + len(walked) < _MAX_STEPS:
        if chunk.key in known:
            found = known[chunk.key]
            break
        walked.append(chunk.key)
        above = chunk.above()
        if above is None:
            found = chunk.parent
            break
        chunk = above
    known.update(dict.fromkeys(walked, found))
    return found
