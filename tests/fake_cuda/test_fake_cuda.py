"""fake-cuda: our code and the real kvikio call CUDA's driver rightly. No GPU, no GDS, no speed is tested here."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.fakecuda
Run = Callable[..., str]


@pytest.mark.parametrize("name", ["ring", "ring_failures", "pinned", "pinned_arena", "no_device"])
def test_on_the_driver_alone(run_scenario: Run, name: str) -> None:
    assert "WARNING" not in run_scenario(name)


def test_what_to_install_is_said(run_scenario: Run) -> None:
    """This Python has no kvikio."""
    assert "pip install 'kvfs[gds]'" in run_scenario("no_kvikio")


@pytest.mark.parametrize("name", ["kvikio", "kvikio_handles", "slab", "fork", "fork_before"])
def test_with_the_real_kvikio(run_scenario: Run, kvikio_python: str, name: str) -> None:
    assert "WARNING" not in run_scenario(name, kvikio_python)


def test_kvikio_is_given_up_once(run_scenario: Run, kvikio_python: str) -> None:
    said = run_scenario("kvikio_fails", kvikio_python)
    assert said.count("WARNING files are read into GPU memory through pinned buffers from now on") == 1


@pytest.mark.parametrize("has_kvikio", [True, False])
def test_without_cuda(run_scenario: Run, kvikio_python: str, has_kvikio: bool) -> None:
    run_scenario("no_cuda", kvikio_python if has_kvikio else sys.executable, fake=False)
