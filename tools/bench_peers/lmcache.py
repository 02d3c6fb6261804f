"""LMCache in a process of its own environment, and the lines that are spoken with it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from kvfs.errors import KvfsError
from kvfs.tools.tied import tied

_WORKER = Path(__file__).with_name("lmcache_worker.py")
_DEADLINE_S = 300.0
_END_S = 10.0


class Task(msgspec.Struct, frozen=True):
    """What a worker is started for.

    Attributes:
        source_fd: shared memory with the payloads, one after the other; inherited.
        chunk_bytes: num_layers × 2 × 256 tokens × num_heads × head_size × 2.
        directory: where its files lie; num_tokens: of the prompt that is looked up.
    """

    source_fd: int
    chunk_bytes: int
    num_chunks: int
    num_layers: int
    num_heads: int
    head_size: int
    num_tokens: int
    directory: str


class Worker:
    """LMCache's storage backends. Attributes: version, torch_version."""

    def __init__(self, python: str, task: Task, log: Path) -> None:
        self.version = ""
        self.torch_version = ""
        self._python, self._task, self._log = python, task, log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        environment = {
            **os.environ,
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_DISABLE_BANNER": "1",
            "LMCACHE_LOG_LEVEL": "ERROR",
            "PYTHONHASHSEED": "0",
        }
        command = [self._python, "-P", os.fspath(_WORKER), msgspec.json.encode(self._task).decode()]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                tied(command, signal.SIGKILL), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, cwd="/",
                pass_fds=[self._task.source_fd], start_new_session=True, bufsize=0,
            )  # fmt: skip
        hello = self._answer()
        self.version, self.torch_version = hello["version"], hello["torch"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(_END_S if error is None else 0.1)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()

    def ask(self, do: str, **words: object) -> dict[str, float]:
        """Give an order; the answer. Raises KvfsError if LMCache cannot, or does not come to an end."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer is what is told
            self._process.stdin.write(msgspec.json.encode({"do": do, **words}) + b"\n")
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([self._process.stdout], [], [], _DEADLINE_S)[0]:
                raise KvfsError(f"LMCache does not answer since {_DEADLINE_S:.0f} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise KvfsError(f"LMCache's process ended: {self._last_words()}")
            line += piece
        answer: dict[str, Any] = msgspec.json.decode(line)
        if "error" in answer:
            raise KvfsError(f"LMCache failed: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "without a word"
