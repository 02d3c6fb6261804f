"""`kvfs simulate` as a command: what it prints, what it says of mistakes, and that Ctrl-C costs nothing that is there."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.errors import UsageError
from kvfs.policies.named import NAMES
from kvfs.testing import wait_until

from .simulated import chats, kvfs, write_mooncake


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    """A trace file of a thousand requests."""
    path = tmp_path / "trace.jsonl"
    write_mooncake(chats(5, 1000), path)
    return path


def test_the_command_compares_policies(mooncake: Path) -> None:
    done = kvfs("simulate", mooncake, "--ram", "1%", "--nvme", "20%", "--policy", "lru,learned,opt", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    lru, learned, best = json.loads(done.stdout)
    assert [found["policy"] for found in (lru, learned, best)] == ["lru", "learned", "opt"]
    assert best["token_hit_rate"] >= learned["token_hit_rate"] > 0
    assert best["token_hit_rate"] >= lru["token_hit_rate"] > lru["ram_token_hit_rate"] > 0
    assert best["ttft_s"]["mean"] <= lru["ttft_s"]["mean"]
    done = kvfs("simulate", mooncake, "--ram", "5%", "--policy", "lru,opt")
    assert done.returncode == 0
    assert "1,000 requests in" in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines()[-2:]] == ["lru", "opt"]


@pytest.mark.heavy
def test_pictures(mooncake: Path, tmp_path: Path) -> None:
    """All of them, of all policies; they say where they are."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install kvfs[plots]")
    done = kvfs("simulate", mooncake, "--ram", "5%", "--policy", "lru,opt", "--plot", tmp_path / "new" / "pictures")
    assert done.returncode == 0, done.stderr
    names = {
        "hit-rate-over-time", "hits-of-requests", "where-hits-end", "chunk-reuse", "request-length", "reuse-distance",
        "capacity",
    }  # fmt: skip
    pictures = [*(tmp_path / "new" / "pictures").iterdir()]
    assert {path.name for path in pictures} == {f"{name}.png" for name in names}
    for path in pictures:
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert str(path) in done.stderr
    done = kvfs("simulate", mooncake, "--ram", "5%", "--policy", "lru", "--plot", mooncake)
    assert done.returncode == 2
    assert "cannot write to" in done.stderr


def test_distances_between_uses() -> None:
    """By counting the different chunks between, one by one."""
    plot = pytest.importorskip("kvfs.tools.simulate.plot", reason="needs matplotlib", exc_type=UsageError)
    trace = chats(9, 60)
    flat = [chunk for request in trace.requests for chunk in request.chunks]
    distances = []
    for place, chunk in enumerate(flat):
        before = next((other for other in range(place - 1, -1, -1) if flat[other] == chunk), None)
        if before is not None:
            distances.append(len(set(flat[before + 1 : place])))
    for most, number in plot._cumulated_distances(trace):
        assert number == sum(distance < most for distance in distances)


