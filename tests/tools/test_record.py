"""`kvfs record` on real mounts: what it writes is what engines asked for, and a simulation of it finds what the daemon found."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import stat
import subprocess
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest

from kvfs.chunk import geometry
from kvfs.client import Client, new_chunk
from kvfs.config import format_size
from kvfs.keys import KeyChain, root
from kvfs.messages import MAX_BATCH, Heard
from kvfs.mount.listening import Ear
from kvfs.namespace import Namespace
from kvfs.testing import DEADLINE_S, wait_until
from kvfs.tools.simulate.stand_ins import namespace_of
from kvfs.volume import SUPERBLOCK_BYTES

from .conftest import KVFS, NAMESPACE, Mount, kvfs

needs_fuse = pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse")
NUM_RAM = 160  # chunks
CHUNK_BYTES = geometry(NAMESPACE, 16).file_bytes


def prompts(seed: int, number: int, num_open: int = 30) -> list[list[int]]:
    """Prompts that grow and branch, in tokens; `num_open` of them may go on at a time."""
    chance = random.Random(seed)
    found: list[list[int]] = []
    for _ in range(number):
        begin = list(chance.choice(found[-num_open:])) if found and chance.random() < 0.7 else []
        begin = begin[: 16 * chance.randrange(len(begin) // 16 + 1)] if chance.random() < 0.3 else begin
        found.append([*begin, *(chance.randrange(1 << 30) for _ in range(16 * chance.randrange(1, 6)))])
    return found


def serve(client: Client, tokens: list[int]) -> tuple[int, int]:
    """What an engine does with a prompt: match, load, store the rest; how many chunks it found, of how many."""
    chain = KeyChain(root(client.namespace.identity.fingerprint()), 16, tokens)
    with client.match(chain.chains) as lease:
        found = lease.count
        load = client.load(chain.chains[:found], deadline_s=DEADLINE_S)
        assert load is not None
        load.close()
    new = [
        new_chunk(value, chain.parent_of(position), position, 16)
        for position, value in enumerate(chain.chains)
        if position >= found
    ]
    reservations = client.store(new)
    for reservation in reservations:
        if reservation.payload is not None:
            reservation.payload[:] = bytes(len(reservation.payload))
    client.publish(reservations)
    return found, len(chain.chains)


class Recorder:
    """`kvfs record` as a process that listens; `said` is what it wrote to stderr behind its first line."""

    def __init__(self, mount: Mount, file: Path, *flags: str) -> None:
        self.process = subprocess.Popen(
            [KVFS, "record", mount.path, file, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        assert "Ctrl-C ends it" in self.process.stderr.readline()

    def end(self, code: int = 0) -> str:
        self.process.send_signal(signal.SIGINT)
        return self.wait(code)

    def wait(self, code: int = 0) -> str:
        _, said = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == code, said
        return said


def lines_of(file: Path) -> list[Any]:
    opened: IO[bytes]
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
        return [json.loads(line) for line in opened]


@pytest.fixture
def cache(mount: Mount) -> Mount:
    """A RAM cache of `NUM_RAM` chunks that evicts by lru."""
    others = [flag for flag in mount.flags if not flag.startswith(("--ram", "--nvme"))]
    mount.flags = [f"--ram={NUM_RAM * CHUNK_BYTES >> 10}KiB", "--policy=lru", *others]
    mount.start()
    return mount


@needs_fuse
@pytest.mark.heavy
@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_simulation_of_a_recording_finds_what_the_daemon_found(name: str, cache: Mount, tmp_path: Path) -> None:
    """Request by request; no key of the mount is in the file, which others cannot read."""
    file = tmp_path / name
    recorder = Recorder(cache, file)
    with Client(cache.path, NAMESPACE, deadline_s=DEADLINE_S) as client:
        served = [serve(client, tokens) for tokens in prompts(3, 300)]
    said = recorder.end()
    lines = lines_of(file)
    assert [(line["found_blocks"], len(line["hash_ids"])) for line in lines] == served
    found, asked = map(sum, zip(*served, strict=True))
    assert 0.1 * asked < found < 0.9 * asked
    assert "300 requests in" in said
    assert cache.json("status")["counters"]["matched_chunks"] == found
    wait_until(lambda: cache.json("status")["counters"]["loads_ram"] == found, "the last load is counted")
    chunk_bytes = geometry(namespace_of(0, 16, 256), 16).file_bytes
    simulated = kvfs("simulate", file, f"--ram={NUM_RAM * chunk_bytes >> 10}KiB", "--policy=lru", "--json")
    assert simulated.returncode == 0, simulated.stderr
    [result] = json.loads(simulated.stdout)
    assert (result["requests"], result["references"]) == (300, asked)
    assert result["hit_rate"] == pytest.approx(found / asked, abs=1e-12)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    keys = [name.partition(".")[0] for name in os.listdir(cache.path / NAMESPACE.directory / "chunks")]
    numbers = {id_ for line in lines for id_ in line["hash_ids"]}
    for key in keys:
        assert key.encode() not in text
        assert (
            not {int.from_bytes(bytes.fromhex(key)[:size], order) for size in (7, 8) for order in ("big", "little")}
            & numbers
        )  # type: ignore[arg-type]


NUM_NVME = 400  # chunks


@needs_fuse
@pytest.mark.heavy
@pytest.mark.parametrize("rule", ["always", "second-use"])
def test_a_simulation_of_two_tiers_finds_what_the_daemon_found(rule: str, mount: Mount, tmp_path: Path) -> None:
    """With the mount's own settings, request by request: what was found, where, and what NVMe was written.

    Nothing is dirty any more when the next request comes: a simulation knows no time, and writes at once.
    """
    others = [flag for flag in mount.flags if not flag.startswith(("--ram", "--nvme"))]
    sizes = [f"--ram={NUM_RAM * CHUNK_BYTES >> 10}KiB", f"--nvme={tmp_path}/volume:{_volume_kib(CHUNK_BYTES)}KiB"]
    mount.flags = [*sizes, "--policy=lru", f"--admission={rule}", *others]
    mount.start()
    file = tmp_path / "trace.jsonl"
    recorder = Recorder(mount, file)
    served = []
    with Client(mount.path, NAMESPACE, deadline_s=DEADLINE_S) as client:
        for tokens in prompts(4, 400, 150):
            served.append(serve(client, tokens))
            sync(mount.path)
    recorder.end()
    found, asked = map(sum, zip(*served, strict=True))
    status = mount.json("status")
    counters = status["counters"]
    assert counters["loads_ram"] + counters["loads_nvme"] == found
    assert counters["loads_nvme"] > 0.05 * asked
    assert min(counters["evictions_ram"], counters["evictions_nvme"], counters["stores_returned"]) > 50
    assert counters["stores_refused"] == 0
    assert bool(counters["not_admitted_unused"]) == (rule == "second-use")
    chunk_bytes = geometry(namespace_of(0, 16, 256), 16).file_bytes
    assert chunk_bytes == CHUNK_BYTES
    flags = [f"--admission={rule}", "--policy=lru", "--json"]
    simulated = kvfs("simulate", file, sizes[0], f"--nvme={NUM_NVME * CHUNK_BYTES >> 10}KiB", *flags)
    assert simulated.returncode == 0, simulated.stderr
    [result] = json.loads(simulated.stdout)
    assert result["hit_rate"] == pytest.approx(found / asked, abs=1e-12)
    assert (result["not_admitted_unused"] or 0) == counters["not_admitted_unused"]
    assert result["written_bytes"] == counters["written_bytes"]
    assert result["ram_token_hit_rate"] == pytest.approx(counters["loads_ram"] / asked, abs=1e-12)


def _volume_kib(chunk_bytes: int) -> int:
    return (NUM_NVME * chunk_bytes + SUPERBLOCK_BYTES) >> 10


def sync(path: Path) -> None:
    """Wait until all is on NVMe that is to be there."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@needs_fuse
