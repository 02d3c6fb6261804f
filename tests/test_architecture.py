"""The layers, the links that make packages of the top-level folders, and what an import costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
IMPORT_WITHOUT = """
import sys
{statement}
print(*sorted(name for name in sys.modules if "." not in name))
"""


def modules_after(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after `statement`."""
    script = IMPORT_WITHOUT.format(statement=statement)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd="/")
    return set(result.stdout.split())


def test_layers_hold() -> None:
    """The contracts in pyproject.toml: tools → mount | engine_adapters → kvfs, one place for each optional library."""
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", ["mount", "engine_adapters", "tools"])
def test_links_are_relative(name: str) -> None:
    link = ROOT / "kvfs" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert (link / "__init__.py").is_file()


@pytest.mark.parametrize(
    "package",
    ["kvfs", "kvfs.client", "kvfs.config", "kvfs.engine_adapters", "kvfs.device.reader", "kvfs.tools.commands"],
)
def test_imports_are_light(package: str) -> None:
    """The store, its client and the command line need no numeric library."""
    loaded = modules_after(f"import {package}")
    assert not loaded & {"torch", "numpy", "transformers", "kvikio", "cupy"}


def test_the_package_alone_imports_nothing() -> None:
    assert not modules_after("import kvfs") & {"trio", "msgspec", "pyfuse3", "xxhash", "safetensors", "typer"}


def test_the_client_needs_no_fuse() -> None:
    """An engine that only talks to a daemon does not load libfuse or an event loop into its process."""
    assert not modules_after("import kvfs.client") & {"pyfuse3", "trio", "typer", "rich"}


def test_the_version_is_public() -> None:
    import kvfs

    assert kvfs.__version__.count(".") == 2
