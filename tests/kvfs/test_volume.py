"""The volume: the superblock is what its table says, and an operator's mistakes end in one sentence, with nothing lost."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest
import xxhash

from kvfs.errors import FormatError, UsageError
from kvfs.system import System
from kvfs.testing import FaultySystem
from kvfs.volume import FILE_NAME, SUPERBLOCK_BYTES, Volume, aligned_buffer

CAPACITY = 1 << 20


def filled(size: int, byte: int) -> memoryview:
    buffer = aligned_buffer(size)
    buffer[:] = bytes([byte]) * size
    return buffer


def test_superblock_is_as_its_table_says(tmp_path: Path) -> None:
    """Offsets, sizes, byte order and checksum, worked out here from the table alone."""
    system = FaultySystem()
    system.now_ns = 1_700_000_000_000_000_001
    volume = Volume.open(tmp_path, CAPACITY, system)
    volume.close()
    block = (tmp_path / FILE_NAME).read_bytes()[:4096]
    assert block[:8] == b"KVFSVOL\0"
    assert struct.unpack_from("<II", block, 8) == (1, 0)
    assert block[16:32] == volume.identity
    assert len(set(volume.identity)) > 4
    assert struct.unpack_from("<QQ", block, 32) == (CAPACITY, 1_700_000_000_000_000_001)
    assert struct.unpack_from("<Q", block, 48)[0] == xxhash.xxh3_64_intdigest(block[:48])
    assert block[56:] == bytes(4040)
    assert (tmp_path / FILE_NAME).stat().st_size == CAPACITY


def test_it_is_private_and_preallocated(tmp_path: Path) -> None:
    """Nobody else may read prompts from the disk, and room that was promised is there."""
    Volume.open(tmp_path / "new", CAPACITY, System()).close()
    stat = (tmp_path / "new" / FILE_NAME).stat()
    assert stat.st_mode & 0o777 == 0o600
    assert stat.st_blocks * 512 >= CAPACITY
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_content_and_identity_survive(tmp_path: Path) -> None:
    volume = Volume.open(tmp_path, CAPACITY, System())
    volume.write([filled(8192, 7)], 4096)
    volume.sync()
    volume.close()
    again = Volume.open(tmp_path, CAPACITY, System())
    found = aligned_buffer(8192)
    again.read(found, 4096)
    assert bytes(found) == b"\7" * 8192
    assert again.identity == volume.identity
    assert again.is_direct == volume.is_direct
    again.close()


def test_growing_keeps_everything(tmp_path: Path) -> None:
    """A larger capacity extends the volume; its identity and content stay."""
    volume = Volume.open(tmp_path, CAPACITY, System())
    volume.write([filled(4096, 9)], CAPACITY - 4096)
    volume.close()
    grown = Volume.open(tmp_path, 2 * CAPACITY, System())
    found = aligned_buffer(4096)
    grown.read(found, CAPACITY - 4096)
    assert bytes(found) == b"\x09" * 4096
    assert (grown.capacity, grown.identity) == (2 * CAPACITY, volume.identity)
    grown.close()
    Volume.open(tmp_path, 2 * CAPACITY, System()).close()


def test_shrinking_is_refused(tmp_path: Path) -> None:
    Volume.open(tmp_path, 2 * CAPACITY, System()).close()
    with pytest.raises(UsageError) as refused:
        Volume.open(tmp_path, CAPACITY, System())
    assert str(refused.value) == (
        f"the volume in {tmp_path} has 2.0 MiB and cannot shrink to 1.0 MiB: give 2MiB or more, "
        f"or start anew: kvfs destroy {tmp_path}"
    )
    Volume.open(tmp_path, 2 * CAPACITY, System()).close()


def test_a_missing_parent_is_refused(tmp_path: Path) -> None:
    """A typo, or a disk that is not mounted, must not fill the disk that the path happens to lie on."""
    with pytest.raises(UsageError, match=f"{tmp_path}/disk does not exist.* is the disk mounted"):
        Volume.open(tmp_path / "disk" / "kvfs", CAPACITY, System())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["device", "file", "link to nowhere"])
def test_what_is_no_directory_is_refused(tmp_path: Path, kind: str) -> None:
    place = Path("/dev/null") if kind == "device" else tmp_path / "place"
    if kind == "file":
        place.touch()
    elif kind == "link to nowhere":
        place.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=f"cannot open the volume in {place}: it is not a directory"):
        Volume.open(place, CAPACITY, System())


@pytest.mark.parametrize(
    ("place", "said"), [("/proc", "no file can be made there"), ("/proc/kvfs", "no directory can be made there")]
)
def test_a_file_system_that_takes_nothing_is_refused(place: str, said: str) -> None:
    with pytest.raises(UsageError, match=f"cannot open the volume in {place}: {said}"):
        Volume.open(Path(place), CAPACITY, System())


class AlmostFull(System):
    """A disk with 512 KiB left, on which nothing may be allocated in vain."""

    def free_bytes(self, fd: int) -> int | None:
        return 512 << 10

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        raise AssertionError("the disk would have been filled for a moment")


def test_what_cannot_fit_is_refused_before_it_fills_the_disk(tmp_path: Path) -> None:
    """The sentence has sizes for people, the directory, and what is free."""
    sentence = f"there is no room for a volume of 1.0 MiB in {tmp_path}: 512.0 KiB are free"
    with pytest.raises(UsageError, match=f"^{sentence}$"):
        Volume.open(tmp_path, CAPACITY, AlmostFull())
    assert os.listdir(tmp_path) == []


def test_a_second_daemon_is_refused(tmp_path: Path) -> None:
    """The lock ends with the volume, not with a file that is left over."""
    volume = Volume.open(tmp_path, CAPACITY, System())
    with pytest.raises(UsageError, match="in use by another kvfs daemon"):
        Volume.open(tmp_path, CAPACITY, System())
    volume.close()
    Volume.open(tmp_path, CAPACITY, System()).close()


@pytest.mark.parametrize("content", [b"", b"x", b"SQLite format 3\0" * 1000, bytes(CAPACITY)])
def test_a_foreign_file_is_left_alone(tmp_path: Path, content: bytes) -> None:
    """What is not a volume is neither opened nor overwritten."""
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(UsageError, match="is not a kvfs volume"):
        Volume.open(tmp_path, CAPACITY, System())
    assert (tmp_path / FILE_NAME).read_bytes() == content


def damage(path: Path, offset: int, data: bytes) -> None:
    with open(path / FILE_NAME, "r+b") as file:
        file.seek(offset)
        file.write(data)


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    Volume.open(tmp_path, CAPACITY, System()).close()
    damage(tmp_path, 8, struct.pack("<I", 2))
    with pytest.raises(UsageError, match="volume format 2, this kvfs reads 1"):
        Volume.open(tmp_path, CAPACITY, System())


@pytest.mark.parametrize("offset", range(12, 56))
def test_a_damaged_superblock_is_refused(tmp_path: Path, offset: int) -> None:
    """Every byte behind the version is covered by the checksum."""
    Volume.open(tmp_path, CAPACITY, System()).close()
    raw = (tmp_path / FILE_NAME).read_bytes()[offset]
    damage(tmp_path, offset, bytes([raw ^ 1]))
    with pytest.raises(FormatError, match="checksum"):
        Volume.open(tmp_path, CAPACITY, System())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EFBIG])
def test_a_failed_creation_leaves_nothing(tmp_path: Path, number: int) -> None:
    """No room: one sentence, no file, no lock."""
    system = FaultySystem()
    system.allocate_error = number
    with pytest.raises(UsageError if number == errno.ENOSPC else OSError):
        Volume.open(tmp_path, CAPACITY, system)
    assert os.listdir(tmp_path) == []
    Volume.open(tmp_path, CAPACITY, System()).close()


@pytest.mark.parametrize("attribute", ["write_error", "sync_error"])
def test_a_superblock_that_cannot_be_written_leaves_nothing(tmp_path: Path, attribute: str) -> None:
    system = FaultySystem()
    setattr(system, attribute, errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        Volume.open(tmp_path, CAPACITY, system)
    assert os.listdir(tmp_path) == []


def test_a_failed_growth_changes_nothing(tmp_path: Path) -> None:
    """No room to grow: the volume stays as it was, and opens at its old size."""
    Volume.open(tmp_path, CAPACITY, System()).close()
    system = FaultySystem()
    system.allocate_error = errno.ENOSPC
    with pytest.raises(UsageError, match="no room"):
        Volume.open(tmp_path, 2 * CAPACITY, system)
    assert (tmp_path / FILE_NAME).stat().st_size == CAPACITY
    Volume.open(tmp_path, CAPACITY, System()).close()


@pytest.mark.parametrize("length", [0, 100])
def test_a_truncated_volume_is_noticed(tmp_path: Path, length: int) -> None:
    """What a volume lost reads as zeros, which fit no checksum: from the byte at which it ends, while it is open."""
    volume = Volume.open(tmp_path, CAPACITY, System())
    end = CAPACITY // 2
    volume.write([filled(16384, 5)], end)
    os.truncate(tmp_path / FILE_NAME, end + 4096 + length)
    found = filled(16384, 7)
    volume.read(found, end)
    assert bytes(found).rstrip(b"\0") == b"\5" * (4096 + length)
    found = filled(16384, 7)
    volume.read(found, CAPACITY - 16384)
    assert not any(found)
    volume.close()


@pytest.mark.expect_log("was cut from")
def test_a_truncated_volume_is_extended_again(tmp_path: Path) -> None:
    """At the next start it has its size again, so that writes into it cannot run out of room."""
    Volume.open(tmp_path, CAPACITY, System()).close()
    os.truncate(tmp_path / FILE_NAME, CAPACITY // 2 + 1)
    Volume.open(tmp_path, CAPACITY, System()).close()
    assert (tmp_path / FILE_NAME).stat().st_size == CAPACITY


def test_short_transfers_go_on(tmp_path: Path) -> None:
    """The kernel may read and write less than asked for; the rest follows."""
    system = FaultySystem()
    volume = Volume.open(tmp_path, CAPACITY, system)
    system.max_transfer = 4096
    volume.write([filled(16384, 5)], SUPERBLOCK_BYTES)
    found = aligned_buffer(16384)
    volume.read(found, SUPERBLOCK_BYTES)
    assert bytes(found) == b"\5" * 16384
    assert len(system.writes) == 1 + 4
    volume.close()


def test_clients_cannot_write(tmp_path: Path) -> None:
    """The descriptor that is handed out is read-only."""
    volume = Volume.open(tmp_path, CAPACITY, System())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(volume.client_fd, bytes(4096), 4096)
    volume.close()


def test_no_descriptor_is_lost(tmp_path: Path) -> None:
    """Whether opening succeeds or is refused, nothing stays open."""
    Volume.open(tmp_path, CAPACITY, System()).close()
    before = set(os.listdir("/proc/self/fd"))
    Volume.open(tmp_path, CAPACITY, System()).close()
    with pytest.raises(UsageError):
        Volume.open(tmp_path, CAPACITY // 2, System())
    damage(tmp_path, 20, b"xxxx")
    with pytest.raises(FormatError):
        Volume.open(tmp_path, CAPACITY, System())
    assert set(os.listdir("/proc/self/fd")) == before
