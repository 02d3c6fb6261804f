"""`kvfs why`: why a prompt, or a chunk, is not in the cache; or where it is."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from kvfs import namespace as namespaces
from kvfs.chunk import SUFFIX
from kvfs.connection import Connection
from kvfs.durations import rfc3339
from kvfs.errors import FormatError, UnavailableError, UsageError
from kvfs.explaining import BY_EARLIER_POLICY
from kvfs.keys import Key, KeyChain, root
from kvfs.messages import Explained, Known, Tier
from kvfs.namespace import Namespace
from kvfs.tools import asking, listing, mounted
from kvfs.tools.words import format_count, format_duration, printable

EXAMPLES = """
kvfs why /mnt/kvfs SmolLM2 --tokens prompt.json

How much of a prompt is stored, and why the rest is not. The file has token ids, as JSON or with spaces between; - reads stdin.

kvfs why /mnt/kvfs SmolLM2 0a1b2c3d4e5f60718293a4b5c6d7e8f9

A chunk by its key.

kvfs why /mnt/kvfs/SmolLM2-135M-bf16-r0of1-3f9c21ab77d0/chunks/0a1b2c3d4e5f60718293a4b5c6d7e8f9.safetensors --json

A chunk by its name in the mount, though it is gone.

The exit code is 0 if all is stored, and what leads to it, 1 if not, and 2 if that cannot be said. Engines whose request has a salt, an adapter or
images make other keys of the same tokens: say them with --extra, in the engine's order.
"""

EXIT_NOT_STORED = 1
_KEY = re.compile(r"[0-9a-f]{32}")
_MAX_FILE_BYTES = 256 << 20
_NS = 1e9


class Question(NamedTuple):
    """Keys of a namespace, in order if they are those of a prompt, and how many tokens are behind them."""

    directory: str
    keys: list[Key]
    is_prompt: bool
    num_tokens: int = 0
    tokens_per_chunk: int = 0


class Other(NamedTuple):
    """What another namespace has of the same: how many of the first keys, and in which fields it differs."""

    namespace: str
    num_stored: int
    differs: dict[str, tuple[Any, Any]]


@dataclass(frozen=True)
class Answer:
    """All that is known for a question."""

    question: Question
    told: Explained
    others: list[Other]

    @property
    def num_stored(self) -> int:
        """Keys, from the first on, that an engine finds."""
        return next((at for at, fact in enumerate(self.told.facts) if fact.tier is Tier.NONE), len(self.told.facts))

    @property
    def is_stored(self) -> bool:
        """Whether an engine finds all of it, and there is something to find."""
        return bool(self.told.facts) and all(
            fact.tier is not Tier.NONE and not fact.missing for fact in self.told.facts
        )


def why(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="MOUNTPOINT NAMESPACE [KEY]… | PATH…",
            help="A mount, a namespace in it (or the namespace.json of an engine), and keys; or names of chunks in a mount.",
            show_default=False,
        ),
    ],
    tokens: Annotated[
        str | None, typer.Option(metavar="FILE", help="Token ids of a prompt; - for stdin.", show_default=False)
    ] = None,
    extra: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="What the KV depends on beside the tokens: a salt, …", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Say why a prompt or a chunk is not in the cache: never stored, evicted, removed, refused; or where it is.

    What went is remembered in the daemon's memory: bounded, and since it started. The answer says from when on that is
    whole.
    """
    path, wanted, prompt = _plan(places, tokens, extra or [])
    try:
        present = _namespaces(path)
        with asking.connected(path) as connection:
            if prompt is not None:
                answers = [_of_prompt(connection, present, wanted, prompt, extra or [])]
            else:
                answers = [_of_key(connection, present, directory, key) for directory, key in _keys(present, wanted)]
    except UnavailableError as error:
        raise UsageError(str(error)) from error  # exit code 2: 1 would say that it is not stored
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode([_document(answer) for answer in answers]), indent=2))
    else:
        typer.echo("\n\n".join("\n".join(map(printable, _sentences(answer))) for answer in answers))
    if not all(answer.is_stored for answer in answers):
        raise typer.Exit(EXIT_NOT_STORED)


