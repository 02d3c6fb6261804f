"""Threads that help with one piece after the other."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from kvfs.helping import for_each

DEADLINE_S = 60.0


@pytest.mark.parametrize("num_helpers", [0, 1, 3])
def test_each_piece_is_worked_on_once(num_helpers: int) -> None:
    done: list[int] = []
    for _ in range(50):
        for_each(iter(range(100)), done.append, num_helpers)
    assert sorted(done) == sorted([*range(100)] * 50)


def test_helpers_work_beside_the_one_that_asked() -> None:
    """Three pieces, each of which waits for the two others to be begun."""
    meeting = threading.Barrier(3)
    threads: set[int] = set()

    def meet(_: int) -> None:
        meeting.wait(DEADLINE_S)
        threads.add(threading.get_ident())

    for_each(iter(range(3)), meet, 2)
    assert len(threads) == 3
    assert threading.get_ident() in threads


def test_pieces_are_taken_by_one_at_a_time() -> None:
    taking = threading.Lock()

    def pieces() -> Iterator[int]:
        for piece in range(2000):
            assert taking.acquire(blocking=False)
            taking.release()
            yield piece

    for_each(pieces(), lambda _: None, 3)


@pytest.mark.parametrize("who", ["helper", "asker"])
def test_what_the_work_raises_is_raised(who: str) -> None:
    """By whichever thread, when both have begun; of pieces without end none is begun after it."""
    meeting = threading.Barrier(2)
    asker = threading.get_ident()

    def work(piece: int) -> None:
        if piece < 2:
            meeting.wait(DEADLINE_S)
            if (threading.get_ident() == asker) == (who == "asker"):
                raise KeyError(piece)

    with pytest.raises(KeyError):
        for_each(itertools.count(), work, 1)


def test_nothing_is_begun_after_a_failure_while_the_next_piece_is_fetched() -> None:
    """The helper waits for a piece when the asker fails: that piece, and all behind it, are left."""
    is_fetching, may_go = threading.Event(), threading.Event()
    begun: list[int] = []

    def pieces() -> Iterator[int]:
        yield 0
        is_fetching.set()
        assert may_go.wait(DEADLINE_S)
        yield from range(1, 20)

    def work(piece: int) -> None:
        begun.append(piece)
        if piece == 0:
            assert is_fetching.wait(DEADLINE_S)
            threading.Timer(0.1, may_go.set).start()
            raise KeyError(piece)

    with pytest.raises(KeyError):
        for_each(pieces(), work, 1)
    assert begun == [0]


def test_what_the_pieces_raise_is_raised() -> None:
    def pieces() -> Iterator[int]:
        yield 1
        raise LookupError("no more")

    for num_helpers in (0, 1):
        with pytest.raises(LookupError, match="no more"):
            for_each(pieces(), lambda _: None, num_helpers)


def test_nobody_waits_for_a_helper_that_has_something_else_to_do() -> None:
    """The only helper is kept busy; work with a helper is done all the same, by the one that asks."""
    program = f"""
import threading
from kvfs.helping import for_each
is_kept, may_go = threading.Event(), threading.Event()
first = threading.Thread(target=for_each, args=(iter(range(2)), lambda _: (is_kept.set(), may_go.wait({DEADLINE_S})), 1))
first.start()
is_kept.wait({DEADLINE_S})
done = []
for_each(iter(range(100)), done.append, 1)
may_go.set()
first.join()
assert done == [*range(100)]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=DEADLINE_S)


def test_a_child_that_is_forked_by_a_piece_of_work_waits_for_nobody() -> None:
    """The helper that is at work in the parent is not in the child."""
    program = f"""
import os, threading
from kvfs.helping import for_each
both, forked = threading.Barrier(2), threading.Event()
asker, child = threading.get_ident(), None
def work(piece):
    global child
    if piece > 1:
        return
    both.wait({DEADLINE_S})
    if threading.get_ident() == asker:
        child = os.fork()
        forked.set()
    else:
        forked.wait({DEADLINE_S})
for_each(iter(range(9)), work, 1)
if not child:
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=2 * DEADLINE_S)


def test_a_forked_child_has_helpers_of_its_own() -> None:
    """Its parent's threads are not there: two pieces that wait for each other are done all the same."""
    program = f"""
import os, threading
from kvfs.helping import for_each
def meet():
    meeting = threading.Barrier(2)
    for_each(iter(range(2)), lambda _: meeting.wait({DEADLINE_S}), 1)
meet()
child = os.fork()
if not child:
    meet()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=2 * DEADLINE_S)
