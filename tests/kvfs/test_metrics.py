"""Counters, the event log and ghosts: what is counted is shown, and nothing grows without bound."""

from __future__ import annotations

import json

from prometheus_client.parser import text_string_to_metric_families

from kvfs.ghosts import Ghost, Ghosts
from kvfs.metrics import KEPT_EVENT_BYTES, MAX_EVENT_BYTES, Counters, EventLog, Gauge, render
from kvfs.testing import FaultySystem


def test_events_are_json_lines() -> None:
    """One object a line, newest last, with the time and what happened."""
    system = FaultySystem()
    system.now_ns = 42
    log = EventLog(system)
    log.append("publish", key="ab", odd='"\n')
    log.append("rm")
    lines = log.read(0, log.size).decode().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"time_ns": 42, "event": "publish", "key": "ab", "odd": '"\n'}, {"time_ns": 42, "event": "rm"},
    ]  # fmt: skip
    assert log.num_events == 2


def test_an_event_may_name_a_path_that_is_no_text() -> None:
    """Such as an error of the operating system does."""
    log = EventLog(FaultySystem())
    log.append("degraded", reason="no room at /data/\udcff")
    assert json.loads(log.read(0, log.size))["reason"] == "no room at /data/\udcff"


def test_reading_past_the_end() -> None:
    """Reads are cut at the end, and beyond it they are empty."""
    log = EventLog(FaultySystem())
    log.append("x")
    assert log.read(0, 1 << 20) == log.read(0, log.size)
    assert log.read(log.size, 10) == log.read(log.size + 5, 10) == b""


def test_the_log_is_bounded() -> None:
    """Past 4 MiB it is cut to whole lines of its last 1 MiB; nothing is lost at the newest end."""
    log = EventLog(FaultySystem())
    num_cuts, before = 0, 0
    for number in range(60_000):
        log.append("publish", number=number, filler="x" * 80)
        num_cuts += log.size < before
        before = log.size
        assert log.size <= MAX_EVENT_BYTES
    assert num_cuts >= 2
    lines = [json.loads(line)["number"] for line in log.read(0, log.size).decode().splitlines()]
    assert lines == list(range(lines[0], 60_000))
    assert log.size >= KEPT_EVENT_BYTES - 200
    assert log.num_events == 60_000


def test_one_huge_event() -> None:
    """An event larger than what is kept does not break the log."""
    log = EventLog(FaultySystem())
    log.append("x", filler="y" * (MAX_EVENT_BYTES + 1))
    log.append("z")
    assert log.size <= MAX_EVENT_BYTES
    assert json.loads(log.read(0, log.size).splitlines()[-1])["event"] == "z"


def test_prometheus_reads_it() -> None:
    """Every counter and gauge is there, under its name, with its help and value."""
    counters = Counters()
    for number, name in enumerate(Counters.__slots__):
        setattr(counters, name, number)
    text = render(counters, [Gauge("chunks", "visible chunks", 7)]).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for number, name in enumerate(Counters.__slots__):
        family = families[f"kvfs_{name}"]
        assert family.type == "counter"
        assert family.documentation
        assert family.samples[0].value == number
    assert families["kvfs_chunks"].samples[0].value == 7


def test_ghosts_are_bounded() -> None:
    """The oldest ghost makes room; one that comes back is forgotten; a second death renews it."""
    ghosts = Ghosts(limit=3)
    for number in range(3):
        ghosts.add("ns", bytes([number]), Ghost(number, "evict", 0))
    ghosts.add("ns", b"\0", Ghost(9, "rm", 5))
    ghosts.add("ns", b"\3", Ghost(10, "evict", 0))
    assert len(ghosts) == 3
    assert ghosts.get("ns", b"\1") is None
    assert ghosts.pop("ns", b"\0") == Ghost(9, "rm", 5)
    assert ghosts.pop("ns", b"\0") is None
    assert ghosts.get("other", b"\2") is None