def _plan(places: list[str], tokens: str | None, extra: list[str]) -> tuple[str, list[str], array[int] | None]:
    """The mount, what is asked for in it (a namespace and keys in turn), and the prompt."""
    first = mounted.inside(places[0])
    if first is not None:
        root_, wanted = first[0], []
        for place in places:
            inside = mounted.inside(place)
            parts = inside[1].split("/") if inside is not None and inside[0] == root_ else []
            if len(parts) < 3 or not _KEY.fullmatch(parts[-1].removesuffix(SUFFIX)):
                raise UsageError(f"{place} is no name of a chunk in the mount on {root_}")
            wanted += [parts[0], parts[-1].removesuffix(SUFFIX)]
        if tokens is not None:
            raise UsageError("--tokens goes with a mount and a namespace, not with names of chunks")
        return root_, wanted, None
    path = mounted.find(places[0])
    if len(places) == 1 or (len(places) == 2) != (tokens is not None):
        raise UsageError(f"say of what: kvfs why {path} NAMESPACE and either KEY… or --tokens FILE")
    if tokens is not None:
        return path, places[1:2], _read_tokens(tokens)
    if extra:
        raise UsageError("--extra goes with --tokens: a key has it in itself")
    wanted = []
    for key in places[2:]:
        key = key.removesuffix(SUFFIX)
        if not _KEY.fullmatch(key):
            raise UsageError(f"{key!r} is no key: one has 32 hex digits, `ls` of chunks/ and .kvfs/events show them")
        wanted += [places[1], key]
    return path, wanted, None


def _read_tokens(name: str) -> array[int]:
    """Token ids out of a file: a JSON array, or numbers with commas or space between. Raises UsageError."""
    try:
        with sys.stdin.buffer if name == "-" else Path(name).open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}") from error
    if len(raw) > _MAX_FILE_BYTES:
        raise UsageError(f"{name} is larger than a prompt may be, {_MAX_FILE_BYTES >> 20} MiB")
    try:
        text = raw.decode("ascii")
        found = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [int(word) for word in text.replace(",", " ").split()]
        )
        if not all(type(token) is int for token in found):
            raise ValueError("not all of it are whole numbers")
        tokens = array("I", found)
    except (ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"{name} has no token ids, whole numbers below 2**32: {str(error)[:200]}") from error
    if not tokens:
        raise UsageError(f"{name} has no token ids")
    return tokens


def _namespaces(path: str) -> dict[str, Namespace]:
    def look(beat: mounted.Beat) -> dict[str, Namespace]:
        found = {}
        for name in listing.namespace_names(path):
            beat()
            try:
                found[name] = namespaces.decode(Path(path, name, "namespace.json").read_bytes())
            except (FileNotFoundError, FormatError):  # it goes, or comes, at this moment
                continue
        return found

    return mounted.ask(path, look)


def _chosen(present: dict[str, Namespace], wanted: str) -> Namespace:
    """The namespace that a name, the beginning of one, or an engine's namespace.json means. Raises UsageError."""
    if os.path.isfile(wanted):
        try:
            return namespaces.decode(Path(wanted).read_bytes())
        except (OSError, FormatError) as error:
            raise UsageError(f"{wanted} is no namespace.json: {error}") from error
    found = [name for name in present if name == wanted] or [name for name in present if name.startswith(wanted)]
    if len(found) != 1:
        those = f"it fits {', '.join(found)}" if found else f"there are {', '.join(present) or 'none'}"
        raise UsageError(f"{wanted!r} is no namespace here, nor the beginning of one: {those}")
    return present[found[0]]


def _keys(present: dict[str, Namespace], wanted: Sequence[str]) -> Iterator[tuple[str, Key]]:
    """Namespaces and keys; a namespace that is gone may be named in full."""
    for name, key in zip(wanted[::2], wanted[1::2], strict=True):
        is_gone = name not in present and namespaces.is_directory_name(name)
        yield name if is_gone else _chosen(present, name).directory, Key(bytes.fromhex(key))


def _chain(namespace: Namespace, tokens: array[int], extra: Sequence[str]) -> list[Key]:
    start = root(namespace.identity.fingerprint(), extra)
    return KeyChain(start, namespace.identity.tokens_per_chunk, tokens).keys


