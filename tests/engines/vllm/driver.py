"""Runs in the Python that has vLLM: imports it once, and forks an engine for each that is asked for.

    driver.py DESCRIPTOR

DESCRIPTOR is a socket. A packet {"arguments": what `vllm.LLM` is made with, "environment"} comes with three descriptors:
commands, answers, log. The answer is the number of the engine's process, a session of its own. A packet {"end": NUMBER}
is answered when all processes of that engine are gone. The engine takes commands, one JSON line each: they name methods of
`Driver`; their arguments are the other members of the line.

The import takes ten seconds. The processes that an engine starts are forked as well, see `vllm_python` in conftest.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

IMPORTED = (
    "vllm", "vllm.v1.engine.core", "vllm.v1.engine.llm_engine", "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.llama", "kvfs.engine_adapters.vllm_connector",
)  # fmt: skip
END_DEADLINE_S = 60.0
PR_SET_CHILD_SUBREAPER = 36


class Driver:
    """An engine and what may be asked of it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**arguments)

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 8,
        salts: list[str | None] | None = None,
        said: dict[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Greedy tokens of prompts given at once, and what vLLM says of each request."""
        from vllm import SamplingParams

        inputs: list[Any] = []
        for prompt, salt in zip(prompts, salts or [None] * len(prompts), strict=True):
            inputs.append({"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})})
        extra = {"kv_transfer_params": {"kvfs": said}} if said is not None else None  # as the OpenAI server does
        parameters = SamplingParams(
            temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True, extra_args=extra
        )
        begin = time.perf_counter()
        outputs = self.llm.generate(inputs, parameters, use_tqdm=False)
        seconds = time.perf_counter() - begin
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "finish": output.outputs[0].finish_reason,
                "cached": output.num_cached_tokens,
                "ttft_s": getattr(output.metrics, "first_token_latency", None),
                "seconds": seconds,
            }
            for output in outputs
        ]

    def abandon(self, prompt: list[int], num_steps: int) -> int:
        """Begin a prompt and cancel it after some steps; how many requests are left when the engine has settled."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        parameters = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
        request_id = engine.add_request("abandoned", {"prompt_token_ids": prompt}, parameters)
        for _ in range(num_steps):
            engine.step()
        engine.abort_request([request_id], internal=True)
        while engine.has_unfinished_requests():
            engine.step()
        return int(engine.get_num_unfinished_requests())

    def serve(self, prompts: list[list[int]], num_at_once: int, mark: str, patience_s: float) -> list[dict[str, Any]]:
        """Ask one prompt after the other, so many at once, until one that was asked after `mark` was made is a hit.

        Times are of the monotonic clock. It gives up when so many seconds have passed.
        """
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        parameters = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
        running: dict[str, dict[str, Any]] = {}
        answers: list[dict[str, Any]] = []
        end = time.monotonic() + patience_s
        while True:
            is_marked = os.path.exists(mark)
            has_hit = any(answer["is_marked"] and answer["cached"] for answer in answers)
            while len(running) < num_at_once and not has_hit and time.monotonic() < end:
                number = len(answers) + len(running)
                request = {"prompt": number % len(prompts), "asked": time.monotonic(), "is_marked": is_marked}
                running[f"served-{number}"] = request
                engine.add_request(f"served-{number}", {"prompt_token_ids": prompts[request["prompt"]]}, parameters)
            if not running:
                return answers
            for output in engine.step():
                if output.finished:
                    answer = running.pop(output.request_id)
                    tokens, cached = list(output.outputs[0].token_ids), output.num_cached_tokens
                    answers.append({**answer, "done": time.monotonic(), "tokens": tokens, "cached": cached})

    def reset(self, connector: bool = False) -> bool:
        """Empty vLLM's own prefix cache."""
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def metrics(self) -> dict[str, float]:
        """Counters of vLLM and of the connector: NAME, or NAME{tier}."""
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                tier = metric.labels.get("tier")
                name = metric.name + (f"{{{tier}}}" if tier else "")
                found[name] = found.get(name, 0.0) + value
        return found


class Sources:
    """Where engines are forked. Attributes: names: of each engine, a file of the shared memory that it has made."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._names: dict[int, int] = {}

    def serve(self) -> None:
        """Answer until the other side closes the socket."""
        while True:
            packet, fds, _, _ = socket.recv_fds(self._control, 1 << 20, 3)
            if not packet:
                return
            request = json.loads(packet)
            answer = self.end(request["end"]) if "end" in request else self.start(request, fds)
            for fd in fds:
                os.close(fd)
            self._control.send(json.dumps(answer).encode())

    def start(self, request: dict[str, Any], fds: list[int]) -> int:
        """Fork an engine; the number of its process."""
        names = os.memfd_create("names")
        number = os.fork()
        if not number:
            self._control.close()
            run_engine(request, fds, names)
        self._names[number] = names
        return number

    def end(self, number: int) -> bool:
        """Return when the engine, all its processes and all its shared memory are gone; True if it went by itself."""
        late = threading.Timer(END_DEADLINE_S, os.killpg, (number, signal.SIGKILL))
        late.start()
        status = os.waitpid(number, 0)[1]
        late.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(number, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:  # this process is the parent of those that lost theirs
                os.waitpid(-number, 0)
        with os.fdopen(self._names.pop(number), "r") as names:
            names.seek(0)
            for name in names.read().split():
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"/dev/shm/{name}")
        return status == 0


def run_engine(request: dict[str, Any], fds: list[int], names: int) -> NoReturn:
    """In the forked process: an engine, until its commands end."""
    code = 1
    try:
        os.setsid()
        commands, answers, log = fds
        os.dup2(commands, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(request["environment"])
        with os.fdopen(answers, "w") as replies:
            driver = Driver(request["arguments"])
            os.write(names, "\n".join(own_shared_memory()).encode())
            print(json.dumps("ready"), file=replies, flush=True)
            for line in os.fdopen(0):
                command = json.loads(line)
                print(json.dumps(getattr(driver, command.pop("do"))(**command)), file=replies, flush=True)
        driver.llm.llm_engine.engine_core.shutdown()
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def own_shared_memory() -> set[str]:
    """What the processes of this engine have mapped of /dev/shm. vLLM leaves some of it there."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(process.name)) == os.getpgrp():
                found.update(re.findall(r"/dev/shm/(\S+)", (process / "maps").read_text("utf-8", "replace")))
    return found


def main() -> None:
    """Entry point."""
    for module in IMPORTED:
        importlib.import_module(module)
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    Sources(socket.socket(fileno=int(sys.argv[1]))).serve()


if __name__ == "__main__":
    main()
