"""Questions to the daemon of a mount, by its session socket, that need no namespace."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvfs import messages as m
from kvfs.connection import Connection, find_socket
from kvfs.errors import UsageError
from kvfs.keys import Key, join
from kvfs.messages import Explained

_DEADLINE_S = 10.0


@contextlib.contextmanager
def connected(path: str) -> Iterator[Connection]:
    """A connection to the daemon of the mount at `path`. Raises UnavailableError, or UsageError for who may not."""
    try:
        socket_path = find_socket(Path(path), _DEADLINE_S)
        if os.path.exists(socket_path) and not os.access(socket_path, os.W_OK):
            raise UsageError(f"you may not ask the daemon of {path}: ask whoever mounted it")
        connection = Connection.look(socket_path, _DEADLINE_S)
    except PermissionError as error:
        raise UsageError(f"you may not look into {path}: ask whoever mounted it") from error
    try:
        yield connection
    finally:
        connection.close()


def why(connection: Connection, directory: str, keys: Sequence[Key]) -> Explained:
    """What the daemon knows of these keys in a namespace, as many questions as that takes."""
    answers: list[Explained] = []
    for begin in range(0, max(1, len(keys)), m.MAX_QUESTIONS):
        some = keys[begin : begin + m.MAX_QUESTIONS]
        question = m.Why(connection.next_id(), m.VERSION, directory, join(some))
        answers.append(connection.ask(question, m.Explained, _DEADLINE_S))
    facts = tuple(fact for answer in answers for fact in answer.facts)
    last = answers[-1]
    return Explained(
        last.id, facts, last.started_ns, last.whole_since_ns, last.refusals_since_ns, last.policy, last.is_namespace
    )


def listen(connection: Connection) -> m.Overheard:
    """What engines asked for since the last time."""
    return connection.ask(m.Listen(connection.next_id(), m.VERSION), m.Overheard, _DEADLINE_S)
