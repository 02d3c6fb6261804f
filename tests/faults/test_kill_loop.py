"""kill -9 of the daemon at random moments: what was clean is there, what was removed is not, and nothing is ever wrong.

Engines work on it in threads, each doing one thing of `VERBS` after the other, until it is killed: under load, in the
middle of an eviction or a removal, or while it starts and recovers. After each start everything is compared with a
ledger. A verb more is a function more: it acts as an engine or a person would, and notes in the ledger what follows.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest

from kvfs.client import Client
from kvfs.errors import UnavailableError
from kvfs.keys import KeyChain
from kvfs.messages import StoreStatus
from kvfs.testing import (
    chain_of,
    load_right,
    settings_in,
    socket_path,
    tiny_namespace,
)
from kvfs.testing.daemon import ForkedDaemonProcess

from .clients import client_of, store_prompt
from .volumes import chunk_file

NS = tiny_namespace(head_size=8)
KILLS_OF_A_LIFE = 25
LARGE = {"ram": 16 << 20, "nvme": 1 << 30}
SMALL = {"ram": 2 << 20, "nvme": 4 << 20}
"""So small that the volume is full in a moment, and every write takes the place of something."""
SAMPLE = 40
NUM_THREADS = 2


@dataclass
class Ledger:
    """What has to be true after a kill.

    Attributes:
        chains: all that anybody tried to store; stored: those of which nothing is on its way any more.
        clean: chunks that the daemon called clean, and that nobody has begun to remove since.
        removing: chunks that somebody has begun to remove; nobody stores them again.
        gone: chunks whose removal has returned.
        pinned, unpinned: chunks whose pin, or whose pin's end, has returned, while nobody has begun the other.
        kept: those of them that were clean: nothing evicts them.
        spaces: namespaces that are there, whose removal nobody has begun; spaces_gone: whose removal has returned.
        ever_clean, num_kills: for the last line.
    """

    chains: list[KeyChain] = field(default_factory=list)
    stored: list[KeyChain] = field(default_factory=list)
    clean: set[bytes] = field(default_factory=set)
    gone: set[bytes] = field(default_factory=set)
    removing: set[bytes] = field(default_factory=set)
    pinned: set[bytes] = field(default_factory=set)
    unpinned: set[bytes] = field(default_factory=set)
    kept: set[bytes] = field(default_factory=set)
    spaces: set[str] = field(default_factory=set)
    spaces_gone: set[str] = field(default_factory=set)
    ever_clean: set[bytes] = field(default_factory=set)
    num_kills: int = 0


@dataclass
class Engine:
    """One thread's view: a client, the daemon for what has no verb in the session, the ledger, and its own chance.

    Only thread `number` of them says of a chunk, by its number, whether it is pinned. `directory`: for its files.
    """

    client: Client
    daemon: ForkedDaemonProcess
    ledger: Ledger
    rng: random.Random
    directory: Path
    number: int


# what goes on when the daemon is killed


def store(engine: Engine) -> None:
    """A prompt, a few chunks at a time."""
    chain = chain_of(NS, engine.rng.randrange(1, 20), engine.rng.getrandbits(60))
    engine.ledger.chains.append(chain)
    if not {StoreStatus.STORED}.issuperset(store_prompt(engine.client, chain)):
        return
    engine.ledger.stored.append(chain)


def load(engine: Engine) -> None:
    """A prompt that was stored, whatever is there of it; a load that the daemon's death ends is a miss."""
    if engine.ledger.chains:
        with contextlib.suppress(UnavailableError):
            load_right(engine.client, engine.rng.choice(engine.ledger.chains))


def remove(engine: Engine) -> None:
    """Some chunks of a prompt."""
    if not engine.ledger.stored:
        return
    keys = set(engine.rng.choice(engine.ledger.stored[-20:]).keys[engine.rng.randrange(4) :])
    engine.ledger.removing |= keys
    engine.ledger.clean -= keys
    with suppress(RuntimeError):  # it was killed before it answered: nobody knows
        engine.daemon.remove(keys)
        engine.ledger.gone |= keys


def pin(engine: Engine) -> None:
    """The begin of a prompt, if the pins do not hold too much already."""
    keys = keys_to_pin(engine)
    engine.ledger.unpinned -= keys
    with suppress(RuntimeError):
        engine.ledger.pinned |= engine.daemon.pin(keys)


