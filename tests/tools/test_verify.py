"""`kvfs verify` on real mounts: good chunks, flipped bytes, and chunks that go while it looks."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from kvfs.chunk import Facts, build_header, file_name, geometry
from kvfs.errors import CorruptChunk
from kvfs.keys import KeyChain, key_of, root
from kvfs.testing import DEADLINE_S, wait_until
from kvfs.testing.processes import open_files
from kvfs.tools import verify
from kvfs.tools.progress import Track

from .conftest import KVFS, NAMESPACE, Mount, kvfs, store

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse")


def chunk_file() -> tuple[str, bytearray]:
    """The name and the content of a chunk's file."""
    chain = KeyChain(root(NAMESPACE.identity.fingerprint()), 16, list(range(16)))
    geo = geometry(NAMESPACE, 16)
    payload = os.urandom(geo.payload_bytes)
    ranges = [geo.layer_range(layer) for layer in range(NAMESPACE.num_layers)]
    checksums = tuple(
        xxh3_64_intdigest(payload[begin - geo.header_bytes : end - geo.header_bytes]) for begin, end in ranges
    )
    [value] = chain.chains
    facts = Facts(value, key_of(chain.parent_of(0)), 0, 16, 1, checksums)
    return file_name(facts.key), bytearray(build_header(geo, facts) + payload + bytes(geo.pad_bytes))


def test_a_whole_file_is_good() -> None:
    name, raw = chunk_file()
    verify._check(NAMESPACE, name, memoryview(raw))


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("length", "not a chunk header|not the one its facts call for"),
        ("header", "not the one its facts call for"),
        ("layer 0", "layer 0 does not have its checksum"),
        ("layer 1", "layer 1 does not have its checksum"),
        ("padding", "the padding is not zero"),
    ],
)
def test_a_flipped_bit_is_found(part: str, reason: str) -> None:
    name, raw = chunk_file()
    geo = geometry(NAMESPACE, 16)
    places = {
        "length": 0,
        "header": geo.header_bytes - 1,
        "layer 0": geo.header_bytes,
        "layer 1": geo.layer_range(1)[1] - 1,
        "padding": geo.file_bytes - 1,
    }
    raw[places[part]] ^= 1
    with pytest.raises(CorruptChunk, match=reason):
        verify._check(NAMESPACE, name, memoryview(raw))


def test_names_and_lengths_are_checked() -> None:
    name, raw = chunk_file()
    with pytest.raises(CorruptChunk, match="the header is that of the chunk"):
        verify._check(NAMESPACE, "0" * 32 + ".safetensors", memoryview(raw))
    for wrong in (raw[:-1], raw + b"\0"):
        with pytest.raises(CorruptChunk, match=f"the file has {len(wrong)} bytes instead of {len(raw)}"):
            verify._check(NAMESPACE, name, memoryview(wrong))
    with pytest.raises(CorruptChunk):
        verify._check(NAMESPACE, name, memoryview(raw[:100]))


def uses(mount: Mount) -> list[tuple[str, int, int]]:
    chunks = mount.json("ls", "tiny", "--chunks")
    return [(chunk["name"], chunk["hits"], chunk["last_used_ns"]) for chunk in chunks]


def test_good_chunks_and_a_flipped_byte(mount: Mount) -> None:
    """From RAM and from NVMe; looking is no use. What is flipped while nobody looks is told of, once, and dropped."""
    mount.start()
    assert kvfs("verify", mount.path).stdout == "kvfs: checked 0 chunks, 0 B: all good\n"
    keys = store(mount.path, list(range(48)))
    before = uses(mount)
    result = kvfs("verify", mount.path, "tiny")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "kvfs: checked 3 chunks, 24.0 KiB: all good\n"
    assert uses(mount) == before
    assert kvfs("umount", mount.path).returncode == 0

    volume = Path(str(mount.path.parent), "volume", "volume")
    raw = volume.read_bytes()
    begin = raw.index(f'"key":"{keys[1]}"'.encode()) // 4096 * 4096
    with volume.open("r+b") as file:
        file.seek(begin + geometry(NAMESPACE, 16).layer_range(1)[0])
        file.write(b"\1")

    mount.start()
    before = uses(mount)
    result = kvfs("verify", mount.path)
    assert (result.returncode, result.stderr) == (1, "")
    [line, summary] = result.stdout.splitlines()
    path = f"{NAMESPACE.directory}/chunks/{keys[1]}.safetensors"
    assert line == f"{path}  it cannot be read: Input/output error; the daemon dropped it, see its log"
    assert summary == "kvfs: checked 3 chunks, 24.0 KiB: 1 bad"
    assert uses(mount) == [use for use in before if use[0] != keys[1]]
    assert mount.json("verify") == {"chunks": 2, "bytes": 16384, "gone": 0, "bad": [], "interrupted": False}
    assert mount.json("status")["counters"]["corrupt"] == 1
    assert kvfs("umount", mount.path).returncode == 0


def test_what_goes_meanwhile_is_counted_apart(mount: Mount) -> None:
    mount.start()
    keys = store(mount.path, list(range(48)))
    path = str(mount.path)
    chunks = verify._list(path, None, lambda: None)
    (mount.path / NAMESPACE.directory / "chunks" / f"{keys[1]}.safetensors").unlink()
    found = verify.Findings()
    verify._verify(path, chunks, found, Track(lambda: None, threading.Event(), lambda _: None))
    assert found == verify.Findings(chunks=2, bytes=16384, gone=1)
    assert kvfs("umount", mount.path).returncode == 0


def test_what_an_interrupt_leaves_half_read_is_not_counted(mount: Mount) -> None:
    """Nor is it called bad."""
    mount.start()
    store(mount.path, list(range(48)))
    path = str(mount.path)
    found, stopping, steps = verify.Findings(), threading.Event(), []

    def advance(num_bytes: int) -> None:
        steps.append(num_bytes)
        if len(steps) == 2:
            stopping.set()

    verify._verify(path, verify._list(path, None, lambda: None), found, Track(lambda: None, stopping, advance))
    assert (found, len(steps)) == (verify.Findings(chunks=1, bytes=8192), 2)
    assert kvfs("umount", mount.path).returncode == 0


def test_an_interrupt_says_how_far_it_came(mount: Mount) -> None:
    """What it had done until then is said; the exit code is that of Ctrl-C."""
    mount.start()
    store(mount.path, list(range(16 * 1000)))
    command = [KVFS, "verify", str(mount.path), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:

        def is_reading() -> bool:
            assert process.poll() is None, "it has ended"
            return any(target.endswith(".safetensors") for _, target in open_files(process.pid))

        wait_until(is_reading, "it reads")
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert '"interrupted": true' in told
    assert '"bad": []' in told
    assert kvfs("umount", mount.path).returncode == 0


@pytest.mark.heavy
def test_a_stopped_daemon_is_told_of(mount: Mount) -> None:
    pid = mount.start()
    store(mount.path, list(range(48)))
    os.kill(pid, signal.SIGSTOP)
    try:
        result = kvfs("verify", mount.path)
        assert (result.returncode, result.stdout) == (1, "")
        assert f"the kvfs daemon of {mount.path} has not answered" in result.stderr
        assert result.stderr.count("\n") == 1
    finally:
        os.kill(pid, signal.SIGCONT)
    assert kvfs("umount", mount.path).returncode == 0
