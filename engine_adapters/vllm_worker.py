"""The worker's side of the connector: orders in, blocks loaded and stored, results out.

Nothing here imports vLLM: `vllm_connector` translates its hooks into these calls, all of which come from the thread that
runs the model. The order of a step is that of vLLM: `preempted` · `begin_loads` (before the forward pass if its requests
wait for them, else after it) · `wait_for_layer` · `begin_stores` · `finished`, `failed_blocks`, `report`, `take_counts`.
"""

from __future__ import annotations

import functools
from collections import Counter

from kvfs.client import Client
from kvfs.engine_adapters.keeping import Keeping, warn_together
from kvfs.engine_adapters.pinned_arena import register
from kvfs.engine_adapters.populating import Populating
from kvfs.engine_adapters.spare_cores import spare_cores
from kvfs.engine_adapters.vllm_blocks import HostBlocks, KvBlocks
from kvfs.engine_adapters.vllm_device_blocks import DeviceBlocks
from kvfs.engine_adapters.vllm_direct_loads import DirectLoads
from kvfs.engine_adapters.vllm_loads import BlockLoad, BlockLoader
from kvfs.engine_adapters.vllm_namespace import WorkerKv
from kvfs.engine_adapters.vllm_orders import StepOrders, StepReport
from kvfs.engine_adapters.vllm_settings import VllmSettings
from kvfs.engine_adapters.vllm_stores import BlockStore
from kvfs.errors import UsageError

STORE_DEADLINE_S = 5.0
"""How long an answer may take that no request waits for: a daemon on a busy machine is not a dead one."""

IDLE_WAIT_S = 0.003
"""vLLM steps without a pause while a load or a store has not ended, and takes the cores that these need: 50 steps in the
80 ms of a load. A step that computes nothing waits for so long, which is all that a new request loses by it."""

IDLE_WAIT_ONE_CORE_S = 0.01
"""The same where all beside the model has one core, which the steps then take from the load."""

MAX_HELD_SHARE = 4
"""At most a quarter of the blocks may be waiting to be copied out."""


