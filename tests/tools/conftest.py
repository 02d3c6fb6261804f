"""Real mounts for commands to run on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvfs.client import Client, new_chunk
from kvfs.keys import KeyChain, key_of, root
from kvfs.messages import StoreStatus
from kvfs.mount import mountpoint
from kvfs.namespace import Identity, LayerRun, Namespace, TensorSpec
from kvfs.testing import DEADLINE_S

KVFS = str(Path(sys.executable).parent / "kvfs")

NAMESPACE = Namespace(
    identity=Identity(
        model="tests/tiny", revision="1", kv_dtype="F32", layout="test", num_layers=2, num_kv_heads=1, head_size=8,
        tokens_per_chunk=16,
    ),
    layers=(LayerRun(2, (TensorSpec("k", "F32", (16, 8), 0), TensorSpec("v", "F32", (16, 8), 0))),),
)  # fmt: skip


def kvfs(*arguments: str | Path, timeout_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
    command = [KVFS, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=timeout_s
    )


@dataclass
class Mount:
    """A directory to mount on, the flags to do so, and the end of what was mounted."""

    path: Path
    flags: list[str]

    def start(self) -> int:
        """Mount in the background; the daemon's pid."""
        result = kvfs("mount", self.path, *self.flags, "--background")
        assert result.returncode == 0, result.stderr
        return self.pid()

    def pid(self) -> int:
        return int(json.loads((self.path / ".kvfs" / "status.json").read_bytes())["pid"])

    def json(self, command: str, *arguments: str) -> Any:
        result = kvfs(command, self.path, *arguments, "--json")
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    @property
    def is_mounted(self) -> bool:
        return mountpoint.mount_at(str(self.path)) is not None


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """A directory to mount on; what is left mounted there is taken away."""
    path = tmp_path / "mnt"
    flags = [
        "--ram=16MiB",
        f"--nvme={tmp_path}/volume:16MiB",
        f"--socket-directory={tmp_path.parent}/run",
        "--huge-pages=never",
    ]
    flags.append(f"--log-file={tmp_path}/log")
    mount = Mount(path, flags)
    yield mount
    if mount.is_mounted:
        mountpoint.unmount(str(path), lazy=True)


def store(path: Path, tokens: list[int], namespace: Namespace = NAMESPACE, *, first: int = 0) -> list[str]:
    """Store the full chunks of a sequence, from the `first` on; their keys."""
    chain = KeyChain(root(namespace.identity.fingerprint()), 16, tokens)
    with Client(path, namespace, deadline_s=DEADLINE_S) as client:
        chunks = [
            new_chunk(value, chain.parent_of(position), position, 16) for position, value in enumerate(chain.chains)
        ]
        reservations = client.store(chunks[first:])
        for reservation in reservations:
            if reservation.payload is not None:
                reservation.payload[:] = bytes(len(reservation.payload))
        assert set(client.publish(reservations)) <= {StoreStatus.STORED, StoreStatus.EXISTS}
    return [key_of(value).hex() for value in chain.chains[first:]]


def store_three(path: Path) -> tuple[list[str], list[str], list[str]]:
    """Store a prompt of four chunks, one of three that shares the first, and one of two that shares none; their keys."""
    return (
        store(path, list(range(64))),
        store(path, [*range(16), *range(100, 132)]),
        store(path, list(range(500, 532))),
    )


def assert_refused(result: subprocess.CompletedProcess[str], sentence: str) -> None:
    """The command was used wrongly: it says so in one sentence that begins like this, and nothing else."""
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"kvfs: {sentence}")
    assert result.stderr.count("\n") == 1
