"""The demo's prompts: a text about KV caches with a question at its end, and an unrelated one to warm up with."""

from __future__ import annotations

from importlib import resources
from typing import Any

NUM_TOKENS = 3200
"""12 full chunks of 256 tokens, and 128 more: a short last chunk."""

NUM_WARM_UP_TOKENS = 320
QUESTION = "In one short sentence: what does the KV cache of a language model hold?"
_MARK = "<the text>"


def build(tokenizer: Any, num_tokens: int = NUM_TOKENS) -> list[int]:
    """Token ids of the prompt, `num_tokens` of them: the text cut to fit, the question, the beginning of an answer."""
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{_MARK}\n\n{QUESTION}"}], tokenize=False, add_generation_prompt=True
    )
    before, _, after = chat.partition(_MARK)
    head, tail = _encode(tokenizer, before), _encode(tokenizer, after)
    body = (2 * _encode(tokenizer, text()))[: num_tokens - len(head) - len(tail)]
    tokens = head + body + tail
    if len(tokens) != num_tokens:
        raise ValueError(f"the text of the demo makes a prompt of {len(tokens)} tokens, not {num_tokens}")
    return tokens


def build_warm_up(tokenizer: Any) -> list[int]:
    """Token ids of a prompt that shares no prefix with the other: the end of the text."""
    return _encode(tokenizer, text())[-NUM_WARM_UP_TOKENS:]


def text() -> str:
    """The text, as it is shipped."""
    return resources.files(__package__).joinpath("text.txt").read_text("utf-8")


def _encode(tokenizer: Any, words: str) -> list[int]:
    return list(tokenizer(words, add_special_tokens=False)["input_ids"])
