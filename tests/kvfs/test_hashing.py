"""Checksums of many pieces, with and without the interpreter."""

from __future__ import annotations

import itertools
import platform
import sys
import threading
import time

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvfs import hashing

CUTS = st.lists(st.integers(0, 200_000), min_size=2, max_size=9).map(sorted)


@given(cuts=CUTS, shift=st.integers(0, 9), is_readonly=st.booleans())
def test_checksums_are_those_of_xxhash(cuts: list[int], shift: int, is_readonly: bool) -> None:
    """Whatever the pieces and where the memory begins, and whichever way is taken."""
    memory = memoryview(bytearray(range(256)) * 800)[shift:]
    cuts = [min(cut, len(memory)) for cut in cuts]
    view = memory.toreadonly() if is_readonly else memory
    expected = tuple(xxhash.xxh3_64_intdigest(memory[a:b]) for a, b in itertools.pairwise(cuts))
    assert hashing.checksums(view, cuts) == expected


@pytest.mark.parametrize("bounds", [(-65_536, 0, 65_536), (0, 65_536, 131_073)])
def test_pieces_outside_of_the_memory_are_refused(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="lie within"):
        hashing.checksums(memoryview(bytearray(131_072)), bounds)


def test_the_function_is_found_here() -> None:
    """The wheels of xxhash have it; if that ends, stores of small layers become slower, and we want to know."""
    assert hashing._function is not None
    if platform.machine() == "x86_64":  # the faster of two
        assert hashing._function.__name__ == "XXH3_64bits_dispatch"


def test_the_memory_is_held_no_longer_than_the_call() -> None:
    """A map that was hashed can be closed."""
    memory = bytearray(262_144)
    hashing.checksums(memoryview(memory), (0, 131_072, 262_144))
    memory.append(0)  # raises BufferError while anybody holds it


def test_others_run_meanwhile() -> None:
    """A thread goes on while another takes checksums of short pieces, though nobody makes it give way."""
    memory = memoryview(bytearray(64 << 20))
    bounds = range(0, len(memory) + 1, 64 << 10)
    interval = sys.getswitchinterval()
    is_over = threading.Event()
    steps = 0

    def count() -> None:
        nonlocal steps
        while not is_over.is_set():
            steps += 1
            time.sleep(0)

    sys.setswitchinterval(60.0)
    counter = threading.Thread(target=count)
    try:
        counter.start()
        before = after = steps
        for _ in range(1000):  # a busy machine may not let the other thread have its turn
            before = steps
            hashing.checksums(memory, bounds)
            after = steps
            if after > before:
                break
    finally:
        is_over.set()
        sys.setswitchinterval(interval)
        counter.join()
    assert after > before
