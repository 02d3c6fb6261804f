"""What the scheduler's side tells the workers in a step, and what they tell back. Pickled by vLLM; pure facts.

A chunk's KV lies in whole blocks of vLLM's, `block_ids` in order. A load leaves the first `num_kept` of them alone: the
local prefix cache has them, and other requests may be reading them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvfs.hints import Said
from kvfs.keys import ChainHash
from kvfs.messages import NewChunk, Tier


@dataclass(frozen=True, slots=True)
class PlacedChunk:
    """A chunk and the blocks that hold its KV."""

    chunk: NewChunk
    block_ids: tuple[int, ...]
    num_kept: int = 0

    @property
    def loaded_blocks(self) -> tuple[int, ...]:
        """The blocks that a load writes."""
        return self.block_ids[self.num_kept :]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Chunks of one request to load, or to store, in the order of their positions."""

    request_id: str
    chunks: tuple[PlacedChunk, ...]


@dataclass(frozen=True, slots=True)
class ChainHint:
    """What is known of the chain of a request that is over."""

    chains: tuple[ChainHash, ...]
    said: Said


@dataclass(slots=True)
class StepOrders:
    """One step.

    Attributes:
        number: of the step, for `StepReport`.
        loads: begin now, their requests wait.
        loads_in_step: begin now, their requests run in this very step.
        stores: what is whole when this step has run.
        preempted: requests whose blocks are about to belong to others.
        held: finished requests whose blocks are held until their stores have been copied.
        hints: to be given when the stores of these and earlier orders are published.
        is_timed: the step's time says something about the speed of a prefill.
        is_idle: the step computes nothing: vLLM makes it to hear what has ended.
    """

    number: int = 0
    loads: list[Transfer] = field(default_factory=list)
    loads_in_step: list[Transfer] = field(default_factory=list)
    stores: list[Transfer] = field(default_factory=list)
    preempted: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    hints: list[ChainHint] = field(default_factory=list)
    is_timed: bool = False
    is_idle: bool = False


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A load has ended: the tokens asked for by the tier they were in, how long it took; `failed` if any did not arrive."""

    request_id: str
    tokens_by_tier: dict[Tier, int]
    seconds: float
    failed: bool


@dataclass(slots=True)
class StepReport:
    """What workers tell the scheduler's side after a step."""

    number: int | None = None
    loads: list[LoadReport] = field(default_factory=list)

    def merge(self, other: StepReport) -> StepReport:
        """The report of several workers."""
        number = self.number if self.number is not None else other.number
        return StepReport(number, self.loads + other.loads)