def unpin(engine: Engine) -> None:
    keys = keys_to_pin(engine)
    engine.ledger.pinned -= keys
    engine.ledger.kept -= keys
    with suppress(RuntimeError):
        engine.daemon.unpin(keys)
        engine.ledger.unpinned |= keys


def keys_to_pin(engine: Engine) -> set[bytes]:
    own = engine.ledger.stored[engine.number :: NUM_THREADS][-10:]
    return set(engine.rng.choice(own).keys[: engine.rng.randrange(1, 6)]) if own else set()


def copy_in(engine: Engine) -> None:
    """A prompt as files, in any order; one of them is not what its name says, and leaves nothing."""
    chain = chain_of(NS, engine.rng.randrange(1, 4), engine.rng.getrandbits(60))
    engine.client.match(chain.chains)  # makes the namespace, if it is the first
    engine.ledger.chains.append(chain)
    path = engine.directory / f"copy-{engine.number}"
    positions = list(range(len(chain.keys)))
    engine.rng.shuffle(positions)
    words = set()
    with suppress(RuntimeError):
        for position in positions:
            raw = bytearray(chunk_file(NS, chain, position, 7))
            key = chain.keys[position]
            if engine.rng.random() < 0.3:
                path.write_bytes(raw[:-1])
                assert engine.daemon.admit(NS.directory, key, path) in {"CorruptChunk", "UsageError", "CapacityError"}
            path.write_bytes(raw)
            words.add(engine.daemon.admit(NS.directory, key, path))
            assert words <= {"admitted", "UsageError", "CapacityError"}, words
        if words == {"admitted"}:
            engine.ledger.stored.append(chain)


def make_and_remove_a_namespace(engine: Engine) -> None:
    """One that nobody stores in, most often for a moment only."""
    namespace = tiny_namespace(f"tests/x{engine.rng.getrandbits(40)}", head_size=8)
    with suppress(RuntimeError):
        engine.daemon.attach(namespace)
        engine.ledger.spaces.add(namespace.directory)
        if engine.rng.random() < 0.8:
            engine.ledger.spaces.discard(namespace.directory)
            engine.daemon.forget(namespace.directory)
            engine.ledger.spaces_gone.add(namespace.directory)


VERBS: tuple[Callable[[Engine], None], ...] = (
    store, store, store, store, store, store, load, load, remove, pin, unpin, copy_in, make_and_remove_a_namespace,
)  # fmt: skip


class Load:
    """Engines that do one thing after the other, in threads, until they are told to stop."""

    def __init__(self, directory: Path, daemon: ForkedDaemonProcess, ledger: Ledger, rng: random.Random) -> None:
        self._over = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(
                target=self._run, args=(directory, daemon, ledger, random.Random(rng.getrandbits(60)), number)
            )
            for number in range(NUM_THREADS)
        ]

    def _run(
        self, directory: Path, daemon: ForkedDaemonProcess, ledger: Ledger, rng: random.Random, number: int
    ) -> None:
        try:
            with client_of(directory, NS, deadline_s=0.5) as client:
                while not self._over.is_set():
                    rng.choice(VERBS)(Engine(client, daemon, ledger, rng, directory, number))
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self._errors.append(error)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]


# the loop


