"""The RAM tier outlives its daemon: what was published is there after a kill, what was removed is not, nothing is wrong."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvfs import kept
from kvfs.client import Client
from kvfs.config import Settings
from kvfs.keys import KeyChain
from kvfs.messages import StoreStatus
from kvfs.namespace import Namespace
from kvfs.testing import (
    chain_of,
    load_right,
    new_chunks,
    payload_of,
    settings_in,
    sized_namespace,
    socket_path,
    tiny_namespace,
    wait_until,
)
from kvfs.testing.daemon import DaemonProcess

from .clients import client_of, store_prompt

NS = tiny_namespace()
MIB = sized_namespace(1 << 20)
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount the tmpfs of an arena that is kept")


class Place:
    """A directory with a place for an arena; `start` starts a daemon there, which takes over what is left in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "id" / "arena"
        self.path.parent.mkdir(mode=0o700)

    def settings(self, **settings: object) -> Settings:
        return settings_in(self.directory, **{"huge_pages": "auto", "ram": 16 << 20, **settings})  # type: ignore[arg-type]

    def start(self, **settings: object) -> DaemonProcess:
        return DaemonProcess.start(self.settings(**settings), socket_path(self.directory), self.path)

    def client(self, namespace: Namespace = NS) -> Client:
        return client_of(self.directory, namespace)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    kept.remove(place.path)


def store(client: Client, chain: KeyChain) -> None:
    assert set(store_prompt(client, chain)) == {StoreStatus.STORED}


def taken(daemon: DaemonProcess, keys: set[bytes]) -> None:
    """Wait until these chunks, and no others, are there; they are verified one after the other."""
    wait_until(lambda: daemon.keys() == keys, "the chunks are taken over")


@pytest.mark.parametrize("nvme", [None, 64 << 20])
def test_a_killed_daemon_loses_nothing_that_was_published(place: Place, nvme: int | None) -> None:
    """Dirty or clean, with or without a volume: after kill -9 all chunks are in RAM, and right."""
    chain, rest = chain_of(MIB, 6), chain_of(MIB, 3, 1)
    with place.start(nvme=nvme) as daemon, place.client(MIB) as client:
        store(client, chain)
        assert daemon.flush()
        store(client, rest)
        daemon.kill()
    with place.start(nvme=nvme) as daemon, place.client(MIB) as client:
        taken(daemon, {*chain.keys, *rest.keys})
        wait_until(lambda: daemon.statistics()["ram"]["num_chunks"] == 9, "all are in RAM")
        assert load_right(client, chain) == set(chain.keys)
        assert load_right(client, rest) == set(rest.keys)
        assert daemon.statistics()["counters"]["loads_nvme"] == 0
        assert daemon.statistics()["counters"]["corrupt"] == 0
        assert daemon.flush()
    assert not kept.is_mounted(place.path), "an end in order gives the memory back"


def test_an_end_in_order_keeps_it_if_asked(place: Place) -> None:
    """A RAM cache that is told to stay, three times over."""
    chain = chain_of(MIB, 6)
    with place.start(nvme=None), place.client(MIB) as client:
        store(client, chain)
        (place.path / kept.KEEP).touch()
    for _ in range(2):
        assert kept.is_mounted(place.path)
        with place.start(nvme=None) as daemon, place.client(MIB) as client:
            taken(daemon, set(chain.keys))
            assert load_right(client, chain) == set(chain.keys)
            (place.path / kept.KEEP).touch()


