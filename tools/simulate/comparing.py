"""Replays of one trace beside each other: each policy, the optimum, each without admission, and curves of room."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kvfs.admission import Admission, Rule
from kvfs.errors import UsageError
from kvfs.policies import named
from kvfs.tools.simulate import optimum, report
from kvfs.tools.simulate.cache import Cache, MakePolicy
from kvfs.tools.simulate.hints import give
from kvfs.tools.simulate.replay import Replay
from kvfs.tools.simulate.report import Machine, Result
from kvfs.tools.simulate.tally import Tally
from kvfs.tools.simulate.timed import AT_ONCE, Pace, Timed
from kvfs.tools.simulate.traces import Trace

OPTIMUM = "opt"
_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of the curves

Watch = Callable[[str, Iterator[None]], Iterator[None]]
"""Shows how far something is: its name, and its steps, one for each request; these are to be taken from what it returns."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated, for all policies alike.

    Attributes:
        ram_bytes, nvme_bytes (0: a RAM cache), chunk_bytes.
        rule, budget_bytes: of admission to NVMe, see `Admission`.
        pace: how the engine asks, and so what is prefetched.
        hints: what the policy is told, see `hints`.
    """

    trace: Trace
    machine: Machine
    ram_bytes: int
    nvme_bytes: int
    chunk_bytes: int
    rule: Rule = "always"
    budget_bytes: int | None = None
    pace: Pace = AT_ONCE
    hints: frozenset[str] = frozenset()

    @property
    def is_restricted(self) -> bool:
        """Whether admission may keep anything from NVMe."""
        return bool(self.nvme_bytes) and (self.rule != "always" or self.budget_bytes is not None)


class Comparison:
    """Attributes: setting; results, tallies: by policy, of what was played so far; curves: (share of the chunks, hit ratio), by policy."""

    def __init__(self, setting: Setting, makers: Mapping[str, MakePolicy | None], watch: Watch) -> None:
        """`makers` has None for the optimum."""
        self.results: dict[str, Result] = {}
        self.tallies: dict[str, Tally] = {}
        self.curves: dict[str, list[tuple[float, float]]] = {}
        self.setting = setting
        self._makers = makers
        self._watch = watch

    def run(self) -> None:
        """Play every policy. Raises UsageError for what a user's own policy raises, or brings about."""
        setting = self.setting
        with _few_collections():
            for name in self._makers:
                tally = Tally()
                started_s = time.perf_counter()
                try:
                    self._play(name, name, setting, tally)
                finally:
                    took_s = time.perf_counter() - started_s
                    tally.cut()
                    if tally.ram:
                        self.tallies[name] = tally
                        self.results[name] = self._sum_up(name, tally, took_s)
                if setting.is_restricted and name != OPTIMUM:
                    free = Tally()
                    self._play(name, f"{name}, all admitted", replace(setting, rule="always", budget_bytes=None), free)
                    always = self._sum_up(name, free, took_s)
                    self.results[name] = report.with_admission(self.results[name], tally, always)

    def draw_curves(self) -> None:
        """Hits of every policy by the room in all: that of the lowest tier, since a tier above it adds none."""
        setting = self.setting
        trace = setting.trace
        shares = sorted({*_SHARES, min(1.0, self.capacity)})
        with _few_collections():
            for name in self._makers:
                points = self.curves.setdefault(name, [])
                for share in shares:
                    tally = Tally()
                    room = max(1, int(trace.num_chunks * share)) * setting.chunk_bytes
                    alone = Setting(trace, setting.machine, room, 0, setting.chunk_bytes)
                    self._play(name, f"{name}, {100 * share:.3g} %", alone, tally)
                    points.append((share, tally.num_found / trace.num_references))

    @property
    def capacity(self) -> float:
        """The room in all that is simulated, as a share of the trace's different chunks."""
        setting = self.setting
        return max(setting.ram_bytes, setting.nvme_bytes) // setting.chunk_bytes / setting.trace.num_chunks

    def _play(self, name: str, label: str, setting: Setting, tally: Tally) -> None:
        try:
            for _ in self._watch(label, self._steps(name, setting, tally)):
                pass
        except Exception as error:
            if name in named.NAMES or name == OPTIMUM:
                raise
            when = f"at request {len(tally.ram) + 1:,}"
            if isinstance(error, UsageError):
                raise UsageError(f"{when}: {error}") from error
            raise UsageError(f"policy {name!r} failed {when}: {type(error).__name__}: {error}") from error

    def _steps(self, name: str, setting: Setting, tally: Tally) -> Iterator[None]:
        """One for each request that was played."""
        make_policy = self._makers[name]
        if make_policy is None:
            yield from _best(setting, tally)
            return
        trace = setting.trace
        cache = Cache(
            trace, make_policy, setting.machine.bytes_per_token, setting.ram_bytes, setting.nvme_bytes, tally,
            has_ghosts=name not in named.BLIND_TO_USES,
            admission=Admission(setting.rule, setting.budget_bytes) if setting.is_restricted else None,
            has_tree=bool(setting.pace.chunks_a_load),
        )  # fmt: skip
        replay = Replay(cache)
        steps: Iterator[None] = map(replay.request, trace.requests)
        if setting.pace.prefetches and setting.nvme_bytes:
            machine = setting.machine
            steps = Timed(replay, setting.pace, machine.ram_bytes_s, machine.nvme_bytes_s).play(trace.requests)
        tally.hints = setting.hints & cache.ram.policy.heeds
        yield from give(tally.hints, trace, replay, steps) if tally.hints else steps

    def _sum_up(self, name: str, tally: Tally, took_s: float) -> Result:
        setting = self.setting
        return report.result(
            name, setting.trace, tally, setting.machine, took_s, has_nvme=bool(setting.nvme_bytes),
            is_optimum=name == OPTIMUM, has_prefetch=setting.pace.prefetches and name != OPTIMUM,
        )  # fmt: skip


def _best(setting: Setting, tally: Tally) -> Iterator[None]:
    """The optimum of each tier alone: no policy has more of both."""
    num_ram, num_nvme = setting.ram_bytes // setting.chunk_bytes, setting.nvme_bytes // setting.chunk_bytes
    in_ram = optimum.hits(setting.trace, num_ram)
    in_all = optimum.hits(setting.trace, max(num_ram, num_nvme))
    for ram, both in zip(in_ram, in_all, strict=True):
        tally.ram.append(ram)
        tally.nvme.append(max(both - ram, 0))
        yield


@contextmanager
def _few_collections() -> Iterator[None]:
    """A replay makes hundreds of thousands of objects that stay, and few that go: look seldom for those in circles."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
