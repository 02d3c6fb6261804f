"""Settings: one TOML file and flags of the same names, checked once, frozen from then on.

    mountpoint = "/mnt/kvfs"
    ram = "4GiB"
    nvme = "/data/kvfs:64GiB"

`load` merges a file with flags (flags win) and answers any mistake with a `ConfigError` of one sentence. What the
settings do is described where they are used; this module knows names, units, defaults and ranges only, and touches
no path that is named in them.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from kvfs.admission import Rule
from kvfs.errors import ConfigError
from kvfs.messages import MAX_VOLUMES

LogLevel = Literal["debug", "info", "warning", "error"]
HugePages = Literal["auto", "never"]
Access = Literal["isolated", "trusted"]

UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_ALMOST_UNITS = ("K", "KB", "M", "MB", "G", "GB", "T", "TB")  # 10**9 or 2**30: who writes "GB" may mean either
_SIZES_ARE = "write a number and KiB, MiB, GiB or TiB, such as 64GiB"
_NO_SIZE = 1 << 100
MIN_TIER_BYTES = 1 << 20
MAX_TIER_BYTES = 1 << 50
MAX_IO_THREADS = 256
_MAX_FILE_BYTES = 64 << 10
_MAX_FILE_DOTS = (
    1000  # a key of 5,000 dotted parts, 10 KB, takes tomllib 97 MiB, and one of 50,000 a hundred times that
)
MAX_SOCKET_DIRECTORY_BYTES = 76  # sockaddr_un holds 107; the daemon adds a directory and a name, 30 together
POLICIES = ("learned", "lru", "arc", "s3fifo", "lfu", "lfu-ttl", "cost", "fifo")
"""What `kvfs.policies.named` has."""
DEFAULT_POLICY = "learned"
OPTIMUM = "opt"
"""What `kvfs simulate` calls the best that is possible."""
NEEDS_THE_FUTURE = f"{OPTIMUM} needs to know every request to come, so it is for `kvfs simulate` only, where it shows the best that is possible"
_CLASS = re.compile(r"^[A-Za-z_]\w{0,99}(\.[A-Za-z_]\w{0,99}){0,19}:[A-Za-z_]\w{0,99}$", re.ASCII)
_SIZE = re.compile(r"^\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*$", re.ASCII)


def parse_size(text: str | int) -> int:
    """Bytes in "64GiB", "1.5 TiB", "4096" or 4096; raises ConfigError for anything else.

    Units are powers of 1024 and written in full: nobody should have to guess what "64G" means.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        if text >= _NO_SIZE:
            raise ConfigError(f"a number of {len(str(text))} digits is not a size: {_SIZES_ARE}")
        return text
    match = _SIZE.match(text) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(f"{text!r} is not a size: {_SIZES_ARE}")
    number, word = match[1], match[2].upper()
    if word not in UNITS:
        meant = f"{word[:1]}iB"
        raise ConfigError(
            f"{text!r} is not a size: " + (f"write {number}{meant}" if word in _ALMOST_UNITS else _SIZES_ARE)
        )
    unit = UNITS[word]
    if "." not in number:
        return int(number) * unit
    return round(float(number) * unit)


def format_size(size_bytes: int) -> str:
    """A size for people: "64.0 GiB", "512 B"."""
    if abs(size_bytes) < 1 << 10:
        return f"{size_bytes} B"
    value = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        value /= 1024
        if abs(value) < 1023.95 or unit == "PiB":
            break
    return f"{value:.1f} {unit}"


def default_socket_directory() -> str:
    """Where session sockets lie: /run/kvfs for root, else the user's runtime directory."""
    if os.geteuid() == 0:
        return "/run/kvfs"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return f"{runtime}/kvfs" if runtime else f"{tempfile.gettempdir()}/kvfs-{os.geteuid()}"