def _of_prompt(
    connection: Connection,
    present: dict[str, Namespace],
    wanted: Sequence[str],
    tokens: array[int],
    extra: Sequence[str],
) -> Answer:
    namespace = _chosen(present, wanted[0])
    keys = _chain(namespace, tokens, extra)
    question = Question(namespace.directory, keys, True, len(tokens), namespace.identity.tokens_per_chunk)
    answer = Answer(question, asking.why(connection, namespace.directory, keys), [])
    if answer.is_stored or not keys:
        return answer
    for name, other in present.items():
        if name == namespace.directory:
            continue
        theirs = _chain(other, tokens, extra)
        told = asking.why(connection, name, theirs)
        stored = next((at for at, fact in enumerate(told.facts) if fact.tier is Tier.NONE), len(told.facts))
        if stored:
            answer.others.append(Other(name, stored, _differences(namespace, other)))
    return answer


def _of_key(connection: Connection, present: dict[str, Namespace], directory: str, key: Key) -> Answer:
    answer = Answer(Question(directory, [key], False), asking.why(connection, directory, [key]), [])
    if answer.told.facts[0].tier is not Tier.NONE:
        return answer
    for name, other in present.items():
        if name != directory and asking.why(connection, name, [key]).facts[0].tier is not Tier.NONE:
            differs = _differences(present[directory], other) if directory in present else {}
            answer.others.append(Other(name, 1, differs))
    return answer


def _differences(one: Namespace, other: Namespace) -> dict[str, tuple[Any, Any]]:
    """The fields of namespace.json that are not equal, with both values."""
    left, right = (
        {**msgspec.to_builtins(each.identity), "rank": each.rank, "num_ranks": each.num_ranks} for each in (one, other)
    )
    differs = {name: (left[name], right[name]) for name in left if left[name] != right[name]}
    if one.layers != other.layers:
        differs["layers"] = (msgspec.to_builtins(one.layers), msgspec.to_builtins(other.layers))
    return differs


# what is said


def _document(answer: Answer) -> dict[str, Any]:
    question, told = answer.question, answer.told
    document: dict[str, Any] = {
        "namespace": question.directory,
        "is_namespace": told.is_namespace,
        "is_stored": answer.is_stored,
        "num_stored": answer.num_stored,
        "num_keys": len(question.keys),
        "policy": told.policy,
        "started_ns": told.started_ns,
        "whole_since_ns": told.whole_since_ns,
        "refusals_whole_since_ns": told.refusals_since_ns,
        "keys": [
            {"key": key.hex(), "state": _state(fact), **msgspec.structs.asdict(fact), "tier": fact.tier.name.lower(),
             "missing": fact.missing.hex()}
            for key, fact in zip(question.keys, told.facts, strict=True)
        ],
        "others": [{"namespace": other.namespace, "num_stored": other.num_stored, "differs": other.differs} for other in answer.others],
    }  # fmt: skip
    if question.is_prompt:
        document |= {"num_tokens": question.num_tokens, "tokens_per_chunk": question.tokens_per_chunk}
    return document


def _state(fact: Known) -> str:
    """In a word, for programs."""
    if fact.tier is not Tier.NONE:
        return "unreachable" if fact.missing else "stored"
    if fact.refusal and fact.refused_ns > fact.since_ns:
        return "refused"
    return {"": "unknown", "evict": "evicted", "rm": "removed", "expire": "expired", "bypass": "refused"}.get(
        fact.why, fact.why
    )


def _sentences(answer: Answer) -> list[str]:
    question, facts = answer.question, answer.told.facts
    if not question.is_prompt:
        lines = [f"{question.keys[0].hex()} {_sentence(facts[0], answer.told)}"]
    elif not facts:
        lines = [
            f"{format_count(question.num_tokens, 'token')} are less than a chunk, {question.tokens_per_chunk}: only full chunks "
            f"have keys of their own here"
        ]
    else:
        stored = answer.num_stored
        lines = [
            f"{stored:,} of {format_count(len(facts), 'chunk')} are stored in {question.directory}: the first "
            f"{stored * question.tokens_per_chunk:,} of {question.num_tokens:,} tokens"
            + (f" ({_tiers(facts[:stored])})" if stored else "")
        ]
        if stored < len(facts):
            lines.append(f"{question.keys[stored].hex()}, the next one, {_sentence(facts[stored], answer.told)}")
            behind = sum(fact.tier is not Tier.NONE for fact in facts[stored:])
            if behind:
                lines.append(
                    f"{format_count(behind, 'chunk')} behind it are stored, but no engine reaches them without it."
                )
    if not answer.told.is_namespace:
        lines.append(f"There is no namespace {question.directory} in this mount.")
    lines += map(_other, answer.others)
    return lines


