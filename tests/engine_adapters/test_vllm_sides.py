"""The connector's two sides with a real store between them, and a stand-in for vLLM around them."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.engine_adapters import vllm_scheduler
from kvfs.engine_adapters.vllm_orders import LoadReport, StepReport
from kvfs.engine_adapters.vllm_scheduler import MAX_LEASED_REQUESTS
from kvfs.heeding import is_closed
from kvfs.messages import Tier
from kvfs.testing import DEADLINE_S, settings_in, socket_path, wait_until
from kvfs.testing.daemon import DaemonProcess

from .conftest import Node
from .vllm_stand_in import BLOCK, CHUNK, StandIn, request_of

TOKENS = [(7 * index) % 90 + 3 for index in range(70)]  # four chunks and six tokens
BLOCK_IDS = list(range(10, 28))
OTHER_IDS = list(range(60, 40, -1))


@pytest.fixture
def engines(node: Node) -> Iterator[Callable[..., StandIn]]:
    made: list[StandIn] = []

    def make(**settings: Any) -> StandIn:
        made.append(StandIn(node.mount, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def fill(engine: StandIn, tokens: list[int] = TOKENS) -> None:
    """Compute and store a prompt."""
    request = request_of(tokens, "fill")
    engine.run(request, BLOCK_IDS)
    engine.finish(request)
    wait_for_publishing(engine)


def wait_for_publishing(engine: StandIn) -> None:
    for worker in engine.workers:
        worker.flush()


@pytest.mark.parametrize("load_async", [True, False, None])
def test_another_engine_gets_the_same_kv(node: Node, engines: Any, load_async: bool) -> None:
    fill(engines())
    assert [chunk.position for chunk in node.chunks()] == [0, 1, 2, 3]
    engine = engines(load_async=load_async)
    request = request_of(TOKENS)
    assert engine.run(request, OTHER_IDS) == 4 * CHUNK
    assert not engine.wrong_tokens(request, len(TOKENS))
    assert not engine.failed


@pytest.mark.parametrize("load_async", [True, False, None])
def test_a_chunk_is_loaded_from_where_the_local_blocks_end(engines: Any, load_async: bool) -> None:
    """Local blocks may be read by others at this moment: they are not written, not even with the same bytes."""
    fill(engines())
    engine = engines(load_async=load_async)
    request = request_of(TOKENS)
    num_local = CHUNK + 2 * BLOCK
    engine.block_ids["r"] = OTHER_IDS
    engine.compute(request, 0, num_local)
    mark = OTHER_IDS[num_local // BLOCK - 1]
    engine.tensors[0][1][mark] = 255
    assert engine.run(request, OTHER_IDS, num_local) == 4 * CHUNK - num_local
    assert (engine.tensors[0][1][mark] == 255).all()
    assert engine.wrong_tokens(request, len(TOKENS)) == list(range(num_local - BLOCK, num_local))


def test_a_step_whose_layers_do_not_wait_has_its_kv_before_it_begins(engines: Any) -> None:
    """A compiled model might leave the hook out: until every layer was seen to call it, the step begins with the KV."""
    fill(engines())
    engine = engines(load_async=False)
    engine.wait_for_layers = False
    request = request_of(TOKENS)
    running = threading.Thread(target=engine.run, args=(request, OTHER_IDS))
    with engine.pausing(rank=0):
        running.start()
        running.join(0.3)
        assert running.is_alive()
    running.join()
    assert not engine.wrong_at_begin
    assert not engine.wrong_tokens(request, len(TOKENS))


def test_a_prompt_that_is_stored_whole(engines: Any) -> None:
    """Between steps all of it is loaded; inside a step one token is left to compute."""
    tokens = TOKENS[: 2 * CHUNK]
    fill(engines(), tokens)
    assert engines().run(request_of(tokens), OTHER_IDS) == 2 * CHUNK
    engine = engines(load_async=False)
    request = request_of(tokens)
    assert engine.run(request, OTHER_IDS) == 2 * CHUNK - 1
    assert not engine.wrong_tokens(request, len(tokens))


def test_a_long_prompt_is_stored_through_a_small_window(node: Node, engines: Any) -> None:
    """Half a window at a time, while the daemon still checks the half before."""
    tokens = [(11 * index) % 90 + 3 for index in range(14 * CHUNK)]
    engine = engines(window_bytes=1 << 16)
    request = request_of(tokens)
    engine.run(request, list(range(14 * CHUNK // BLOCK)))
    wait_for_publishing(engine)
    assert [chunk.position for chunk in node.chunks()] == list(range(14))


def test_chunked_prefills_store_what_is_whole(node: Node, engines: Any) -> None:
    engine = engines()
    request = request_of(TOKENS)
    engine.scheduler.arrived(request)
    engine.admit(request, BLOCK_IDS)
    stored = []
    for num_tokens in (10, 10, 30, 20):
        engine.schedule(request, num_tokens)
        engine.step()
        wait_for_publishing(engine)
        stored.append(len(node.chunks()))
    assert stored == [0, 1, 3, 4]


def test_generated_tokens_are_stored_with_the_prompt(node: Node, engines: Any) -> None:
    """Also the chunk that the very last token completed; the blocks are held until it is copied."""
    engine = engines()
    request = request_of(TOKENS[:20])
    engine.run(request, BLOCK_IDS)
    request.all_token_ids = TOKENS[:33]
    request.num_tokens = request.num_computed_tokens = 33
    engine.compute(request, 20, 13)
    engine.finish(request)
    wait_for_publishing(engine)
    assert [chunk.position for chunk in node.chunks()] == [0, 1]
    again = request_of(TOKENS)
    other = engines()
    assert other.run(again, OTHER_IDS) == 2 * CHUNK
    assert not other.wrong_tokens(again, len(TOKENS))


@pytest.mark.expect_log("does not have its checksum|bad|corrupt|dropped")
@pytest.mark.parametrize("load_async", [True, False, None])
def test_what_did_not_arrive_is_named_and_stored_anew(node: Node, engines: Any, load_async: bool) -> None:
    """The third chunk has rotted: its blocks and those behind it are reported, the ones before are right."""
    fill(engines())
    node.flip(node.chunks()[2], 1)
    engine = engines(load_async=load_async)
    request = request_of(TOKENS)
    engine.scheduler.arrived(request)
    assert engine.admit(request, OTHER_IDS) == 4 * CHUNK
    if engine.scheduler.is_async(request):
        engine.settle(request)
    else:
        engine.schedule(request, 6)
        engine.step()
        assert not engine.orders.stores
    assert engine.failed == set(OTHER_IDS[2 * CHUNK // BLOCK : 4 * CHUNK // BLOCK])
    assert not engine.wrong_tokens(request, 2 * CHUNK)
    request.num_computed_tokens = 2 * CHUNK  # as vLLM does under "recompute"
    assert engine.scheduler.loadable_tokens(request, 0) == 0, "it is not tried again"
    engine.schedule(request, len(TOKENS) - 2 * CHUNK)
    engine.step()
    engine.finish(request)
    wait_for_publishing(engine)
    assert [chunk.position for chunk in node.chunks()] == [0, 1, 2, 3]
    again = engines()
    assert again.run(request_of(TOKENS), OTHER_IDS) == 4 * CHUNK
    assert not again.wrong_tokens(request_of(TOKENS), len(TOKENS))


def test_a_prefix_counts_as_far_as_every_rank_has_it(node: Node, engines: Any) -> None:
    fill(engines(num_ranks=2))
    second = [chunk for chunk in node.chunks() if chunk.table.namespace.rank == 1]
    node.run(node.store.remove, [second[2]])
    engine = engines(num_ranks=2)
    request = request_of(TOKENS)
    assert engine.run(request, OTHER_IDS) == 2 * CHUNK
    assert not engine.wrong_tokens(request, len(TOKENS))


def test_a_load_has_ended_when_it_has_on_every_rank(engines: Any) -> None:
    """One rank may be steps behind another: until it is there too the request waits, and its chunks stay leased."""
    fill(engines(num_ranks=2))
    engine = engines(num_ranks=2)
    request = request_of(TOKENS)
    engine.scheduler.arrived(request)
    with engine.pausing(rank=1):
        assert engine.admit(request, OTHER_IDS) == 4 * CHUNK
        while not engine.receiving.num_named["r"] and not engine.received:
            engine.step()
        assert not engine.received
        assert engine.scheduler.num_leased == 1
    engine.settle(request)
    assert not engine.wrong_tokens(request, 4 * CHUNK)
    assert engine.scheduler.num_leased == 0


def test_blocks_are_free_when_every_rank_has_copied_them(engines: Any) -> None:
    """One rank may be steps behind another: what it has not read yet is not given to another request."""
    engine = engines(num_ranks=2)
    request = request_of(TOKENS)
    with engine.pausing(rank=1):
        engine.run(request, BLOCK_IDS)
        assert engine.scheduler.finished(request, BLOCK_IDS)
        while not engine.sending.num_named["r"] and not engine.sent:
            engine.step()
        assert not engine.sent
    while not engine.sent:
        engine.step()
    for tensors in engine.tensors:
        for tensor in tensors:
            tensor.fill_(0)  # another request
    wait_for_publishing(engine)
    other, again = engines(num_ranks=2), request_of(TOKENS)
    assert other.run(again, OTHER_IDS) == 4 * CHUNK
    assert not other.wrong_tokens(again, len(TOKENS))


def test_asking_twice_changes_nothing(node: Node, engines: Any) -> None:
    """The engine asks again in every step in which there is no room; the chunks stay leased meanwhile."""
    fill(engines())
    engine = engines()
    request = request_of(TOKENS)
    engine.scheduler.arrived(request)
    assert [engine.scheduler.loadable_tokens(request, 0) for _ in range(3)] == [4 * CHUNK] * 3
    assert node.call(lambda: sum(chunk.leases > 0 for chunk in node.store.catalog.chunks())) == 4
    assert not engine.scheduler.finished(request, [])
    engine.close()
    wait_until(
        lambda: not node.call(lambda: sum(chunk.leases for chunk in node.store.catalog.chunks())),
        "its session has ended",
    )


def test_a_request_that_missed_asks_again_when_it_is_its_turn(
    node: Node, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another may have stored the prefix while it waited; but right after it arrived it does not ask twice."""
    engine = engines()
    request = request_of(TOKENS)
    engine.scheduler.arrived(request)
    for _ in range(3):
        assert engine.scheduler.loadable_tokens(request, 0) == 0
    assert node.call(lambda: node.store.counters.matches) == 1
    fill(engines())
    monkeypatch.setattr(vllm_scheduler, "ASK_AGAIN_S", 0.0)
    assert engine.scheduler.loadable_tokens(request, 0) == 4 * CHUNK


