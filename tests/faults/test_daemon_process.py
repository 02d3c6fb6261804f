"""Daemons and clients in processes of their own, stopped and killed: nobody waits, nothing leaks, nothing is wrong."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvfs.client import RETRY_S, Client
from kvfs.errors import UnavailableError
from kvfs.loading import Load
from kvfs.messages import StoreStatus
from kvfs.testing import (
    DEADLINE_S,
    chain_of,
    load_right,
    new_chunks,
    payload_of,
    plain_mount,
    sized_namespace,
    tiny_namespace,
    wait_until,
)
from kvfs.testing.daemon import DaemonProcess

from .clients import client_of, start, store_prompt

NS = tiny_namespace()
MIB = sized_namespace(1 << 20)
SLACK_S = 20.0  # for cores that are busy; a client that waits for the daemon would wait until it goes on, for ever


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with start(tmp_path, ram=16 << 20) as daemon:
        yield daemon


def until(condition: Callable[[], object]) -> float:
    """Seconds until what another process does made the condition true."""
    return wait_until(condition, "what the other process does")


@contextmanager
def impatient(client: Client, deadline_s: float) -> Iterator[None]:
    """A client with a short deadline: only while the daemon cannot answer, since a busy machine may not answer either."""
    client.deadline_s = deadline_s
    try:
        yield
    finally:
        client.deadline_s = DEADLINE_S


# a stopped daemon

no_answer = pytest.mark.expect_log("does not answer, going on without it")


@no_answer
def test_a_stopped_daemon_is_a_miss_within_the_deadline(tmp_path: Path, daemon: DaemonProcess) -> None:
    """match, load and store come back empty-handed in time; processes start as fast as ever; SIGCONT heals."""
    chain = chain_of(NS, 3)
    with client_of(tmp_path) as client:
        assert store_prompt(client, chain) == [StoreStatus.STORED] * 3
        with daemon.stopped(), impatient(client, 0.3):
            for call in (
                lambda: client.match(chain.chains).count,
                lambda: client.load(chain.chains),
                lambda: client.load(chain.chains, stream=True),
                lambda: client.store(new_chunks(chain_of(NS, 1, 1)))[0].payload,
            ):
                client._retry_at = 0.0  # each of them gets to ask
                begin = time.monotonic()
                assert not call()
                assert time.monotonic() - begin < 0.5 + SLACK_S
            begin = time.monotonic()
            for _ in range(100):
                assert client.match(chain.chains).count == 0  # nothing is asked for a while after a failure
            assert time.monotonic() - begin < 0.5 + SLACK_S
            begin = time.monotonic()
            for _ in range(5):
                subprocess.run(["true"], check=True)
            assert time.monotonic() - begin < 0.5 + SLACK_S
        assert until(lambda: client.match(chain.chains).count == 3) < RETRY_S + SLACK_S
        assert load_right(client, chain) == set(chain.keys)
        assert client.statistics.failures >= 4
    until(lambda: daemon.statistics()["num_leases"] == 0)
    until(lambda: daemon.statistics()["num_sessions"] == 0)


@pytest.mark.heavy
@no_answer
def test_a_stopped_daemon_and_a_streamed_load(tmp_path: Path) -> None:
    """A load whose layers were still on their way ends with its deadline, and closing it does not hang."""
    chain = chain_of(MIB, 6)
    with start(tmp_path, ram=16 << 20), client_of(tmp_path, MIB) as client:
        store_prompt(client, chain)
    with start(tmp_path, ram=16 << 20) as daemon, client_of(tmp_path, MIB) as client:
        client.attach()
        loads: list[Load] = []

        def has_begun() -> bool:
            load = client.load(chain.chains, deadline_s=0.5, stream=True)
            loads.extend([load] if load else [])
            return load is not None

        until(has_begun)
        [load] = loads
        with daemon.stopped(), impatient(client, 0.5):
            begin = time.monotonic()
            try:
                for layer in range(4):
                    for index in range(6):
                        load.layer(index, layer)
            except UnavailableError:
                pass  # or everything had arrived before the daemon was stopped
            load.close()
            client.match(chain.chains)
            assert time.monotonic() - begin < 0.5 + 0.2 + 2 * 0.5 + SLACK_S
        until(lambda: load_right(client, chain) == set(chain.keys))


def is_asking(client: Client) -> bool:
    """Whether another thread waits for a reply."""
    lock = client._connection._lock if client._connection else threading.Lock()
    is_free = lock.acquire(blocking=False)
    if is_free:
        lock.release()
    return not is_free


@no_answer
def test_one_thread_that_waits_does_not_make_others_wait(tmp_path: Path, daemon: DaemonProcess) -> None:
    """While a publish waits its half minute for a stopped daemon, a match in another thread is a miss in time."""
    chain = chain_of(NS, 1)
    with client_of(tmp_path) as client:
        reservations = client.store(new_chunks(chain))
        payload = reservations[0].payload
        assert payload is not None
        payload[:] = payload_of(chain.chains[0], reservations[0].geometry)
        with daemon.stopped(), impatient(client, 0.3):
            publisher = threading.Thread(target=client.publish, args=(reservations,))
            publisher.start()
            until(lambda: is_asking(client))
            begin = time.monotonic()
            assert client.match(chain.chains).count == 0
            assert client.load(chain.chains) is None
            assert time.monotonic() - begin < 2 * 0.3 + 0.2 + 2 * SLACK_S
        publisher.join()
        until(lambda: client.match(chain.chains).count == 1)


@no_answer
def test_a_daemon_that_is_gone(tmp_path: Path) -> None:
    """Killed, started again: the client attaches by itself, and finds what was clean."""
    chain = chain_of(NS, 3)
    with client_of(tmp_path) as client:
        with start(tmp_path) as daemon:
            store_prompt(client, chain)
            assert daemon.flush()
            daemon.kill()
        begin = time.monotonic()
        with impatient(client, 0.5):
            assert client.match(chain.chains).count == 0
            assert client.load(chain.chains) is None
            assert client.window_bytes() == 0
        assert time.monotonic() - begin < SLACK_S
        with start(tmp_path):
            assert until(lambda: client.match(chain.chains).count == 3) < RETRY_S + SLACK_S
            assert load_right(client, chain) == set(chain.keys)


@no_answer
def test_nothing_is_mounted(tmp_path: Path) -> None:
    """No mount, no daemon: misses at once, one warning."""
    for mount in (tmp_path / "nothing", plain_mount(tmp_path)):
        with Client(mount, NS) as client:
            begin = time.monotonic()
            for _ in range(10):
                assert client.match(chain_of(NS, 1).chains).count == 0
                assert client.load(chain_of(NS, 1).chains) is None
                assert client.store(new_chunks(chain_of(NS, 1)))[0].status is StoreStatus.REFUSED
            assert time.monotonic() - begin < SLACK_S
            assert client.statistics.failures == 1


# clients that die

_HOLDER = """
import sys, time
from kvfs.client import Client
from kvfs.testing import chain_of, new_chunks, sized_namespace
ns = sized_namespace(1 << 20)
client = Client(sys.argv[1], ns, deadline_s=60)
matched, loaded = client.match(chain_of(ns, 6).chains), client.load(chain_of(ns, 6).chains)
reserved = client.store(new_chunks(chain_of(ns, 3, 1)))
print(matched.count, loaded.num_chunks, sum(r.payload is not None for r in reserved), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_client_gives_back_what_it_held(tmp_path: Path, daemon: DaemonProcess, number: signal.Signals) -> None:
    """Leases and reservations return at once, and the RAM they held is usable."""
    chain = chain_of(MIB, 6)
    with client_of(tmp_path, MIB) as client:
        store_prompt(client, chain)
        assert daemon.flush()
        used = daemon.statistics()["ram"]["used_bytes"]
        holder = subprocess.Popen([sys.executable, "-c", _HOLDER, str(tmp_path / "mount")], stdout=subprocess.PIPE)
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"6 6 3\n"
        before = daemon.statistics()
        assert before["num_leases"] == 12
        assert before["ram"]["used_bytes"] > used
        holder.send_signal(number)
        assert until(lambda: daemon.statistics()["num_leases"] == 0) < SLACK_S
        until(lambda: daemon.statistics()["ram"]["used_bytes"] == used)
        holder.wait()
        holder.stdout.close()
        assert store_prompt(client, chain_of(MIB, 14, 2), at_once=2) == [StoreStatus.STORED] * 14


def test_a_stopped_client_stops_nobody_else(tmp_path: Path, daemon: DaemonProcess) -> None:
    """A client that is alive keeps its leases for as long as it lives; others go on."""
    chain = chain_of(MIB, 6)
    with client_of(tmp_path, MIB) as client:
        store_prompt(client, chain)
        assert daemon.flush()
        holder = subprocess.Popen([sys.executable, "-c", _HOLDER, str(tmp_path / "mount")], stdout=subprocess.PIPE)
        assert holder.stdout is not None
        holder.stdout.readline()
        holder.send_signal(signal.SIGSTOP)
        assert load_right(client, chain) == set(chain.keys)
        until(lambda: daemon.statistics()["num_leases"] == 12)  # nobody waits for the reply to a release
        holder.kill()
        holder.wait()
        holder.stdout.close()
        until(lambda: daemon.statistics()["num_leases"] == 0)


# daemons that die


def test_a_terminated_daemon_writes_what_is_dirty(tmp_path: Path) -> None:
    """SIGTERM: every published chunk is there at the next start."""
    chain = chain_of(MIB, 12)
    with start(tmp_path, ram=16 << 20) as daemon, client_of(tmp_path, MIB) as client:
        assert store_prompt(client, chain, at_once=2) == [StoreStatus.STORED] * 12
        assert daemon.terminate() == 0
    with start(tmp_path, ram=16 << 20), client_of(tmp_path, MIB) as client:
        assert load_right(client, chain) == set(chain.keys)
