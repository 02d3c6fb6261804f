"""Real mounts: a daemon in a process of its own, and a client that stores tiny chunks in it."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.client import Client, new_chunk
from kvfs.keys import ChainHash, extend, key_of, root
from kvfs.messages import StoreStatus
from kvfs.mount import mountpoint
from kvfs.namespace import Identity, LayerRun, Namespace, TensorSpec
from kvfs.testing import DEADLINE_S, wait_until

TOKENS = 16


class Daemon:
    """`kvfs mount` in the foreground.

    Attributes:
        path: the mount point; process: None when it does not run; log: what it wrote to stderr and its log.
    """

    def __init__(self, directory: Path, run_directory: Path) -> None:
        self.directory = directory
        self.path = directory / "mnt"
        self.run_directory = run_directory
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        return self.directory.joinpath("log").read_text()

    def command(self, *flags: str, ram: str = "16MiB", nvme: str | None = "16MiB") -> list[str]:
        volume = [f"--nvme={self.directory}/volume:{nvme}"] if nvme else []
        return [
            sys.executable, "-m", "kvfs.tools.cli", "mount", str(self.path), f"--ram={ram}", *volume,
            "--huge-pages=never", "--window=1MiB", f"--socket-directory={self.run_directory}", *flags,
        ]  # fmt: skip

    def start(self, *flags: str, ram: str = "16MiB", nvme: str | None = "16MiB") -> None:
        """Return when the mount answers."""
        with self.directory.joinpath("log").open("ab") as log:
            before = log.tell()
            self.process = subprocess.Popen(
                self.command(*flags, ram=ram, nvme=nvme), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/"
            )

        def is_up() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log
            return "Ctrl-C unmounts" in self.log[before:]

        wait_until(is_up, "the daemon is up")

    def refusal(self, *flags: str) -> str:
        """Start a daemon that must refuse to; what it says."""
        result = subprocess.run(
            self.command(*flags), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            timeout=DEADLINE_S, cwd="/",
        )  # fmt: skip
        assert result.returncode == 2, (result.returncode, result.stderr)
        assert result.stderr.count("\n") == 1, result.stderr
        return result.stderr

    def ended(self) -> int:
        """Wait for its end; its exit code."""
        assert self.process is not None
        process, self.process = self.process, None
        return process.wait(DEADLINE_S)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        os.kill(self.pid, number)
        return self.ended()

    def clean_up(self) -> None:
        """Whatever happened: no process, no mount."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        while mountpoint.mount_at(str(self.path)) is not None and mountpoint.unmount(str(self.path), lazy=True):
            pass


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon that is not started yet."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("there is no /dev/fuse")
    run_directory = Path(tempfile.mkdtemp(prefix=f"kvfs-{os.getpid()}-"))  # names of sockets are short
    daemon = Daemon(tmp_path, run_directory)
    yield daemon
    daemon.clean_up()
    shutil.rmtree(run_directory)


@pytest.fixture
def mounted(daemon: Daemon) -> Daemon:
    """A daemon with a RAM tier and a volume."""
    daemon.start()
    return daemon


class Engine:
    """Stands for an engine: stores and loads chains of tiny chunks through the session.

    A path such as "abc" is a chain of three chunks; "abd" shares the first two.
    """

    def __init__(self, mount: Path) -> None:
        self.namespace = Namespace(
            identity=Identity(
                model="tests/tiny", revision="1", kv_dtype="F32", layout="test", num_layers=2, num_kv_heads=1,
                head_size=8, tokens_per_chunk=TOKENS,
            ),
            layers=(LayerRun(2, (TensorSpec("k", "F32", (TOKENS, 8), 0), TensorSpec("v", "F32", (TOKENS, 8), 0))),),
        )  # fmt: skip
        self.client = Client(mount, self.namespace, deadline_s=DEADLINE_S, window_bytes=1 << 20)
        self.directory = mount / self.namespace.directory
        self.chunks = self.directory / "chunks"
        self.prefixes = self.directory / "prefixes"

    def chains(self, path: str) -> list[ChainHash]:
        chain, chains = root(self.namespace.identity.fingerprint()), []
        for letter in path:
            chain = extend(chain, ord(letter).to_bytes(4, "little") * TOKENS)
            chains.append(chain)
        return chains

    def key(self, path: str) -> str:
        return key_of(self.chains(path)[-1]).hex()

    def file(self, path: str) -> Path:
        """The chunk at the end of a path, by its flat name."""
        return self.chunks / f"{self.key(path)}.safetensors"

    def store(self, path: str) -> None:
        """Store a chain, one chunk after the other; each payload is full of its letter."""
        assert set(self.try_store(path)) <= {StoreStatus.STORED, StoreStatus.EXISTS}

    def try_store(self, path: str) -> list[StoreStatus]:
        """The same in a cache that may have no room."""
        parent = root(self.namespace.identity.fingerprint())
        statuses = []
        for position, (letter, chain) in enumerate(zip(path, self.chains(path), strict=True)):
            reservations = self.client.store([new_chunk(chain, parent, position, TOKENS)])
            parent = chain
            payload = reservations[0].payload
            if payload is not None:
                payload[:] = bytes([ord(letter) & 255]) * len(payload)
            statuses += self.client.publish(reservations)
        return statuses

    def load(self, path: str) -> None:
        """Load a chain, as an engine does before it computes."""
        load = self.client.load(self.chains(path))
        assert load is not None
        with load:
            for index in range(len(path)):
                for layer in range(self.namespace.num_layers):
                    assert set(load.layer(index, layer)) == {ord(path[index]) & 255}


@pytest.fixture
def engine(mounted: Daemon) -> Iterator[Engine]:
    """An engine on a mount."""
    engine = Engine(mounted.path)
    yield engine
    engine.client.close()


@pytest.fixture
def engines() -> Iterator[Callable[[Path], Engine]]:
    """Makes engines for mounts that come and go."""
    made: list[Engine] = []

    def make(mount: Path) -> Engine:
        made.append(Engine(mount))
        return made[-1]

    yield make
    for engine in made:
        engine.client.close()


@pytest.fixture
def reap() -> Iterator[Callable[[subprocess.Popen[bytes]], subprocess.Popen[bytes]]]:
    """Registers a process that is killed when the test ends."""
    processes: list[subprocess.Popen[bytes]] = []

    def register(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        processes.append(process)
        return process

    yield register
    for process in processes:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stdin, process.stderr):
            if stream is not None:
                stream.close()


def read_within(descriptor: int, deadline_s: float = DEADLINE_S) -> bytes:
    """What a pipe has to say, waiting for it."""
    ready, _, _ = select.select([descriptor], [], [], deadline_s)
    assert ready, "nothing came"
    return os.read(descriptor, 1 << 16)


@pytest.fixture
def wait() -> Callable[..., None]:
    """See `wait_until`."""
    return wait_until
