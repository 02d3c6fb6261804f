"""A user's policy that does not keep to what a policy promises: one sentence, exit code 2, and soon; in the store too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.errors import UsageError
from kvfs.messages import StoreStatus
from kvfs.policies.named import maker
from kvfs.testing import chain_of, new_chunks, open_table, sized_namespace, store_chunk

from .simulated import chats, play, write_mooncake

CARELESS = """
import itertools
from kvfs.policies.lru import LeafFirstLRU


class Honest(LeafFirstLRU):
    def __init__(self, clock):
        super().__init__()


class Foreign(Honest):
    def victims(self, may_go):
        return iter([object()])


class Gone(Honest):
    def victims(self, may_go):
        self.seen = getattr(self, "seen", None) or [*super().victims(may_go)]
        return iter(self.seen)


class KeepsAll(Honest):
    def remove(self, entry):
        pass


class Twice(Honest):
    def victims(self, may_go):
        first = next(super().victims(may_go), None)
        return iter([] if first is None else [first, first])


class Endless(Honest):
    def victims(self, may_go):
        return itertools.cycle(self._order)


class Spins(Honest):
    def victims(self, may_go):
        while True:
            yield from (entry for entry in self._order if may_go(entry) and entry.hits > 10**6)


class Raises(Honest):
    def touch(self, prefix):
        raise ZeroDivisionError("oh")


class RaisesLater(Honest):
    def victims(self, may_go):
        yield from itertools.islice(super().victims(may_go), 0)
        raise OSError("no more")


class Nobody(Honest):
    def victims(self, may_go):
        return iter(())


class Anybody(Honest):
    def victims(self, may_go):
        return iter([*self._order])


class Miscounts(Honest):
    def __len__(self):
        return 1
"""
LIARS = {
    "Foreign": "not in the tier",
    "Gone": "not in the tier",
    "KeepsAll": "not in the tier",
    "Spins": "asks without end which entries may go",
}
MIB = sized_namespace(1 << 20)
ROOM = [(40, 0), (30, 90)]


@pytest.fixture(autouse=True)
def careless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes can be imported, and nobody keeps the module of the test before."""
    (tmp_path / "careless_classes.py").write_text(CARELESS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "careless_classes", raising=False)


@pytest.mark.parametrize(("num_ram", "num_nvme"), ROOM)
@pytest.mark.parametrize("name", LIARS)
def test_a_policy_that_lies_is_found_out(name: str, num_ram: int, num_nvme: int) -> None:
    with pytest.raises(UsageError, match=f"policy 'careless_classes:{name}' .*{LIARS[name]}"):
        play(chats(1, 300), f"careless_classes:{name}", num_ram, num_nvme)


@pytest.mark.parametrize(("num_ram", "num_nvme"), ROOM)
def test_what_is_careless_and_no_lie_is_played_to_the_end(num_ram: int, num_nvme: int) -> None:
    """Who may go is asked again, how many there are is counted; a tier whose policy lets nothing go stays as it is."""
    trace = chats(1, 300)
    honest = play(trace, "lru", num_ram, num_nvme)
    for name in ("Honest", "Anybody", "Miscounts"):
        found = play(trace, f"careless_classes:{name}", num_ram, num_nvme)
        assert (found.ram, found.nvme, found.num_written) == (honest.ram, honest.nvme, honest.num_written)
    full = play(trace, "careless_classes:Nobody", num_ram, num_nvme)
    assert 0 < full.num_stored <= (num_nvme or num_ram) + num_ram
    assert len(full.ram) == 300


@pytest.mark.parametrize("size", [["--ram", "5%"], ["--ram", "2%", "--nvme", "10%"]])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "Gone",
            r"at request [\d,]+: policy 'careless_classes:Gone' names <Chunk .*> ?, which is not in the tier: see .*",
        ),
        ("Raises", r"policy 'careless_classes:Raises' failed at request [\d,]+: ZeroDivisionError: oh"),
        ("RaisesLater", r"policy 'careless_classes:RaisesLater' failed at request [\d,]+: OSError: no more"),
    ],
)
def test_the_command_says_so_in_one_sentence(name: str, said: str, size: list[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    write_mooncake(chats(5, 1000), trace)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [
            sys.executable, "-m", "kvfs.tools.cli", "simulate", trace, *size,
            "--policy", f"careless_classes:{name}", "--json",
        ],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"kvfs: {said}\n", done.stderr), done.stderr


@pytest.mark.parametrize("nvme", [None, 20 << 20])
@pytest.mark.parametrize("name", LIARS)
async def test_no_store_looks_for_room_for_ever(name: str, nvme: int | None, tmp_path: Path) -> None:
    """A store that such a policy orders says so where it would have gone round and round, and serves what it has."""
    async with open_table(tmp_path, MIB, policy=f"careless_classes:{name}", nvme=nvme) as (store, table):
        statuses, said = [], []
        for seed in range(16):
            (new,) = new_chunks(chain_of(MIB, 1, seed))
            try:
                statuses.append(await store_chunk(store, table, new))
            except UsageError as error:
                said.append(str(error))
            await store.flush()
        assert statuses[0] is StoreStatus.STORED
        assert LIARS[name] in said[0]
        assert len(store.match(table, list(table.chunks)[:1])) == 1


@pytest.mark.parametrize("name", ["Twice", "Endless"])
def test_no_entry_is_named_twice(name: str) -> None:
    """Nobody asks on behind the first that may go; but where none may, nobody asks for ever."""
    policy = maker(f"careless_classes:{name}")(lambda: 0.0)
    for entry in ("a", "b", "c"):
        policy.insert(entry)
    victims = policy.victims(lambda _: True)
    assert next(victims) == "a"
    with pytest.raises(UsageError, match="twice"):
        list(victims)


def test_a_users_policy_goes_on_over_a_restart_if_it_can(tmp_path: Path) -> None:
    """What it learned is asked of it, and of none that does not have it."""
    (tmp_path / "learning.py").write_text("from kvfs.policies.learned import Learned\nclass Mine(Learned):\n    pass\n")
    policy = maker("learning:Mine")(lambda: 0.0)
    assert getattr(policy, "learnt")(str).startswith(b"{")  # noqa: B009 - as `Holding` asks
    assert not hasattr(maker("careless_classes:Honest")(lambda: 0.0), "learnt")