def _tiers(facts: Sequence[Known]) -> str:
    counts = [
        (sum(fact.tier is tier for fact in facts), name) for tier, name in ((Tier.RAM, "RAM"), (Tier.NVME, "NVMe"))
    ]
    return ", ".join(f"{count:,} in {name}" for count, name in counts if count)


_DECLINED = "the engine found it cheaper to compute than to load"
_REFUSALS = {
    "pressure": "RAM was full of what is in use or not yet on NVMe",
    "quota": "its namespace had reached its quota",
    "too_large": "a tier is smaller than such a chunk",
    "declined": _DECLINED,
}
_CAUSES = {
    "": "",
    "policy": "by the policy {policy}, as the least worthy",
    BY_EARLIER_POLICY: "by the policy in force then, as the least worthy",
    "quota": "for the quota of its namespace",
    "unreachable": "because what it is built on had gone before it",
    "not_admitted": "from RAM, and admission had kept it from NVMe (see --admission and --write-budget)",
    "no_room": "before it was written: nothing on NVMe was worth less",
}


def _sentence(fact: Known, told: Explained) -> str:
    """What is known of one key, as the rest of a sentence that begins with it."""
    declined = ""
    if fact.refusal == "declined" and fact.refused_ns >= fact.since_ns:
        declined = f" {_DECLINED[0].upper()}{_DECLINED[1:]}, {_times(fact)}."
    if fact.tier is not Tier.NONE:
        where = "in RAM" if fact.tier is Tier.RAM else "on NVMe"
        said = f"is stored, {where}, since {_ago(fact.since_ns)}; loaded {format_count(fact.hits, 'time')}."
        if fact.missing:
            said += (
                f" No engine finds it: {fact.missing.hex()}, which it is built on, is not there (ask why of that one)."
            )
        return said + declined
    if fact.refusal not in ("", "declined") and fact.refused_ns > fact.since_ns:
        return f"was refused when an engine wanted to store it, {_times(fact)}: {_REFUSALS[fact.refusal]}."
    if fact.why == "evict":
        full = "the quota" if fact.cause == "quota" else "the room"
        return (
            f"was evicted {_ago(fact.since_ns)}, {_CAUSES[fact.cause].format(policy=told.policy)}: {full} was {fact.full} % full, "
            f"and it had not been used for {format_duration(fact.unused_s)} (loaded {format_count(fact.hits, 'time')})."
            + declined
        )
    if fact.why == "rm":
        return f"was removed by a person (rm, kvfs rm) {_ago(fact.since_ns)}."
    if fact.why == "expire":
        return f"reached the max_age of its namespace {_ago(fact.since_ns)}: it had not been used for {format_duration(fact.unused_s)}."
    if fact.why == "corrupt":
        return f"was dropped {_ago(fact.since_ns)}, because its bytes were proven bad; the log says how."
    if fact.why == "bypass":
        policy = "in force then" if fact.cause == BY_EARLIER_POLICY else told.policy
        return (
            f"was refused when an engine wanted to store it, {_ago(fact.since_ns)}: the policy {policy} would have let it go "
            f"first, or RAM was full of what is in use."
        )
    since = _ago(told.whole_since_ns)
    is_start = told.whole_since_ns == told.started_ns
    return (
        f"was not stored since {since}, "
        + (
            "when the daemon started; what went before that is not remembered."
            if is_start
            else "as far back as is remembered."
        )
        + declined
    )


def _other(other: Other) -> str:
    said = ", ".join(
        f"{name} {_short(there)} instead of {_short(here)}" for name, (here, there) in other.differs.items()
    )
    return f"{other.namespace} has the first {format_count(other.num_stored, 'chunk')} of it; it differs in: {said or 'nothing that is known'}."


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _times(fact: Known) -> str:
    return f"{_ago(fact.refused_ns)}" + (f" and {fact.times - 1:,} times before" if fact.times > 1 else "")


def _ago(time_ns: int) -> str:
    return f"{rfc3339(time_ns)} ({format_duration(max(0.0, time.time() - time_ns / _NS))} ago)"