class WorkerSide:
    """One worker's KV memory and its sessions with the cache.

    Loads do not wait behind stores, nor a load for which a step waits behind one that comes from a slower tier.

    Attributes: kv: what the worker holds.
    """

    def __init__(
        self, kv: WorkerKv, blocks: KvBlocks, settings: VllmSettings, direct: DirectLoads | None = None
    ) -> None:
        """With `direct` chunks that are on NVMe only are read from there; it is closed with this."""
        self.kv = kv
        self._blocks = blocks
        self._direct = direct
        name = f"vllm rank {kv.namespace.rank}"
        self._clients = [
            Client(settings.mount, kv.namespace, deadline_s=deadline_s, name=f"{name} {what}",
                   window_bytes=settings.window_bytes)
            for what, deadline_s in (
                ("loads", settings.deadline_s), ("loads in steps", settings.deadline_s), ("stores", max(settings.deadline_s, STORE_DEADLINE_S)),
            )
        ]  # fmt: skip
        self._keeping = [
            Keeping(client, attached=functools.partial(self._attached, client)) for client in self._clients
        ]
        self._copied_from = self._clients[1 if settings.load_async is False else 0]
        num_chunks = kv.num_tokens // kv.namespace.identity.tokens_per_chunk
        self._loader = BlockLoader(self._clients[0], blocks, direct)
        self._step_loader = BlockLoader(self._clients[1], blocks, direct)
        self._store = BlockStore(self._clients[2], blocks, max(1, num_chunks // MAX_HELD_SHARE))
        self._populating = Populating(_host_memory(kv))
        self._idle_wait_s = IDLE_WAIT_S if len(spare_cores()) > 1 else IDLE_WAIT_ONE_CORE_S
        self._in_step: list[BlockLoad] = []
        self._waiting_layers: set[int] = set()  # that were seen to wait for their KV, in whatever step
        self._held: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._received: set[str] = set()
        self._report = StepReport()
        self._counts: Counter[str] = Counter()
        self._counted_before = Counter[str]()

    def open(self) -> None:
        """Map the cache's memory now, so that no request pays for it. Raises UsageError if it refuses this engine."""
        self._populating.start()
        for loader in (self._loader, self._step_loader):
            loader.open()
        warn_together([keeping.open() for keeping in self._keeping])

    def _attached(self, client: Client) -> None:
        """There is a session, in the thread that keeps it: what takes long once is done beside the work.

        On a GPU the arena is registered; the window is mapped before there is anything to store.
        """
        blocks = self._blocks
        if client is self._clients[-1] and self.kv.is_storing:
            client.window_bytes()
        if client is self._copied_from and isinstance(blocks, DeviceBlocks) and blocks.device.type == "cuda":
            blocks.use_arena(register(client.arena, blocks.device.index or 0))

    def flush(self) -> None:
        """Wait until everything that was ordered so far is stored, or turned away."""
        self._store.flush()

    def close(self) -> None:
        """Finish what is running and end the sessions."""
        self._populating.close()
        for keeping in self._keeping:
            keeping.close()
        self._loader.close()
        self._step_loader.close()
        self._store.close()
        if self._direct is not None:
            self._direct.close()
        if isinstance(self._blocks, DeviceBlocks):
            self._blocks.use_arena(None)
        for client in self._clients:
            client.close()

    # a step

    def preempted(self, orders: StepOrders) -> None:
        """Blocks are about to be given away: copy them before."""
        if orders.preempted:
            self._store.drain(orders.preempted)

    def begin_loads(self, orders: StepOrders) -> None:
        """Begin the loads of a step."""
        for transfer in orders.loads_in_step:
            self._in_step.append(self._step_loader.begin(transfer, is_async=False))
        for transfer in orders.loads:
            self._loader.begin(transfer, is_async=True)
        if len(self._waiting_layers) < len(self.kv.layer_numbers):  # as far as is known nobody would wait
            for load in self._in_step:
                load.wait_for_end()

    def wait_for_layer(self, layer_name: str) -> None:
        """The forward pass is about to look at a layer."""
        number = self.kv.layer_numbers.get(layer_name)
        if number is not None:
            self._waiting_layers.add(number)
            for load in self._in_step:
                self._blocks.wait(load.wait_for(number))

    def begin_stores(self, orders: StepOrders) -> None:
        """The forward pass is over (on a GPU: queued); the loads that it waited for are too."""
        in_step, self._in_step = self._in_step, []
        for load in in_step:
            load.wait_for_end()
        self._take_ended()
        self._held |= orders.held
        # A step that computed with blocks which did not arrive computed nonsense, and will be repeated.
        if self.kv.is_storing and not (in_step and self._failed_blocks):
            for transfer in orders.stores:
                self._store.begin(transfer)
            for hint in orders.hints:
                self._store.hint(hint)
        if orders.is_idle and not self._loader.wait_a_moment(self._idle_wait_s) and self._has_held():
            self._store.wait_a_moment(self._idle_wait_s)
        if orders.is_timed:
            self._report.number = orders.number

    def finished(self) -> tuple[set[str], set[str]]:
        """Requests whose blocks are free to go, requests whose loads have ended; each is named once."""
        self._take_ended()
        sent = {request_id for request_id in self._held if not self._store.has_stores(request_id)}
        self._held -= sent
        received, self._received = self._received, set()
        return sent, received

    def _has_held(self) -> bool:
        return any(self._store.has_stores(request_id) for request_id in self._held)

    def failed_blocks(self) -> set[int]:
        """Blocks whose KV did not arrive, each named once."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def report(self) -> StepReport | None:
        """What the scheduler's side is told; None if there is nothing."""
        report, self._report = self._report, StepReport()
        return report if report.loads or report.number is not None else None

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call, by name; one rank counts for all."""
        now = Counter(
            chunks_stored=self._store.num_stored,
            chunks_refused=self._store.num_refused,
            chunks_dropped=self._store.num_dropped,
        )
        if isinstance(self._blocks, DeviceBlocks):
            now.update({f"gpu_bytes_{way}": size for way, size in self._blocks.bytes_by_way.items()})
        if self._direct is not None:
            now.update(self._direct.totals())
        self._counts.update(now - self._counted_before)
        self._counted_before = now
        counts, self._counts = self._counts, Counter()
        return dict(counts) if self.kv.namespace.rank == 0 and self.kv.is_storing else {}

    def _take_ended(self) -> None:
        for load in self._loader.ended() + self._step_loader.ended():
            report = load.report()
            self._report.loads.append(report)
            self._failed_blocks |= load.missing_blocks()
            if load.is_async:
                self._received.add(load.transfer.request_id)
            self._counts["loads"] += 1
            self._counts["loads_failed"] += report.failed
            self._counts["load_microseconds"] += int(report.seconds * 1e6)
            for tier, tokens in load.tokens_by_tier.items():
                self._counts[f"hit_tokens_{tier.name.lower()}"] += tokens


def _host_memory(kv: WorkerKv) -> list[tuple[int, int]]:
    """Addresses and sizes of the KV tensors' memory, as far as it is the host's."""
    storages = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in kv.views}
    return [(address, storage.nbytes()) for address, storage in storages.items() if storage.device.type == "cpu"]


def open_worker(kv: WorkerKv, settings: VllmSettings) -> WorkerSide:
    """A worker's side for the device that its tensors are on; raises UsageError for one that kvfs does not know."""
    device = kv.views[0].device.type
    if device == "cpu":
        side = WorkerSide(kv, HostBlocks(kv.views), settings)
    elif device == "cuda":
        blocks = DeviceBlocks(kv.views)
        direct = DirectLoads.open(kv.namespace, blocks) if settings.is_direct(device) else None
        side = WorkerSide(kv, blocks, settings, direct)
    else:
        raise UsageError(f"kvfs moves KV to and from host memory and CUDA devices, not {device!r}")
    side.open()
    return side
