"""The workload: groups of prompts that share a system prompt, asked in random order.

The parameters bear the names, and have the meanings, of the workload "generated-shared-prefix" that serving benchmarks
use. The text is made of random words of which each is one token, so that a prompt has exactly the tokens that were asked
for, and all prompts of a group begin with the same ones. Equal parameters give equal requests, in any process.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from kvfs.errors import KvfsError

MIN_WORDS = 200
"""With fewer words to choose from, two system prompts might begin alike."""

_WORD = re.compile(r"[Ġ▁]([a-z]{2,})")
"""Vocabularies mark the space before a word with one of these."""


class Workload(msgspec.Struct, frozen=True):
    """What is asked.

    Attributes:
        num_groups: system prompts.
        prompts_per_group: prompts that begin with the same one.
        system_prompt_len, question_len: tokens of a system prompt, and of what comes behind it, different in each prompt.
        output_len: tokens that are generated, no fewer and no more.
        request_rate: requests that arrive in a second, on average, as a Poisson process; None: all at once.
        max_concurrency: requests under way at one time; what has arrived waits for its turn, and its time begins then.
        seed: of words, order and arrivals.
    """

    num_groups: int = 12
    prompts_per_group: int = 4
    system_prompt_len: int = 2048
    question_len: int = 64
    output_len: int = 8
    request_rate: float | None = None
    max_concurrency: int = 2
    seed: int = 1

    @property
    def num_prompts(self) -> int:
        """Requests in a pass."""
        return self.num_groups * self.prompts_per_group

    @property
    def prompt_tokens(self) -> int:
        """Tokens of each prompt."""
        return self.system_prompt_len + self.question_len

    @property
    def request_tokens(self) -> int:
        """Tokens of each prompt and its answer."""
        return self.prompt_tokens + self.output_len


class Request(msgspec.Struct, frozen=True):
    """One prompt. Attributes: group; text; pause_s: between the arrival of the one before and its own."""

    group: int
    text: str
    pause_s: float


class Tokenizer(Protocol):
    """What is used of `tokenizers.Tokenizer`."""

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        """Ids by token."""

    def encode_batch(self, input: list[str], *, add_special_tokens: bool = True) -> list[Any]:  # noqa: A002 - its name
        """Encodings, which have `ids`."""


def words(tokenizer: Tokenizer) -> list[str]:
    """Words with the space before them that are one token each, in a fixed order. Raises KvfsError if they are too few."""
    ids = {f" {word[1]}": id_ for token, id_ in tokenizer.get_vocab(False).items() if (word := _WORD.fullmatch(token))}
    texts = sorted(ids)
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    found = [text for text, each in zip(texts, encoded, strict=True) if each.ids == [ids[text]]]
    if len(found) < MIN_WORDS:
        raise KvfsError(
            f"of this model's tokens only {len(found)} are words; prompts of an exact length want {MIN_WORDS}"
        )
    return found


def requests(workload: Workload, vocabulary: Sequence[str]) -> list[Request]:
    """The requests of a pass, in the order in which they arrive."""
    generator = random.Random(f"{workload.seed} prompts")
    prompts = []
    for group in range(workload.num_groups):
        system = _text(generator, vocabulary, workload.system_prompt_len)
        questions = [_text(generator, vocabulary, workload.question_len) for _ in range(workload.prompts_per_group)]
        prompts += [(group, system + question) for question in questions]
    generator = random.Random(f"{workload.seed} order")
    generator.shuffle(prompts)
    rate = workload.request_rate
    pauses = [generator.expovariate(rate) if rate is not None and number else 0.0 for number in range(len(prompts))]
    return [Request(group, text, pause_s) for (group, text), pause_s in zip(prompts, pauses, strict=True)]


def warm_up(workload: Workload, vocabulary: Sequence[str], purpose: str) -> str:
    """A prompt as long as the others that shares nothing with them, nor with those of another purpose."""
    return _text(random.Random(f"{workload.seed} warm-up {purpose}"), vocabulary, workload.prompt_tokens)


def check_lengths(workload: Workload, texts: Sequence[str], tokenizer: Tokenizer) -> None:
    """Raise KvfsError if a prompt has not exactly the tokens that were asked for: words would have grown together."""
    for each in tokenizer.encode_batch(list(texts), add_special_tokens=False):
        if len(each.ids) != workload.prompt_tokens:
            raise KvfsError(f"a prompt of {workload.prompt_tokens} words has {len(each.ids)} tokens in this model")


def _text(generator: random.Random, vocabulary: Sequence[str], num_words: int) -> str:
    return "".join(generator.choices(vocabulary, k=num_words))