def test_what_was_removed_stays_away(place: Place) -> None:
    """Removed, evicted and removed, removed while an engine held it: none of it comes back after a kill."""
    held, gone, cold, stays = chain_of(MIB, 2), chain_of(MIB, 2, 1), chain_of(MIB, 2, 2), chain_of(MIB, 2, 3)
    with place.start(nvme=64 << 20) as daemon, place.client(MIB) as client:
        for chain in (held, gone, cold):
            store(client, chain)
        daemon.chill()  # their bytes stay where they were in the arena
        store(client, stays)
        load = client.load(held.chains)
        assert load is not None
        assert load.num_chunks == 2
        assert daemon.remove([*held.keys, *gone.keys, *cold.keys]) == 6
        daemon.kill()
        load.close()
    with place.start(nvme=64 << 20) as daemon:
        taken(daemon, set(stays.keys))


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_is_removed_while_it_waits_to_be_verified(place: Place, is_killed: bool) -> None:
    """Clean chunks that are removed at the very start, before anybody looked at their copies in RAM, stay away."""
    chain, rest = chain_of(MIB, 60), chain_of(MIB, 60, 1)
    sizes = {"nvme": 256 << 20, "ram": 160 << 20}
    with place.start(**sizes) as daemon, place.client(MIB) as client:
        store(client, rest)
        store(client, chain)
        assert daemon.flush()
        daemon.kill()
    with place.start(**sizes) as daemon:
        daemon.remove(chain.keys)
        if is_killed:
            daemon.kill()
        else:
            wait_until(lambda: daemon.statistics()["ram"]["num_chunks"] == 60, "the others are taken over")
            assert daemon.keys() == set(rest.keys)
            (place.path / kept.KEEP).touch()
    with place.start(**sizes) as daemon:
        wait_until(lambda: daemon.statistics()["ram"]["num_chunks"] == 60, "the others are taken over")
        assert daemon.keys() == set(rest.keys)


@pytest.mark.expect_log("does not answer, going on without it")
@pytest.mark.parametrize("seed", range(3))
def test_under_load(place: Place, seed: int) -> None:
    """Killed while two engines store and remove: all whose publish has returned is there, all that was removed is not."""
    rng = random.Random(seed)
    stored: list[KeyChain] = []
    tried: set[bytes] = set()
    removing: set[bytes] = set()
    gone: set[bytes] = set()
    for _ in range(3):
        with place.start(ram=64 << 20, nvme=256 << 20) as daemon:
            wait_until(
                lambda: {key for chain in stored for key in chain.keys} - removing <= daemon.keys(), "taken over"
            )
            assert not gone & daemon.keys()
            assert daemon.keys() <= tried
            with place.client() as client:
                for chain in rng.sample(stored, min(20, len(stored))):
                    assert set(chain.keys) - removing <= load_right(client, chain) | removing
            is_over = threading.Event()

            def work(seed: int, daemon: DaemonProcess = daemon, is_over: threading.Event = is_over) -> None:
                own = random.Random(seed)
                with place.client() as client:
                    while not is_over.is_set():
                        chain = chain_of(NS, own.randrange(1, 12), own.getrandbits(60))
                        tried.update(chain.keys)
                        reservations = client.store(new_chunks(chain))
                        for one in reservations:
                            if one.payload is not None:
                                one.payload[:] = payload_of(one.chunk.chain, one.geometry)  # type: ignore[arg-type]
                        if set(client.publish(reservations)) == {StoreStatus.STORED}:
                            stored.append(chain)
                        if own.random() < 0.2 and stored:
                            keys = set(own.choice(stored[-5:]).keys)
                            removing.update(keys)
                            try:
                                daemon.remove(keys)
                            except RuntimeError:
                                return
                            gone.update(keys)

            threads = [threading.Thread(target=work, args=(rng.getrandbits(60),)) for _ in range(2)]
            before = len(stored)
            for thread in threads:
                thread.start()
            wait_until(lambda: len(stored) > before + 20, "something is stored")  # noqa: B023
            daemon.kill()
            is_over.set()
            for thread in threads:
                thread.join()


