"""What libfuse says on stderr becomes the reason in a sentence."""

from __future__ import annotations

import os

import pytest

from kvfs.mount.libfuse_words import overheard, reason


def say_and_fail(heard: list[list[str]]) -> None:
    with overheard() as lines:
        heard.append(lines)
        os.write(2, b"first\n\n")
        os.system("echo 'fusermount3: mount failed: Operation not permitted' >&2")
        raise RuntimeError


def test_what_is_said_in_vain_is_kept_from_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    """It is in the sentence instead; a child's words are heard too, and afterwards stderr is what it was."""
    heard: list[list[str]] = []
    with pytest.raises(RuntimeError):
        say_and_fail(heard)
    assert heard == [["first", "fusermount3: mount failed: Operation not permitted"]]
    os.write(2, b"afterwards\n")
    assert capfd.readouterr().err == "afterwards\n"


def test_what_is_said_by_the_way_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    with overheard() as lines:
        os.write(2, b"by the way\n")
    assert lines == ["by the way"]
    assert capfd.readouterr().err == "by the way\n"


def test_a_reason_in_half_a_sentence() -> None:
    """The last line says it; where there is none, what to look at."""
    assert (
        reason(["x", "fusermount3: mount failed: Operation not permitted"]) == "mount failed: Operation not permitted"
    )
    assert (
        reason(["fuse: device not found, try 'modprobe fuse' first"]) == "device not found, try 'modprobe fuse' first"
    )
    assert "/dev/fuse" in reason([])
