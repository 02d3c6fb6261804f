"""Runs in vLLM's Python: sends the workload to a server with the OpenAI client, and tells what came, a line of JSON each.

    python -m kvfs.tools.bench_vllm.asking TASK

Concurrency: a thread for each request under way; the lines are written one at a time.
"""

from __future__ import annotations

import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from kvfs.tools.bench_vllm import counts, workload
from kvfs.tools.bench_vllm.results import Answer, Line, PassOver, Stage
from kvfs.tools.bench_vllm.workload import Request, Workload

DEADLINE_S = 3600.0
SETTLE_S = 2.0
"""After the warm-up: what was computed is stored meanwhile, and loaded by the second half of it."""


class Task(msgspec.Struct, frozen=True):
    """What is asked of whom.

    Attributes:
        url: the server's; model: the name that it gives it; model_directory: where its tokenizer is.
        workload: what is asked, `num_passes` times.
        purpose: names the warm-up, so that no two runs have the same.
    """

    url: str
    model: str
    model_directory: str
    workload: Workload
    num_passes: int
    purpose: str


class Asker:
    """A server, and the client that asks it."""

    def __init__(self, task: Task) -> None:
        from openai import OpenAI
        from tokenizers import Tokenizer

        self._task = task
        self._client = OpenAI(base_url=f"{task.url}/v1", api_key="none", timeout=DEADLINE_S, max_retries=0)
        self._lock = threading.Lock()
        tokenizer = Tokenizer.from_file(str(Path(task.model_directory, "tokenizer.json")))
        vocabulary = workload.words(tokenizer)
        self._requests = workload.requests(task.workload, vocabulary)
        self._warm_up = workload.warm_up(task.workload, vocabulary, task.purpose)
        workload.check_lengths(task.workload, [self._warm_up, *(each.text for each in self._requests)], tokenizer)

    def run(self) -> None:
        """The warm-up, then the passes."""
        for _ in range(2):
            self._say(Stage("warming up"))
            self._ask(-1, Request(-1, self._warm_up, 0.0))
            self._say(Stage("warmed up"))
            time.sleep(SETTLE_S)
            self._reset()
        before = self._counts()
        for _ in range(self._task.num_passes):
            seconds = self._pass()
            now = self._counts()
            self._say(PassOver(seconds, now.since(before)))
            before = now

    def _pass(self) -> float:
        """Ask everything once; the seconds that it took."""
        begin = time.perf_counter()
        with ThreadPoolExecutor(self._task.workload.max_concurrency) as pool:
            futures = []
            for number, request in enumerate(self._requests):
                time.sleep(request.pause_s)
                futures.append(pool.submit(self._ask_and_tell, number, request))
            for future in futures:
                future.result()
        return time.perf_counter() - begin

    def _ask_and_tell(self, number: int, request: Request) -> None:
        self._say(self._ask(number, request))

    def _ask(self, number: int, request: Request) -> Answer:
        begin, ttft_s, usage = time.perf_counter(), None, None
        stream = self._client.completions.create(
            model=self._task.model,
            prompt=request.text,
            max_tokens=self._task.workload.output_len,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, "add_special_tokens": False, "return_token_ids": True},
        )
        for part in stream:
            # A token that is half a letter is a token without text.
            if ttft_s is None and part.choices and (part.choices[0].text or getattr(part.choices[0], "token_ids", ())):
                ttft_s = time.perf_counter() - begin
            usage = part.usage or usage
        latency_s = time.perf_counter() - begin
        if ttft_s is None or usage is None or usage.prompt_tokens != self._task.workload.prompt_tokens:
            raise RuntimeError(f"request {number} was answered with {usage}")
        return Answer(
            number, request.group, round(ttft_s * 1000, 2), round(latency_s * 1000, 2), usage.prompt_tokens,
            usage.completion_tokens,
        )  # fmt: skip

    def _reset(self) -> None:
        """Empty the engine's own prefix cache: the warm-up takes none of its room."""
        request = urllib.request.Request(f"{self._task.url}/reset_prefix_cache", method="POST")
        with urllib.request.urlopen(request, timeout=60):
            pass

    def _counts(self) -> counts.Counts:
        with urllib.request.urlopen(f"{self._task.url}/metrics", timeout=60) as reply:
            return counts.read(reply.read().decode())

    def _say(self, line: Line) -> None:
        with self._lock:
            print(msgspec.json.encode(line).decode(), flush=True)


def main() -> None:
    """Entry point of the process."""
    Asker(msgspec.json.decode(sys.argv[1], type=Task)).run()


if __name__ == "__main__":
    main()
