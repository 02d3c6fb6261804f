"""What is built from here can be installed and imported: the wheel, by way of the sdist."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str | Path, cwd: Path | None = None) -> str:
    result = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist of the working copy, and the wheel that was built from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    source = tmp_path_factory.mktemp("source")
    run("cp", "-a", "--", *_tracked_tops(), source)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source)
    return folder


def _tracked_tops() -> list[Path]:
    """What a build reads; caches, environments and other people's files stay out of it."""
    names = ["pyproject.toml", "README.md", "LICENSE", "kvfs", "mount", "engine_adapters", "tools"]
    return [ROOT / name for name in names]


def test_the_sdist_holds_the_sources_once(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = archive.getnames()
    assert any(name.endswith("kvfs/mount/__init__.py") for name in names)
    assert len(names) == len(set(names))


def test_the_wheel_holds_one_top_level_package(built: Path) -> None:
    """Other distributions own the names `mount` and `tools`."""
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvfs"}


def test_the_wheel_installs_and_imports(built: Path, tmp_path: Path) -> None:
    """In an environment of its own; only the dependencies come from the one the tests run in."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    wheel = next(built.glob("*.whl"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    run(*pip, "install", "--no-deps", "--no-index", "--quiet", wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    script = "import kvfs, kvfs.mount, kvfs.engine_adapters, kvfs.tools, kvfs.tools.cli; print(kvfs.__file__)"
    assert Path(run(python, "-c", script, cwd=tmp_path).strip()).is_relative_to(site)
    version = run(tmp_path / "venv" / "bin" / "kvfs", "--version", cwd=tmp_path)
    assert version.startswith("kvfs ")
    assert (site / "kvfs" / "py.typed").is_file()