def test_a_long_queue_does_not_hold_the_cache(node: Node, engines: Any) -> None:
    fill(engines())
    engine = engines()
    requests = [request_of(TOKENS, f"r{number}") for number in range(MAX_LEASED_REQUESTS + 5)]
    for request in requests:
        engine.scheduler.arrived(request)
    assert engine.scheduler.num_leased == MAX_LEASED_REQUESTS
    assert engine.scheduler.loadable_tokens(requests[-1], 0) == 4 * CHUNK
    for request in requests:
        engine.scheduler.finished(request, [])
    assert engine.scheduler.num_leased == 0


def test_blocks_of_a_preempted_request_are_copied_before_they_go(node: Node, engines: Any) -> None:
    """In the very step that stores them they may be given to another request in the next."""
    engine = engines()
    request = request_of(TOKENS)
    engine.run(request, BLOCK_IDS)
    engine.preempted = {"r"}
    engine.step()
    for tensor in engine.tensors[0]:
        tensor.fill_(0)  # another request
    wait_for_publishing(engine)
    request.num_computed_tokens = 0
    assert engine.admit(request, OTHER_IDS) == 4 * CHUNK
    engine.settle(request)
    assert not engine.wrong_tokens(request, 4 * CHUNK)


@pytest.mark.expect_log("does not answer")
def test_blocks_are_given_away_without_waiting_for_a_stopped_daemon(tmp_path: Path) -> None:
    """The daemon does not answer the store: the engine goes on after a moment, and what it gave away is not read."""
    settings = settings_in(tmp_path)
    with DaemonProcess.start(settings, socket_path(tmp_path)) as daemon:
        engine = StandIn(tmp_path / "mount", deadline_s=30.0)
        request = request_of(TOKENS)
        engine.scheduler.arrived(request)
        engine.admit(request, BLOCK_IDS)
        with daemon.stopped():
            engine.schedule(request, 70)
            engine.step()
            begin = time.monotonic()
            engine.preempted = {"r"}
            engine.step()
            assert time.monotonic() - begin < 10
            for tensor in engine.tensors[0]:
                tensor.fill_(0)
        wait_for_publishing(engine)
        assert daemon.statistics()["num_chunks"] == 0
        engine.close()