def test_without_matplotlib_plot_says_what_to_install(mooncake: Path, tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('no')")
    done = subprocess.run(
        [sys.executable, "-m", "kvfs.tools.cli", "simulate", mooncake, "--ram", "5%", "--plot", tmp_path / "x"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvfs: --plot draws with matplotlib: pip install 'kvfs[plots]', or pip install matplotlib\n"
    assert not (tmp_path / "x").exists()


def test_help_teaches_by_example() -> None:
    done = kvfs("simulate", "--help")
    assert done.returncode == 0
    assert "kvfs simulate conversation.jsonl.gz --ram 5%" in done.stdout
    assert all(name in done.stdout for name in NAMES)
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ram", "5%", "--policy", "lruu"], "there is no policy 'lruu'"),
        (["--ram", "5"], "--ram is 5 B: it holds at least a chunk"),
        (["--ram", "200%"], "200% is no share of a trace"),
        (["--ram", "5%", "--policy", "lruu"], "lfu-ttl, cost, fifo, opt, or package.module:Class"),
        (["--ram", "5%", "--policy", " , "], "--policy names none: it is one or more"),
        (["--ram", "5%", "--prefill-rate", "0"], "--prefill-rate is a number of tokens above 0"),
        (["--ram", "5%", "--prefill-rate", "nan"], "--prefill-rate is a number of tokens above 0"),
        (["--ram", "5%", "--prefill-rate", "inf"], "--prefill-rate is a number of tokens above 0"),
        (["--ram", "5%", "--bytes-per-token", "0"], "--bytes-per-token is between 1 and"),
        (["--ram", "5%", "--bytes-per-token", "99999999999999999999"], "--bytes-per-token is between 1 and"),
        (["--ram", "5%", "--tokens-per-chunk", "0"], "--tokens-per-chunk is between 1 and"),
        (["--ram", "5%", "--session-gap", "5"], "--session-gap: '5' is not a duration"),
        (["--ram", "5%", "--tokens-per-chunk", "700"], "is no multiple of the blocks"),
        (["--ram", "5%", "--bytes-per-token", "99999999"], "a chunk of 512 tokens of 95.4 MiB cannot be"),
        (["--ram", "5%", "--nvme", "many"], "--nvme: 'many' is not a size"),
        (["--ram", "5%", "--nvme", "20%", "--admission", "never"], "--admission is always or second-use, not 'never'"),
        (["--ram", "5%", "--admission", "second-use"], "say what is written to NVMe: give --nvme too"),
        (["--ram", "5%", "--write-budget", "1GiB"], "say what is written to NVMe: give --nvme too"),
        (["--ram", "5%", "--nvme", "20%", "--write-budget", "5"], "--write-budget lies between 1.0 MiB and 1.0 PiB"),
        (["--ram", "5%", "--queue-time", "2s"], "what is prefetched comes from NVMe"),
        (["--ram", "5%", "--load-chunks", "2"], "what is prefetched comes from NVMe"),
        (["--ram", "5%", "--nvme", "20%", "--load-chunks", "-2"], "--load-chunks is a number of chunks above 0"),
        (["--ram", "5%", "--nvme", "20%", "--queue-time", "2d"], "--queue-time is at most 1d"),
        (["--ram", "5%", "--nvme-bandwidth", "0"], "--nvme-bandwidth is above 0"),
    ],
)
def test_mistakes_are_told_in_one_sentence(arguments: list[str], said: str, mooncake: Path) -> None:
    done = kvfs("simulate", mooncake, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("is_gzipped", [False, True])
def test_a_trace_comes_through_a_pipe(is_gzipped: bool, mooncake: Path) -> None:
    """As -, plain or gzipped, it is what it is as a file; one that is empty or broken is told as a file would be."""
    raw = gzip.compress(mooncake.read_bytes()) if is_gzipped else mooncake.read_bytes()
    command = [sys.executable, "-m", "kvfs.tools.cli", "simulate", "-", "--ram", "5%", "--policy", "lru", "--json"]
    whole = json.loads(kvfs("simulate", mooncake, "--ram", "5%", "--policy", "lru", "--json").stdout)
    done = subprocess.run(command, input=raw, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)[0]["hit_rate"] == whole[0]["hit_rate"]
    done = subprocess.run(command, input=b"", capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, b"", b"kvfs: the standard input is empty\n")


def test_where_pictures_cannot_be_written_nothing_is_simulated(mooncake: Path) -> None:
    """Also as root, for whom no directory is closed; found out before anything takes time."""
    done = kvfs("simulate", mooncake, "--ram", "5%", "--json", "--plot", "/proc/pictures")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvfs: cannot write to /proc/pictures: ")


def test_one_request_of_one_chunk(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 7, "input_length": 512, "hash_ids": [1]}\n')
    done = kvfs("simulate", file, "--ram", "100%", "--nvme", "100%", "--admission", "second-use", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    for found in json.loads(done.stdout):
        assert (found["requests"], found["hit_rate"], found["written_bytes_a_day"]) == (1, 0.0, None)
    shown = kvfs("simulate", file, "--ram", "100%", "--nvme", "100%", "--admission", "second-use")
    assert (shown.returncode, shown.stderr) == (0, "")


def test_ctrl_c_while_reading_is_one_sentence(tmp_path: Path) -> None:
    """The trace is a pipe in which nothing comes."""
    fifo = tmp_path / "trace"
    os.mkfifo(fifo)
    process = subprocess.Popen(
        [sys.executable, "-m", "kvfs.tools.cli", "simulate", fifo, "--ram", "5%"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with fifo.open("wb") as pipe:  # which waits until the command has opened it
        pipe.flush()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err == "kvfs: interrupted before a request was played: there is nothing to show\n"


SLOW = """
import pathlib, time
from kvfs.policies.lru import LeafFirstLRU


class Slow(LeafFirstLRU):
    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def built_on(self, prefix):
        super().built_on(prefix)
        if self.clock() >= 50:
            pathlib.Path(__file__).with_name("is-at-50").touch()
            time.sleep(1000)
"""


def test_ctrl_c_shows_what_there_is(mooncake: Path, tmp_path: Path) -> None:
    """While a user's own policy, by its import path, hangs at the request of second 50; another has come to its end."""
    (tmp_path / "slow.py").write_text(SLOW)
    command = [sys.executable, "-m", "kvfs.tools.cli", "simulate", mooncake, "--ram", "5%", "--json"]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [*command, "--policy", "fifo,slow:Slow,lru"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    with process:
        wait_until((tmp_path / "is-at-50").exists, "the policy hangs")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    first, second = json.loads(out)
    assert (first["policy"], first["requests"], first["is_partial"]) == ("fifo", 1000, False)
    assert (second["policy"], second["requests"], second["is_partial"]) == ("slow:Slow", 51, True)
