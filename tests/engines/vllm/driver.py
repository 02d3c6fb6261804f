"""Runs in the Python that has vLLM: an engine that takes commands, one JSON line each, and answers on a descriptor.

    driver.py DESCRIPTOR ARGUMENTS

ARGUMENTS is JSON: what `vllm.LLM` is made with. The commands are the methods of `Driver`; their arguments are the other
members of the line. Log output of vLLM goes to stdout and stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


class Driver:
    """An engine and what may be asked of it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**arguments)

    def generate(
        self, prompts: list[list[int]], max_tokens: int = 8, salts: list[str | None] | None = None
    ) -> list[dict[str, Any]]:
        """Greedy tokens of prompts given at once, and what vLLM says of each request."""
        from vllm import SamplingParams

        inputs: list[Any] = []
        for prompt, salt in zip(prompts, salts or [None] * len(prompts), strict=True):
            inputs.append({"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})})
        parameters = SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True)
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


def main() -> None:
    """Answer commands until standard input ends."""
    answers = os.fdopen(int(sys.argv[1]), "w")
    driver = Driver(json.loads(sys.argv[2]))
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        result = getattr(driver, command.pop("do"))(**command)
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
