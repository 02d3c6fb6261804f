"""What the connector did, in vLLM's own log and in the engine's /metrics."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

TIERS = ("ram", "nvme")
COUNTERS = {
    "loads": "Requests that began with a prefix from kvfs.",
    "loads_failed": "Loads of which a part did not arrive; it was computed.",
    "load_microseconds": "Time between the order to load and the end of the load, added up.",
    "chunks_stored": "Chunks published to kvfs.",
    "chunks_refused": "Chunks that kvfs turned away, or that could not be handed over.",
    "chunks_dropped": "Chunks that were not stored because too many were waiting.",
    "not_worth_it": "Requests that found a prefix and computed it, because that was measured to be cheaper.",
    "direct_failures": "1 once a worker gave up reading chunks from NVMe past RAM.",
    "bypasses": "Requests of a kind that kvfs does not serve.",
    "hints": "Requests that said something of their chain in kv_transfer_params, which was passed on.",
    "hints_invalid": "Requests whose hint could not be understood, and was ignored.",
}


WAYS = ("arena", "staged", "gds", "kvikio", "ring")
"""How bytes came into GPU memory. From RAM: out of the arena itself, through pinned memory. From NVMe past RAM: by cuFile,
through kvikio's buffers, through our pinned ones."""


class KvfsStats(KVConnectorStats):
    """Counts by name, since the last time they were taken."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KvfsStats:
        """Add what another worker, or another interval, counted."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line."""
        return {f"kvfs {name}": count for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class KvfsPromMetrics(KVConnectorPromMetrics):
    """The same counts as Prometheus counters; hit tokens bear the tier that they came from."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._hits = self._counter_cls(
            name="vllm:kvfs_hit_tokens",
            documentation="Prompt tokens whose KV was loaded from kvfs, by tier.",
            labelnames=[*labelnames, "tier"],
        )
        self._ways = self._counter_cls(
            name="vllm:kvfs_gpu_bytes",
            documentation="Bytes loaded into GPU memory, by the way they took.",
            labelnames=[*labelnames, "way"],
        )
        self._others = {
            name: self._counter_cls(name=f"vllm:kvfs_{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        for labels in per_engine_labelvalues.values():
            for tier in TIERS:  # shown as 0 from the start
                self._hits.labels(*labels, tier)
            for way in WAYS:
                self._ways.labels(*labels, way)
            for counter in self._others.values():
                counter.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            if name.startswith("hit_tokens_"):
                self._hits.labels(*labels, name.removeprefix("hit_tokens_")).inc(count)
            elif name.startswith("gpu_bytes_"):
                self._ways.labels(*labels, name.removeprefix("gpu_bytes_")).inc(count)
            elif name in self._others:
                self._others[name].labels(*labels).inc(count)
