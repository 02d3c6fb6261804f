"""A daemon that comes later, or again: every client finds it, also where the mount it once asked is stale for good."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest

from kvfs.client import RETRY_S, Client
from kvfs.errors import UnavailableError
from kvfs.messages import StoreStatus
from kvfs.testing import (
    DEADLINE_S,
    chain_of,
    plain_mount,
    settings_in,
    tiny_namespace,
)
from kvfs.testing.daemon import DaemonProcess

from .clients import client_of, start, store_prompt

NS = tiny_namespace()
no_answer = pytest.mark.expect_log("does not answer, going on without it")


def forget_mount(directory: Path) -> None:
    """As where the mount is stale: the link cannot be read any more."""
    shutil.rmtree(directory / "mount" / ".kvfs")


def test_a_first_connect_that_is_refused_is_no_reason_to_forget_the_socket(tmp_path: Path) -> None:
    """The client is there before the daemon, and the mount it asked does not answer when the daemon comes."""
    with client_of(tmp_path) as client:
        with pytest.raises(UnavailableError, match="no daemon at"):
            client.attach()
        forget_mount(tmp_path)
        with pytest.raises(UnavailableError):
            client.attach()
        with start(tmp_path):
            forget_mount(tmp_path)
            client.attach()
            assert client.is_attached()


def test_nor_is_one_that_fails_between_two_daemons(tmp_path: Path) -> None:
    """A killed daemon leaves a socket at which nobody listens; the next one is found at the same path."""
    with client_of(tmp_path) as client:
        with start(tmp_path) as daemon:
            client.attach()
            daemon.kill()
        assert not client.is_attached()
        forget_mount(tmp_path)
        for _ in range(3):
            with pytest.raises(UnavailableError):
                client.attach()
        with start(tmp_path):
            forget_mount(tmp_path)
            client.attach()


def test_a_daemon_at_another_path_is_found_through_the_mount(tmp_path: Path) -> None:
    """Mounted anew with another socket directory, while the old socket is still there."""
    mount = plain_mount(tmp_path)
    with Client(mount, NS, deadline_s=DEADLINE_S) as client:
        with start(tmp_path) as daemon:
            client.attach()
            daemon.kill()
        other = tmp_path / "other.sock"
        (mount / ".kvfs" / "session").unlink()
        (mount / ".kvfs" / "session").symlink_to(other)
        with DaemonProcess.start(settings_in(tmp_path), str(other)):
            client.attach()


@pytest.mark.heavy
def test_a_daemon_that_replaced_a_stopped_one_is_found_through_the_mount(tmp_path: Path) -> None:
    """The old one still listens and never answers: the second try asks the mount."""
    mount = plain_mount(tmp_path)
    (tmp_path / "second").mkdir()
    with start(tmp_path) as daemon, Client(mount, NS, deadline_s=5.0) as client:
        client.attach()
        client.close()
        with daemon.stopped():
            other = tmp_path / "other.sock"
            (mount / ".kvfs" / "session").unlink()
            (mount / ".kvfs" / "session").symlink_to(other)
            with DaemonProcess.start(settings_in(tmp_path / "second"), str(other)):
                with pytest.raises(UnavailableError, match="did not answer in time"):
                    client.attach()
                client.attach()
                client.close()


def test_a_daemon_that_came_back_between_two_requests_costs_nothing(tmp_path: Path) -> None:
    """No request fails, none waits for the next try: the end of the old session is seen before anything is asked."""
    with client_of(tmp_path) as client:
        with start(tmp_path) as daemon:
            assert store_prompt(client, chain_of(NS, 3)) == [StoreStatus.STORED] * 3
            assert daemon.flush()
            daemon.kill()
        with start(tmp_path):
            with client.match(chain_of(NS, 3).chains) as lease:
                assert lease.count == 3
            assert client.statistics.failures == 0


@no_answer
def test_requests_cost_little_while_the_daemon_is_away(tmp_path: Path) -> None:
    """One try a second; what is asked between two tries is answered at once, and no thread is left behind."""
    with client_of(tmp_path) as client:
        begin = time.monotonic()
        for _ in range(2000):
            assert client.match(chain_of(NS, 1).chains).count == 0
        took_s = time.monotonic() - begin
        assert took_s < DEADLINE_S
        assert client.statistics.failures <= 2 + took_s / RETRY_S
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvfs")]