def test_a_request_that_is_cancelled_while_it_loads(engines: Any) -> None:
    """The engine keeps its blocks until the load has ended, and hears of that once; nothing else is held."""
    fill(engines())
    engine = engines()
    request = request_of(TOKENS)
    engine.scheduler.arrived(request)
    engine.admit(request, OTHER_IDS)
    assert not engine.scheduler.finished(request, OTHER_IDS)
    engine.settle(request)
    assert not engine.sent


def test_a_salt_keeps_requests_apart(engines: Any) -> None:
    engine = engines()
    for salt in (None, "mine"):
        request = request_of(TOKENS, f"{salt}", cache_salt=salt)
        assert engine.run(request, BLOCK_IDS) == 0
        engine.finish(request)
    wait_for_publishing(engine)
    assert engine.run(request_of(TOKENS, cache_salt="mine"), OTHER_IDS) == 4 * CHUNK
    assert engine.run(request_of(TOKENS, "yours", cache_salt="yours"), BLOCK_IDS) == 0


def test_loads_that_cost_more_than_computing_are_declined(engines: Any) -> None:
    """Measured: computing takes 1 ms a token and loading 2; with a faster tier it loads again."""
    fill(engines())
    engine = engines(break_even=True)
    slow = LoadReport("other", {Tier.RAM: 100}, 0.2, failed=False)
    for _ in range(8):
        engine.scheduler.break_even.observe_compute(100, 0.1)
        engine.scheduler.reported(StepReport(None, [slow]), (), 0)
    request = request_of(TOKENS)
    engine.scheduler.arrived(request)
    assert [engine.scheduler.loadable_tokens(request, 0) for _ in range(3)] == [0, 0, 0]
    assert engine.scheduler.take_counts()["not_worth_it"] == 1
    fast = LoadReport("other", {Tier.RAM: 100}, 0.01, failed=False)
    engine.scheduler.reported(StepReport(None, [fast] * 8), (), 0)
    request = request_of(TOKENS, "later")
    engine.scheduler.arrived(request)
    assert engine.scheduler.loadable_tokens(request, 0) == 4 * CHUNK


