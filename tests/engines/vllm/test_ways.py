"""The other ways to run vLLM: loads inside the step, no prefix cache of its own, too little memory, two ranks."""

from __future__ import annotations

from collections.abc import Callable

from .conftest import StartEngine, found_after_reset, wait_until

Prompt = Callable[..., list[int]]


def test_loads_inside_the_step_without_a_local_prefix_cache(start_engine: StartEngine, prompt: Prompt) -> None:
    """`load_async` off: the layers wait for their KV; with vLLM's own cache off, kvfs is the only one."""
    with start_engine(settings={"load_async": False}, enable_prefix_caching=False) as engine:
        asked, before = prompt(1100), engine.stored()
        expected = engine.tokens(asked)
        engine.wait_for_stores(before + 4)
        again = engine.run(asked)[0]
        assert again["tokens"] == expected == engine.recomputed(asked)
        assert engine.hits() == 1024
        whole = prompt(512, seed=1)
        expected = engine.tokens(whole)
        engine.wait_for_stores(before + 4 + 4 + 2)
        assert engine.tokens(whole) == expected
        assert engine.hits() == 1024 + 512


def test_preempted_requests_are_right(start_engine: StartEngine, prompt: Prompt) -> None:
    """Six long answers in a cache for two: requests lose their blocks, while they are being stored as well."""
    with start_engine(num_gpu_blocks_override=32, block_size=32, max_model_len=512) as engine:
        prompts = [prompt(300, seed=number) for number in range(6)]
        expected = [engine.tokens(each, max_tokens=80, salts=["x"]) for each in prompts]
        answers = engine.run(*prompts, max_tokens=80)
        assert [answer["tokens"] for answer in answers] == expected
        assert engine.counts()["vllm:num_preemptions"] > 0
        engine.reset()
        again = engine.run(*prompts, max_tokens=80)
        assert [answer["tokens"] for answer in again] == expected
        assert engine.hits() > 0


def test_two_ranks_share_one_prefix(start_engine: StartEngine, prompt: Prompt, mount: object) -> None:
    """Tensor parallel: each rank has a namespace of its own, and both have the prefix."""
    with start_engine(tensor_parallel_size=2, threads="0|1") as engine:
        asked, before = prompt(1100), engine.stored()
        expected = engine.tokens(asked)
        engine.wait_for_stores(before + 4)  # of the first rank; the other may be behind
        wait_until(lambda: found_after_reset(engine, asked) == 1024, "both ranks have stored it")
        assert engine.tokens(asked) == expected == engine.recomputed(asked)
