"""What a vLLM finds in kvfs: its own prefixes, those of another process, and nothing that is not its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from .conftest import Engine, StartEngine

Prompt = Callable[..., list[int]]


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine) -> Iterator[Engine]:
    with start_engine() as engine:
        yield engine


def test_a_stored_prefix_is_loaded_and_gives_the_same_tokens(engine: Engine, prompt: Prompt) -> None:
    """1,100 tokens are computed in three steps and stored as four chunks; the rest is computed again."""
    asked, before, hits = prompt(1100), engine.stored(), engine.hits()
    expected = engine.tokens(asked)
    engine.wait_for_stores(before + 4)
    engine.reset()
    again = engine.run(asked)[0]
    assert again["tokens"] == expected == engine.recomputed(asked)
    assert again["cached"] == 1024
    assert engine.hits() - hits == 1024


def test_a_prompt_that_is_stored_to_its_last_token(engine: Engine, prompt: Prompt) -> None:
    """All of it is loaded, one token is computed."""
    asked, before = prompt(512), engine.stored()
    expected = engine.tokens(asked)
    engine.wait_for_stores(before + 2)
    engine.reset()
    again = engine.run(asked)[0]
    assert again["tokens"] == expected == engine.recomputed(asked)
    assert again["cached"] >= 511


def test_what_was_generated_is_stored_too(engine: Engine, prompt: Prompt) -> None:
    """The next turn of a conversation begins with the answer of the last one."""
    asked, before = prompt(200), engine.stored()
    answer = engine.tokens(asked, max_tokens=100)
    engine.wait_for_stores(before + 1)
    engine.reset()
    turn = [*asked, *answer, *prompt(30, seed=1)]
    again = engine.run(turn)[0]
    assert again["cached"] == 256
    assert again["tokens"] == engine.recomputed(turn)


def test_the_local_prefix_cache_ends_inside_a_chunk(engine: Engine, prompt: Prompt) -> None:
    """The engine has three blocks of 128 tokens, kvfs four chunks of 256: loading begins in the middle of the second."""
    asked, before = prompt(1100), engine.stored()
    expected = engine.tokens(asked)
    engine.wait_for_stores(before + 4)
    engine.reset()
    engine.run(asked[:434])  # one chunk is loaded, the third block computed
    hits = engine.hits()
    again = engine.run(asked)[0]
    assert engine.hits() - hits == 1024 - 384
    assert again["tokens"] == expected == engine.recomputed(asked)


def test_a_salt_keeps_prefixes_apart(engine: Engine, prompt: Prompt) -> None:
    asked, before = prompt(300), engine.stored()
    mine = engine.run(asked, salts=["mine"])[0]["tokens"]
    engine.wait_for_stores(before + 1)
    engine.reset()
    assert engine.run(asked, salts=["yours"])[0]["cached"] == 0
    assert engine.run(asked)[0]["cached"] == 0
    engine.reset()
    again = engine.run(asked, salts=["mine"])[0]
    assert again["cached"] == 256
    assert again["tokens"] == mine


def test_many_requests_at_once_share_a_prefix(engine: Engine, prompt: Prompt) -> None:
    """Their loads queue up, each into blocks of its own request, and every answer is right."""
    shared, before = prompt(600), engine.stored()
    prompts = [[*shared, *prompt(20 + 30 * number, seed=number + 1)] for number in range(6)]
    expected = [answer["tokens"] for answer in engine.run(*prompts, salts=["x"] * 6)]
    engine.tokens(shared)
    engine.wait_for_stores(before + 2)
    engine.reset()
    answers = engine.run(*prompts)
    assert [answer["tokens"] for answer in answers] == expected
    assert all(answer["cached"] >= 512 for answer in answers)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_a_cancelled_request_leaves_nothing_behind(engine: Engine, prompt: Prompt, num_steps: int) -> None:
    """Whether it was waiting, loading, computing or storing: its blocks come back, and the next request is answered."""
    asked = prompt(1500)
    engine.tokens(asked[:800])
    engine.reset()
    assert engine.ask("abandon", prompt=asked, num_steps=num_steps) == 0
    assert engine.tokens(asked) == engine.recomputed(asked)
    engine.reset()  # which fails as long as blocks of the cancelled request are held


def test_a_second_server_shares_what_the_first_stored(
    engine: Engine, start_engine: StartEngine, prompt: Prompt
) -> None:
    """Another process of the same configuration has the same namespace; vLLM's default policy gets a warning."""
    asked, before = prompt(1100), engine.stored()
    expected = engine.tokens(asked)
    engine.wait_for_stores(before + 4)
    with start_engine(policy=None) as second:
        answer = second.run(asked)[0]
        assert answer["cached"] == 1024
        assert answer["tokens"] == expected
        assert "kv_load_failure_policy is 'fail'" in second.log
    assert "kv_load_failure_policy is" not in engine.log


def test_a_server_with_another_dtype_finds_nothing(
    engine: Engine, start_engine: StartEngine, prompt: Prompt, directory: object
) -> None:
    """bfloat16, and blocks of 64 tokens: the namespace is another one, so no byte is taken for what it is not."""
    asked, before = prompt(600), engine.stored()
    engine.tokens(asked)
    engine.wait_for_stores(before + 2)
    with start_engine(dtype="bfloat16", block_size=64) as other:
        before = other.stored()
        first = other.run(asked)[0]
        assert first["cached"] == 0
        other.wait_for_stores(before + 2)
        other.reset()
        again = other.run(asked)[0]
        assert again["cached"] == 512


def test_after_a_reset_of_the_connector_nothing_old_is_found(engine: Engine, prompt: Prompt) -> None:
    """An engine is asked for it when weights were changed in place. (Last in this module: the engine is of no more use.)"""
    asked, before = prompt(600), engine.stored()
    engine.tokens(asked)
    engine.wait_for_stores(before + 2)
    engine.reset(connector=True)
    assert engine.run(asked)[0]["cached"] == 0
    engine.wait_for_stores(before + 4)
    engine.reset()
    assert engine.run(asked)[0]["cached"] == 512
