"""How much memory may be taken: /proc/meminfo and memory cgroups of both versions, read from a tree made here."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvfs import memory
from kvfs.errors import UsageError
from kvfs.opening import open_store
from kvfs.system import System
from kvfs.testing import settings_in

GIB = 1 << 30
NO_LIMIT_V1 = 9223372036854771712


def machine(root: Path, files: dict[str, str]) -> Path:
    """A machine with 16 GiB available, and what else is in `files`."""
    for name, text in {"proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(directory: str, limit: int | str, usage: int, cached: int = 0) -> dict[str, str]:
    """A memory cgroup of version 2; `cached` bytes of its usage can be reclaimed."""
    return {
        f"{directory}/memory.max": f"{limit}\n",
        f"{directory}/memory.current": f"{usage}\n",
        f"{directory}/memory.stat": f"anon 1\ninactive_file {cached // 2}\nactive_file {cached - cached // 2}\n",
    }


def group_v1(directory: str, limit: int, usage: int, cached: int = 0) -> dict[str, str]:
    return {
        f"{directory}/memory.limit_in_bytes": f"{limit}\n",
        f"{directory}/memory.usage_in_bytes": f"{usage}\n",
        f"{directory}/memory.stat": f"cache 1\ntotal_inactive_file {cached}\ntotal_active_file 0\n",
    }


def test_without_cgroups_it_is_what_the_kernel_has_left(tmp_path: Path) -> None:
    assert memory.available(machine(tmp_path, {})) == 16 * GIB


def test_nothing_is_known_of_a_machine_without_proc(tmp_path: Path) -> None:
    assert memory.available(tmp_path) is None


@pytest.mark.parametrize(
    ("inner", "outer", "left"),
    [
        (("max", GIB), ("max", GIB), 16 * GIB),
        ((4 * GIB, GIB), ("max", GIB), 3 * GIB),
        (("max", GIB), (4 * GIB, 3 * GIB), GIB),
        ((4 * GIB, GIB), (3 * GIB, 2 * GIB), GIB),
        ((GIB, 2 * GIB), ("max", GIB), 0),
    ],
)
def test_version_2_the_tightest_group_counts(
    tmp_path: Path, inner: tuple[int | str, int], outer: tuple[int | str, int], left: int
) -> None:
    """A limit holds for all that is below it, and what is used already is no longer free."""
    root = machine(
        tmp_path,
        {"proc/self/cgroup": "0::/pods/engine\n"}
        | group("sys/fs/cgroup/pods/engine", *inner)
        | group("sys/fs/cgroup/pods", *outer),
    )
    assert memory.available(root) == left


def test_version_1_is_read_too(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {"proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/pods/engine\n0::/\n"}
        | group_v1("sys/fs/cgroup/memory/pods/engine", 4 * GIB, 3 * GIB, cached=GIB)
        | group_v1("sys/fs/cgroup/memory", NO_LIMIT_V1, 20 * GIB),
    )
    assert memory.available(root) == 2 * GIB


def test_cached_files_do_not_count_as_used(tmp_path: Path) -> None:
    """The kernel drops them before it kills anybody."""
    files = {"proc/self/cgroup": "0::/a\n"} | group("sys/fs/cgroup/a", 4 * GIB, 4 * GIB, cached=3 * GIB)
    assert memory.available(machine(tmp_path, files)) == 3 * GIB


@pytest.mark.parametrize("path", ["/docker/0123", "/../other"])
def test_a_container_sees_its_own_group_at_the_top(tmp_path: Path, path: str) -> None:
    """Its path is that of the host, or leads out of its namespace; there is no such directory."""
    files = {"proc/self/cgroup": f"0::{path}\n"} | group("sys/fs/cgroup", 2 * GIB, GIB)
    assert memory.available(machine(tmp_path, files)) == GIB


def test_lines_that_say_nothing_limit_nothing(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "\nx\n0::/a\n", "sys/fs/cgroup/a/memory.max": "lots\n"}
    assert memory.available(machine(tmp_path, files)) == 16 * GIB


def test_an_arena_leaves_room_for_a_window_and_the_rest_of_the_machine() -> None:
    """A twentieth stays free, and one window is counted: without any, nothing could be stored."""
    assert memory.largest_arena(20 * GIB, GIB) == 18 * GIB
    assert memory.largest_arena(GIB, GIB) == 0


def test_this_machine_has_memory() -> None:
    available = System().available_memory()
    assert available is not None
    assert available > 1 << 20


class Machine(System):
    """A machine with 10 GiB left."""

    def available_memory(self) -> int | None:
        return 10 * GIB


@pytest.mark.parametrize(
    ("ram_bytes", "sentence"),
    [
        (
            100 * GIB,
            "ram is 100.0 GiB, but only 10.0 GiB of memory are free; beside one window and a reserve 9724MiB fit",
        ),
        (
            10 * GIB,
            "ram is 10.0 GiB, but only 10.0 GiB of memory are free; beside one window and a reserve 9724MiB fit",
        ),
    ],
)
async def test_more_ram_than_there_is_is_refused_at_once(tmp_path: Path, ram_bytes: int, sentence: str) -> None:
    """Nothing is allocated, and nothing made: the sentence says what would fit."""
    settings = msgspec.structs.replace(settings_in(tmp_path), ram_bytes=ram_bytes)
    with pytest.raises(UsageError) as refused:
        async with open_store(settings, Machine()):
            pass
    assert str(refused.value) == sentence
    assert not (tmp_path / "nvme").exists()