@pytest.mark.heavy
def test_two_recordings_have_nothing_in_common_but_what_is_equal(cache: Mount, tmp_path: Path) -> None:
    recorders = [Recorder(cache, tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    with Client(cache.path, NAMESPACE, deadline_s=DEADLINE_S) as client:
        for tokens in (list(range(64)), list(range(64)), list(range(100, 132))):
            serve(client, tokens)
        chain = KeyChain(root(NAMESPACE.identity.fingerprint()), 16, list(range(64)))
        client.match(chain.chains, is_again=True).release()  # the same request once more
    for recorder in recorders:
        recorder.end()
    one, other = (lines_of(tmp_path / name) for name in ("a.jsonl", "b.jsonl"))
    assert [len(line["hash_ids"]) for line in one] == [len(line["hash_ids"]) for line in other] == [4, 4, 2]
    assert one[0]["hash_ids"] == one[1]["hash_ids"] != other[0]["hash_ids"]
    assert not {id_ for line in one for id_ in line["hash_ids"]} & {id_ for line in other for id_ in line["hash_ids"]}
    assert [line["timestamp"] for line in one] == sorted(line["timestamp"] for line in one)


@needs_fuse
@pytest.mark.heavy
def test_it_ends_by_size_and_time_and_with_the_daemon(cache: Mount, tmp_path: Path) -> None:
    """Each time what was written is a trace; a file that is there stays unless --force says so."""
    small, gone, short = (tmp_path / name for name in ("small.jsonl.gz", "gone.jsonl.gz", "short.jsonl"))
    by_size = Recorder(cache, small, "--max-size=20B")
    by_death = Recorder(cache, gone)
    with Client(cache.path, NAMESPACE, deadline_s=DEADLINE_S) as client:
        serve(client, list(range(64)))
        said = by_size.wait()
        assert "it ended because 20 B are written" in said
    assert len(lines_of(small)) == 1
    again = kvfs("record", cache.path, small)
    assert (again.returncode, again.stderr) == (2, f"kvfs: {small} is there already; --force writes over it\n")
    by_time = kvfs("record", cache.path, short, "--for", "1s")
    assert by_time.returncode == 1
    assert by_time.stderr.splitlines()[-1] == "kvfs: no engine asked for anything: the trace is empty"
    assert not short.exists()
    os.kill(cache.pid(), signal.SIGKILL)
    said = by_death.wait()
    assert "it ended because the session broke" in said or "daemon" in said
    assert len(lines_of(gone)) == 1
    assert kvfs("record", cache.path, tmp_path / "late.jsonl").returncode == 1
    assert not (tmp_path / "late.jsonl").exists()
    assert kvfs("why", cache.path, "tiny", "ab" * 16).returncode == 2


@needs_fuse
@pytest.mark.heavy
def test_each_namespace_is_recorded_with_its_sizes(cache: Mount, tmp_path: Path) -> None:
    """Tokens a chunk, bytes a token, a name that leads to nothing; of several ranks the first. `kvfs simulate` uses them."""
    identity = msgspec.structs.replace(NAMESPACE.identity, tokens_per_chunk=32)
    run = msgspec.structs.replace(
        NAMESPACE.layers[0],
        tensors=tuple(msgspec.structs.replace(each, shape=(32, 8)) for each in NAMESPACE.layers[0].tensors),
    )
    wide = Namespace(identity, (run,))
    wide_bytes = geometry(wide, 32).file_bytes
    second = msgspec.structs.replace(NAMESPACE, rank=1, num_ranks=2)
    files = [tmp_path / name for name in ("all.jsonl", "wide.jsonl")]
    with Client(cache.path, wide, deadline_s=DEADLINE_S) as client:
        client.attach()
    recorders = [Recorder(cache, files[0]), Recorder(cache, files[1], "--namespace", wide.directory)]
    for namespace in (NAMESPACE, second, wide):
        with Client(cache.path, namespace, deadline_s=DEADLINE_S) as client:
            chain = KeyChain(
                root(namespace.identity.fingerprint()), namespace.identity.tokens_per_chunk, list(range(64))
            )
            client.match(chain.chains).release()
            client.match(chain.chains, is_again=True).release()  # answered once the first was passed on
    for recorder in recorders:
        recorder.end()
    every, alone = (lines_of(file) for file in files)
    assert [(line["block_size"], line["bytes_per_token"]) for line in every] == [(16, 128), (32, 128)]
    assert [(line["block_size"], line["bytes_per_token"]) for line in alone] == [(32, 128)]
    names = {line["namespace"] for line in [*every, *alone]}
    assert len(names) == 3, "two recordings have no name in common"
    text = files[0].read_text()
    assert not [part for part in ("tiny", NAMESPACE.directory, wide.directory) if part in text]
    simulated = kvfs("simulate", files[0], "--ram=1MiB", "--policy=lru,opt")
    assert simulated.returncode == 0, simulated.stderr
    assert "of 16 or 32 tokens, " in simulated.stdout
    assert "opt is left out: it is known for chunks of one size only" in simulated.stderr
    simulated = kvfs("simulate", files[1], f"--ram={wide_bytes >> 10}KiB", "--policy=lru,opt")
    assert f"of 32 tokens, {format_size(wide_bytes)} each" in simulated.stdout


def test_an_ear_keeps_a_bounded_number_and_counts_the_rest() -> None:
    """A message never has more than it may; what was lost is told once."""
    ear = Ear()
    heard = Heard(9**18, 3, "n" * 200, 256, 4096, bytes(16 * MAX_BATCH))
    for _ in range(1000):
        ear.add(heard)
    taken, lost, is_more = ear.take()
    assert (len(taken), is_more) == (1, True)
    assert 700 < lost < 800
    num_taken = 1
    while is_more:
        taken, again, is_more = ear.take()
        num_taken += len(taken)
        assert again == 0
    assert num_taken + lost == 1000