class VolumeSetting(msgspec.Struct, frozen=True):
    """Where a volume lies, and how large it is."""

    directory: str
    size_bytes: int


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings in force.

    Attributes:
        mountpoint: absolute path of the directory that shows the cache.
        ram_bytes: size of the RAM tier ("ram").
        nvme: the volumes, each in a directory of its own; none for a RAM cache.
        socket_directory: plain directory outside the mount for session sockets.
        allow_other: whether users other than the daemon's may enter the mount (file modes still hold).
        access: "isolated" gives engines a read-only arena and a window each; "trusted" lets those of the daemon's own
            user write chunks in place, which saves a copy and trusts them not to write elsewhere.
        huge_pages: "auto" takes huge pages where the system has them, "never" takes 4 KiB pages.
        window_bytes: most memory that one session may use to hand over chunks ("window").
        io_threads: threads that write a volume, for each, and read it where the kernel has no queue of reads.
        admission: "always" writes every chunk to NVMe, "second-use" only what was used again.
        write_budget_bytes: most that is written to NVMe a day (UTC), None for no bound ("write_budget").
        policy: who goes first when a tier is full: a name of `kvfs.policies.named`, or a class as ``package.module:Class``.
        log_level, log_file: what is logged, and where if not to stderr.

    Raises ConfigError when built with values that are out of range or contradict each other.
    """

    mountpoint: str
    ram_bytes: int
    nvme: tuple[VolumeSetting, ...] = ()
    socket_directory: str = msgspec.field(default_factory=default_socket_directory)
    allow_other: bool = False
    access: Access = "isolated"
    huge_pages: HugePages = "auto"
    window_bytes: int = 64 << 20
    io_threads: int = 4
    admission: Rule = "always"
    write_budget_bytes: int | None = None
    policy: str = DEFAULT_POLICY
    log_level: LogLevel = "info"
    log_file: str | None = None

    def __post_init__(self) -> None:
        _check_path("mountpoint", self.mountpoint)
        _check_path("socket_directory", self.socket_directory)
        if len(os.fsencode(self.socket_directory)) > MAX_SOCKET_DIRECTORY_BYTES:
            raise _Mistake(
                "socket_directory",
                f" {self.socket_directory!r} is longer than {MAX_SOCKET_DIRECTORY_BYTES} bytes, "
                "which leaves no room for the names of sockets",
            )
        _check_range("ram", self.ram_bytes, MIN_TIER_BYTES, MAX_TIER_BYTES)
        for volume in self.nvme:
            _check_path("nvme", volume.directory)
            _check_range("nvme", volume.size_bytes, MIN_TIER_BYTES, MAX_TIER_BYTES)
            if _is_inside(volume.directory, self.mountpoint):
                raise ConfigError(f"the volume in {volume.directory} cannot lie inside the mount itself")
        if len(self.nvme) > MAX_VOLUMES:
            raise _Mistake("nvme", f" names {len(self.nvme)} volumes; there may be {MAX_VOLUMES}")
        directories = [volume.directory for volume in self.nvme]
        if twice := {each for each in directories if directories.count(each) > 1}:
            raise _Mistake("nvme", f" names {min(twice)} twice; each volume needs a directory of its own")
        if _is_inside(self.socket_directory, self.mountpoint):
            raise _Mistake("socket_directory", f" {self.socket_directory} cannot lie inside the mount itself")
        _check_range("window", self.window_bytes, 1 << 16, 1 << 40)
        if not 1 <= self.io_threads <= MAX_IO_THREADS:
            raise _Mistake("io_threads", f" is {self.io_threads}; it must lie between 1 and {MAX_IO_THREADS}")
        if self.policy == OPTIMUM:
            raise _Mistake("policy", f" cannot be that: {NEEDS_THE_FUTURE}")
        if self.policy not in POLICIES and not _CLASS.match(self.policy):
            raise _Mistake(
                "policy", f" is {self.policy!r}; it must be {_one_of(POLICIES)}, or a class as package.module:Class"
            )
        if self.write_budget_bytes is not None:
            _check_range("write_budget", self.write_budget_bytes, MIN_TIER_BYTES, MAX_TIER_BYTES)
        words = (("access", Access), ("huge_pages", HugePages), ("admission", Rule), ("log_level", LogLevel))
        for name, allowed in words:
            if getattr(self, name) not in get_args(allowed):
                raise _Mistake(name, f" is {getattr(self, name)!r}; it must be {_one_of(get_args(allowed))}")
        if self.log_file is not None:
            _check_path("log_file", self.log_file)
            if _is_inside(self.log_file, self.mountpoint):
                raise _Mistake("log_file", f" {self.log_file} cannot lie inside the mount itself")


class _Mistake(ConfigError):
    """A setting that is wrong: its name, which `load` replaces by what the user typed, and what is said of it."""

    def __init__(self, name: str, said: str) -> None:
        super().__init__(f"{name}{said}")
        self.name = name
        self.said = said


NAMES: dict[str, type[Any]] = {
    "mountpoint": str, "ram": int, "nvme": str, "socket_directory": str, "allow_other": bool, "access": str,
    "huge_pages": str, "window": int, "io_threads": int, "policy": str, "admission": str, "write_budget": int,
    "log_level": str, "log_file": str,
}  # fmt: skip
"""Every setting as it is called in the TOML file and on the command line, with its type; sizes are int."""

_PATHS = ("mountpoint", "socket_directory", "log_file")
_SIZES = {"ram": "ram_bytes", "window": "window_bytes", "write_budget": "write_budget_bytes"}
_KIND = {str: "a text in quotes", bool: "true or false", int: "a whole number"}


def load(path: str | os.PathLike[str] | None, overrides: dict[str, object]) -> Settings:
    """The settings in the TOML file at `path`, if one is named, with `overrides` over them.

    `overrides` bear the names of `NAMES`; None means not given. Relative paths count from the file's directory in a
    file and from the working directory in overrides. Raises ConfigError, in one sentence.
    """
    given = {name: value for name, value in overrides.items() if value is not None}

    def typed(mistake: _Mistake) -> ConfigError:
        """The mistake in the words of whoever made it: the flag, or the file and the name in it."""
        if mistake.name in given:
            return ConfigError(_flag(mistake.name) + mistake.said)
        return ConfigError(f"{os.fspath(path)}: {mistake}") if path is not None else mistake

    values: dict[str, object] = {}
    if path is not None:
        raw = _read_toml(path)
        try:
            values = _named(raw, Path(path).absolute().parent)
        except ConfigError as error:
            raise ConfigError(f"{os.fspath(path)}: {error}") from error
    try:
        values |= _named(given, Path.cwd())
        for name in ("mountpoint", "ram"):
            if _SIZES.get(name, name) not in values:
                raise ConfigError(
                    f"{name} is not set: a cache needs a mountpoint and a size for its RAM tier, such as --ram 4GiB"
                )
        return Settings(**values)  # type: ignore[arg-type]
    except _Mistake as mistake:
        raise typed(mistake) from mistake


def _flag(name: str) -> str:
    return name if name == "mountpoint" else f"--{name.replace('_', '-')}"


def to_toml(settings: Settings) -> str:
    """The settings as a TOML file that `load` reads back to the same settings. It holds no secrets."""
    lines = [f"mountpoint = {_quote(settings.mountpoint)}", f"ram = {_quote(exact_size(settings.ram_bytes))}"]
    volumes = [_quote(f"{each.directory}:{exact_size(each.size_bytes)}") for each in settings.nvme]
    if volumes:
        listed = ", ".join(volumes)
        lines.append(f"nvme = {listed if len(volumes) == 1 else f'[{listed}]'}")
    lines += [
        f"socket_directory = {_quote(settings.socket_directory)}",
        f"allow_other = {str(settings.allow_other).lower()}",
        f"access = {_quote(settings.access)}",
        f"huge_pages = {_quote(settings.huge_pages)}",
        f"window = {_quote(exact_size(settings.window_bytes))}",
        f"io_threads = {settings.io_threads}",
        f"policy = {_quote(settings.policy)}",
        f"admission = {_quote(settings.admission)}",
        f"log_level = {_quote(settings.log_level)}",
    ]
    if settings.write_budget_bytes is not None:
        lines.append(f"write_budget = {_quote(exact_size(settings.write_budget_bytes))}")
    if settings.log_file is not None:
        lines.append(f"log_file = {_quote(settings.log_file)}")
    return "\n".join(lines) + "\n"


def _read_toml(path: str | os.PathLike[str]) -> dict[str, object]:
    try:
        with open(path, "rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
        if len(raw) > _MAX_FILE_BYTES or raw.count(b".") > _MAX_FILE_DOTS:
            raise ConfigError(f"{os.fspath(path)} is too large or too nested for a file of settings")
        return tomllib.loads(raw.decode())
    except OSError as error:
        raise ConfigError(f"cannot read the settings in {os.fspath(path)}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{os.fspath(path)} is not a TOML file: {error}") from error


def _named(raw: dict[str, object], base: Path) -> dict[str, object]:
    """Fields of `Settings` from named settings; relative paths count from `base`."""
    fields: dict[str, object] = {}
    for name, value in raw.items():
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(NAMES)}"
            raise ConfigError(f"there is no setting {name!r}; {hint}")
        fields |= _field(name, value, base)
    return fields


def _field(name: str, value: Any, base: Path) -> dict[str, object]:
    if name in _SIZES:
        try:
            return {_SIZES[name]: parse_size(value)}
        except ConfigError as error:
            raise _Mistake(name, f": {error}") from error
    kind = NAMES[name]
    if name == "nvme" and isinstance(value, list):
        if not all(isinstance(each, str) for each in value):
            raise _Mistake(name, f" must be a list of texts in quotes, not {value!r}")
        return {name: tuple(_parse_nvme(each, base) for each in value)}
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _Mistake(name, f" must be {_KIND[kind]}, not {value!r}")
    if name == "nvme":
        return {name: (_parse_nvme(value, base),)}
    if name in _PATHS:
        return {name: _absolute(value, base)}
    return {name: value}


def _parse_nvme(text: str, base: Path) -> VolumeSetting:
    directory, colon, size = text.rpartition(":")
    if not colon or not directory:
        raise _Mistake("nvme", f" is {text!r}; write a directory, a colon and a size, such as /data/kvfs:64GiB")
    try:
        return VolumeSetting(_absolute(directory, base), parse_size(size))
    except ConfigError as error:
        raise _Mistake("nvme", f": {error}") from error


def _absolute(path: str, base: Path) -> str:
    """`path` made absolute without looking at the file system: a mount that hangs must not hang us."""
    return os.path.normpath(base / os.path.expanduser(path)) if path else ""


def _check_path(name: str, path: str) -> None:
    if not path.startswith("/"):
        raise _Mistake(name, f" must be an absolute path, not {path!r}")
    if "\0" in path or any("\ud800" <= letter <= "\udfff" for letter in path):
        raise _Mistake(name, f" is not a path in UTF-8: {path!r}")


def _check_range(name: str, size_bytes: int, least: int, most: int) -> None:
    if not least <= size_bytes <= most:
        raise _Mistake(
            name, f" is {format_size(size_bytes)}; it must lie between {format_size(least)} and {format_size(most)}"
        )


def _is_inside(path: str, directory: str) -> bool:
    return os.path.commonpath([path, directory]) == directory


def _one_of(words: tuple[str, ...]) -> str:
    return ", ".join(words[:-1]) + f" or {words[-1]}"


def exact_size(size_bytes: int) -> str:
    """A size as it is written in settings: in the largest unit that leaves no fraction."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes and size_bytes % UNITS[unit.upper()] == 0:
            return f"{size_bytes // UNITS[unit.upper()]}{unit}"
    return str(size_bytes)


def _quote(text: str) -> str:
    """A TOML basic string; JSON's escapes are a subset but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
