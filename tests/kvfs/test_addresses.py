"""Where memory lies, read-only or not."""

from __future__ import annotations

import ctypes

import pytest

from kvfs.addresses import address_of


@pytest.mark.parametrize("begin", [0, 3, 4096])
def test_the_bytes_are_found_there(begin: int) -> None:
    """What lies at the address is what the memory holds, also in the middle of something that is read-only."""
    raw = bytes(range(256)) * 32
    for memory in (memoryview(raw), memoryview(bytearray(raw)), memoryview(bytearray(raw)).toreadonly()):
        view = memory[begin:]
        assert ctypes.string_at(address_of(view), len(view)) == raw[begin:]


def test_bytes_that_do_not_lie_together_have_no_address() -> None:
    with pytest.raises(BufferError):
        address_of(memoryview(bytearray(64))[::2])


def test_the_memory_is_not_held() -> None:
    """It can be resized afterwards."""
    memory = bytearray(64)
    with memoryview(memory) as view:
        address_of(view)
    memory.append(0)  # raises BufferError while anybody holds it
