"""A tiny random model, and a cache node: the real store and session server, without the FUSE mount.

A client finds a node through the link `.kvfs/session` in a directory, so a plain directory with that link stands for
the mount. Each node runs in a thread of its own, with trio.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import trio
from transformers import LlamaConfig, LlamaForCausalLM

from kvfs.catalog import Chunk
from kvfs.config import Settings
from kvfs.mount.session import serve_sessions
from kvfs.opening import open_store
from kvfs.store import Store
from kvfs.testing import DEADLINE_S

T = TypeVar("T")
torch.set_num_threads(1)  # the models are tiny: several threads wait for each other longer than they compute


class Node:
    """A running store. Attributes: mount: what to give to a client; store: only for `call`."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        self.mount = directory
        self._settings = settings
        self._ready = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._run,), name="node")
        self.store: Store
        self._token: trio.lowlevel.TrioToken
        self._stop: trio.Event

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(DEADLINE_S)

    def stop(self) -> None:
        """Flush and end, as SIGTERM does with a daemon."""
        self.call(self._stop.set)
        self._thread.join()

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in the node's thread."""
        return trio.from_thread.run_sync(function, *args, trio_token=self._token)

    def run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Call an async function in the node's thread."""
        return trio.from_thread.run(function, *args, trio_token=self._token)

    def chunks(self) -> list[Chunk]:
        """All chunks, by position."""
        tables = self.call(lambda: list(self.store.catalog.tables.values()))
        return sorted((chunk for table in tables for chunk in table.chunks.values()), key=lambda chunk: chunk.position)

    def flip(self, chunk: Chunk, layer: int) -> None:
        """Flip a bit of one layer of a chunk in RAM, as a failing DIMM would."""
        offset = chunk.ram + self.geometry(chunk).layer_range(layer)[0]

        def flip() -> None:
            self.store.arena.view[offset] ^= 1

        self.call(flip)

    @staticmethod
    def geometry(chunk: Chunk) -> Any:
        from kvfs.chunk import geometry

        return geometry(chunk.table.namespace, chunk.num_tokens)

    async def _run(self) -> None:
        socket_path = self.mount / "socket"
        link = self.mount / ".kvfs" / "session"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(socket_path)
        self._token = trio.lowlevel.current_trio_token()
        self._stop = trio.Event()
        async with open_store(self._settings) as store, trio.open_nursery() as nursery:
            self.store = store
            await nursery.start(serve_sessions, store, str(socket_path))
            self._ready.set()
            await self._stop.wait()
            nursery.cancel_scope.cancel()


@pytest.fixture
def start_node(tmp_path: Path) -> Callable[..., Any]:
    """A context manager that runs a node; nodes with the same name have the same volume."""

    @contextmanager
    def start(name: str = "node", **settings: Any) -> Iterator[Node]:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        settings = {"ram_bytes": 64 << 20, "huge_pages": "never", "window_bytes": 4 << 20, **settings}
        node = Node(directory, Settings(mountpoint=str(directory / "mount"), **settings))
        node.start()
        try:
            yield node
        finally:
            node.stop()

    return start


@pytest.fixture
def node(start_node: Callable[..., Any]) -> Iterator[Node]:
    with start_node() as started:
        yield started


def tiny_config(**changes: Any) -> LlamaConfig:
    facts: dict[str, Any] = {
        "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "eos_token_id": None,
        "bos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    return LlamaConfig(**{**facts, **changes})


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(tiny_config(**changes)).to(dtype).eval()


@pytest.fixture(scope="session")
def model() -> Any:
    return tiny_model()


def prompt_of(num_tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 128, (1, num_tokens), generator=generator)
