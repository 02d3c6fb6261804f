"""A cache that fails costs time: chunks that rotted, a daemon that is killed, stopped, or not there yet."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ...e2e.conftest import Daemon  # noqa: TID252 - tests are no package with a name
from .conftest import Engine, StartEngine, found_after_reset, wait_until

Prompt = Callable[..., list[int]]
FLAGS = ("--window=16MiB",)
pytestmark = [pytest.mark.leaves("a process"), pytest.mark.leaves("a mount")]
"""The daemon of the module is another one after each test; the module's end checks that it is gone."""


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine) -> Iterator[Engine]:
    """Without a prefix cache of its own: what it has, it has from kvfs."""
    with start_engine(enable_prefix_caching=False) as engine:
        yield engine


def restart(mount: Daemon) -> None:
    """Stop the daemon, which writes everything, and start it again: nothing is in RAM then."""
    mount.stop()
    mount.start(*FLAGS, ram="128MiB", nvme="256MiB")


def damage(volume: Path, key: str) -> None:
    """Flip a bit in the last layer of a chunk, by its place in the volume."""
    raw = volume.read_bytes()
    header = raw.index(f'"key":"{key}"'.encode())
    begin = header - header % 4096
    length = int.from_bytes(raw[begin : begin + 8], "little")
    with volume.open("r+b") as file:
        file.seek(begin + 8 + length + 3 * 128 * 1024 - 100)
        byte = raw[begin + 8 + length + 3 * 128 * 1024 - 100]
        file.seek(begin + 8 + length + 3 * 128 * 1024 - 100)
        file.write(bytes([byte ^ 1]))


def newest_keys(mount: Daemon, num_chunks: int) -> list[str]:
    """The keys of the chunks that were stored last, in the order of their positions."""
    paths = [path for path in mount.path.glob("*/chunks/*.safetensors") if path.name[0] != "."]
    newest = sorted(paths, key=lambda path: path.stat().st_mtime_ns)[-num_chunks:]
    return [path.stem for path in sorted(newest, key=lambda path: int(os.getxattr(path, "user.kvfs.position")))]


def test_a_chunk_that_rotted_is_computed(engine: Engine, mount: Daemon, prompt: Prompt, directory: Path) -> None:
    """The chunks before it are used, it and what follows are computed, and stored anew."""
    asked, before = prompt(1100), engine.stored()
    expected = engine.tokens(asked)
    engine.wait_for_stores(before + 4)
    key = newest_keys(mount, 4)[2]
    mount.stop()
    damage(volume_of(directory), key)
    mount.start(*FLAGS, ram="128MiB", nvme="256MiB")
    engine.reset()
    wait_for_session(engine, mount)
    failed = engine.counts()["vllm:kvfs_loads_failed"]
    assert engine.run(asked)[0]["tokens"] == expected
    assert engine.counts()["vllm:kvfs_loads_failed"] == failed + 1
    engine.reset()
    wait_until(lambda: found_after_reset(engine, asked) == 1024, "the chunk is stored anew")


def test_the_policy_fail_ends_the_request(
    start_engine: StartEngine, mount: Daemon, prompt: Prompt, directory: Path
) -> None:
    """That is vLLM's default, and why there is a warning at start."""
    with start_engine(policy="fail") as engine:
        asked, before = prompt(600), engine.stored()
        engine.tokens(asked)
        engine.wait_for_stores(before + 2)
        key = newest_keys(mount, 2)[0]
        mount.stop()
        damage(volume_of(directory), key)
        mount.start(*FLAGS, ram="128MiB", nvme="256MiB")
        engine.reset()
        wait_for_session(engine, mount)
        assert engine.run(asked)[0]["finish"] == "error"
        assert engine.run(asked)[0]["finish"] == "length"  # the chunk has been dropped


def test_a_stopped_daemon_costs_one_deadline(engine: Engine, mount: Daemon, prompt: Prompt) -> None:
    """Requests go on without the cache, and no request after the first waits for it."""
    asked = prompt(600)
    expected = engine.recomputed(asked)
    wait_for_session(engine, mount)
    os.kill(mount.pid, signal.SIGSTOP)
    try:
        assert engine.tokens(asked) == expected
        times = [engine.run(prompt(40, seed=number), max_tokens=2)[0]["seconds"] for number in range(1, 9)]
    finally:
        os.kill(mount.pid, signal.SIGCONT)
    assert sorted(times)[4] < 0.5
    wait_for_session(engine, mount)


def test_the_daemon_is_killed_and_restarted_under_load(
    engine: Engine, mount: Daemon, prompt: Prompt, tmp_path: Path
) -> None:
    """Every request is answered, correctly and soon; hits resume within two seconds of the new daemon."""
    shared, before = prompt(600), engine.stored()
    engine.tokens(shared)
    engine.wait_for_stores(before + 2)
    wait_until(lambda: all_clean(mount), "the chunks are on NVMe")
    prompts = [[*shared, *prompt(60, seed=number)] for number in range(1, 7)]
    expected = [answer["tokens"] for answer in engine.run(*prompts, salts=["x"] * 6)]
    mark = tmp_path / "the daemon is back"
    engine.begin("serve", prompts=prompts, num_at_once=2, mark=str(mark), patience_s=120.0)
    mount.stop(signal.SIGKILL)
    killed = time.monotonic()
    mount.start(*FLAGS, ram="128MiB", nvme="256MiB")
    back = time.monotonic()
    mark.touch()
    answers = engine.answer()
    assert all(answer["tokens"] == expected[answer["prompt"]] for answer in answers)
    assert max(answer["done"] - answer["asked"] for answer in answers) < 3.0
    assert any(killed < answer["done"] < back for answer in answers), "nothing was answered without a daemon"
    hits = [answer["done"] for answer in answers if answer["asked"] > killed and answer["cached"] >= 512]
    print(f"hits again {min(hits) - back:.2f} s after the daemon")
    assert min(hits) - back < 2.0


def all_clean(mount: Daemon) -> bool:
    return all(os.getxattr(path, "user.kvfs.dirty") == b"0" for path in mount.path.glob("*/chunks/*.safetensors"))


def volume_of(directory: Path) -> Path:
    return max((path for path in (directory / "volume").iterdir()), key=lambda path: path.stat().st_size)


def wait_for_session(engine: Engine, mount: Daemon) -> None:
    """Return when the engine has noticed that there is a daemon: what it stores is found."""
    number = 0

    def is_up() -> bool:
        nonlocal number
        number += 1
        asked = [3 + (number * 7 + index * 31) % 500 for index in range(300)]
        engine.run(asked, max_tokens=2)
        return found_after_reset(engine, asked) == 256

    wait_until(is_up, "the engine has a session")
