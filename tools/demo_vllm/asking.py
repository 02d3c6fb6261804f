"""Runs in vLLM's Python: asks a server with the OpenAI client and prints each run as a line of JSON.

python -m kvfs.tools.demo_vllm.asking TASK
"""

from __future__ import annotations

import statistics
import sys
import time
import urllib.request
import uuid
from typing import Any

import msgspec

from kvfs.tools.demo import prompt as prompts
from kvfs.tools.demo_vllm.runs import NEW_TOKENS, NUM_TOKENS, REPETITIONS, Run, Task

SETTLE_S = 1.0


class Asker:
    """One server and the prompt."""

    def __init__(self, task: Task) -> None:
        from openai import OpenAI
        from transformers import AutoTokenizer

        self._task = task
        self._client = OpenAI(base_url=f"{task.url}/v1", api_key="none", timeout=600.0, max_retries=0)
        tokenizer = AutoTokenizer.from_pretrained(task.model_directory)
        self.prompt = prompts.build(tokenizer, NUM_TOKENS)
        self.warm_up = prompts.build_warm_up(tokenizer)

    def ask(self, prompt: list[int], salt: str | None = None) -> tuple[float, list[int], int]:
        """Milliseconds to the first token, the generated token ids, prompt tokens that were not computed.

        With a salt nothing is found that was not asked with the same one.
        """
        answer: list[int] = []
        begin, ttft_ms, reused = time.perf_counter(), 0.0, 0
        stream = self._client.completions.create(
            model=self._task.model,
            prompt=prompt,
            max_tokens=NEW_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True, "ignore_eos": True, **({"cache_salt": salt} if salt else {})},
        )
        for part in stream:
            if part.choices:
                ttft_ms = ttft_ms or (time.perf_counter() - begin) * 1000
                answer += getattr(part.choices[0], "token_ids", None) or []
            if part.usage is not None:
                details: Any = part.usage.prompt_tokens_details
                reused = (details.cached_tokens or 0) if details is not None else 0
        return ttft_ms, answer, reused

    def run(self, name: str) -> Run:
        """A run, several times if the server can be put back to where it was."""
        found = []
        for _ in range(REPETITIONS if name in ("own_cache", "same_server") else 1):
            if name == "same_server":
                self.reset()
            found.append(self.ask(self.prompt))
        times = [round(ttft_ms, 1) for ttft_ms, _, _ in found]
        answers = [answer for _, answer, _ in found]
        return Run(
            run=name,
            ttft_ms=round(statistics.median(times), 1),
            tokens=len(self.prompt),
            tokens_reused=min(reused for _, _, reused in found),
            answer=answers[0] if all(answer == answers[0] for answer in answers) else [],
            all_ttft_ms=times,
        )

    def reset(self) -> None:
        """Empty the server's own prefix cache."""
        request = urllib.request.Request(f"{self._task.url}/reset_prefix_cache", method="POST")
        with urllib.request.urlopen(request, timeout=60):
            pass


def main() -> None:
    """Entry point of the process."""
    task = msgspec.json.decode(sys.argv[1], type=Task)
    asker = Asker(task)
    for _ in range(2):
        asker.ask(asker.warm_up, uuid.uuid4().hex)  # computed, so that all hits in the metrics are those of the runs
    for name in task.runs:
        print(msgspec.json.encode(asker.run(name)).decode(), flush=True)
        time.sleep(SETTLE_S)  # what was computed is stored meanwhile, beside the engine


if __name__ == "__main__":
    main()
