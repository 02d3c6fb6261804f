"""The scheduler's side of the connector: which requests load how much, and what is to be stored after a step.

Nothing here imports vLLM: `vllm_connector` translates its hooks into these calls, all of which come from the thread of the
scheduler. Requests are vLLM's own objects, of which only facts are read.

A prefix is matched when its request arrives, and the chunks found are leased until their load has ended; those on NVMe are
prefetched while the request waits for its turn. When that comes the break-even decides how far to load; asking again is
free of effects. A prefix counts as far as every rank has it. What is stored follows from how far vLLM has computed, step by
step, so chunked prefills, preemptions and loads that failed need no cases of their own. What a request says of its chain
(a hint) is passed on when it is over: by the workers behind its stores, or from here where it has none.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvfs.chunk import geometry
from kvfs.client import Client, Lease, Prefetching
from kvfs.engine_adapters.break_even import BreakEven
from kvfs.engine_adapters.keeping import warn_together
from kvfs.engine_adapters.vllm_orders import ChainHint, PlacedChunk, StepOrders, StepReport, Transfer
from kvfs.engine_adapters.vllm_requests import RequestChunks, hint_of, root_extras, why_bypass
from kvfs.engine_adapters.vllm_session import PatientSession
from kvfs.engine_adapters.vllm_settings import VllmSettings
from kvfs.errors import UsageError
from kvfs.hints import Said
from kvfs.messages import MAX_BATCH, Tier
from kvfs.namespace import Namespace

log = logging.getLogger(__name__)
IN_STEP_BYTES = 256 << 20
"""More than this is not loaded inside one step: others compute in it too."""

ASK_AGAIN_S = 0.1
"""A request of which nothing is stored asks again when it is older than this: another one may have stored it by then."""

MAX_LEASED_REQUESTS = 64
"""Requests that hold leases while they wait for their turn: a long queue must not hold the whole cache."""


class TrackedRequest:
    """What is known of one request.

    Attributes:
        request: vLLM's.
        chunks: its full chunks, as far as its tokens are known.
        leases: of each rank, for the chunks that were found.
        prefetches: of each rank, for those of them that were on NVMe.
        num_found: chunks, from the first on, that every rank has.
        tiers: a byte for each, the slowest tier that a rank has it in, when they were matched.
        num_asked: chunks that were asked for then; asked_at: by the monotonic clock.
        may_load: False once a load failed: what is missing is computed then.
        may_store: False once the weights may have changed under it.
        load_end: the token up to which to load; None until it was decided.
        is_in_step: whether the load is part of the step that computes the rest; decided with it.
        loading: what is being loaded.
        num_handled: chunks, from the first on, that are stored or ordered to be.
        has_stores: stores were ordered from its present blocks.
        said: what is known of its chain when it is over, None: nothing.
    """

    def __init__(self, request: Any, chunks: RequestChunks) -> None:
        self.request = request
        self.chunks = chunks
        self.leases: list[Lease] = []
        self.prefetches: list[Prefetching] = []
        self.num_found = 0
        self.tiers = b""
        self.num_asked = 0
        self.asked_at = 0.0
        self.may_load = True
        self.may_store = True
        self.load_end: int | None = None
        self.is_in_step = False
        self.loading: Transfer | None = None
        self.num_handled = 0
        self.has_stores = False
        self.said: Said | None = None


class SchedulerSide:
    """The scheduler's sessions with the cache, one for each rank, and the requests under way.

    Attributes: break_even: decides whether a load pays; num_leased: requests that hold leases.
    """

    def __init__(
        self,
        settings: VllmSettings,
        namespaces: Sequence[Namespace],
        block_size: int,
        digest_lora: Callable[[str], str],
        *,
        may_load_in_step: bool,
        may_prefetch: bool = True,
    ) -> None:
        """`namespaces` are those of all ranks; `digest_lora` names the weights of an adapter by its path.

        `may_load_in_step`: attention layers wait for their KV, also where the settings leave that open. `may_prefetch`:
        what is on NVMe only is to be brought into RAM while its request waits.
        """
        self.break_even = BreakEven(settings.floor_tokens, is_measuring=settings.break_even)
        self._settings = settings
        self._fingerprint = namespaces[0].identity.fingerprint()
        self._block_size = block_size
        self._tokens_per_chunk = namespaces[0].identity.tokens_per_chunk
        self._sessions = [
            PatientSession(Client(settings.mount, namespace, deadline_s=settings.deadline_s, name="vllm scheduler"))
            for namespace in namespaces
        ]
        self._requests: dict[str, TrackedRequest] = {}
        self.num_leased = 0
        self._may_prefetch = may_prefetch
        self._may_load_in_step = may_load_in_step if settings.load_async is None else not settings.load_async
        self._chunk_bytes = geometry(namespaces[0], self._tokens_per_chunk).payload_bytes
        self._num_in_step = 0  # loads inside steps whose end was not told yet
        self._bytes_in_step = 0  # to be loaded inside the next step
        self._ordered: list[tuple[Transfer, bool]] = []  # and whether it is part of the step
        self._last_stores: list[Transfer] = []
        self._held: set[str] = set()
        self._hints: list[ChainHint] = []
        self._has_complained = False
        self._generation: list[str] = []
        self._clock = StepClock(settings.floor_tokens)
        self._counts: Counter[str] = Counter()
        self._lora_digests: dict[str, str] = {}
        self._digest_lora = digest_lora

    def open(self) -> None:
        """Attach to the namespaces. Raises UsageError if the daemon refuses this engine."""
        warn_together([session.open() for session in self._sessions])

    def close(self) -> None:
        """End the sessions."""
        for session in self._sessions:
            session.close()

    # finding

    def arrived(self, request: Any) -> None:
        """A request is new: compute its chunks and match them, so that its turn finds the answer."""
        reason = why_bypass(request)
        if reason is not None:
            self._counts["bypasses"] += 1
            log.info("the cache does not serve request %s: %s", request.request_id, reason)
            return
        extras = self._generation + root_extras(request, self._adapter_digest(request))
        chunks = RequestChunks(self._fingerprint, extras, self._tokens_per_chunk, request.mm_features)
        tracked = self._requests[request.request_id] = TrackedRequest(request, chunks)
        tracked.said = self._hint_of(request)
        self._match(tracked)
        if self._may_prefetch and tracked.leases and Tier.NVME in tracked.tiers and self.break_even.pays(Tier.NVME):
            cold = [chain for chain, tier in zip(chunks.chains, tracked.tiers, strict=False) if tier == Tier.NVME]
            tracked.prefetches = [session.prefetch(cold) for session in self._sessions]

    def _hint_of(self, request: Any) -> Said | None:
        try:
            return hint_of(request)
        except UsageError as error:
            self._counts["hints_invalid"] += 1
            if not self._has_complained:
                log.warning("a hint in kv_transfer_params is ignored, and others like it are only counted: %s", error)
            self._has_complained = True
            return None

    def loadable_tokens(self, request: Any, num_computed: int) -> int:
        """Tokens behind the first `num_computed`, whole blocks of which vLLM has, that come from the cache."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or not tracked.may_load:
            return 0
        self._match(tracked)
        if tracked.num_found * self._tokens_per_chunk - num_computed < self._settings.floor_tokens:
            return 0
        if tracked.load_end is None:
            if tracked.prefetches:  # where the chunks are by now
                self._match(tracked, again=True)
            tracked.load_end = self.break_even.worth_loading(tracked.tiers, self._tokens_per_chunk, num_computed)
            declined = tracked.num_found * self._tokens_per_chunk - max(tracked.load_end, num_computed)
            if declined >= self._settings.floor_tokens:
                self._counts["not_worth_it"] += 1
                begin = max(tracked.load_end, num_computed) // self._tokens_per_chunk
                for session in self._sessions:
                    session.declined(tracked.chunks.chains[begin : tracked.num_found])
            if tracked.load_end <= num_computed:
                tracked.load_end = 0  # also if vLLM has less of it when it asks again
            tracked.is_in_step = self._should_load_in_step(tracked, num_computed)
        wanted = self._end_of_load(tracked) - num_computed
        return wanted if wanted >= self._settings.floor_tokens else 0

    def is_async(self, request: Any) -> bool:
        """Whether a request for which `loadable_tokens` found some waits for them."""
        tracked = self._requests.get(request.request_id)
        return tracked is not None and not tracked.is_in_step

    def _should_load_in_step(self, tracked: TrackedRequest, num_computed: int) -> bool:
        if not self._may_load_in_step or self._settings.load_async is False:
            return self._may_load_in_step
        assert tracked.load_end is not None
        size = self._tokens_per_chunk
        tiers = tracked.tiers[num_computed // size : tracked.load_end // size]
        return tiers.count(Tier.RAM) == len(tiers) and self._bytes_in_step < IN_STEP_BYTES

    def _end_of_load(self, tracked: TrackedRequest) -> int:
        """The token behind the last one that is loaded."""
        assert tracked.load_end is not None
        # A load inside the step leaves a token to compute.
        return min(tracked.load_end, tracked.request.num_tokens - 1) if tracked.is_in_step else tracked.load_end

    def allocated(self, request: Any, block_ids: Sequence[int], num_external: int) -> None:
        """A request got blocks; `num_external` tokens at the end of those counted as computed are to be loaded."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        if num_external <= 0:
            tracked.load_end = None
            if tracked.loading is None:
                self._release(tracked)
            return
        end = self._end_of_load(tracked)  # vLLM has not counted them yet
        tracked.load_end = None
        tracked.loading = self._transfer(tracked, block_ids, (end - num_external) // self._block_size, end)
        log.debug("request %s: %d tokens are loaded", request.request_id, num_external)
        self._ordered.append((tracked.loading, tracked.is_in_step))
        if tracked.is_in_step:
            self._num_in_step += 1
            self._bytes_in_step += len(tracked.loading.chunks) * self._chunk_bytes

    def _transfer(self, tracked: TrackedRequest, block_ids: Sequence[int], first_block: int, end: int) -> Transfer:
        blocks_a_chunk = self._tokens_per_chunk // self._block_size
        first = first_block // blocks_a_chunk
        last = -(-end // self._tokens_per_chunk)
        placed = []
        for position in range(first, last):
            begin = position * blocks_a_chunk
            ids = tuple(block_ids[begin : begin + blocks_a_chunk])
            placed.append(PlacedChunk(tracked.chunks.new_chunk(position), ids, max(0, first_block - begin)))
        return Transfer(tracked.request.request_id, tuple(placed))

    def _match(self, tracked: TrackedRequest, *, again: bool = False) -> None:
        """See how far every rank has the prefix, and in which tiers, unless that is known and leased."""
        tracked.chunks.take(tracked.request.all_token_ids)
        chains = tracked.chunks.chains[:MAX_BATCH]
        now = time.monotonic()
        is_fresh = bool(tracked.leases) if tracked.num_found else now - tracked.asked_at < ASK_AGAIN_S
        if (is_fresh and tracked.num_asked == len(chains) and not again) or tracked.loading is not None:
            return
        before, tracked.leases = tracked.leases, []  # which end when there are new ones
        self.num_leased -= bool(before)
        was_asked = bool(tracked.asked_at)
        tracked.num_asked, tracked.asked_at = len(chains), now
        found = len(chains)
        leases = []
        for session in self._sessions:
            lease = session.match(chains[:found], is_again=was_asked)
            leases.append(lease)
            found = lease.count
            if not found:
                break
        self._give_back(before)
        log.debug("request %s: %d of %d chunks are stored", tracked.request.request_id, found, len(chains))
        tracked.num_found = found
        tiers = [lease.tiers[:found] for lease in leases]
        tracked.tiers = tiers[0] if len(tiers) == 1 else bytes(map(max, *tiers))
        tracked.num_handled = max(tracked.num_handled, found)
        if found and self.num_leased < MAX_LEASED_REQUESTS:
            tracked.leases = leases
            self.num_leased += 1
        else:
            self._give_back(leases)

    def _release(self, tracked: TrackedRequest) -> None:
        prefetches, tracked.prefetches = tracked.prefetches, []
        for session, prefetching in zip(self._sessions, prefetches, strict=False):
            session.cancel(prefetching)
        leases, tracked.leases = tracked.leases, []
        self.num_leased -= bool(leases)
        self._give_back(leases)

    def _give_back(self, leases: Sequence[Lease]) -> None:
        for session, lease in zip(self._sessions, leases, strict=False):
            session.release(lease)

    def _adapter_digest(self, request: Any) -> str:
        if request.lora_request is None:
            return ""
        path = str(request.lora_request.lora_path)
        if path not in self._lora_digests or request.lora_request.load_inplace:
            self._lora_digests[path] = self._digest_lora(path)
        return self._lora_digests[path]

    # a step

    def orders(self, step: Any, block_ids_of: Callable[[str], Sequence[int]]) -> StepOrders:
        """What the workers do in a step; `step` is vLLM's SchedulerOutput."""
        ordered, self._ordered = self._ordered, []
        self._bytes_in_step = 0
        held, self._held = self._held, set()
        last_stores, self._last_stores = self._last_stores, []
        hints, self._hints = self._hints, []
        orders = StepOrders(
            loads=[transfer for transfer, is_in_step in ordered if not is_in_step],
            loads_in_step=[transfer for transfer, is_in_step in ordered if is_in_step],
            stores=last_stores,
            preempted=frozenset(step.preempted_req_ids or ()),
            held=frozenset(held),
            hints=hints,
            is_idle=not step.total_num_scheduled_tokens,
        )
        for request_id in orders.preempted:
            if (tracked := self._requests.get(request_id)) is not None:
                tracked.has_stores = False  # the workers copy them before the blocks go
                tracked.num_handled = 0
                tracked.asked_at = 0.0  # there may be more by now: its own chunks
        # A step may compute with KV that did not arrive; vLLM repeats it, and nothing of it may be stored. What is due
        # is stored with a later step.
        may_store = not self._num_in_step
        num_prefill = 0
        for request_id, num_scheduled in step.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            if tracked.request.num_computed_tokens < tracked.request.num_prompt_tokens:
                num_prefill += num_scheduled
            if may_store:
                computed = min(tracked.request.num_computed_tokens + num_scheduled, tracked.request.num_tokens)
                orders.stores += self._stores(tracked, computed, block_ids_of)
        orders.number, orders.is_timed = self._clock.begin(num_prefill, step.total_num_scheduled_tokens)
        return orders

    def _stores(
        self, tracked: TrackedRequest, computed: int, block_ids_of: Callable[[str], Sequence[int]]
    ) -> list[Transfer]:
        """The chunks among the first `computed` tokens that are to be stored and were not ordered yet."""
        size = self._tokens_per_chunk
        if computed // size <= tracked.num_handled or not tracked.may_store:
            return []
        tracked.chunks.take(tracked.request.all_token_ids)
        begin, end = tracked.num_handled * size, computed // size * size
        tracked.num_handled = computed // size
        tracked.has_stores = True
        return [self._transfer(tracked, block_ids_of(tracked.request.request_id), begin // self._block_size, end)]

    def reported(self, report: StepReport | None, received: Iterable[str], num_failed_blocks: int) -> None:
        """The workers are done with a step, or with loads that were begun earlier."""
        for load in report.loads if report is not None else ():
            self.break_even.observe_load(load.tokens_by_tier, load.seconds, has_failed=load.failed)
            tracked = self._requests.get(load.request_id)
            if tracked is not None and load.failed:
                tracked.may_load = False
                tracked.num_handled = 0  # what is there already is noticed when it is stored
            if tracked is not None and tracked.is_in_step:
                self._load_ended(tracked)
        for request_id in received:
            if (tracked := self._requests.get(request_id)) is not None:
                self._load_ended(tracked)
        if report is not None and report.number is not None:
            measured = self._clock.end(report.number)
            if measured is not None and not num_failed_blocks:
                self.break_even.observe_compute(*measured)

    def _load_ended(self, tracked: TrackedRequest) -> None:
        self._num_in_step -= tracked.loading is not None and tracked.is_in_step
        tracked.loading = None
        self._release(tracked)

    def finished(self, request: Any, block_ids: Sequence[int]) -> bool:
        """A request is over; True if its blocks are still to be copied, which `orders` tells the workers."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False
        is_loading = tracked.loading is not None
        self._load_ended(tracked)
        # vLLM itself keeps the blocks of a request that is being loaded, and wants to hear of one end only.
        if not is_loading and tracked.may_load:
            computed = min(request.num_computed_tokens, request.num_tokens - 1)
            self._last_stores += self._stores(tracked, computed, lambda _: block_ids)
        if tracked.said is not None:
            self._pass_on(tracked, tracked.said)
        if is_loading or not tracked.has_stores:
            return False
        self._held.add(request.request_id)
        return True

    def _pass_on(self, tracked: TrackedRequest, said: Said) -> None:
        tracked.chunks.take(tracked.request.all_token_ids)
        self._counts["hints"] += 1
        if tracked.has_stores:
            self._hints.append(ChainHint(tuple(tracked.chunks.chains), said))
            return
        for session in self._sessions:
            session.hint(tracked.chunks.chains, said)

    def forget_all(self) -> None:
        """From now on nothing that was stored so far is found: the weights may be others."""
        self._generation = [f"generation:{uuid.uuid4().hex}"]
        for tracked in self._requests.values():
            tracked.may_load = tracked.may_store = False

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call, by name."""
        counts, self._counts = self._counts, Counter()
        return {name: count for name, count in counts.items() if count}


class StepClock:
    """How long steps take that do little but prefill; steps may overlap."""

    def __init__(self, floor_tokens: int) -> None:
        self._floor_tokens = floor_tokens
        self._number = 0
        self._begun: dict[int, tuple[float, int]] = {}
        self._last_end = 0.0

    def begin(self, num_prefill: int, num_tokens: int) -> tuple[int, bool]:
        """A step is handed to the workers: its number, and whether its end should be told."""
        self._number += 1
        is_timed = num_prefill >= self._floor_tokens and 2 * num_prefill > num_tokens
        if is_timed:
            self._begun[self._number] = (time.perf_counter(), num_prefill)
        return self._number, is_timed

    def end(self, number: int) -> tuple[int, float] | None:
        """The step's prefill tokens, and the seconds that it had the workers for itself."""
        found = self._begun.pop(number, None)
        if found is None:
            return None
        now = time.perf_counter()
        begin = max(found[0], self._last_end)
        self._last_end = now
        return found[1], now - begin