def test_bytes_that_were_changed_between(place: Place) -> None:
    """A flipped bit in a payload, a header or the record costs that chunk, and no wrong byte is served."""
    chain = chain_of(MIB, 6)
    with place.start(nvme=None) as daemon, place.client(MIB) as client:
        store(client, chain)
        daemon.kill()
    with open(place.path / kept.TABLE, "rb") as file:
        raw = file.read()
    offsets = [place * 4096 for place in range(len(raw) // 8) if any(raw[place * 8 : place * 8 + 8])]
    assert len(offsets) == 6
    with open(place.path / kept.BYTES, "r+b") as file:
        for offset in (offsets[0] + 600_000, offsets[1] + 40, offsets[2] + 2):
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))
    with open(place.path / kept.TABLE, "r+b") as file:
        file.seek(offsets[3] // 4096 * 8)
        file.write(b"\xff\xff\xff\x7f")
    with place.start(nvme=None) as daemon, place.client(MIB) as client:
        wait_until(lambda: len(daemon.keys()) == 2, "the others are taken over")
        wait_until(lambda: daemon.statistics()["counters"]["corrupt"] == 3, "those are told of")
        found = daemon.keys() & set(chain.keys)
        assert len(found) == 2
        assert daemon.statistics()["ram"]["used_bytes"] == daemon.statistics()["ram"]["num_chunks"] * (
            offsets[1] - offsets[0]
        )
        again = chain_of(MIB, 6)
        reservations = client.store(new_chunks(again))
        assert sum(one.status is StoreStatus.STORED for one in reservations) == 4


@pytest.mark.parametrize("what", ["size", "boot", "version", "mountpoint", "unfinished", "volume"])
def test_what_is_not_ours_is_cleared(place: Place, what: str) -> None:
    """Another size, boot, version, mount point or volume: a clean start, and nothing is left of the old one."""
    chain = chain_of(MIB, 3)
    with place.start(nvme=None) as daemon, place.client(MIB) as client:
        store(client, chain)
        daemon.kill()
    facts = kept.read_facts(place.path)
    assert facts is not None
    file = place.path / kept.FACTS
    changes = {"boot": {"boot_id": "x"}, "version": {"format": "kvfs-arena/2"}, "mountpoint": {"mountpoint": "/x"}}
    if what in changes:
        file.write_bytes(msgspec.json.encode(msgspec.structs.replace(facts, **changes[what])))  # type: ignore[arg-type]
    elif what == "unfinished":
        file.unlink()
    with place.start(nvme=(64 << 20) if what == "volume" else None, ram=(32 if what == "size" else 16) << 20) as daemon:
        assert daemon.statistics()["ram"]["used_bytes"] == 0
        assert daemon.keys() == set()
        assert len([each for each in kept.places() if each == place.path]) == 1
    assert not kept.is_mounted(place.path)


def test_a_start_that_is_refused_leaves_it(place: Place) -> None:
    """A mistake in the settings must not cost what is in RAM."""
    chain = chain_of(MIB, 3)
    with place.start(nvme=None) as daemon, place.client(MIB) as client:
        store(client, chain)
        daemon.kill()
    with pytest.raises(RuntimeError):
        place.start(nvme=None, policy="no.such.module:Policy")
    with place.start(nvme=None) as daemon:
        taken(daemon, set(chain.keys))


_WRITER = """
import sys, time
from kvfs.client import Client
from kvfs.testing import chain_of, new_chunks, sized_namespace
ns = sized_namespace(1 << 20)
client = Client(sys.argv[1], ns, deadline_s=60)
reserved = client.store(new_chunks(chain_of(ns, 3, 9)))
print(sum(one.payload is not None for one in reserved), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("ends", ["killed", "in order"])
def test_what_a_trusted_client_may_still_write_to_is_not_reused(place: Place, ends: str) -> None:
    """Its extents are nobody's before its process is gone; then they are free."""
    with place.start(nvme=None, access="trusted") as daemon:
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(place.directory / "mount")], stdout=subprocess.PIPE
        )
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"3\n"
            used = daemon.statistics()["ram"]["used_bytes"]
            assert used
            if ends == "killed":
                daemon.kill()
            else:
                (place.path / kept.KEEP).touch()
                assert daemon.terminate() == 0
            with place.start(nvme=None, access="trusted") as second:
                assert second.statistics()["ram"]["used_bytes"] == used
                writer.kill()
                writer.wait()
                wait_until(lambda: second.statistics()["ram"]["used_bytes"] == 0, "they are free")
        finally:
            writer.kill()
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
