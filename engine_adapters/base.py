"""What every engine adapter counts.

Which tokens are which chunk stands in `spans`, whether loading pays in `break_even`; the session with the cache is
`kvfs.client.Client`. Nothing here imports torch or an engine.
"""

from __future__ import annotations

import msgspec

from kvfs.messages import Tier


class LastLoad(msgspec.Struct, frozen=True):
    """What the cache gave to the latest request.

    Attributes:
        tokens_reused: prompt tokens whose KV was loaded, not computed.
        tier: the slowest tier that they came from; NONE if nothing was loaded.
        seconds: what the load cost the request: asking, and waiting for bytes.
    """

    tokens_reused: int = 0
    tier: Tier = Tier.NONE
    seconds: float = 0.0


class AdapterStatistics(msgspec.Struct, frozen=True):
    """What an adapter did so far.

    Attributes:
        requests: calls of the engine through the adapter.
        hits, misses: requests that loaded something; that found nothing. A request that was bypassed is neither.
        bypasses: requests of a kind that the adapter does not handle; the engine ran without the cache.
        not_worth_it: requests that found something but computed it, because that is cheaper.
        failures: loads that were abandoned for a corrupt chunk or a cache that did not answer.
        prompt_tokens: of all requests that were not bypassed.
        tokens_reused: by the tier they came from.
        chunks_stored, chunks_refused: published by this adapter; turned away or failed.
        stores_dropped: background stores that were not begun because too many were waiting.
        last_load: see there.
    """

    requests: int = 0
    hits: int = 0
    misses: int = 0
    bypasses: int = 0
    not_worth_it: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    tokens_reused: dict[Tier, int] = {}
    chunks_stored: int = 0
    chunks_refused: int = 0
    stores_dropped: int = 0
    last_load: LastLoad = LastLoad()
