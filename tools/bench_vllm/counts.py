"""Where prompt tokens came from, and what the connector did: read from the engine's /metrics."""

from __future__ import annotations

import msgspec
from prometheus_client.parser import text_string_to_metric_families

_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
_BY_TIER = "vllm:kvfs_hit_tokens_total"
_CONNECTOR = "vllm:kvfs_"


class Counts(msgspec.Struct, frozen=True):
    """Counted since the start of a server, or between two moments.

    Attributes:
        computed, engine, ram, nvme: prompt tokens that were computed, that the engine's own prefix cache had, and that
            came from kvfs, by tier. What of a load did not arrive is in none of them: the engine computes it, but counts
            it as loaded.
        preemptions: of requests, for want of room in the engine's cache.
        connector: the connector's other counters, by name; empty without kvfs.
    """

    computed: int = 0
    engine: int = 0
    ram: int = 0
    nvme: int = 0
    preemptions: int = 0
    connector: dict[str, int] = {}

    def since(self, before: Counts) -> Counts:
        """What came to it since `before`."""
        return Counts(
            computed=self.computed - before.computed,
            engine=self.engine - before.engine,
            ram=self.ram - before.ram,
            nvme=self.nvme - before.nvme,
            preemptions=self.preemptions - before.preemptions,
            connector={name: count - before.connector.get(name, 0) for name, count in self.connector.items()},
        )


def read(text: str) -> Counts:
    """The counts in the text of /metrics."""
    tokens: dict[str, int] = {}
    connector: dict[str, int] = {}
    preemptions = 0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            value = int(sample.value)
            if sample.name == _BY_SOURCE:
                source = sample.labels["source"]
                tokens[source] = tokens.get(source, 0) + value
            elif sample.name == _BY_TIER:
                tier = sample.labels["tier"]
                tokens[tier] = tokens.get(tier, 0) + value
            elif sample.name == "vllm:num_preemptions_total":
                preemptions += value
            elif sample.name.startswith(_CONNECTOR) and sample.name.endswith("_total"):
                name = sample.name.removeprefix(_CONNECTOR).removesuffix("_total")
                connector[name] = connector.get(name, 0) + value
    return Counts(
        computed=tokens.get("local_compute", 0),
        engine=tokens.get("local_cache_hit", 0),
        ram=tokens.get("ram", 0),
        nvme=tokens.get("nvme", 0),
        preemptions=preemptions,
        connector=connector,
    )
