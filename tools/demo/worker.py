"""One process of the demo: load the model, warm up, run the prompt, report.

The kind of a process is the name of its run; `warm` also runs `in_memory`, turn by turn with itself: the stock
`generate()` of transformers with the cache of this very prompt still in memory, cut so that one token is computed. That
is what a prefix cache can hope for.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer
from transformers.utils.logging import disable_progress_bar

from kvfs import keys
from kvfs.engine_adapters.transformers_cache import PrefixCache
from kvfs.engine_adapters.transformers_calls import CACHE_ARGUMENT
from kvfs.tools.demo import prompt as prompts
from kvfs.tools.demo.model import NAME
from kvfs.tools.demo.runs import NEW_TOKENS, REPETITIONS, Answer, Run, digest


class FirstToken(BaseStreamer):
    """Notes when the first generated token is out; the first thing that is put is the prompt."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.ttft_ms = float("nan")
        self._num_put = 0

    def put(self, value: Any) -> None:
        """The prompt, then each token."""
        self._num_put += 1
        if self._num_put == 2:
            self.ttft_ms = (time.perf_counter() - self.begin) * 1000

    def end(self) -> None:
        """Nothing is held back."""


class Worker:
    """The loaded model with its cache, and the prompt."""

    def __init__(self, mount: str, model_directory: str, say: Callable[[str], None]) -> None:
        say("loading the model")
        self.tokenizer = AutoTokenizer.from_pretrained(model_directory)
        self.model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
        self.model.eval()  # type: ignore[no-untyped-call]
        self.cache = PrefixCache(mount, self.model, self.tokenizer, model_id=NAME)
        self.tokens = prompts.build(self.tokenizer)
        self.text = ""

    def generate(self, generate: Callable[..., Any], tokens: list[int], **arguments: Any) -> tuple[float, Any]:
        """Milliseconds to the first token, and what was returned."""
        ids = torch.tensor([tokens])
        streamer = FirstToken()
        output = generate(
            ids,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            streamer=streamer,
            **arguments,
        )
        return streamer.ttft_ms, output

    def warm_up(self) -> None:
        """Answer an unrelated prompt in the way that is measured afterwards."""
        self.generate(self.cache.generate, prompts.build_warm_up(self.tokenizer))

    def run_through_cache(self, kind: str) -> tuple[Run, Any]:
        """The prompt through kvfs; also what `generate` returned."""
        ttft_ms, output = self.generate(self.cache.generate, self.tokens)
        load = self.cache.statistics().last_load
        return self._run(kind, ttft_ms, load.tokens_reused, load.tier.name.lower(), output), output

    def run_in_memory(self, held: Any) -> Run:
        """The prompt through transformers alone, with `held` in memory: the cache of an earlier run."""
        reused = len(self.tokens) - 1
        held.crop(reused - held.get_seq_length())
        ttft_ms, output = self.generate(self.model.generate, self.tokens, **{CACHE_ARGUMENT: held})
        return self._run("in_memory", ttft_ms, reused, "engine", output)

    def answer(self, runs: list[Run]) -> Answer:
        """What is reported."""
        identity = self.cache.namespace.identity
        chain = keys.KeyChain(keys.root(identity.fingerprint()), identity.tokens_per_chunk, self.tokens)
        return Answer(runs, chain.keys[0].hex(), self.text)

    def _run(self, kind: str, ttft_ms: float, reused: int, tier: str, output: Any) -> Run:
        new = output.sequences[0, len(self.tokens) :].tolist()
        self.text = str(self.tokenizer.decode(new, skip_special_tokens=True))
        return Run(kind, ttft_ms, len(self.tokens), reused, tier, digest(new))


def run(kind: str, mount: str, model_directory: str, say: Callable[[str], None]) -> Answer:
    """Do the runs of one process; `say` is told what is being done."""
    logging.basicConfig(level=logging.WARNING)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_grad_enabled(False)
    worker = Worker(mount, model_directory, say)
    say("warming up with an unrelated prompt")
    worker.warm_up()
    say("reading the prompt")
    first, output = worker.run_through_cache(kind)
    runs = [first]
    if kind == "warm":
        held = copy.deepcopy(getattr(output, CACHE_ARGUMENT))
        del output
        worker.run_in_memory(held)  # its first run here finds cold memory, as the first through kvfs did
        for number in range(REPETITIONS):
            say(f"reading it again, {number + 1} of {REPETITIONS}, by turns with the engine's own memory")
            runs.append(worker.run_in_memory(held))
            runs.append(worker.run_through_cache(kind)[0])
    worker.cache.close()
    return worker.answer(runs)