def test_a_few_tokens_are_computed(engines: Any) -> None:
    fill(engines())
    engine = engines(floor_tokens=CHUNK)
    request = request_of(TOKENS)
    engine.scheduler.arrived(request)
    assert engine.scheduler.loadable_tokens(request, 4 * CHUNK - BLOCK) == 0
    assert engine.scheduler.loadable_tokens(request, 3 * CHUNK) == CHUNK


def test_after_forgetting_nothing_old_is_found_or_stored(node: Node, engines: Any) -> None:
    """A request that ran meanwhile computed with two kinds of weights: nothing of it is stored, preempted or not."""
    fill(engines())
    engine = engines()
    running = request_of([5] * 70, "running")
    engine.scheduler.arrived(running)
    engine.admit(running, BLOCK_IDS)
    engine.scheduler.forget_all()
    engine.preempted = {"running"}
    engine.schedule(running, 70)
    engine.step()
    engine.finish(running)
    old = request_of(TOKENS, "old")
    assert engine.run(old, BLOCK_IDS) == 0
    wait_for_publishing(engine)
    assert len(node.chunks()) == 8


@pytest.mark.expect_log("does not answer|going on without")
def test_without_a_daemon_requests_are_computed_at_once(start_node: Any, tmp_path: Any) -> None:
    """And when there is one, it is found without anybody asking for it."""
    engine = StandIn(tmp_path / "node", deadline_s=0.2)
    try:
        begin = time.monotonic()
        for number in range(20):
            assert engine.run(request_of(TOKENS, f"r{number}"), BLOCK_IDS) == 0
        assert time.monotonic() - begin < DEADLINE_S
        numbers = itertools.count()

        def is_found() -> bool:
            request = request_of(TOKENS, f"s{next(numbers)}")
            found = engine.run(request, BLOCK_IDS)
            engine.finish(request)
            return found == 4 * CHUNK

        with start_node():
            wait_until(is_found, "the node is found")
    finally:
        engine.close()


