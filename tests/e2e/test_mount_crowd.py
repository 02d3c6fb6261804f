"""Many at once on a real mount: listing, reading and removing while engines store and the policy evicts."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvfs.messages import StoreStatus
from kvfs.testing import DEADLINE_S

NUM_CHAINS = 120


@pytest.mark.parametrize("nvme", ["2MiB", None])
def test_a_crowd(daemon: Any, engines: Any, nvme: str | None) -> None:
    """Nobody sees a wrong byte, an error other than that a file is gone, or a daemon that stops."""
    daemon.start(ram="1MiB", nvme=nvme)
    engine = engines(daemon.path)
    engine.store("seed")
    is_over = threading.Event()
    failures: list[BaseException] = []
    counts = {"read": 0, "walk": 0, "removed": 0}

    def repeat(act: Callable[[random.Random], None], seed: int) -> None:
        source = random.Random(seed)
        try:
            while not is_over.is_set():
                try:
                    act(source)
                except (FileNotFoundError, NotADirectoryError):
                    pass  # it went meanwhile
        except (AssertionError, OSError) as error:
            failures.append(error)

    def read(source: random.Random) -> None:
        with open(engine.chunks / source.choice(os.listdir(engine.chunks)), "rb") as file:
            data = file.read()
        payload = data[len(data) // 4096 * 4096 - 4096 :][:2048]
        assert len(set(payload)) == 1, "bytes of another chunk"
        counts["read"] += 1

    def walk(_: random.Random) -> None:
        for parent, _directories, names in os.walk(engine.directory):
            assert len(names) == len(set(names)), parent
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    os.lstat(os.path.join(parent, name))
        counts["walk"] += 1

    def remove(source: random.Random) -> None:
        path = engine.chunks / source.choice(os.listdir(engine.chunks))
        is_over.wait(0.01)
        os.unlink(path)
        counts["removed"] += 1

    threads = [
        threading.Thread(target=repeat, args=(act, seed))
        for seed, act in enumerate([read, read, read, walk, walk, remove])
    ]
    for thread in threads:
        thread.start()
    try:
        deadline = time.monotonic() + DEADLINE_S
        for number in itertools.count():
            if number >= NUM_CHAINS and (min(counts.values()) > 0 or time.monotonic() > deadline):
                break  # until then a busy machine may have let one of them do nothing
            statuses = engine.try_store(f"seed{chr(0x100 + number % 7)}{chr(0x200 + number % 0x1000)}xy")
            assert set(statuses) <= {StoreStatus.STORED, StoreStatus.EXISTS, StoreStatus.REFUSED}
    finally:
        is_over.set()
        for thread in threads:
            thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    assert min(counts.values()) > 0, counts
    status = json.loads((daemon.path / ".kvfs/status.json").read_bytes())
    assert status["counters"]["mount_errors"] == 0
    assert status["counters"]["corrupt"] == 0
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log