@dataclass
class Life:
    """A volume, and a daemon on it that is killed again and again. `is_small`: see `SMALL`."""

    directory: Path
    ledger: Ledger
    rng: random.Random
    is_small: bool

    def begin(self) -> ForkedDaemonProcess:
        settings = settings_in(self.directory, **(SMALL if self.is_small else LARGE))
        return ForkedDaemonProcess.begin(settings, socket_path(self.directory))

    def play(self, kills: int) -> None:
        """Start, look, kill under load, some times; once more look, at everything."""
        while self.ledger.num_kills < kills:
            if self.ledger.chains and self.rng.random() < 0.2:
                self.kill_while_starting()
                continue
            daemon = self.begin()
            daemon.wait_until_ready()
            self.check(daemon, SAMPLE)
            self.kill_under_load(daemon)
        with self.begin() as daemon:
            daemon.wait_until_ready()
            self.check(daemon, len(self.ledger.chains))

    def kill_while_starting(self) -> None:
        """At any moment of opening and recovery, or before."""
        daemon = self.begin()
        time.sleep(self.rng.uniform(0.0, 0.15))
        daemon.kill()
        self.ledger.num_kills += 1

    def kill_under_load(self, daemon: ForkedDaemonProcess) -> None:
        """In a large volume nothing is evicted, and whatever was clean before the kill has to be there.

        In a small one only the daemon itself can say what is clean at its end; but then it cannot die just anywhere.
        """
        ledger = self.ledger
        with Load(self.directory, daemon, ledger, self.rng):
            time.sleep(self.rng.uniform(0.02, 0.8))
            if self.is_small and self.rng.random() < 0.5:
                clean = ledger.clean = daemon.die()
            else:
                clean = daemon.clean_keys()
                ledger.clean = set() if self.is_small else ledger.clean | clean
                assert self.is_small or daemon.statistics()["counters"]["evictions_nvme"] == 0, "too small"
                daemon.kill()
        ledger.clean -= ledger.removing
        ledger.kept |= (ledger.pinned & clean) - ledger.removing
        ledger.ever_clean |= clean
        ledger.num_kills += 1

    def check(self, daemon: ForkedDaemonProcess, sample: int) -> None:
        """All names; and the bytes of the last prompts, and of some others."""
        ledger = self.ledger
        clean = daemon.clean_keys()
        assert ledger.clean <= clean, f"{len(ledger.clean - clean)} clean chunks are gone"
        assert not ledger.gone & clean, "what was removed is back"
        assert ledger.kept - ledger.removing <= clean, "what is pinned was evicted"
        pinned = daemon.pinned_keys()
        assert ledger.pinned & clean <= pinned, f"{len((ledger.pinned & clean) - pinned)} pins are gone"
        assert not ledger.unpinned & pinned, "a pin that had been ended is back"
        spaces = daemon.namespaces()
        assert ledger.spaces <= spaces, "a namespace is gone"
        assert not ledger.spaces_gone & spaces, "a namespace that was removed is back"
        assert clean <= {key for chain in ledger.chains for key in chain.keys}, "a name out of nowhere"
        chains = {
            id(chain): chain
            for chain in [*ledger.chains[-sample:], *self.rng.sample(ledger.chains, min(sample, len(ledger.chains)))]
        }
        with client_of(self.directory, NS) as client:
            for chain in chains.values():
                missing = ledger.clean.intersection(chain.keys) - load_right(client, chain)
                assert not missing, f"{len(missing)} clean chunks cannot be loaded"
            assert client.statistics.failures == 0
        counters = daemon.statistics()["counters"]
        assert (counters["corrupt"], counters["session_errors"]) == (0, 0)


def kill_again_and_again(root: Path, seed: int, kills: int) -> tuple[int, int]:
    """Volumes that are large and small in turn; returns how often it killed, and how many chunks had been clean."""
    rng = random.Random(seed)
    num_kills = num_clean = 0
    for number in itertools.count():
        life = Life(root / "life", Ledger(), rng, is_small=bool(number % 2))
        life.directory.mkdir()
        try:
            life.play(min(KILLS_OF_A_LIFE, kills - num_kills))
        except BaseException as error:
            error.add_note(f"KVFS_SEED={seed}, volume {number}, kill {life.ledger.num_kills}")
            raise
        shutil.rmtree(life.directory)
        num_kills += life.ledger.num_kills
        num_clean += len(life.ledger.ever_clean)
        if num_kills >= kills:
            break
    return num_kills, num_clean


no_answer = pytest.mark.expect_log("does not answer, going on without it")


@no_answer
def test_kills(tmp_path: Path) -> None:
    """A few of them, the same at every run as far as chance goes."""
    assert kill_again_and_again(tmp_path, 1, 6)[1] > 0


@pytest.mark.slow
@no_answer
def test_kill_loop(tmp_path: Path) -> None:
    """KVFS_KILLS of them (100 unless set), from a seed that is printed and can be set as KVFS_SEED."""
    seed = int(os.environ.get("KVFS_SEED", time.time_ns() % 100_000))
    kills = int(os.environ.get("KVFS_KILLS", "100"))
    print(f"KVFS_SEED={seed} KVFS_KILLS={kills}")
    begin = time.monotonic()
    num_kills, num_clean = kill_again_and_again(tmp_path, seed, kills)
    took_s = time.monotonic() - begin
    print(f"{num_kills} kills in {took_s:.0f} s; {num_clean} chunks had been clean, each was there and right")
    assert num_clean > 0
