"""A client that is kept attached: before there is a daemon, and after one has gone."""

from __future__ import annotations

import threading
from pathlib import Path

from kvfs.addresses import address_of
from kvfs.client import Client
from kvfs.engine_adapters.keeping import Keeping
from kvfs.testing import DEADLINE_S, settings_in, socket_path, tiny_namespace, wait_until
from kvfs.testing.daemon import DaemonProcess


def test_whoever_needs_the_session_is_told_of_each(tmp_path: Path) -> None:
    """Not in the thread that opens; the arena of the new session is another, and that of the old one stays while it is held."""
    told: list[tuple[memoryview, threading.Thread]] = []
    with Client(tmp_path / "mount", tiny_namespace(), deadline_s=DEADLINE_S) as client:
        keeping = Keeping(client, 0.05, lambda: told.append((client.arena, threading.current_thread())))
        assert client.arena.nbytes == 0
        with DaemonProcess.start(settings_in(tmp_path), socket_path(tmp_path)) as daemon:
            assert keeping.open() == ""
            wait_until(lambda: told, "it is told of the first session")
            daemon.kill()
        with DaemonProcess.start(settings_in(tmp_path), socket_path(tmp_path)):
            wait_until(lambda: len(told) == 2, "it is told of the second session")
            (first, thread), (second, _) = told
            assert thread is not threading.current_thread()
            assert first.nbytes == second.nbytes == settings_in(tmp_path).ram_bytes
            assert address_of(first) != address_of(second)
            keeping.close()


def test_the_reason_is_returned_and_the_daemon_found_when_it_comes(tmp_path: Path) -> None:
    told = threading.Event()
    with Client(tmp_path / "mount", tiny_namespace(), deadline_s=DEADLINE_S) as client:
        keeping = Keeping(client, 0.05, told.set)
        assert "no kvfs is mounted" in keeping.open()
        assert not keeping.is_up
        assert not told.is_set()
        with DaemonProcess.start(settings_in(tmp_path), socket_path(tmp_path)):
            assert told.wait(DEADLINE_S)
            assert keeping.is_up
            keeping.close()