# hints


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_a_request_says_of_its_chain_counts_when_its_stores_are_published(
    node: Node, engines: Any, num_ranks: int
) -> None:
    engine = engines(num_ranks=num_ranks)
    said = {"kvfs": {"class": 3, "expect_s": 60}}
    request = request_of(TOKENS, "said", kv_transfer_params=said)
    engine.run(request, BLOCK_IDS)
    assert all(chunk.hint is None for chunk in node.chunks())
    engine.finish(request)
    wait_until(lambda: [chunk.hint is not None for chunk in node.chunks()].count(True) == 4 * num_ranks, "it is said")
    expected = [chunk.position for chunk in node.chunks() if chunk.hint and chunk.hint.until_s > 0]
    assert expected == [3] * num_ranks
    assert engine.scheduler.take_counts() == {"hints": 1}


def test_what_a_request_that_stores_nothing_says_of_its_chain(node: Node, engines: Any) -> None:
    fill(engines())
    engine = engines()
    request = request_of(TOKENS, kv_transfer_params={"kvfs": {"closed": True}})
    engine.run(request, OTHER_IDS)
    engine.finish(request)
    wait_until(lambda: all(is_closed(chunk) for chunk in node.chunks()), "the chain is closed")


@pytest.mark.expect_log("hint in kv_transfer_params")
@pytest.mark.parametrize("said", [[], 3, {"class": 256}, {"class": True}, {"expect_s": -1}, {"expect_s": "60"}, {"closed": 1},
                                  {"unknown": 1}, {}, {"expect_s": float("nan")}, {"closed": True, "expect_s": 5}])  # fmt: skip
def test_a_hint_that_is_none_is_ignored_and_counted(
    node: Node, engines: Any, caplog: pytest.LogCaptureFixture, said: Any
) -> None:
    engine = engines()
    for number in range(2):
        request = request_of(TOKENS, f"r{number}", kv_transfer_params={"kvfs": said})
        engine.run(request, BLOCK_IDS)
        engine.finish(request)
    wait_for_publishing(engine)
    assert len(node.chunks()) == 4
    assert all(chunk.hint is None for chunk in node.chunks())
    assert engine.scheduler.take_counts() == {"hints_invalid": 2}
    assert caplog.text.count("hint in kv_transfer_params") == 1


@pytest.mark.parametrize("others", [{}, {"do_remote_decode": True}, {"kvfs": None}])
def test_what_is_said_to_other_connectors_is_no_hint(engines: Any, others: Any) -> None:
    engine = engines()
    request = request_of(TOKENS, kv_transfer_params=others)
    engine.run(request, BLOCK_IDS)
    engine.finish(request)
    assert engine.scheduler.take_counts() == {}
