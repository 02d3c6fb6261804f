"""`kvfs why` on real mounts: for every cause, what is said is what happened."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvfs.client import Client, new_chunk
from kvfs.keys import KeyChain, root
from kvfs.messages import StoreStatus
from kvfs.namespace import Namespace
from kvfs.testing import DEADLINE_S, wait_until

from .conftest import KVFS, NAMESPACE, Mount, kvfs, store

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse"),
]
NAME = NAMESPACE.directory
OTHER = msgspec.structs.replace(NAMESPACE, identity=msgspec.structs.replace(NAMESPACE.identity, revision="2"))


def ask(mount: Mount, *arguments: str, code: int = 1) -> tuple[Any, str]:
    """The first answer for programs, and what is said to people."""
    told = kvfs("why", mount.path, *arguments, "--json")
    assert told.returncode == code, (told.stdout, told.stderr)
    said = kvfs("why", mount.path, *arguments)
    assert said.returncode == code
    assert said.stderr == ""
    return json.loads(told.stdout)[0], said.stdout


def chain_of(tokens: list[int], namespace: Namespace = NAMESPACE) -> KeyChain:
    return KeyChain(root(namespace.identity.fingerprint()), 16, tokens)


def refused(mount: Mount, tokens: list[int]) -> str:
    """Try to store one chunk, and be refused; its key."""
    chain = chain_of(tokens)
    with Client(mount.path, NAMESPACE, deadline_s=DEADLINE_S) as client:
        [reservation] = client.store([new_chunk(chain.chains[0], chain.root, 0, 16)])
        assert reservation.status is StoreStatus.REFUSED
    return chain.keys[0].hex()


def fact(answer: Any) -> Any:
    [only] = answer["keys"]
    return only


@pytest.fixture
def mounted(mount: Mount) -> Iterator[Mount]:
    mount.start()
    yield mount
    if mount.is_mounted:
        kvfs("umount", mount.path)


def test_what_is_stored_is_said_to_be_where(mounted: Mount) -> None:
    [key] = store(mounted.path, list(range(16)))
    answer, said = ask(mounted, NAME, key, code=0)
    assert (fact(answer)["state"], fact(answer)["tier"]) == ("stored", "ram")
    assert said.startswith(f"{key} is stored, in RAM, since ")
    by_path = kvfs("why", mounted.path / NAME / "chunks" / f"{key}.safetensors")
    assert (by_path.returncode, by_path.stdout.split()[:5]) == (0, [key, "is", "stored,", "in", "RAM,"])


def test_what_was_never_stored_says_since_when_that_is_known(mounted: Mount) -> None:
    store(mounted.path, list(range(16)))
    answer, said = ask(mounted, NAME, "ab" * 16)
    assert fact(answer)["state"] == "unknown"
    assert answer["whole_since_ns"] == answer["started_ns"] > 0
    assert "was not stored since" in said
    assert "when the daemon started" in said


def test_what_went_before_the_daemon_started(mount: Mount) -> None:
    """It is said as before, and what was never stored is known from as far back, if the end before was in order."""
    mount.start()
    [removed] = store(mount.path, list(range(16)))
    (mount.path / NAME / "chunks" / f"{removed}.safetensors").unlink()
    started = ask(mount, NAME, removed)[0]["started_ns"]
    assert kvfs("umount", mount.path).returncode == 0
    mount.start()
    store(mount.path, list(range(100, 116)))
    answer, said = ask(mount, NAME, removed)
    assert fact(answer)["state"] == "removed"
    assert f"{removed} was removed by a person" in said
    assert answer["whole_since_ns"] == started < answer["started_ns"]
    answer, said = ask(mount, NAME, "ab" * 16)
    assert fact(answer)["state"] == "unknown"
    assert "as far back as is remembered" in said
    os.kill(mount.pid(), signal.SIGKILL)
    mount.start()
    answer, said = ask(mount, NAME, removed)
    assert fact(answer)["state"] == "unknown"
    assert answer["whole_since_ns"] == answer["started_ns"] > started
    assert "when the daemon started; what went before that is not remembered" in said
    kvfs("umount", mount.path)


def test_what_a_person_removed(mounted: Mount) -> None:
    [key] = store(mounted.path, list(range(16)))
    path = mounted.path / NAME / "chunks" / f"{key}.safetensors"
    path.unlink()
    assert fact(ask(mounted, NAME, key)[0])["state"] == "removed"
    said = kvfs("why", path)
    assert said.returncode == 1
    assert f"{key} was removed by a person" in said.stdout


def test_what_reached_its_age(mounted: Mount) -> None:
    [key] = store(mounted.path, list(range(16)))

    def has_gone() -> bool:
        assert kvfs("quota", mounted.path, NAME, "--max-age", "1s").returncode == 0  # which looks at once
        return not (mounted.path / NAME / "chunks" / f"{key}.safetensors").exists()

    wait_until(has_gone, "the chunk is too old")
    answer, said = ask(mounted, NAME, key)
    assert fact(answer)["state"] == "expired"
    assert fact(answer)["unused_s"] >= 1
    assert "reached the max_age of its namespace" in said


def test_what_a_quota_let_go_and_what_it_refused(mounted: Mount) -> None:
    [first] = store(mounted.path, list(range(16)))
    size = (mounted.path / NAME / "chunks" / f"{first}.safetensors").stat().st_size
    wait_until(lambda: not mounted.json("status")["num_dirty"], "it is on NVMe")
    assert kvfs("quota", mounted.path, NAME, f"{size >> 10}KiB").returncode == 0
    store(mounted.path, list(range(100, 116)))
    answer, said = ask(mounted, NAME, first)
    assert (fact(answer)["state"], fact(answer)["cause"], fact(answer)["full"]) == ("evicted", "quota", 100)
    assert "for the quota of its namespace: the quota was 100 % full" in said
    assert kvfs("quota", mounted.path, NAME, "4KiB").returncode == 0
    key = refused(mounted, list(range(200, 216)))
    answer, said = ask(mounted, NAME, key)
    assert (fact(answer)["state"], fact(answer)["refusal"], fact(answer)["times"]) == ("refused", "quota", 1)
    assert "was refused when an engine wanted to store it" in said
    assert "its namespace had reached its quota" in said


def test_what_a_policy_evicted_and_what_it_did_not_take(mount: Mount) -> None:
    """A RAM cache that is full; then one that is full of what is in use."""
    mount.flags = ["--ram=1MiB", *(flag for flag in mount.flags if not flag.startswith(("--ram", "--nvme")))]
    mount.start()
    keys = [store(mount.path, [*range(number * 16, number * 16 + 16)])[0] for number in range(140)]
    answer, said = ask(mount, NAME, keys[0])
    assert (fact(answer)["state"], fact(answer)["cause"]) == ("evicted", "policy")
    assert answer["policy"] in said
    assert fact(answer)["full"] >= 95
    assert "the least worthy" in said
    there = {name.removesuffix(".safetensors") for name in os.listdir(mount.path / NAME / "chunks")}
    with Client(mount.path, NAMESPACE, deadline_s=DEADLINE_S) as client:
        heads = [
            chain_of([*range(number * 16, number * 16 + 16)]).chains for number in range(140) if keys[number] in there
        ]
        leases = [client.match(head) for head in heads]
        assert all(lease.count == 1 for lease in leases)
        key = refused(mount, list(range(90_000, 90_016)))
    answer, said = ask(mount, NAME, key)
    assert (fact(answer)["state"], fact(answer)["why"]) == ("refused", "bypass")
    assert "was refused when an engine wanted to store it" in said
    kvfs("umount", mount.path)


def test_what_ram_had_no_room_for(mount: Mount) -> None:
    """With NVMe below it: all of RAM is in use."""
    mount.flags = ["--ram=1MiB", *(flag for flag in mount.flags if not flag.startswith("--ram"))]
    mount.start()
    tokens = list(range(16 * 100))
    store(mount.path, tokens)
    with Client(mount.path, NAMESPACE, deadline_s=DEADLINE_S) as client:
        reservations: list[Any] = []
        chain = chain_of(list(range(50_000, 50_000 + 16 * 200)))
        lease = client.match(chain_of(tokens).chains)
        assert lease.count == 100
        for position, value in enumerate(chain.chains):
            reservations += client.store([new_chunk(value, chain.parent_of(position), position, 16)])
        last = next(each for each in reservations if each.status is StoreStatus.REFUSED)
        key = last.chunk.chain[:16].hex()
        answer, said = ask(mount, NAME, key)
    assert (fact(answer)["state"], fact(answer)["refusal"]) == ("refused", "pressure")
    assert "RAM was full of what is in use" in said
    kvfs("umount", mount.path)


def test_what_was_bad(mount: Mount, tmp_path: Path) -> None:
    """Its bytes on the volume are altered while nothing is mounted."""
    mount.start()
    [key] = store(mount.path, list(range(16)))
    assert kvfs("umount", mount.path).returncode == 0
    volume = tmp_path / "volume"
    path = volume if volume.is_file() else next(volume.glob("*volume*"))
    at = path.read_bytes().index(key.encode())
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"0" * 32)
    mount.start()
    with Client(mount.path, NAMESPACE, deadline_s=DEADLINE_S) as client:
        load = client.load(chain_of(list(range(16))).chains, deadline_s=DEADLINE_S)
        assert load is not None
        load.close()
    answer, said = ask(mount, NAME, key)
    assert fact(answer)["state"] == "corrupt"
    assert "its bytes were proven bad" in said
    kvfs("umount", mount.path)


def test_what_an_engine_declined_to_load(mounted: Mount) -> None:
    tokens = list(range(32))
    keys = store(mounted.path, tokens)
    with Client(mounted.path, NAMESPACE, deadline_s=DEADLINE_S) as client:
        client.attach()
        client.declined(chain_of(tokens).chains[1:])
        client.match(chain_of(tokens).chains).release()
    answer, said = ask(mounted, NAME, keys[1], code=0)
    assert (fact(answer)["state"], fact(answer)["refusal"]) == ("stored", "declined")
    assert "The engine found it cheaper to compute than to load" in said
    assert "cheaper" not in ask(mounted, NAME, keys[0], code=0)[1]


def test_a_prompt_whose_middle_went(mounted: Mount, tmp_path: Path) -> None:
    tokens = list(range(64))
    keys = store(mounted.path, tokens)
    file = tmp_path / "tokens"
    file.write_text(json.dumps([*tokens, 7]))
    answer, said = ask(mounted, NAME, "--tokens", str(file), code=0)
    assert (answer["is_stored"], answer["num_stored"], answer["num_tokens"]) == (True, 4, 65)
    assert said.startswith("4 of 4 chunks are stored")
    (mounted.path / NAME / "chunks" / f"{keys[1]}.safetensors").unlink()
    answer, said = ask(mounted, NAME, "--tokens", str(file))
    assert answer["num_stored"] == 1
    assert [each["state"] for each in answer["keys"]] == ["stored", "removed", "unreachable", "unreachable"]
    assert {each["missing"] for each in answer["keys"][2:]} == {keys[1]}
    assert f"{keys[1]}, the next one, was removed by a person" in said
    assert "2 chunks behind it are stored, but no engine reaches them without it." in said
    answer, said = ask(mounted, NAME, keys[3])
    assert fact(answer)["state"] == "unreachable"
    assert f"No engine finds it: {keys[1]}, which it is built on, is not there" in said


def test_a_prompt_in_another_namespace(mounted: Mount, tmp_path: Path) -> None:
    """The fields that differ are named; a namespace.json of an engine that stored nothing yet will do."""
    tokens = list(range(48))
    store(mounted.path, tokens, OTHER)
    store(mounted.path, list(range(500, 516)))
    answer = kvfs("why", mounted.path, NAME, "--tokens", "-", "--json")
    assert answer.returncode == 2
    assert "no token ids" in answer.stderr
    done = subprocess.run(
        [KVFS, "why", mounted.path, NAME, "--tokens", "-"], input=" ".join(map(str, tokens)), text=True,
        capture_output=True, check=False, timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 1
    assert f'{OTHER.directory} has the first 3 chunks of it; it differs in: revision "2" instead of "1".' in done.stdout
    third = msgspec.structs.replace(OTHER, identity=msgspec.structs.replace(OTHER.identity, revision="3", isa="x"))
    mine = tmp_path / "namespace.json"
    mine.write_bytes(msgspec.json.encode(msgspec.to_builtins(third)))
    file = tmp_path / "tokens"
    file.write_text(", ".join(map(str, tokens)))
    answer_, said = ask(mounted, str(mine), "--tokens", str(file))
    assert answer_["is_namespace"] is False
    assert answer_["others"] == [
        {"namespace": OTHER.directory, "num_stored": 3, "differs": {"revision": ["3", "2"], "isa": ["x", ""]}}
    ]
    assert f"There is no namespace {third.directory} in this mount." in said


def test_another_rank_has_the_same_key(mounted: Mount) -> None:
    ranks = [msgspec.structs.replace(NAMESPACE, rank=rank, num_ranks=2) for rank in range(2)]
    [key] = store(mounted.path, list(range(16)), ranks[1])
    store(mounted.path, list(range(500, 516)), ranks[0])
    answer, said = ask(mounted, ranks[0].directory, key)
    assert answer["others"] == [{"namespace": ranks[1].directory, "num_stored": 1, "differs": {"rank": [0, 1]}}]
    assert "it differs in: rank 1 instead of 0." in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "say of what"),
        (["tiny"], "say of what"),
        (["tiny", "xyz"], "'xyz' is no key"),
        (["nobody", "ab" * 16], "'nobody' is no namespace here"),
        (["tiny", "--tokens", "/nowhere"], "cannot read /nowhere"),
        (["tiny", "ab" * 16, "--tokens", "/dev/null"], "say of what"),
        (["tiny", "ab" * 16, "--extra", "x"], "--extra goes with --tokens"),
        (["tiny", "--tokens", "/dev/zero"], "larger than a prompt may be"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], said: str, mounted: Mount) -> None:
    store(mounted.path, list(range(16)))
    told = kvfs("why", mounted.path, *arguments)
    assert (told.returncode, told.stdout) == (2, "")
    assert re.fullmatch(rf"kvfs: .*{re.escape(said)}.*\n", told.stderr), told.stderr
