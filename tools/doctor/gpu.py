"""What of the way to the GPU is there. Nothing of it is needed; a machine without a GPU is told so in one line each."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from kvfs.device.driver import Driver, open_driver
from kvfs.device.kvikio_files import INSTALL, import_kvikio
from kvfs.errors import UnavailableError
from kvfs.tools.doctor.finding import Finding

GDSCHECK = ("gdscheck", "gdscheck.py", "/usr/local/cuda/gds/tools/gdscheck", "/usr/local/cuda/gds/tools/gdscheck.py")
_GDSCHECK_DEADLINE_S = 30.0
_NO_GPU = "not without a GPU; host memory is read by direct I/O"


def findings(root: Path = Path("/")) -> Iterator[Finding]:
    """CUDA, whether it can register the arena, kvikio, GPUDirect Storage, and what loads from NVMe make of them."""
    driver = None
    try:
        driver = open_driver()
    except UnavailableError as error:
        advice = "on a machine with an NVIDIA GPU: its driver; in a container: --gpus all"
        yield Finding("CUDA", False, str(error), advice)
    else:
        names = ", ".join(driver.name_of(device) for device in range(driver.num_devices))
        yield Finding("CUDA", True, f"driver for {driver.version // 1000}.{driver.version % 1000 // 10}: {names}")
        yield _registration(driver)
    try:
        version = getattr(import_kvikio(), "__version__", "?")
    except UnavailableError as error:
        what = str(error).removesuffix(f": {INSTALL}")
        advice = INSTALL if driver else f"{INSTALL}; of no use without a GPU"
        yield Finding("kvikio", False, what, advice)
        yield Finding("GPUDirect Storage", False, "kvikio is missing" if driver else _NO_GPU, INSTALL if driver else "")
        yield from_nvme(driver is not None, has_kvikio=False, has_gds=False)
    else:
        yield Finding("kvikio", True, str(version))
        found = gds(root) if driver else Finding("GPUDirect Storage", False, _NO_GPU)
        yield found
        yield from_nvme(driver is not None, has_kvikio=True, has_gds=found.is_ok)


def from_nvme(has_gpu: bool, *, has_kvikio: bool, has_gds: bool) -> Finding:
    """How vLLM's workers on a GPU get chunks that are on NVMe only, unless `direct` in their settings says otherwise."""
    name = "NVMe to the GPU"
    if not has_gpu:
        return Finding(name, False, _NO_GPU)
    if not has_kvikio:
        what = "chunks on NVMe come through RAM; 'direct': true lets workers read them through pinned buffers"
        return Finding(name, False, what, INSTALL)
    way = "GPUDirect Storage" if has_gds else "kvikio's buffers in host memory"
    return Finding(name, True, f"workers read chunks from the volume past the RAM tier, by {way}")


def _registration(driver: Driver) -> Finding:
    """Whether engines copy to the GPU out of the arena itself."""
    read_only, writable = (driver.can_register(0, read_only=flag) for flag in (True, False))
    name = "arena for the GPU"
    if read_only:
        return Finding(name, True, "it can be registered with CUDA as engines have it, read-only")
    what = "memory that may only be read cannot be registered: one copy more, through pinned buffers"
    return Finding(name, False, what, "kvfs mount --access trusted lets engines register it" if writable else "")


def gds(root: Path) -> Finding:
    """Whether files get to the GPU without passing through host memory, by gdscheck's word where it is installed."""
    name = "GPUDirect Storage"
    if not os.path.isdir(root / "run/udev"):
        return Finding(
            name,
            False,
            "there is no /run/udev, without which kvikio does not try",
            "in a container: -v /run/udev:/run/udev:ro",
        )
    said = _ask_gdscheck()
    if said is not None:
        supported = [line for line in said if line.endswith(": Supported")]
        kinds = [line.split(":")[0].strip() for line in supported if line.startswith("NVMe")]
        if kinds:
            return Finding(name, True, f"gdscheck supports {', '.join(kinds)}")
        return Finding(
            name, False, "gdscheck -p supports no NVMe; kvikio copies through host memory", "see gdscheck -p"
        )
    if os.path.isdir(root / "proc/driver/nvidia-fs"):
        return Finding(name, True, "nvidia-fs is loaded; gdscheck, which would say more, is not installed")
    advice = (
        "load nvidia-fs, or on Linux 6.2 or later use P2PDMA (use_pci_p2pdma in cufile.json); gdscheck -p says more"
    )
    return Finding(
        name,
        False,
        "nvidia-fs is not loaded and gdscheck is not installed; kvikio may copy through host memory",
        advice,
    )


def _ask_gdscheck() -> list[str] | None:
    """The lines of `gdscheck -p`, spaces trimmed; None where it is not installed or says nothing."""
    program = next((found for found in map(shutil.which, GDSCHECK) if found), None)
    if program is None:
        return None
    try:
        result = subprocess.run(
            [program, "-p"], capture_output=True, text=True, errors="replace", check=False,
            timeout=_GDSCHECK_DEADLINE_S, cwd=os.path.expanduser("~"), stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return [" ".join(line.split()) for line in result.stdout.splitlines()] or None
