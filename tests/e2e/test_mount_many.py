"""A directory of many names on a real mount: most of them come without attributes, and nobody can tell."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import Daemon, Engine

NUM_CHUNKS = 100


class ShortListingDaemon(Daemon):
    """See `short_listing_daemon`."""

    def command(self, *flags: str, ram: str = "16MiB", nvme: str | None = "16MiB") -> list[str]:
        python, _, _, *words = super().command(*flags, ram=ram, nvme=nvme)
        return [python, str(Path(__file__).with_name("short_listing_daemon.py")), *words]


@pytest.fixture
def many(daemon: Daemon, engines: Callable[[Path], Engine]) -> Engine:
    """An engine that has stored chunks of which none is built on another."""
    daemon.__class__ = ShortListingDaemon
    daemon.start()
    engine = engines(daemon.path)
    for number in range(NUM_CHUNKS):
        engine.store(chr(0x1000 + number))
    return engine


def output(*command: Any) -> list[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()


@pytest.mark.parametrize("view", ["chunks", "prefixes"])
def test_what_is_listed_is_what_stat_says(many: Engine, view: str) -> None:
    """Number and kind come with the name; all else when it is asked for."""
    directory = many.directory / view
    with os.scandir(directory) as entries:
        listed = {entry.name: (entry.inode(), entry.is_file(follow_symlinks=False)) for entry in entries}
    assert len(listed) == NUM_CHUNKS
    for name, (inode, is_file) in listed.items():
        found = os.lstat(directory / name)
        assert (found.st_ino, found.st_nlink, (directory / name).is_file()) == (inode, 2, is_file)


def test_tools_that_look_at_each(many: Engine) -> None:
    """`ls -f` beside those that look at each: twice, as what the kernel knows differs by then."""
    sizes = {path.name: path.stat().st_size for path in many.chunks.iterdir()}
    names = sorted(sizes)
    for _ in range(2):
        assert sorted(output("ls", "-f", many.chunks)) == names  # this mount lists neither itself nor what is above it
        lines = [line.split() for line in output("ls", "-lU", many.chunks)[1:]]
        assert {words[-1]: int(words[4]) for words in lines} == sizes
        assert int(output("du", "-s", "--block-size=1", many.chunks)[0].split()[0]) == sum(sizes.values())
        assert len(output("find", many.chunks, "-type", "f", "-size", "-1000000c")) == NUM_CHUNKS


def test_all_of_it_is_removed(many: Engine, daemon: Daemon) -> None:
    """By names of which the kernel was told nothing."""
    output("rm", "-rf", *many.prefixes.iterdir())
    assert os.listdir(many.chunks) == []
    assert os.listdir(many.prefixes) == []
    status = json.loads((daemon.path / ".kvfs/status.json").read_bytes())
    assert (status["num_chunks"], status["counters"]["mount_errors"]) == (0, 0)
