"""Settings: sizes, one file and flags of the same names, mistakes answered in one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs import config
from kvfs.config import Settings, VolumeSetting, format_size, load, parse_size, to_toml
from kvfs.errors import ConfigError

GIB = 1 << 30


def settings(**changes: object) -> Settings:
    return Settings(**({"mountpoint": "/mnt/kvfs", "ram_bytes": 4 * GIB} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("64GiB", 64 * GIB), ("64 gib", 64 * GIB), ("1.5TiB", 1536 * GIB), ("4096", 4096), (4096, 4096), ("0", 0),
        ("7KiB", 7168), ("3MiB", 3 << 20), ("12B", 12), (" 1GiB ", GIB),
    ],
)  # fmt: skip
def test_sizes_are_read(text: str | int, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "64G", "64GB", "-1GiB", "1e9", "1,5GiB", "64 GiB x", -1, True, 1.5, None])
def test_what_is_no_size_is_refused(text: object) -> None:
    """Among them "64GB" and "64G": whether they mean 10**9 or 2**30 is anybody's guess."""
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (64 * GIB, "64.0 GiB"), (GIB - 1, "1.0 GiB"),
        (1536, "1.5 KiB"), (5 << 60, "5120.0 PiB"),
    ],
)  # fmt: skip
def test_sizes_are_written_for_people(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


def test_flags_alone_are_enough() -> None:
    found = load(None, {"mountpoint": "/mnt/kvfs", "ram": "4GiB", "nvme": "/data/kvfs:64GiB", "window": None})
    assert found == settings(nvme=(VolumeSetting("/data/kvfs", 64 * GIB),))
    assert (found.huge_pages, found.io_threads, found.window_bytes, found.log_file) == ("auto", 4, 64 << 20, None)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvfs.toml"
    file.write_text('mountpoint = "/mnt/a"\nram = "1GiB"\nio_threads = 8\nallow_other = true\n')
    found = load(file, {"ram": "2GiB", "mountpoint": None})
    assert found == settings(mountpoint="/mnt/a", ram_bytes=2 * GIB, io_threads=8, allow_other=True)


def test_relative_paths_count_from_the_file_or_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etc").mkdir()
    file = tmp_path / "etc" / "kvfs.toml"
    file.write_text('mountpoint = "../mnt"\nram = "1GiB"\nnvme = "data:1GiB"\n')
    monkeypatch.chdir(tmp_path)
    found = load("etc/kvfs.toml", {"log_file": "kvfs.log"})
    assert found.mountpoint == str(tmp_path / "mnt")
    assert found.nvme == (VolumeSetting(str(tmp_path / "etc" / "data"), GIB),)
    assert found.log_file == str(tmp_path / "kvfs.log")


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert load(None, {"mountpoint": "~/kv", "ram": "1GiB"}).mountpoint == "/home/ada/kv"


def test_a_colon_in_the_directory_is_kept() -> None:
    assert load(None, {"mountpoint": "/m", "ram": "1GiB", "nvme": "/a:b:2GiB"}).nvme[0].directory == "/a:b"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rma": "1GiB"}, r"there is no setting 'rma'; did you mean 'ram'\?"),
        ({"alow_other": True}, r"did you mean 'allow_other'\?"),
        ({"zzz": 1}, "there is no setting 'zzz'; known are mountpoint, ram, nvme"),
        ({"ram_bytes": 1}, r"did you mean 'ram'\?"),
        ({"ram": None}, "ram is not set"),
        ({"mountpoint": None}, "mountpoint is not set"),
        ({"mountpoint": ""}, "mountpoint must be an absolute path"),
        ({"mountpoint": "/a\0b"}, "mountpoint is not a path in UTF-8"),
        ({"mountpoint": "/a\udcff"}, "mountpoint is not a path in UTF-8"),
        ({"mountpoint": 3}, "mountpoint must be a text in quotes, not 3"),
        ({"ram": "4GB"}, "^--ram: '4GB' is not a size: write 4GiB$"),
        ({"ram": "1KiB"}, r"^--ram is 1\.0 KiB; it must lie between 1\.0 MiB and 1\.0 PiB"),
        ({"ram": "2T"}, "^--ram: '2T' is not a size: write 2TiB$"),
        ({"ram": "lots"}, "^--ram: 'lots' is not a size: write a number and KiB, MiB, GiB or TiB, such as 64GiB$"),
        ({"nvme": "/data/kvfs"}, "^--nvme is '/data/kvfs'; write a directory, a colon and a size"),
        ({"nvme": ":64GiB"}, "write a directory, a colon and a size"),
        ({"nvme": "/data:lots"}, "nvme: 'lots' is not a size"),
        ({"nvme": "/data:0"}, "nvme is 0 B; it must lie between"),
        ({"nvme": "/mnt/kvfs/data:1GiB"}, "cannot lie inside the mount itself"),
        ({"socket_directory": "/mnt/kvfs/run"}, "cannot lie inside the mount itself"),
        ({"socket_directory": "/" + "s" * 76}, "is longer than 76 bytes"),
        ({"log_file": "/mnt/kvfs/log"}, "cannot lie inside the mount itself"),
        ({"huge_pages": "always"}, "^--huge-pages is 'always'; it must be auto or never"),
        ({"log_level": "loud"}, "^--log-level is 'loud'; it must be debug, info, warning or error"),
        ({"io_threads": 0}, "^--io-threads is 0; it must lie between 1 and 256"),
        ({"io_threads": True}, "^--io-threads must be a whole number, not True"),
        ({"allow_other": "yes"}, "^--allow-other must be true or false, not 'yes'"),
        ({"window": "1KiB"}, r"window is 1\.0 KiB; it must lie between"),
    ],
)
def test_mistakes_are_told_in_one_sentence(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(None, {"mountpoint": "/mnt/kvfs", "ram": "4GiB"} | overrides)
    assert "\n" not in str(caught.value)


def test_mistakes_in_a_file_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvfs.toml"
    file.write_text('ram = "lots"')
    with pytest.raises(ConfigError, match=r"kvfs\.toml: ram: 'lots' is not a size"):
        load(file, {})
    file.write_text("ram = ")
    with pytest.raises(ConfigError, match=r"kvfs\.toml is not a TOML file"):
        load(file, {})
    file.write_bytes(b'ram = "\xff"')
    with pytest.raises(ConfigError, match=r"kvfs\.toml is not a TOML file"):
        load(file, {})
    with pytest.raises(ConfigError, match=r"cannot read the settings in .*missing\.toml: No such file"):
        load(tmp_path / "missing.toml", {})


def test_mistakes_are_told_in_the_words_of_whoever_made_them(tmp_path: Path) -> None:
    """A range is checked last of all; still, who wrote a file is shown the file, who typed a flag the flag."""
    file = tmp_path / "kvfs.toml"
    file.write_text('mountpoint = "/mnt/kvfs"\nram = "1KiB"\nio_threads = 0\n')
    with pytest.raises(ConfigError, match=r"kvfs\.toml: ram is 1\.0 KiB; it must lie between"):
        load(file, {})
    with pytest.raises(ConfigError, match=r"kvfs\.toml: io_threads is 0"):
        load(file, {"ram": "1GiB"})
    with pytest.raises(ConfigError, match=r"^--io-threads is 999"):
        load(file, {"ram": "1GiB", "io_threads": 999})


def test_names_have_one_spelling(tmp_path: Path) -> None:
    """In a file it has underscores; the flag's dashes are answered with the name that was meant."""
    file = tmp_path / "kvfs.toml"
    file.write_text('log-file = "/var/log/kvfs.log"\n')
    with pytest.raises(ConfigError, match=r"kvfs\.toml: there is no setting 'log-file'; did you mean 'log_file'\?"):
        load(file, {})


def test_several_volumes_are_a_list_in_the_file_and_a_flag_each(tmp_path: Path) -> None:
    both = (VolumeSetting(str(tmp_path / "a"), GIB), VolumeSetting("/b", 2 * GIB))
    file = tmp_path / "kvfs.toml"
    file.write_text('mountpoint = "/m"\nram = "1GiB"\nnvme = ["a:1GiB", "/b:2GiB"]\n')
    assert load(file, {}).nvme == both
    assert load(None, {"mountpoint": "/m", "ram": "1GiB", "nvme": [f"{tmp_path}/a:1GiB", "/b:2GiB"]}).nvme == both
    assert load(file, {"nvme": ["/c:1GiB"]}).nvme == (VolumeSetting("/c", GIB),)


@pytest.mark.parametrize(
    ("volumes", "message"),
    [
        (["/a:1GiB", "/b"], "--nvme is '/b'; write a directory, a colon and a size"),
        (["/a:1GiB", 7], "--nvme must be a list of texts in quotes"),
        (["/a:1GiB", "/a/:2GiB"], "--nvme names /a twice; each volume needs a directory of its own"),
        ([f"/{number}:1GiB" for number in range(17)], "--nvme names 17 volumes; there may be 16"),
    ],
)
def test_volumes_that_cannot_be(volumes: list[object], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(None, {"mountpoint": "/m", "ram": "1GiB", "nvme": volumes})
    assert str(refused.value).startswith(message)


def test_root_and_users_have_their_own_socket_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert config.default_socket_directory() == "/run/kvfs"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert settings().socket_directory == "/run/user/1000/kvfs"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert settings().socket_directory.endswith("/kvfs-1000")


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), min_size=1, max_size=40)
sizes = st.integers(config.MIN_TIER_BYTES, config.MAX_TIER_BYTES)


@given(
    names,
    sizes,
    st.lists(st.tuples(names, sizes), max_size=3, unique_by=lambda each: each[0]),
    st.booleans(),
    st.none() | names,
)
def test_settings_survive_the_file(
    mount: str, ram_bytes: int, nvme: list[tuple[str, int]], allow_other: bool, log: str | None
) -> None:
    """`to_toml` writes what `load` reads back, whatever letters a path is made of."""
    written = settings(
        mountpoint=os.path.normpath(f"/mnt/{mount}"),
        ram_bytes=ram_bytes,
        nvme=tuple(
            VolumeSetting(os.path.normpath(f"/data/{number}/{name}"), size) for number, (name, size) in enumerate(nvme)
        ),
        allow_other=allow_other,
        log_file=None if log is None else os.path.normpath(f"/log/{log}"),
    )
    raw = config.tomllib.loads(to_toml(written))
    assert load(None, dict(raw)) == written
