"""Where a Python with other software is looked for, and what is said where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvfs.errors import UsageError
from kvfs.tools.environments import chosen_python, find_python, last_line


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two environments, of which one is not whole."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KVFS_X_PYTHON", raising=False)
    environments = tmp_path / "kvfs" / "envs"
    for name in ("x-1-py311", "x-1-py312", "y-1-py311"):
        (environments / name).mkdir(parents=True)
    (environments / "x-1-py312" / ".kvfs").touch()
    (environments / "y-1-py311" / ".kvfs").touch()
    return environments


def find(known: set[str], *others: str | None) -> str | None:
    return find_python("KVFS_X_PYTHON", "x-1-*", known.__contains__, others)


def test_the_order(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed before what was set up; of that only what is whole; the named one alone where one is named."""
    whole = str(place / "x-1-py312/bin/python")
    assert find({whole, str(place / "x-1-py311/bin/python"), str(place / "y-1-py311/bin/python")}) == whole
    assert find({whole, "/b"}, "/a", None, "/b") == "/b"
    assert find(set(), "/a") is None
    monkeypatch.setenv("KVFS_X_PYTHON", "/named")
    assert find({whole, "/b"}, "/b") is None
    assert find({whole, "/named"}) == "/named"


def test_what_a_python_says() -> None:
    assert last_line(sys.executable, "print(1); print(2)") == "2"
    assert last_line(sys.executable, "print(1); raise SystemExit(1)") == ""
    assert last_line("/nowhere/python", "print(1)") == ""


def test_the_choice(tmp_path: Path) -> None:
    """One that is named is taken or refused, else one that is found, or it is said how to get one."""
    good = str(tmp_path / "python")

    def chosen(named: Path | None, found: str | None) -> str:
        return chosen_python(named, lambda: found, lambda path: path == good, "X 1 with y", "bench-x")

    assert chosen(Path(good), None) == good
    assert chosen(None, "/found") == "/found"
    with pytest.raises(UsageError, match=r"^--python: /other has no X 1 with y$"):
        chosen(Path("/other"), good)
    with pytest.raises(UsageError, match=r"^there is no X 1 here: `make bench-x` sets one up"):
        chosen(None, None)
